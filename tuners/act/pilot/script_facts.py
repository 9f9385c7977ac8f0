"""Facts that a script's first steps show: the parts of its key, its own settings, its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from advisor.cache import key as keys
from advisor.cache.config import BATCH, Config, Value
from advisor.cache.task import DTYPES, Task
from advisor.errors import printable
from advisor.tuners import environment, fingerprint, knobs
from advisor.tuners.act.pilot.loop_observer import VARIES, Input, LoopObserver, TrainedModel
from advisor.tuners.act.pilot.parts import FIXED, MICRO
from advisor.tuners.act.pilot.switch import replicates
from advisor.tuners.act.pilot.wrappers import local
from advisor.tuners.act.ranks import Group
from advisor.tuners.compiling import repeated
from advisor.tuners.knobs import LoaderFacts, ScriptSettings
from advisor.tuners.offloading import OffloadedCall
from advisor.tuners.recomputation import RecomputedCall, recomputed_calls

CONVOLVES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
REPLICATES = (
    "nn.DataParallel copies the model at every step, so only flags and the loader are tuned; the "
    "same job under torchrun and DistributedDataParallel is faster, and tuned whole"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """Facts on one process of a running script."""

    model: str  # this and the next seven as in `worker.wire.Facts`
    family: str
    libraries: tuple[str, ...]
    modules: int
    parameters: int
    convolves: bool
    repeats: bool
    threads: int
    shape: tuple[int, ...]  # of the main input of the whole job's step; 1 where it varies
    dtype: str
    others: str  # the other inputs, and further parts of the key
    varies: bool  # whether a shape differed between the steps seen
    optimizer: str
    own: Config  # the script's own settings
    kept: tuple[str, ...]  # knobs that are not tuned
    limits: tuple[str, ...]  # knobs that cannot be tuned here, and why, as text
    rank: int
    processes: int
    device: str
    workers: int  # that its loader may get at most
    room: int  # as in `LoaderFacts`
    memory: Config = Config()  # noqa: RUF009 # immutable; as in `breakdown`
    interconnect: str = ""  # as in a Key
    wrapped: tuple[str, ...] = ()  # as in SearchContext, with `sharded`
    sharded: bool = False

    @classmethod
    def of(cls, observer: LoopObserver, loading: LoaderFacts, saves: bool = False) -> ScriptFacts:
        """The facts of an observer that knows which optimizer steps make one step of the script.
        `saves`: whether the steps take the least memory."""
        trained = observer.trained()
        main = trained[0]
        samples = max(1, main.batch(observer.period()))
        group = Group.current()
        processes, rank = (1, 0) if group is None else (group.size, group.rank)
        first = _main_input(main)
        own, kept, limits = _script_settings(observer, trained, loading)
        if saves:
            blocks = any(recomputed_calls(one.outer) for one in trained)
            own = own.replace(**({knobs.CHECKPOINT: 1} if blocks else {}), **{knobs.OFFLOAD: True})
        device = next(main.model.parameters()).device
        return cls(
            **model_facts([one.model for one in trained]),
            shape=(samples * processes, *(dim or 1 for dim in first.shape[1:] or (1,))),
            dtype=first.dtype if first.dtype in DTYPES else "float32",
            others=_other_inputs(observer, main, samples),
            varies=any(VARIES in one.shape[1:] for one in main.inputs),
            optimizer=_optimizer_name(observer.optimizers[0]),
            own=own,
            kept=kept,
            limits=limits,
            rank=rank,
            processes=processes,
            device=str(device),
            workers=loading.most,
            room=loading.room,
            memory=breakdown(trained, observer.optimizers, device),
            interconnect=environment.interconnect(str(device), processes),
            wrapped=observer.wrappers.names,
            sharded=observer.wrappers.is_sharded,
        )

    def task(self, command: Sequence[str], given: Mapping[str, object]) -> Task:
        """The Task of this command; `given`: the user's permissions."""
        words = tuple(map(printable, command))
        return Task(
            target=" ".join(words),
            command=words,
            shapes=(self.shape,),
            dtype=self.dtype,
            optimizer=self.optimizer,
            processes=self.processes,
            others=self.others,
            script=self.script,
            **given,  # type: ignore[arg-type]
        )

    def lines(self) -> list[str]:
        """Lines of text: the script's own settings, and what is not tuned."""
        own = self.own.without(BATCH, *knobs.SAVING)
        already = [f"your script already: {knobs.described_own(own, Config())}"] if own else []
        return already + [f"not tuned: {line}" for line in self.limits]

    @property
    def script(self) -> str:
        """The script's own settings, as part of the key: 'bf16, fused_optimizer'."""
        own = self.own.without(*knobs.INPUT_PIPELINE)
        return knobs.described(own.without(BATCH), Config()) if own else ""


def _optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """'adamw' for torch.optim.AdamW, also within a wrapper such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return type(inner).__name__.lower()[:32]


def _main_input(trained: TrainedModel) -> Input:
    """The first input with more than one dimension: labels or lengths may come before it."""
    inputs = trained.inputs or (Input("0", (1,), "float32"),)
    return next((one for one in inputs if len(one.shape) > 1), inputs[0])


def _other_inputs(observer: LoopObserver, main: TrainedModel, samples: int) -> str:
    """One line of further parts of the key: other inputs, micro-batches, several optimizers."""
    first = _main_input(main)
    parts = [
        f"{one.name} {'x'.join(str(dim or '?') for dim in one.shape[1:]) or '1'} {one.dtype}"
        for one in main.inputs
        if one != first or VARIES in one.shape[1:]
    ]
    if (calls := main.micro_batches(samples)) > 1:
        parts.append(f"{calls} {MICRO}")
    if len(observer.optimizers) > 1:
        parts.append(", ".join(_optimizer_name(one) for one in observer.optimizers))
    return "; ".join(parts)[:500]


def model_facts(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Facts on models that train together, largest first: fields of ScriptFacts and of Facts."""
    fingerprints = [fingerprint.of_model(model) for model in models]
    sizes = [fingerprint.size(model) for model in models]
    return {
        "model": fingerprints[0] if len(models) == 1 else keys.fingerprint(fingerprints),
        "family": fingerprint.family(models[0]),
        "libraries": tuple(sorted({n for model in models for n in fingerprint.libraries(model)})),
        "modules": sum(modules for modules, _parameters in sizes),
        "parameters": sum(parameters for _modules, parameters in sizes),
        "convolves": any(isinstance(m, CONVOLVES) for model in models for m in model.modules()),
        "repeats": bool(repeated(models[0])),
        "threads": torch.get_num_threads(),
    }


def breakdown(
    trained: Sequence[TrainedModel],
    optimizers: Iterable[torch.optim.Optimizer],
    device: torch.device,
) -> Config:
    """Bytes of the steps so far, by name in PARTS; empty on a CPU. Only steps that save memory have
    `host`, `blocks` and `block`, the name of the repeated blocks' class. Where ranks share weights,
    `unsharded` is what each would hold of FIXED without."""
    if device.type != "cuda":
        return Config()
    weights = [w for one in trained for w in (*one.model.parameters(), *one.model.buffers())]
    states = [s for one in optimizers for s in one.state.values() if isinstance(s, dict)]
    state = [value for one in states for value in one.values() if isinstance(value, Tensor)]
    parts = weights, [one for one in weights if one.requires_grad], state
    found = {name: _bytes(map(local, one), device) for name, one in zip(FIXED, parts, strict=True)}
    fixed, unsharded = sum(found.values()), sum(_bytes(one, device) for one in parts)
    peak = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    found |= {
        "peak": peak,
        "activations": max(0, peak - fixed),
        "fragmentation": torch.cuda.max_memory_reserved(device) - peak,
        "others": max(0, total - free - torch.cuda.memory_reserved(device)),
    }
    calls = [vars(m).get("_compiled_call_impl") for one in trained for m in one.outer.modules()]
    held = [call.most_bytes for call in calls if isinstance(call, OffloadedCall)]
    kept = [call for call in calls if isinstance(call, RecomputedCall)]
    # The peak has one block's.
    again = [call.kept_bytes for call in kept]
    saved = {"host": sum(held), "blocks": sum(again) - max(again, default=0)} if held else {}
    saved |= {"unsharded": unsharded} if unsharded > fixed else {}
    named = {"block": type(kept[0].block).__name__} if kept else {}
    return Config(found | saved, **named)


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    # Shared ones once. Not by their storage, which sharded tensors do not have.
    there = {id(one): one for one in tensors if one.device == device}
    return sum(one.nbytes for one in there.values())


def _script_settings(
    observer: LoopObserver, trained: Sequence[TrainedModel], loading: LoaderFacts
) -> tuple[Config, tuple[str, ...], tuple[str, ...]]:
    """What a script sets itself, what stays, and why: `own`, `kept`, `limits` of ScriptFacts."""
    wrappers = observer.wrappers
    script = ScriptSettings(
        weights=[weight for one in trained for weight in one.model.parameters()],
        autocast=observer.autocast or wrappers.dtype,
        compiled=any(_is_compiled(module) for one in trained for module in one.outer.modules()),
        optimizers=observer.optimizers,
        loading=loading,
        wrapped=wrappers.own,
    )
    found: dict[str, Value] = {}
    kept: list[str] = []
    limits = [*wrappers.limits]
    for knob in knobs.KNOBS:
        own = knob.script(script) if knob.script is not None else None
        if own is not None:
            found |= {knob.name: own.value} if own.value is not None else {}
            kept += [knob.name] if own.locked else []
            limits += [own.why] if own.why else []
    if observer.sparse:
        kept.append("fused_optimizer")
        limits.append("fused kernels: a gradient is sparse, which they do not support")
    copied = any(replicates(one.outer) for one in trained)
    limits += [REPLICATES] if copied else []
    if copied or wrappers.left_alone:
        kept += [k.name for k in knobs.KNOBS if k.model or k.blocks or k.autocast or k.optimizer]
    if wrappers.is_sharded:
        kept += [k.name for k in knobs.KNOBS if (k.model and k.name != knobs.COMPILE) or k.blocks]
    if wrappers.locked:
        kept.append(knobs.FORMATS[0])
        limits.append("the number format: the script's MixedPrecisionPolicy sets a part of it")
    return Config(found), tuple(dict.fromkeys(kept)), tuple(dict.fromkeys(limits))


def _is_compiled(module: nn.Module) -> bool:
    """Whether the script has compiled a module."""
    there = vars(module).get("_compiled_call_impl")
    if isinstance(there, OffloadedCall):
        there = there.plain if there.plain != module._call_impl else None
    return "_orig_mod" in module._modules or not isinstance(there, RecomputedCall | None)
