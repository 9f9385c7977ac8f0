"""What a script's first steps show: what makes its key, and what it sets itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from advisor.cache import key as keys
from advisor.cache.config import BATCH, Config, Value
from advisor.cache.task import DTYPES, Task
from advisor.errors import printable
from advisor.tuners import fingerprint
from advisor.tuners.act.pilot.crew import VARIES, Crew, Input, Trained
from advisor.tuners.act.pilot.switch import replicates
from advisor.tuners.compiling import repeated
from advisor.tuners.knobs import FEEDS, KNOBS, Loading, Script, described

MICRO = "micro-batches"
FUSED = "fused_optimizer"
CONVOLVES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
REPLICATES = (
    "nn.DataParallel copies the model at every step, so only flags and the loader are tuned; the "
    "same job under torchrun and DistributedDataParallel is faster, and tuned whole"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One process of a running script.

    Attributes:
        model: fingerprint of all that trains.
        family, libraries, modules, parameters, convolves, repeats: as in a worker's `Facts`;
            `repeats` of the largest model.
        shape: of the largest model's first input, preceded by the job's samples a step; 1 for a
            dimension that varies.
        others: its other inputs, and what else makes another job.
        varies: whether a shape differed between the steps seen.
        own: knobs that the script sets itself, with its values; of these `kept` are not tuned.
        limits: knobs that cannot be tuned here, and why, as text.
        rank, processes: of the job.
        workers: that its loader may be given; `room`: as in `Loading`.
    """

    model: str
    family: str
    libraries: tuple[str, ...]
    modules: int
    parameters: int
    convolves: bool
    repeats: bool
    shape: tuple[int, ...]
    dtype: str
    others: str
    varies: bool
    optimizer: str
    own: Config
    kept: tuple[str, ...]
    limits: tuple[str, ...]
    rank: int
    processes: int
    device: str
    threads: int
    workers: int
    room: int

    @classmethod
    def of(cls, crew: Crew, loading: Loading) -> Seen:
        """What the steps of a crew show, once its period is known."""
        trained = crew.trained()
        main, models = trained[0], [one.model for one in trained]
        fingerprints = [fingerprint.of_model(model) for model in models]
        sizes = [fingerprint.size(model) for model in models]
        samples = max(1, main.batch(crew.period()))
        processes, rank = 1, 0
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            processes, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        first = main.inputs[0] if main.inputs else Input("0", (1,), "float32")
        weight = next(main.model.parameters(), None)
        own, kept, limits = _own(crew, trained, loading)
        return cls(
            model=fingerprints[0] if len(models) == 1 else keys.fingerprint(fingerprints),
            family=fingerprint.family(main.model),
            libraries=tuple(sorted({n for model in models for n in fingerprint.libraries(model)})),
            modules=sum(modules for modules, _parameters in sizes),
            parameters=sum(parameters for _modules, parameters in sizes),
            convolves=any(convolves(one.model) for one in trained),
            repeats=bool(repeated(main.model)),
            shape=(samples * processes, *(dim or 1 for dim in first.shape[1:])),
            dtype=first.dtype if first.dtype in DTYPES else "float32",
            others=_others(crew, main, samples),
            varies=any(VARIES in one.shape[1:] for one in main.inputs),
            optimizer=_called(crew.optimizers[0]),
            own=own,
            kept=kept,
            limits=limits,
            rank=rank,
            processes=processes,
            device="cpu" if weight is None else str(weight.device),
            threads=torch.get_num_threads(),
            workers=loading.most,
            room=loading.room,
        )

    def task(self, command: Sequence[str], given: Mapping[str, object]) -> Task:
        """The task that a command is, with what its user permits."""
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
        """What is seen, for people."""
        own = [f"your script already: {_described(self.own)}"] if self.own else []
        return own + [f"not tuned: {line}" for line in self.limits]

    @property
    def script(self) -> str:
        """What the script sets itself, as part of the key: 'bf16, fused_optimizer'."""
        own = self.own.without(*FEEDS)
        return _described(own) if own else ""


def _described(own: Config) -> str:
    return described(own.without(BATCH), Config())


def _called(optimizer: torch.optim.Optimizer) -> str:
    """'adamw' for torch.optim.AdamW, also within a wrapper such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return type(inner).__name__.lower()[:32]


def micro_batches(task: Task) -> int:
    """Of a step in each process of a run, as they were seen; 1 for a workload."""
    found = re.search(rf"(?:^|; )(\d{{1,9}}) {MICRO}(?:;|$)", task.others)
    return max(1, int(found[1])) if found else 1


def _others(crew: Crew, main: Trained, samples: int) -> str:
    """What else of the job makes another key, on one line."""
    parts = [
        f"{one.name} {'x'.join(str(dim or '?') for dim in one.shape[1:]) or '1'} {one.dtype}"
        for n, one in enumerate(main.inputs)
        if n or VARIES in one.shape[1:]
    ]
    if (calls := main.micro_batches(samples)) > 1:
        parts.append(f"{calls} {MICRO}")
    if len(crew.optimizers) > 1:
        parts.append(", ".join(_called(one) for one in crew.optimizers))
    return "; ".join(parts)[:500]


def convolves(model: nn.Module) -> bool:
    """Whether a model has convolutions."""
    return any(isinstance(module, CONVOLVES) for module in model.modules())


def _own(
    crew: Crew, trained: Sequence[Trained], loading: Loading
) -> tuple[Config, tuple[str, ...], tuple[str, ...]]:
    """What a script has set itself, what of it is kept, and why some knobs cannot be tuned."""
    script = Script(
        weights=[weight for one in trained for weight in one.model.parameters()],
        autocast=crew.autocast,
        compiled=any(
            hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None
            for one in trained
            for module in one.outer.modules()
        ),
        optimizers=crew.optimizers,
        loading=loading,
    )
    found: dict[str, Value] = {}
    kept: list[str] = []
    limits: list[str] = []
    for knob in KNOBS:
        own = knob.script(script) if knob.script is not None else None
        if own is None:
            continue
        if own.value is not None:
            found[knob.name] = own.value
        kept += [knob.name] if own.stays else []
        limits += [own.why] if own.why else []
    if crew.sparse:
        kept.append(FUSED)
        limits.append("fused kernels: a gradient is sparse, for which there are none")
    if beyond := [why for one in trained if (why := _beyond(one.outer))]:
        kept += [k.name for k in KNOBS if k.model or k.autocast or k.optimizer]
    return Config(found), tuple(dict.fromkeys(kept)), tuple(dict.fromkeys([*limits, *beyond]))


def _beyond(outer: nn.Module) -> str:
    """Why a model is left alone: its weights are not where they are computed with."""
    if replicates(outer):
        return REPLICATES
    kinds = {type(module).__name__ for module in outer.modules()}
    if any(kind.startswith(("FSDP", "FullyShardedDataParallel", "DeepSpeed")) for kind in kinds):
        return "its weights are sharded: only flags and the loader are tuned"
    return ""
