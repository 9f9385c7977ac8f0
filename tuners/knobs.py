"""The table of knobs: for each its values, when it is offered, and how it acts.

A knob acts on the process (`flag`), the model, the batch, the optimizer's or the loader's
arguments, or the forward pass (`autocast`, `scaled`). To add a knob, add a row to KNOBS, and add
the name that each framework has for it to `advisor/frameworks`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from advisor.cache.config import BATCH, Config, Value
from advisor.cache.record import CAPTURE, FLAGS, LOOP, PILOT, USES, Record
from advisor.cache.task import OFFLOADED, PERMITTED, PRECISIONS, Task
from advisor.tuners import compiling, fp8
from advisor.tuners.compiling import BLOCKS
from advisor.tuners.decisions import COMPILE_S
from advisor.tuners.environment import threads_set
from advisor.tuners.tf32 import Float32, describe, set_float32
from advisor.tuners.torch_facts import torch

CHECKPOINT, OFFLOAD = "checkpoint_blocks", "offload"
COMPUTE, INPUT = "compute", "input"  # stages: a batch lies on the device; a loader feeds it
WORKERS, THREADS = "num_workers", "threads"
BF16_REDUCE, RESHARD = "bf16_reduce", "reshard_after_forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """Facts that decide which values make sense: device, workload, and the user's permissions."""

    device: str  # 'cuda' or 'cpu'
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    cpu_bf16: bool = False
    cores: int = 1
    threads: int = 1  # torch's own choice of intra-op threads
    threads_set: bool = False  # by the user
    dimensions: int = 4  # of one batch: 4 is NCHW, 5 is NCDHW
    convolves: bool = True
    repeats: bool = False  # most of the model is blocks that repeat
    training: bool = True
    fp8: bool = False  # torchao is installed, and linear layers are large enough
    batches: tuple[int, ...] = (1,)  # to try, the user's own first
    deterministic: bool = False
    precisions: tuple[str, ...] = PERMITTED
    full: bool = False
    compiles: bool = False
    quick: bool = False  # compile only what takes seconds
    step_graph: bool = True  # the script can have its whole step captured
    use: str = USES[-1]  # the widest use to search for; PILOT for an unmodified script
    workers: int = 0  # most workers for the loader of a running script, or of a workload's data
    loaded: bool = False  # a workload has data of its own
    any_order: bool = False  # its batches may come in any order
    by_name: bool = False  # its workers share memory by name: else too many files would be open
    mapped: tuple[str, ...] = ()  # knobs that options of a run's command set: a start per value
    varies: bool = False  # inputs of a running script vary in shape
    wrapped: tuple[str, ...] = ()  # knobs of the wrappers around a running script's models
    sharded: bool = False  # FSDP2 shards the weights of a running script
    own: Config = Config()  # noqa: RUF009 # the values that a running script sets: its baseline
    kept: tuple[str, ...] = ()  # knobs that stay as the script, or torch, has them


SWITCH = (False, True)
SHARING = ("file_descriptor", "file_system")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A switch of the process. `set` applies a knob's value. `now` reads the process's state;
    `back` restores this state, if it may be other than a value of the knob."""

    set: Callable[[Value], None]
    now: Callable[[], Any]
    back: Callable[[Any], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """How a running script loads its training data."""

    workers: int = 0
    pinned: bool = False
    prefetch_factor: int = 0  # of its workers, if advisor may replace them
    most: int = 0  # most workers that advisor may give the loader; 0: the loader is left alone
    room: int = 0  # workers that make sense on this host, whether advisor or the script starts them
    why: str = ""  # why the loader is left alone, if the reason is not obvious


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSettings:
    """The settings that a running script makes for the models that it trains."""

    weights: Sequence[torch.Tensor]
    autocast: torch.dtype | None = None
    compiled: bool = False
    optimizers: Sequence[torch.optim.Optimizer] = ()
    loading: LoaderFacts = LoaderFacts()
    wrapped: Config = Config()  # noqa: RUF009 # immutable; settings of the wrappers around its models


@dataclass(frozen=True, slots=True)
class ScriptValue:
    """A knob's value that a script has set; None is torch's own."""

    value: Value
    locked: bool = True  # the knob is not tuned
    why: str = ""  # the reason, if it is not obvious


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that can be tuned. Its columns describe values other than torch's own."""

    name: str
    summary: str
    domain: tuple[Value, ...] | range = SWITCH  # values that a record may hold, all of one type
    default: Value = False  # torch's own; None where the machine or the script decides
    values: Callable[[SearchContext], tuple[Value, ...]]
    """The values to try, torch's own first. One value: the knob is fixed. None: it is absent."""
    numerics: bool = False
    """A change is compared with strict fp32, except to `default` or `strict` if `strict` is set."""
    strict: Value = None  # the value in that fp32 reference, if it is not torch's own
    compile_s: Callable[[Value, int], float] | None = None
    """For knobs that are slow to start, which are tried on leaders only: the seconds that a value
    costs before its first step, from the value and the number of modules."""
    needs_fresh_process: bool = False
    """The process caches its choice under the first value: another value needs a new process."""
    guess: Literal["alone", "leader", ""] = ""  # first tried alone, on the leader, or neither
    conflicts: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """Values of other knobs that permit only this knob's `default`, or its first value if that is
    None; or both values as the script has them."""
    permitted: Callable[[Mapping[str, Any], Value], bool] | None = None  # by a task's given fields
    shown: Callable[[Value], str] | None = None  # default: 'name', 'no name' or 'name=value'
    caveats: Mapping[Value, str] = field(default_factory=dict)  # limits of a short comparison
    stage: str = COMPUTE  # a workload's INPUT knobs are measured last, with the user's data
    input_pipeline: bool = False
    """Acts on a run's input pipeline: tried if the steps wait for data, and no part of the key."""
    by_rule: bool = False  # if the knob is offered, its last value is chosen without a trial
    flag: Flag | None = None
    chosen: Callable[[], bool] | None = None
    """Whether the environment has set the flag, which then stays. None: advice may change it."""
    mapped: str = ""  # its name in `--map`, if an option of a run's script may set it
    script: Callable[[ScriptSettings], ScriptValue | None] | None = None  # that a script has set
    layers: Mapping[Value, Callable[[torch.nn.Module], torch.nn.Module]] = field(
        default_factory=dict
    )
    """By value: replaces a model's layers, before the model is laid out and compiled."""
    model: Callable[[torch.nn.Module, Value], None] | None = None  # acts in place
    blocks: bool = False  # saves memory: `recomputation`, `offloading` of a running script
    layout: Callable[[torch.Tensor, Value], torch.memory_format | None] | None = None
    optimizer: bool = False  # True takes the optimizer's fused kernels
    loader: bool = False  # an argument of DataLoader
    wrapper: bool = False  # of DistributedDataParallel or FSDP2: see `act/pilot/wrappers`
    autocast: Mapping[Value, str] = field(default_factory=dict)  # autocast's dtype, by value
    scaled: Collection[Value] = ()  # values whose loss needs a GradScaler
    non_blocking: Collection[Value] = ()  # values with asynchronous copies of batches
    captured: Collection[Value] = ()  # values for which `Advice.capture` makes a CUDA graph
    graphs: Collection[Value] = ()  # values whose CUDA graphs must be told where a step begins

    def holds(self, value: Value) -> bool:
        """Whether a value is in the domain; True is not 1."""
        return type(value) is type(self.domain[0]) and value in self.domain

    def needs(self, value: Value) -> str:
        """The least use that can follow a value, by what it acts on."""
        if self.captured:
            return CAPTURE
        in_loop = value in self.scaled or value in self.layers
        if in_loop or (self.loader and not self.input_pipeline):
            return LOOP
        acts = self.model or self.blocks or self.optimizer or self.loader or self.wrapper
        acts = acts or value in self.autocast
        return PILOT if acts else FLAGS


def _precisions(here: SearchContext) -> tuple[Value, ...]:
    if here.device == "cpu":
        possible = {"bf16"} if here.cpu_bf16 else set()
    else:
        possible = set(PRECISIONS) - (set() if here.capability >= (8, 0) else {"tf32", "bf16"})
        if not (here.fp8 and here.training and here.capability >= fp8.CAPABILITY):
            possible.discard("fp8")
    return tuple(p for p in PRECISIONS if p == "default" or p in possible & {*here.precisions})


AUTOCAST: dict[Value, str] = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}


def _own_precision(script: ScriptSettings) -> ScriptValue | None:
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    formats = [script.autocast, *(weight.dtype for weight in script.weights)]
    if own := next((half[one] for one in formats if one in half), None):
        return ScriptValue(own)
    if any(isinstance(one, torch.optim.LBFGS) for one in script.optimizers):
        return ScriptValue(None, why="the number format: LBFGS needs exact gradients")
    # The script set only the switch for matrix products: half precision may still be faster.
    return ScriptValue("tf32", locked=False) if "matmul=tf32" in describe() else None


def _layout(tensor: torch.Tensor) -> torch.memory_format | None:
    """The channels-last format for a tensor's number of dimensions; None if there is none."""
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())


def _laid_out(batch: torch.Tensor, value: Value) -> torch.memory_format | None:
    found = _layout(batch) if batch.is_floating_point() else None
    return found if value or found is None else torch.contiguous_format


def _lay_out_model(model: torch.nn.Module, value: Value) -> None:
    # Not model.to(memory_format=...): that raises on a model with both 4-D and 5-D weights.
    # Not contiguous(): it leaves a tensor of one channel as it is, and cuDNN goes by the strides.
    if value:
        for tensor in (*model.parameters(), *model.buffers()):
            # A lazy parameter has no dimensions before the first forward.
            layout = None if torch.nn.parameter.is_lazy(tensor) else _layout(tensor)
            if layout is not None:
                tensor.data = tensor.data.to(memory_format=layout)


def _own_layout(script: ScriptSettings) -> ScriptValue | None:
    for weight in script.weights:
        layout = _layout(weight)
        last = layout is not None and weight.is_contiguous(memory_format=layout)
        if last and not weight.is_contiguous():
            return ScriptValue(True)
    return None


def _searches(here: SearchContext) -> tuple[Value, ...]:
    """The values of cudnn_benchmark. True is tried with --effort exhaustive only: it needs a new
    worker process, and gave ResNet-50 0.977x and MobileNetV3 0.983x. A search by time is not
    deterministic, and a running script keeps the algorithms that it has chosen."""
    if here.device != "cuda" or not here.convolves:
        return ()
    return SWITCH if here.full and not here.deterministic and here.use != PILOT else (False,)


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class _Determinism(NamedTuple):
    algorithms: bool
    warn_only: bool
    cudnn: bool
    workspace: str | None

    @classmethod
    def now(cls) -> _Determinism:
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            os.environ.get(_WORKSPACE),
        )

    def put(self) -> None:
        # Only if it changes something: the setter imports torch.compile's machinery, for seconds.
        if self[:2] != self.now()[:2]:
            torch.use_deterministic_algorithms(self.algorithms, warn_only=self.warn_only)
        torch.backends.cudnn.deterministic = self.cudnn
        os.environ.pop(_WORKSPACE, None)
        if self.workspace is not None:
            os.environ[_WORKSPACE] = self.workspace

    def __str__(self) -> str:
        return str(self.algorithms and self.cudnn)


def _set_deterministic(value: Value) -> None:
    # https://docs.pytorch.org/docs/stable/notes/randomness.html: all of what training needs.
    on, now = bool(value), _Determinism.now()
    workspace = now.workspace or (":4096:8" if on else None)
    now._replace(algorithms=on, cudnn=on, workspace=workspace).put()


COMPILE_MODES = ("cudagraphs", BLOCKS, "reduce-overhead", "default")
"""By cost, for ResNet-50 on an H200: 3-4 s, less than the whole model, 19-32 s and 15-32 s."""
COMPILE_MODES_FULL = (*COMPILE_MODES, "max-autotune-no-cudagraphs", "max-autotune")
GRAPHED_MODES = ("cudagraphs", "reduce-overhead", "max-autotune")
"""Modes that replay CUDA graphs of the forward and the backward pass."""


def _compile_modes(here: SearchContext) -> tuple[Value, ...]:
    if not here.compiles or here.deterministic:
        return ()
    possible: tuple[str, ...] = ()
    if here.quick:
        possible = ("cudagraphs",) if here.device == "cuda" else ()
    elif here.device == "cuda":  # Triton comes with CUDA; the CPU needs a C++ compiler
        possible = COMPILE_MODES_FULL if here.full else COMPILE_MODES
    elif shutil.which(os.environ.get("CXX", "g++")):
        possible = (BLOCKS, "default")
    modes = [mode for mode in possible if here.repeats or mode != BLOCKS]
    if OFFLOAD in here.own:  # a CUDA graph holds its memory while the baseline trains
        modes = [mode for mode in modes if mode not in GRAPHED_MODES]
    if here.sharded:  # each block gathers its weights by hooks, which cannot be compiled
        modes = [mode for mode in modes if mode == BLOCKS]
    return ("none", *modes) if modes else ()


def _compile_seconds(value: Value, modules: int) -> float:
    kind = str(value).removesuffix("-no-cudagraphs")
    seconds, each = COMPILE_S.get("cudagraphs" if kind == BLOCKS else kind, COMPILE_S[""])
    return seconds + each * modules


def _compile(model: torch.nn.Module, value: Value) -> None:
    if value != "none":
        compiling.compile_in_place(model, str(value))


def _compile_dynamic(model: torch.nn.Module, value: Value) -> None:
    if value:  # in mode default, the only one that `conflicts` permits
        compiling.compile_in_place(model, "default", dynamic=True)


def _own_fused(script: ScriptSettings) -> ScriptValue | None:
    groups = [group for one in script.optimizers for group in one.param_groups]
    if any(group.get("fused") for group in groups):
        return ScriptValue(True)
    fused = all("fused" in group for group in groups)
    return None if fused else ScriptValue(None, why="fused_optimizer: there are no fused kernels")


def _checkpointing(value: Value) -> str:
    few = {0: "no checkpointing", 1: "checkpointing of every block"}
    return few.get(int(value or 0)) or f"checkpointing of one block in {value}"


def _threads(here: SearchContext) -> tuple[Value, ...]:
    if here.device != "cpu":
        return ()
    if here.threads_set:
        return (here.threads,)
    others = {here.cores, max(1, here.cores // 2), max(1, here.cores // 4), 1}
    return (here.threads, *sorted(others - {here.threads}, reverse=True))


def _workers(here: SearchContext) -> tuple[Value, ...]:
    """Numbers of loader workers, few first: the search stops when more workers gain nothing."""
    most, own = here.workers, workers(here.own)
    if here.use != PILOT:
        counts = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
        return tuple(sorted({min(most, number) for number in counts})) if here.loaded else ()
    others = sorted({most, most // 2, most // 4} - {0, own})
    if WORKERS in here.mapped:  # each number takes a start: fewer than the script's gain the least
        others = [number for number in others if number > own]
    return (own, *others) if most else ()


def _own_loading(
    script: ScriptSettings, value: Value, *, locked: bool, why: str = ""
) -> ScriptValue | None:
    if value:
        return ScriptValue(value, locked)
    return None if script.loading.most else ScriptValue(None, why=why)


def _of_wrapper(name: str, summary: str, *values: Value, **more: Any) -> Knob:
    """A setting of the wrappers around a script's models; `values`: to try, torch's own first."""

    def own(script: ScriptSettings) -> ScriptValue | None:
        there = name in script.wrapped
        return ScriptValue(script.wrapped[name], locked=False) if there else None

    return Knob(
        name=name,
        summary=summary,
        domain=values,
        default=values[0],
        values=lambda here: values if name in here.wrapped else (),
        guess="leader",
        script=own,
        wrapper=True,
        **more,
    )


KNOBS: tuple[Knob, ...] = (
    Knob(
        name="precision",
        summary="number format: torch's default, TF32, bf16 or fp16 autocast, bf16 with large "
        "linear layers in fp8, or strict fp32",
        domain=PRECISIONS,
        default="default",
        values=_precisions,
        numerics=True,
        strict="fp32",
        # A record may come from a host with torchao.
        permitted=lambda given, value: (
            value in ("default", *given.get("precisions", PRECISIONS))
            and (value != "fp8" or fp8.installed())
        ),
        guess="alone",
        shown=str,
        script=_own_precision,
        flag=Flag(
            set=lambda value: set_float32(str(value)), now=Float32.now, back=Float32.put_back
        ),
        layers={"fp8": fp8.convert},
        caveats={"fp8": fp8.CAVEAT},
        autocast=AUTOCAST,
        scaled=("fp16",),
    ),
    Knob(
        name="channels_last",
        summary="channels-last memory format of weights and inputs (NHWC, NDHWC)",
        numerics=True,  # a model may depend on strides, as by as_strided
        values=lambda here: SWITCH if here.convolves and here.dimensions in (4, 5) else (),
        guess="alone",
        script=_own_layout,
        model=_lay_out_model,
        layout=_laid_out,
    ),
    Knob(
        name="cudnn_benchmark",
        summary="search for the fastest cuDNN algorithm at the first step of each shape",
        values=_searches,
        # A search takes 10 to 20 s for each format and layout, and changes rounding only.
        strict=False,
        needs_fresh_process=True,
        guess="leader",
        script=lambda _script: ScriptValue(True) if torch.backends.cudnn.benchmark else None,
        flag=Flag(
            set=lambda value: setattr(torch.backends.cudnn, "benchmark", bool(value)),
            now=lambda: torch.backends.cudnn.benchmark,
        ),
    ),
    Knob(
        name="cudnn_deterministic",
        summary="deterministic algorithms only (fixed by --deterministic)",
        values=lambda here: (here.deterministic,),
        flag=Flag(set=_set_deterministic, now=_Determinism.now, back=_Determinism.put),
    ),
    Knob(
        name=BATCH,
        summary="samples per step",
        domain=range(1, 2**24 + 1),
        default=None,
        values=lambda here: here.batches,
        mapped="batch",
        loader=True,
    ),
    Knob(
        name="fused_optimizer",
        summary="one fused kernel for the optimizer step (default: foreach on CUDA, else a loop)",
        values=lambda here: SWITCH if here.training else (),
        numerics=True,
        guess="leader",
        # For steps that the GradScaler skips, see `init_momentum`.
        conflicts={"precision": ("fp16",)},
        script=_own_fused,
        optimizer=True,
    ),
    Knob(
        name="compile",
        summary="torch.compile mode, its backend cudagraphs, or only the blocks that repeat",
        domain=("none", *COMPILE_MODES_FULL),
        default="none",
        values=_compile_modes,
        numerics=True,
        compile_s=_compile_seconds,
        permitted=lambda given, value: value == "none" or given.get("compile", True),
        script=lambda script: ScriptValue("default") if script.compiled else None,
        model=_compile,
        graphs=GRAPHED_MODES,
    ),
    Knob(
        name="dynamic_shapes",
        summary="compile once for inputs of any length, if a run's inputs vary",
        values=lambda here: SWITCH if here.varies and "default" in _compile_modes(here) else (),
        numerics=True,
        # A CUDA graph has one fixed shape, and only compiled code has dynamic shapes.
        conflicts={"compile": tuple(m for m in ("none", *COMPILE_MODES_FULL) if m != "default")},
        permitted=lambda given, value: not value or given.get("compile", True),
        script=lambda script: ScriptValue(None) if script.compiled else None,
        model=_compile_dynamic,
    ),
    Knob(
        name=CHECKPOINT,
        summary="activation checkpointing: every block, or one of 2 or 4, computes its activations "
        "again in backward; outside of code that compiles the whole model",
        domain=(0, 1, 2, 4),
        default=0,
        # Slower: only for a script that runs out of memory without it.
        values=lambda here: (0, 1, 2, 4) if CHECKPOINT in here.own else (),
        numerics=True,
        conflicts={"compile": tuple(m for m in COMPILE_MODES_FULL if m != BLOCKS)},
        shown=_checkpointing,
        blocks=True,
    ),
    Knob(
        name=OFFLOAD,
        summary="what is kept for backward lies in page-locked memory of the host; weights and "
        "small tensors stay on the device",
        values=lambda here: SWITCH if OFFLOAD in here.own else (),
        numerics=True,
        shown=lambda value: OFFLOADED if value else "activations on the device",
        blocks=True,
    ),
    Knob(
        name="step_graph",
        summary="the whole training step as one CUDA graph, through advice.capture",
        values=lambda here: (
            SWITCH if here.device == "cuda" and here.training and here.step_graph else ()
        ),
        numerics=True,
        guess="alone",
        # CUDA graphs do not nest. A captured step always has the fused optimizer: only that one
        # reads the learning rate, and whether a GradScaler skips the step, on the device.
        conflicts={"compile": GRAPHED_MODES, "fused_optimizer": (True,)},
        permitted=lambda given, value: not value or given.get("step_graph", True),
        optimizer=True,
        captured=(True,),
    ),
    _of_wrapper(
        BF16_REDUCE,
        "FSDP2: gradients are sent and summed in bf16, if --allow bf16-reduce is given",
        *SWITCH,
        numerics=True,
        permitted=lambda given, value: not value or "bf16-reduce" in given.get("allow", ()),
    ),
    _of_wrapper(
        RESHARD,
        "FSDP2: free gathered weights after a block's forward pass",
        *(True, False),
        shown=lambda value: f"{RESHARD}={value}",
    ),
    Knob(
        name=THREADS,
        summary="CPU threads inside one operation",
        domain=range(1, 2**12 + 1),
        default=None,
        values=_threads,
        guess="alone",
        script=lambda _script: ScriptValue(None) if threads_set() else None,
        flag=Flag(
            set=lambda value: torch.set_num_threads(int(value or 1)),
            now=lambda: torch.get_num_threads(),
        ),
        chosen=threads_set,
    ),
    Knob(
        name=WORKERS,
        summary="processes that load data ahead of the steps",
        domain=range(2**10 + 1),
        default=None,
        values=_workers,
        stage=INPUT,
        shown=lambda value: f"{value} loader worker{'s' * (value != 1)}",
        input_pipeline=True,
        mapped="num_workers",
        script=lambda script: _own_loading(
            script, script.loading.workers, locked=not script.loading.most, why=script.loading.why
        ),
        loader=True,
    ),
    Knob(
        name="prefetch_factor",
        summary="batches that each loader worker fetches ahead",
        domain=range(1, 2**10 + 1),
        default=None,
        # PyTorch's own first. A larger factor evens out samples that take long to load.
        values=lambda here: (2, 4, 8) if here.workers else (),
        conflicts={"num_workers": (0,)},
        stage=INPUT,
        shown=lambda value: f"{value} batches ahead",
        input_pipeline=True,
        script=lambda script: _own_loading(
            script, script.loading.most and script.loading.prefetch_factor, locked=False
        ),
        loader=True,
    ),
    Knob(
        name="in_order",
        summary="batches in the sampler's order, not in the order in which workers finish",
        default=True,
        values=lambda here: (True, False) if here.any_order and here.workers > 1 else (),
        conflicts={"num_workers": (0, 1)},
        stage=INPUT,
        shown=lambda value: "in_order" if value else "batches in any order",
        loader=True,
    ),
    Knob(
        name="sharing",
        summary="how workers share memory: as open files, or by the names of files",
        domain=SHARING,
        default=SHARING[0],
        values=lambda here: SHARING if here.by_name and here.workers else (),
        conflicts={"num_workers": (0,)},
        stage=INPUT,
        by_rule=True,
        flag=Flag(
            set=lambda value: torch.multiprocessing.set_sharing_strategy(str(value)),
            now=lambda: torch.multiprocessing.get_sharing_strategy(),
        ),
    ),
    Knob(
        name="persistent_workers",
        summary="loader workers that stay from one epoch to the next",
        # A running script may change its dataset between two epochs.
        values=lambda here: SWITCH if here.use != PILOT and here.workers > 0 else (),
        conflicts={"num_workers": (0,)},
        stage=INPUT,
        by_rule=True,
        loader=True,
    ),
    Knob(
        name="pin_memory",
        summary="page-locked host memory with asynchronous copies to the device",
        # Without workers, pinning gains nothing.
        values=lambda here: SWITCH if here.device == "cuda" and here.workers > 0 else (),
        conflicts={"num_workers": (0,)},
        guess="alone",
        stage=INPUT,
        input_pipeline=True,
        script=lambda script: _own_loading(script, script.loading.pinned, locked=True),
        loader=True,
        non_blocking=(True,),
    ),
)

COMPILE = "compile"
RECIPE: tuple[dict[str, Value], ...] = (
    {"precision": "bf16", "channels_last": True},
    {"precision": "tf32", "channels_last": True},
    {"channels_last": True},
)
"""The precision and layout that are tried first, and their substitutes if they fail. They led in 12
of 16 measured models, and in all third-party scripts. A knob that the space lacks is left out."""
COMPILED: tuple[dict[str, Value], ...] = (
    {"compile": "default", "dynamic_shapes": True},
    {"compile": "reduce-overhead"},
    {"compile": "default"},
    {"compile": BLOCKS},
)
"""How the recipe is compiled: the first of these that is offered and runs."""
SAVED: tuple[dict[str, Value], ...] = (
    {CHECKPOINT: 0, OFFLOAD: False},
    {CHECKPOINT: 4, OFFLOAD: False},
    {CHECKPOINT: 2, OFFLOAD: False},
    {CHECKPOINT: 1, OFFLOAD: False},
    {},
)
"""Ways to save memory, the fastest first, for a script that runs out of memory: the first of these
that fits."""
COMPILED_SAVING: tuple[dict[str, Value], ...] = ({"compile": BLOCKS}, {"compile": "default"})
"""How the recipe is compiled if it saves memory: code for the whole model saves by itself."""
CAPTURED: tuple[dict[str, Value], ...] = (
    {"step_graph": True},
    {"compile": "default", "step_graph": True},
    {"compile": BLOCKS, "step_graph": True},
)
"""The whole step as one graph. Around a compiled step, it was the fastest for most models."""
GRAPHS: tuple[dict[str, Value], ...] = (
    {"compile": "cudagraphs"},
    {"step_graph": True},
    {"precision": "tf32", "step_graph": True},
)
"""Graphs without a compiler: small nets gain severalfold by graphs, and lose by autocast."""
FORMATS_TRIED: tuple[dict[str, Value], ...] = (
    {"precision": "fp16"},
    {"channels_last": False},
    {"precision": "tf32"},
    {"precision": "default"},
    {"precision": "fp8"},
)
"""Other precisions and layouts for the leader."""

BY_NAME = {knob.name: knob for knob in KNOBS}
INPUT_PIPELINE = tuple(knob.name for knob in KNOBS if knob.input_pipeline)
SAVING = tuple(knob.name for knob in KNOBS if knob.blocks)  # knobs that save memory
FIRST_STEP_COSTS = (
    "threads",
    *(k.name for k in KNOBS if k.needs_fresh_process or k.blocks or (k.model and not k.layout)),
)
"""Knobs that cost time at the first step, which starts threads, searches algorithms, compiles."""
FORMATS = tuple(k.name for k in KNOBS if k.autocast or (k.wrapper and k.numerics))
LAYOUTS = tuple(knob.name for knob in KNOBS if knob.layout)
TORCH = Config({knob.name: knob.default for knob in KNOBS if knob.default is not None})
"""The defaults of torch and its DataLoader, where they are the same everywhere."""


class Advised(Config):
    """A config as a script reads it: each knob is an attribute. If the config lacks a knob, its
    value is torch's own, or None if the script or the machine decides it."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Value:
        if name in BY_NAME and name not in self:
            return BY_NAME[name].default
        return super().__getattr__(name)


def _rows(config: Mapping[str, Value]) -> Iterator[tuple[Knob, Value]]:
    """Knobs and their values. Records of later versions have unknown knobs, which are left out."""
    return ((BY_NAME[name], value) for name, value in config.items() if name in BY_NAME)


def plain(task: Task, device: str) -> Config:
    """torch's own config for a task on 'cuda:0' or 'cpu', before anything else is known."""
    here = SearchContext(device=device.partition(":")[0], deterministic=task.deterministic)
    known = {k.name: v[0] for k in KNOBS if k.default is not None and (v := k.values(here))}
    return Config(known).at(task.batch)


def use_of(config: Config, default: Config) -> str:
    """The least use that can follow all of a config."""
    needed = {knob.needs(value) for knob, value in _rows(config.changed(default))}
    return max(needed, key=USES.index, default=FLAGS)


def follows(use: str, config: Config, default: Config) -> bool:
    """Whether a script of this use can follow all of a config."""
    return USES.index(use_of(config, default)) <= USES.index(use)


def caveats(config: Config) -> list[str]:
    """Sentences on what the comparison with fp32 cannot show about a config."""
    return [knob.caveats[value] for knob, value in _rows(config) if value in knob.caveats]


def compiles(config: Config) -> bool:
    """Whether a config compiles code that is cached on disk; the backend cudagraphs does not."""
    return config.get(COMPILE, "none") not in ("none", "cudagraphs")


def code(config: Config) -> Config:
    """The part of a config that decides what code a compiler makes: without the input pipeline, the
    optimizer, and the choice among kernels of libraries."""
    return config.without(
        *(
            k.name
            for k in KNOBS
            if k.input_pipeline or k.optimizer or k.needs_fresh_process or k.wrapper
        )
    )


def needs_comparison(config: Config, default: Config = TORCH) -> bool:
    """Whether a config changes numbers, so that it must be compared with fp32."""
    return any(
        knob.numerics and (knob.strict is None or value not in (knob.default, knob.strict))
        for knob, value in _rows(config.changed(default))
    )


def strict(default: Config) -> Config:
    """The reference for numbers: `default` in strict fp32."""
    known = (knob for knob in KNOBS if knob.strict is not None and knob.name in default)
    return default.replace(**{knob.name: knob.strict for knob in known})


def reference(own: Config) -> Config:
    """The reference for a script's own settings: `strict`, neither compiled nor laid out."""
    undone = (knob for knob in KNOBS if knob.model is not None and knob.name in own)
    return strict(own).replace(**{knob.name: knob.default for knob in undone})


def permits(given: Mapping[str, Any], config: Config) -> bool:
    """Whether a task's given fields permit a config."""
    return all(knob.permitted is None or knob.permitted(given, v) for knob, v in _rows(config))


def workers(config: Mapping[str, Value]) -> int:
    """Loader workers of a config; 0 if it does not say."""
    return int(config.get(WORKERS) or 0)


def adoption_cost(config: Config, default: Config) -> int:
    """How many changes a config asks for. Of configs that tie, the one with the lowest cost is
    advised. fp16 costs one more for its scaler, fp8 for torchao."""
    changed = config.changed(default)
    more = (value in knob.scaled or value in knob.layers for knob, value in _rows(changed))
    return len(changed) + sum(more)


def described(config: Config, default: Config = TORCH, *, nothing: str = "torch default") -> str:
    """The changes of a config in words: 'bf16, channels_last'; `nothing` if there are none. How a
    config saves memory is said whatever the default does."""
    if not config.changed(default):
        return nothing
    base = without_saving(default)
    parts = [_described(*pair) for pair in config.changed(base).items()]
    saves = config == without_saving(config) and base != default
    return ", ".join([*parts, *["without saving memory"] * saves])


def without_saving(config: Config) -> Config:
    """The config of a script that saves memory, without that."""
    return config | TORCH.only(*SAVING).only(*config)


def described_own(own: Config, others: Config, *, nothing: str = "torch default") -> str:
    """As `described`, of a script: in which mode, and by which backend, it compiles is unknown."""
    return described(own, others, nothing=nothing).replace("compile=default", "torch.compile")


def _described(name: str, value: Value) -> str:
    knob = BY_NAME.get(name)
    if knob is not None and knob.shown is not None:
        return knob.shown(value)
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name}={value}"


def refusal(record: Record) -> str:
    """Why a record may not be used, such as a value outside its knob's domain; '' if it may."""
    chosen = [record.baseline, *(one.choice for one in record.winners), *record.raced]
    for choice in chosen:
        if choice.config.batch != choice.batch:
            return f"a config has batch {choice.config.batch}, its measurement {choice.batch}"
    fixed = [record.baseline, *(one.choice for one in record.winners if not one.free)]
    if any(choice.batch != record.batch for choice in fixed):
        return f"its batch is {record.batch}, but its choices have another"
    default = record.baseline.config
    measured = [*(choice.config for choice in chosen), *(trial.config for trial in record.trials)]
    others = [record.input, *(part.knob for part in record.parts)]
    # A knob that is unknown here does not matter if all configs have the baseline's value.
    needed = {n for one in (*others, *(c.changed(default) for c in measured)) for n in one}
    seen = {(n, type(v), v) for config in (*measured, *others) for n, v in config.items()}
    for name, _kind, value in sorted(seen, key=repr):
        knob = BY_NAME.get(name)
        if knob is None and name in needed:
            return f"knob {name[:40]!r} is not known to this version of advisor"
        if knob is not None and not knob.holds(value):
            ends = isinstance(knob.domain, range) and f"{knob.domain[0]} to {knob.domain[-1]}"
            return f"{name} {value!r:.60}: expected {ends or ', '.join(map(str, knob.domain))}"
    for one in record.winners:
        if not follows(one.use, one.choice.config, default):
            return f"the winner for use {one.use!r} has knobs that this use cannot follow"
    return ""
