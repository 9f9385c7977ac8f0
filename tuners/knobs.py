"""Every knob in one table: its values, when it is active, and how it acts.

A knob acts on the process (`flag`), the model, the batch, the optimizer's or the loader's keyword
arguments, or the forward pass (`autocast`, `scaled`). To add one, add a row to KNOBS: the space,
the guesses, the worker, the records, `advisor show` and a script's `Advice` all read this table,
and no knob's name stands anywhere else, but where a framework has a word of its own for it
(`advisor/frameworks`): what has none there is said to have none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from advisor.cache.config import BATCH, Config, Value
from advisor.cache.record import CAPTURE, FLAGS, LOOP, PILOT, USES, Record
from advisor.cache.task import PERMITTED, PRECISIONS, Task
from advisor.tuners import fp8, known_wrong
from advisor.tuners.decisions import COMPILE_MODULE_S, COMPILE_S, LONG_COMPILE_S, QUICK_COMPILE_S
from advisor.tuners.environment import threads_set
from advisor.tuners.lazily import torch
from advisor.tuners.tf32 import Float32, describe, set_float32

if TYPE_CHECKING:
    from torch import Tensor, nn

COMPUTE, INPUT = "compute", "input"
"""Stages: a batch that lies on the device; fed by a loader."""
WORKERS = "num_workers"
"""What feeds a workload: the first that is chosen of its loader, and what others stand on."""
COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Of them, as far as the host has cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What decides which values make sense: the device, the workload, what the user permits."""

    device: str
    """'cuda' or 'cpu'."""
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability."""
    cpu_bf16: bool = False
    cores: int = 1
    threads: int = 1
    """Intra-op threads that torch itself chooses here."""
    threads_set: bool = False
    """Whether the user has chosen them."""
    dimensions: int = 4
    """Of one batch: 4 is NCHW, 5 is NCDHW."""
    convolves: bool = True
    modules: int = 0
    """In the model."""
    repeats: bool = False
    """Whether blocks that the model repeats are most of it."""
    training: bool = True
    draws: bool = False
    """Whether a step draws random numbers."""
    fp8: bool = False
    """Whether torchao is there, and linear layers that are large enough for it."""
    batches: tuple[int, ...] = (1,)
    """Batch sizes to try, the user's own first."""
    deterministic: bool = False
    precisions: tuple[str, ...] = PERMITTED
    full: bool = False
    compiles: bool = False
    quick: bool = False
    """Whether only what takes seconds is compiled."""
    step_graph: bool = True
    """Whether the script can have its whole step captured."""
    use: str = USES[-1]
    """The widest use that is looked for: of a run that nobody rewrote the pilot's."""
    workers: int = 0
    """That a loader may be given at most: a running script's, or that of a workload's own data."""
    loaded: bool = False
    """Whether a workload has data of its own."""
    any_order: bool = False
    """Whether its batches may come in any order."""
    by_name: bool = False
    """Whether its workers hand memory over by name: open, it is more files than may be."""
    mapped: tuple[str, ...] = ()
    """Knobs that options of a run's command set, at a start each."""
    varies: bool = False
    """Whether the inputs of a running script vary in shape."""
    own: Config = Config()  # noqa: RUF009 # immutable
    """What a running script sets itself: the baseline is that."""
    kept: tuple[str, ...] = ()
    """Knobs that stay as the script, or torch, has them."""


@dataclass(frozen=True, slots=True)
class Domain:
    """The values that a knob can have at all, anywhere: `values`, or whole numbers to `most`."""

    values: tuple[Value, ...] = ()
    most: int = 0
    least: int = 1

    def holds(self, value: Value) -> bool:
        if self.most:
            return type(value) is int and self.least <= value <= self.most
        return any(value == one and type(value) is type(one) for one in self.values)

    def __str__(self) -> str:
        return f"{self.least} to {self.most}" if self.most else ", ".join(map(str, self.values))


SWITCH = Domain((False, True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A switch of the process: `set` takes a knob's value, `now` says what the process has.

    `now` is for comparing, showing and setting back; where it is no value that `set` takes, as
    other code may set what no knob does, `back` takes it.
    """

    set: Callable[[Value], None]
    now: Callable[[], Any]
    back: Callable[[Any], None] | None = None

    def set_back(self, held: Any) -> None:
        """Make the process have again what `now` once gave."""
        (self.back or self.set)(held)


def _always(_value: Value) -> bool:
    return True


def _never(_value: Value) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How a running script loads the data that it trains on.

    Attributes:
        workers: processes of its loader's, 0 for none.
        pinned: whether its loader pins memory.
        ahead: batches that each of its own workers fetches ahead, where others may take their
            place; 0 where it has none, or they stay.
        most: workers that it may be given, 0 where it is left alone; `why`, if that is not plain.
        room: workers that make sense, whoever starts them.
    """

    workers: int = 0
    pinned: bool = False
    ahead: int = 0
    most: int = 0
    room: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What of a running script tells which knobs it has set itself.

    Attributes:
        weights: of all its models that train.
        autocast: the number format of its own autocast around them.
        compiled: whether it compiles one itself.
        optimizers: those that train.
        loading: of the data that it trains on.
    """

    weights: Sequence[Tensor]
    autocast: torch.dtype | None = None
    compiled: bool = False
    optimizers: Sequence[torch.optim.Optimizer] = ()
    loading: Loading = Loading()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for one in self.optimizers for group in one.param_groups]


@dataclass(frozen=True, slots=True)
class Own:
    """A knob's value that a script has set; `stays`: it is not tuned. `why` it cannot be, where
    that is not plain; the value None is torch's own."""

    value: Value
    stays: bool = True
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that can be tuned. What is said of a value holds for those that are not torch's."""

    name: str
    summary: str
    domain: Domain = SWITCH
    """What a record may hold; anything else in one is refused."""
    default: Value = False
    """torch's own; None where the machine or the script decides."""
    values: Callable[[Situation], tuple[Value, ...]]
    """torch's own behaviour first; one value: fixed; none: the knob is absent here."""
    needs: Callable[[Value], str] = lambda _value: LOOP
    """The least use that can follow a value."""
    numerics: Callable[[Value], bool] = _never
    """Whether a value changes what is computed, so that it is held against strict fp32."""
    strict: Value = None
    """The value of that reference, where it is not torch's own."""
    memory: bool = False
    """It changes what is kept for the backward pass; others hardly matter to the peak."""
    first_step: bool = False
    """Values pay before the first step: algorithm search, compilation, capture."""
    dear: Callable[[Value, int], float] | None = None
    """Seconds that a trial of a value must have, by the modules of the model: each costs many
    before its first step, and is tried on leaders only. None: they cost few."""
    frugal: bool = False
    """It gives speed for memory: tried only where a larger batch does not fit."""
    ahead: Callable[[Value], bool] = _never
    """Whether what a value compiles is kept in caches on disk."""
    compiled: bool = True
    """Whether it decides the code that a compiler makes: what acts on the optimizer, the loader or
    the choice among kernels of libraries alone does not."""
    lasting: bool = False
    """A process keeps what it chose under one value, whatever is set later: another value takes
    another process."""
    guess: Literal["alone", "leader", ""] = "alone"
    """Tried at first by itself, on what leads by then, or only where the search's order says so."""
    conflicts: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """Values of other knobs with which only the first value here is sound."""
    permitted: Callable[[Mapping[str, Any], Value], bool] | None = None
    """Whether what was given of a Task permits a value; None: always."""
    carries: bool = False
    """Whether a record of another shape or device may be followed in it unmeasured: no more memory,
    no other numbers than were verified there, nothing that can fail."""
    weight: Callable[[Value], int] = lambda _value: 1
    """What following it asks of a script: of configs that tie, the lightest is advised."""
    shown: Callable[[Value], str] | None = None
    """As a report calls it; default: 'name', 'no name' or 'name=value'."""
    caveat: Callable[[Value], str] | None = None
    """What must be known of a value that no comparison of some steps shows; '' where there is
    nothing."""
    stage: str = COMPUTE
    """COMPUTE is measured on a batch on the device, INPUT with a loader of the user's data
    afterwards; in a run all are measured with its steps."""
    feeds: bool = False
    """It acts on what a run's steps wait for: tried where they wait, and kept for what is tried
    then; it makes no other key."""
    by_rule: bool = False
    """It is offered where its last value is needed, and that is taken untried."""
    flag: Flag | None = None
    chosen: Callable[[], bool] | None = None
    """Whether the environment says that the user, or a launcher, has set the flag; None for one
    that advice sets whatever it was, others stay as the user has them."""
    mapped: str = ""
    """What `--map` calls it, where an option of a run's script may set it."""
    script: Callable[[Script], Own | None] | None = None
    """What a running script has set itself, None where that is nothing."""
    layers: Callable[[Value], Callable[[nn.Module], nn.Module] | None] | None = None
    """What puts others in the place of a model's layers, before it is laid out and compiled."""
    model: Callable[[nn.Module, Value], nn.Module] | None = None
    layout: Callable[[Tensor, Value], torch.memory_format | None] | None = None
    optimizer: Callable[[Value], dict[str, object]] | None = None
    loader: Callable[[Value], dict[str, object]] | None = None
    autocast: Callable[[Value], torch.dtype | None] | None = None
    scaled: Callable[[Value], bool] | None = None
    non_blocking: Callable[[Value], bool] | None = None
    captured: Callable[[Value], bool] | None = None
    """Whether `Advice.capture` makes a CUDA graph of the training step."""
    graphs: Callable[[Value], bool] | None = None
    """Whether the forward pass replays CUDA graphs, which must be told where a step begins."""


def _precisions(here: Situation) -> tuple[Value, ...]:
    possible: tuple[str, ...]
    if here.device == "cpu":
        possible = ("default", "bf16") if here.cpu_bf16 else ("default",)
    else:
        ampere = here.capability >= (8, 0)
        possible = tuple(p for p in PRECISIONS if ampere or p not in ("tf32", "bf16"))
        if not (here.fp8 and here.training and here.capability >= fp8.CAPABILITY):
            possible = tuple(p for p in possible if p != "fp8")
    return tuple(p for p in possible if p == "default" or p in here.precisions)


AUTOCAST = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""What autocast computes in, by number format: with fp8 all but the layers that are converted."""


def _set_precision(value: Value) -> None:
    # Autocast runs over TF32 for what it leaves in float32, as in the measured tables.
    set_float32("tf32" if value in AUTOCAST else str(value))


def _own_precision(script: Script) -> Own | None:
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    formats = [script.autocast, *(weight.dtype for weight in script.weights)]
    if own := next((half[one] for one in formats if one in half), None):
        return Own(own)
    if any(isinstance(one, torch.optim.LBFGS) for one in script.optimizers):
        return Own(None, why="LBFGS lives by small differences of gradients")
    # Only its matrix products' switch: half precision may still be faster.
    return Own("tf32", stays=False) if "matmul=tf32" in describe() else None


def _autocast(value: Value) -> torch.dtype | None:
    name = AUTOCAST.get(str(value))
    return getattr(torch, name) if name else None


def _permits_precision(given: Mapping[str, Any], value: Value) -> bool:
    """fp8 where torchao is there, too: a record may come from elsewhere."""
    asked = value == "default" or value in given.get("precisions", PRECISIONS)
    return asked and (value != "fp8" or fp8.installed())


def _layout(tensor: Tensor) -> torch.memory_format | None:
    """Channels-last of as many dimensions, None where there is none."""
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())


def _lay_out_model(model: nn.Module, value: Value) -> nn.Module:
    # Not model.to(memory_format=...): that raises on a model with both 4-D and 5-D weights.
    # Not contiguous(): it leaves a tensor of one channel as it is, and cuDNN goes by the strides.
    if value:
        for tensor in (*model.parameters(), *model.buffers()):
            # A lazy parameter has no dimensions before the first forward.
            layout = None if torch.nn.parameter.is_lazy(tensor) else _layout(tensor)
            if layout is not None:
                tensor.data = tensor.data.to(memory_format=layout)
    return model


def _own_layout(script: Script) -> Own | None:
    def laid_out(weight: Tensor) -> bool:
        layout = _layout(weight)
        last = layout is not None and weight.is_contiguous(memory_format=layout)
        return last and not weight.is_contiguous()

    return Own(True) if any(map(laid_out, script.weights)) else None


def _batch_layout(tensor: Tensor, value: Value) -> torch.memory_format | None:
    return _layout(tensor) if value and tensor.is_floating_point() else None


def _searches(here: Situation) -> tuple[Value, ...]:
    """With --effort exhaustive alone: a process keeps the algorithm that it chose first, so that
    each switch takes a start of the worker, and it gave ResNet-50 0.977x and MobileNetV3 0.983x."""
    if here.device != "cuda" or not here.convolves:
        return ()
    # Searching by time picks differently from run to run, so it is not deterministic. A running
    # script has chosen its algorithms, and keeps them.
    fixed = here.deterministic or here.use == PILOT or not here.full
    return (False,) if fixed else (False, True)


def _set_benchmark(value: Value) -> None:
    torch.backends.cudnn.benchmark = bool(value)


class _Determinism(NamedTuple):
    """What asks PyTorch for deterministic algorithms."""

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

    def put_back(self) -> None:
        if self[:2] != self.now()[:2]:
            torch.use_deterministic_algorithms(self.algorithms, warn_only=self.warn_only)
        torch.backends.cudnn.deterministic = self.cudnn
        if self.workspace is None:
            os.environ.pop(_WORKSPACE, None)
        else:
            os.environ[_WORKSPACE] = self.workspace

    def __str__(self) -> str:
        return str(self.algorithms and self.cudnn)


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def _set_deterministic(value: Value) -> None:
    # https://docs.pytorch.org/docs/stable/notes/randomness.html: all of what training needs.
    if value:
        os.environ.setdefault(_WORKSPACE, ":4096:8")
    # Only where it changes something: the setter imports torch.compile's machinery, for seconds.
    if torch.are_deterministic_algorithms_enabled() != bool(value):
        torch.use_deterministic_algorithms(bool(value))
    torch.backends.cudnn.deterministic = bool(value)


def _set_cudnn(value: Value) -> None:
    torch.backends.cudnn.enabled = bool(value)


BLOCKS = "blocks"
"""Mode "default" for each block that a model repeats: one compilation for all of them."""
COMPILE_MODES = ("cudagraphs", BLOCKS, "reduce-overhead", "default")
"""By the seconds they cost on an H200: 3-4, 19-32 and 15-32 for ResNet-50 (FACTS), which has no
such blocks."""
COMPILE_MODES_FULL = (*COMPILE_MODES, "max-autotune-no-cudagraphs", "max-autotune")
"""Autotuning ran over eight minutes on ResNet-50."""
WITHOUT_DEFAULT = tuple(mode for mode in ("none", *COMPILE_MODES_FULL) if mode != "default")
"""With which what compiles a whole model in the mode "default" otherwise has no effect."""
SHARES = (1.0, 0.7, 0.5)
"""Of the activations that a compiled model keeps for its backward pass."""
GRAPHED_MODES = ("cudagraphs", "reduce-overhead", "max-autotune")
"""Those that replay CUDA graphs of the forward and the backward pass."""


def _compile_modes(here: Situation) -> tuple[Value, ...]:
    """Triton comes with CUDA; the CPU needs a C++ compiler."""
    if not here.compiles or here.deterministic:
        return ()
    if here.quick:
        return ("none", "cudagraphs") if here.device == "cuda" else ()
    possible: tuple[str, ...] = ()
    if here.device == "cuda":
        possible = COMPILE_MODES_FULL if here.full else COMPILE_MODES
    elif shutil.which(os.environ.get("CXX", "g++")):
        possible = (BLOCKS, "default")
    modes = [mode for mode in possible if here.repeats or mode != BLOCKS]
    return ("none", *modes) if modes else ()


def _compile_seconds(value: Value, modules: int) -> float:
    """Seconds that compiling a model of so many modules takes, before one has been seen."""
    if value in ("cudagraphs", BLOCKS):
        return QUICK_COMPILE_S
    if str(value).startswith("max-autotune"):
        return LONG_COMPILE_S
    return COMPILE_S + COMPILE_MODULE_S * modules


def _compile(model: nn.Module, value: Value) -> nn.Module:
    # In place, not torch.compile(model): the names in state_dict() stay what they are. Not by a
    # method of its own: timm's task puts what it compiles in the place of its model.
    compile_ = torch.nn.Module.compile
    if value == "cudagraphs":
        compile_(model, backend="cudagraphs")
    elif value == BLOCKS:
        from advisor.tuners.blocks import repeated  # loads torch

        for block in repeated(model):
            compile_(block, **_by_inductor("default"))
    elif value != "none":
        compile_(model, **_by_inductor(str(value)))
    return model


def _by_inductor(mode: str) -> dict[str, Any]:
    """How torch.compile is called for a mode, which it takes options in the place of."""
    if options := known_wrong.avoided():
        return {"options": torch._inductor.list_mode_options(mode) | options}
    return {"mode": mode}


def _compile_dynamic(model: nn.Module, value: Value) -> nn.Module:
    # In the place of what the knob before it has compiled, which is in the same mode.
    if value:
        torch.nn.Module.compile(model, dynamic=True, **_by_inductor("default"))
    return model


def _shares(here: Situation) -> tuple[Value, ...]:
    """Where batches beside the user's are tried; none where what is drawn cannot be computed again:
    see `recomputing`."""
    free = len(here.batches) > 1 and here.use != PILOT
    return SHARES if free and here.training and not here.draws and _compiles_whole(here) else ()


def _compiles_whole(here: Situation) -> bool:
    return "default" in _compile_modes(here)


def _keep_share(model: nn.Module, value: Value) -> nn.Module:
    # In the place of what the knob before it has compiled, which is in the same mode.
    if value != 1.0:
        from advisor.tuners import recomputing  # loads torch.compile's machinery

        recomputing.keep(model, float(value or 0))
    return model


def _own_fused(script: Script) -> Own | None:
    if any(group.get("fused") for group in script.groups):
        return Own(True)
    fused = all("fused" in group for group in script.groups)
    return None if fused else Own(None, why="the optimizer has no fused kernels")


def _set_threads(value: Value) -> None:
    torch.set_num_threads(int(value or 1))


def _threads(here: Situation) -> tuple[Value, ...]:
    if here.device != "cpu":
        return ()
    if here.threads_set:
        return (here.threads,)
    others = {here.cores, max(1, here.cores // 2), max(1, here.cores // 4), 1}
    return (here.threads, *sorted(others - {here.threads}, reverse=True))


def _workers(here: Situation) -> tuple[Value, ...]:
    """Few first: what gains no more by more is left at that."""
    most, own = here.workers, workers(here.own)
    if here.use != PILOT:
        return tuple(sorted({min(most, number) for number in COUNTS})) if here.loaded else ()
    others = sorted({most, most // 2, most // 4} - {0, own})
    if WORKERS in here.mapped:  # each takes a start: fewer than the script has gain the least
        others = [number for number in others if number > own]
    return (own, *others) if most else ()


def _pinning(here: Situation) -> tuple[Value, ...]:
    """Of workers' batches alone: pinned where they are made, memory gains nothing."""
    return (False, True) if here.device == "cuda" and here.workers else ()


def _own_workers(script: Script) -> Own | None:
    loading = script.loading
    if loading.workers:
        return Own(loading.workers, stays=not loading.most)
    return None if loading.most else Own(None, why=loading.why)


def _own_prefetching(script: Script) -> Own | None:
    if script.loading.most and script.loading.ahead:
        return Own(script.loading.ahead, stays=False)
    return None if script.loading.most else Own(None)


def _own_pinning(script: Script) -> Own | None:
    if script.loading.pinned:
        return Own(True)
    return None if script.loading.most else Own(None)


def _off_on(active: Callable[[Situation], bool]) -> Callable[[Situation], tuple[Value, ...]]:
    return lambda here: (False, True) if active(here) else ()


KNOBS: tuple[Knob, ...] = (
    Knob(
        name="precision",
        summary="number format: torch's default, TF32, bf16 or fp16 autocast, bf16 with large "
        "linear layers in fp8, or strict fp32",
        domain=Domain(PRECISIONS),
        default="default",
        values=_precisions,
        needs=lambda value: {"bf16": PILOT, "fp16": LOOP, "fp8": LOOP}.get(str(value), FLAGS),
        numerics=lambda value: value in AUTOCAST or value == "tf32",
        strict="fp32",
        memory=True,
        permitted=_permits_precision,
        carries=True,
        # fp16 needs a scaler, and can overflow; fp8 needs torchao.
        weight=lambda value: 2 if value in ("fp16", "fp8") else 1,
        shown=str,
        script=_own_precision,
        flag=Flag(set=_set_precision, now=Float32.now, back=Float32.put_back),
        layers=lambda value: fp8.convert if value == "fp8" else None,
        caveat=lambda value: fp8.CAVEAT if value == "fp8" else "",
        autocast=_autocast,
        scaled=lambda value: value == "fp16",
    ),
    Knob(
        name="channels_last",
        summary="channels-last memory format of weights and inputs (NHWC, NDHWC)",
        carries=True,
        memory=True,
        values=_off_on(lambda here: here.convolves and here.dimensions in (4, 5)),
        needs=lambda _value: PILOT,
        script=_own_layout,
        model=_lay_out_model,
        layout=_batch_layout,
    ),
    Knob(
        name="cudnn_benchmark",
        summary="search for the fastest cuDNN algorithm at the first step of each shape",
        values=_searches,
        needs=lambda _value: FLAGS,
        first_step=True,
        # A search takes 10 to 20 s for each format and layout, and changes rounding only.
        strict=False,
        compiled=False,
        lasting=True,
        guess="leader",
        script=lambda _script: Own(True) if torch.backends.cudnn.benchmark else None,
        flag=Flag(set=_set_benchmark, now=lambda: torch.backends.cudnn.benchmark),
    ),
    Knob(
        name="cudnn_deterministic",
        summary="deterministic algorithms only (fixed by --deterministic)",
        carries=True,
        values=lambda here: (here.deterministic,),
        needs=lambda _value: FLAGS,
        flag=Flag(set=_set_deterministic, now=_Determinism.now, back=_Determinism.put_back),
    ),
    Knob(
        name="cudnn_enabled",
        summary="cuDNN at all (off is tried with --effort exhaustive only)",
        default=True,
        carries=True,
        values=lambda here: (
            ((True, False) if here.full else (True,)) if here.device == "cuda" else ()
        ),
        needs=lambda _value: FLAGS,
        guess="",
        flag=Flag(set=_set_cudnn, now=lambda: torch.backends.cudnn.enabled),
    ),
    Knob(
        name=BATCH,
        summary="samples per step",
        domain=Domain(most=2**24),
        default=None,
        values=lambda here: here.batches,
        guess="",
        mapped="batch",
        loader=lambda value: {"batch_size": value},
    ),
    Knob(
        name="fused_optimizer",
        summary="one fused kernel for the optimizer step (torch's default on CUDA is foreach)",
        carries=True,
        values=_off_on(lambda here: here.device == "cuda" and here.training),
        needs=lambda _value: PILOT,
        numerics=_always,
        compiled=False,
        guess="leader",
        # A first step that the GradScaler skips leaves fused SGD's momentum uninitialised
        # (torch/optim/sgd.py, _fused_sgd: empty_like, then the kernel returns on found_inf);
        # ResNet-50's loss became NaN on an H200.
        conflicts={"precision": ("fp16",)},
        script=_own_fused,
        optimizer=lambda value: {"fused": True} if value else {},
    ),
    Knob(
        name="compile",
        summary="torch.compile mode, its backend cudagraphs, or only the blocks that repeat",
        domain=Domain(("none", *COMPILE_MODES_FULL)),
        default="none",
        values=_compile_modes,
        needs=lambda _value: PILOT,
        numerics=_always,
        memory=True,
        dear=_compile_seconds,
        ahead=lambda value: value not in ("none", "cudagraphs"),
        first_step=True,
        guess="",
        permitted=lambda given, value: value == "none" or given.get("compile", True),
        script=lambda script: Own("default") if script.compiled else None,
        model=_compile,
        graphs=lambda value: value in GRAPHED_MODES,
    ),
    Knob(
        name="dynamic_shapes",
        summary="compiled for inputs of any length at once, where a run's vary",
        values=_off_on(lambda here: here.varies and _compiles_whole(here)),
        needs=lambda _value: PILOT,
        numerics=_always,
        first_step=True,
        guess="",
        # Graphs are of one shape each, and what is not compiled has none.
        conflicts={"compile": WITHOUT_DEFAULT},
        permitted=lambda given, value: not value or given.get("compile", True),
        script=lambda script: Own(None) if script.compiled else None,
        model=_compile_dynamic,
    ),
    Knob(
        name="activation_memory",
        summary="share of the activations that a compiled model keeps for its backward pass, which "
        "computes the others again",
        domain=Domain(SHARES),
        default=1.0,
        values=_shares,
        needs=lambda _value: PILOT,
        numerics=_always,
        memory=True,
        first_step=True,
        frugal=True,
        guess="",
        # Graphs of a forward and a backward pass have memory of their own.
        conflicts={"compile": WITHOUT_DEFAULT, "dynamic_shapes": (True,)},
        permitted=lambda given, value: value == 1.0 or given.get("compile", True),
        model=_keep_share,
    ),
    Knob(
        name="step_graph",
        summary="the whole training step as one CUDA graph, through advice.capture",
        values=_off_on(lambda here: here.device == "cuda" and here.training and here.step_graph),
        needs=lambda _value: CAPTURE,
        compiled=False,
        numerics=_always,
        memory=True,
        # Graphs do not nest; the fused optimizer is part of it: it alone reads its learning rate
        # from the device, and from a GradScaler whether to step at all.
        conflicts={"compile": GRAPHED_MODES, "fused_optimizer": (True,)},
        permitted=lambda given, value: not value or given.get("step_graph", True),
        optimizer=lambda value: {"fused": True} if value else {},
        captured=bool,
    ),
    Knob(
        name="threads",
        summary="CPU threads inside one operation",
        domain=Domain(most=2**12),
        default=None,
        values=_threads,
        needs=lambda _value: FLAGS,
        first_step=True,  # they are started then
        script=lambda _script: Own(None) if threads_set() else None,
        flag=Flag(set=_set_threads, now=lambda: torch.get_num_threads()),
        chosen=threads_set,
    ),
    Knob(
        name=WORKERS,
        summary="processes that load data ahead of the steps",
        domain=Domain(most=2**10, least=0),
        default=None,
        values=_workers,
        needs=lambda _value: PILOT,
        guess="",
        stage=INPUT,
        shown=lambda value: f"{value} loader worker{'s' * (value != 1)}",
        feeds=True,
        mapped="num_workers",
        script=_own_workers,
        loader=lambda value: {"num_workers": value},
    ),
    Knob(
        name="prefetch_factor",
        summary="batches that each loader worker fetches ahead",
        domain=Domain(most=2**10),
        default=None,
        # PyTorch's own first. More evens out samples that take longer than others.
        values=lambda here: (2, 4, 8) if here.workers else (),
        needs=lambda _value: PILOT,
        conflicts={"num_workers": (0,)},
        guess="",
        stage=INPUT,
        shown=lambda value: f"{value} batches ahead",
        feeds=True,
        script=_own_prefetching,
        loader=lambda value: {"prefetch_factor": value},
    ),
    Knob(
        name="in_order",
        summary="batches in the order of the sampler, whichever worker has finished its own",
        default=True,
        values=lambda here: (True, False) if here.any_order and here.workers > 1 else (),
        conflicts={"num_workers": (0, 1)},
        guess="",
        stage=INPUT,
        shown=lambda value: "in_order" if value else "batches in any order",
        loader=lambda value: {} if value else {"in_order": False},
    ),
    Knob(
        name="sharing",
        summary="how workers hand memory over: as open files, or by the names of files",
        domain=Domain(("file_descriptor", "file_system")),
        default="file_descriptor",
        values=lambda here: (
            ("file_descriptor", "file_system") if here.by_name and here.workers else ()
        ),
        needs=lambda _value: FLAGS,
        conflicts={"num_workers": (0,)},
        guess="",
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
        values=_off_on(lambda here: here.use != PILOT and here.workers > 0),
        conflicts={"num_workers": (0,)},
        guess="",
        stage=INPUT,
        by_rule=True,
        loader=lambda value: {"persistent_workers": bool(value)},
    ),
    Knob(
        name="pin_memory",
        summary="page-locked host memory with asynchronous copies to the device",
        carries=True,
        values=_pinning,
        needs=lambda _value: PILOT,
        conflicts={"num_workers": (0,)},
        stage=INPUT,
        feeds=True,
        script=_own_pinning,
        loader=lambda value: {"pin_memory": bool(value)},
        non_blocking=bool,
    ),
)

COMPILE = "compile"
"""What decides how a model is compiled."""
RECIPE: tuple[dict[str, Value], ...] = (
    {"precision": "bf16", "channels_last": True},
    {"precision": "tf32", "channels_last": True},
    {"channels_last": True},
)
"""The number format and layout that is tried first, and what takes its place where that fails. It
led in 12 of 16 measured models, and in all scripts of others. What the space does not offer keeps
the baseline's value."""
COMPILED: tuple[dict[str, Value], ...] = (
    {"compile": "default", "dynamic_shapes": True},
    {"compile": "reduce-overhead"},
    {"compile": "default"},
)
"""How that is compiled: the first that runs."""
CAPTURED: tuple[dict[str, Value], ...] = (
    {"step_graph": True},
    {"compile": "default", "step_graph": True},
    {"compile": BLOCKS, "step_graph": True},
)
"""Whole steps as one graph; over a compiled step it was the fastest known for most models."""
GRAPHS: tuple[dict[str, Value], ...] = (
    {"compile": "cudagraphs"},
    {"step_graph": True},
    {"precision": "tf32", "step_graph": True},
)
"""Graphs without a compiler: small nets gain severalfold, and lose by casts."""
FORMATS_TRIED: tuple[dict[str, Value], ...] = (
    {"precision": "fp16"},
    {"channels_last": False},
    {"precision": "tf32"},
    {"precision": "default"},
    {"precision": "fp8"},
)
"""Other formats and layouts of what leads."""

FRUGAL: tuple[dict[str, Value], ...] = (
    {"compile": "default"},  # graphs that a leader replays have memory of their own
    {"compile": "default", "activation_memory": 0.7},
    {"compile": "default", "activation_memory": 0.5},
)
"""What to try where a larger batch does not fit, by what it costs."""

BY_NAME = {knob.name: knob for knob in KNOBS}


class Advised(Config):
    """A config as a script reads it: every knob has its name, and torch's own value where the
    config says nothing of it; None where that is the script's or the machine's."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Value:
        if name in BY_NAME and name not in self:
            return BY_NAME[name].default
        return super().__getattr__(name)


FEEDS = tuple(knob.name for knob in KNOBS if knob.feeds)
PAYING = tuple(knob.name for knob in KNOBS if knob.first_step)
FORMATS = tuple(knob.name for knob in KNOBS if knob.autocast)
"""Those of the number format."""
TORCH = Config({knob.name: knob.default for knob in KNOBS if knob.default is not None})
"""What torch and its DataLoader do by themselves, wherever that is known beforehand."""


def loading(config: Config) -> dict[str, Any]:
    """Keyword arguments of a DataLoader for what feeds a run's steps."""
    rows = (k.loader(config[k.name]) for k in KNOBS if k.feeds and k.loader and k.name in config)
    return {name: value for said in rows for name, value in said.items()}


def plain(task: Task, device: str) -> Config:
    """What torch does by itself for a task on 'cuda:0' or 'cpu', before anything else is known."""
    here = Situation(device=device.partition(":")[0], deterministic=task.deterministic)
    offered = {knob.name: knob.values(here) for knob in KNOBS if knob.default is not None}
    known = {name: values[0] for name, values in offered.items() if values}
    return Config(known).at(task.batch)


def convolving(choices: Mapping[str, tuple[Value, ...]]) -> bool:
    """Whether a space is one of convolutions: it offers another layout."""
    return any(len(choices.get(knob.name, ())) > 1 for knob in KNOBS if knob.layout is not None)


def use_of(config: Config, default: Config) -> str:
    """The least use that can follow all of a config."""
    needed = [
        BY_NAME[name].needs(value) if name in BY_NAME else LOOP
        for name, value in config.changed(default).items()
    ]
    return max(needed, key=USES.index, default=FLAGS)


def follows(use: str, config: Config, default: Config) -> bool:
    """Whether a script of this use can follow all of a config."""
    return USES.index(use_of(config, default)) <= USES.index(use)


def caveats(config: Config) -> list[str]:
    """What must be known of its values, a sentence each."""
    rows = ((BY_NAME[name].caveat, value) for name, value in config.items() if name in BY_NAME)
    return [said for caveat, value in rows if caveat is not None and (said := caveat(value))]


def compiles(config: Config) -> bool:
    """Whether code is made for a config, which caches on disk keep: the backend cudagraphs makes
    none."""
    return any(BY_NAME[name].ahead(value) for name, value in config.items() if name in BY_NAME)


def code(config: Config) -> Config:
    """What of a config decides the code that a compiler makes for it."""
    return config.without(*(k.name for k in KNOBS if k.feeds or not k.compiled))


def doubts(config: Config, default: Config = TORCH) -> set[tuple[str, Value]]:
    """The values of a config that change what is computed otherwise than a default, by knob."""
    return {
        (name, value)
        for name, value in config.changed(default).items()
        if name in BY_NAME and BY_NAME[name].numerics(value)
    }


def doubtful(config: Config, default: Config = TORCH) -> bool:
    """Whether a config changes what is computed, so that it must be compared with strict fp32."""
    return bool(doubts(config, default))


def strict(default: Config) -> Config:
    """The reference that numbers are held against: `default` in strict fp32."""
    return default.replace(
        **{k.name: k.strict for k in KNOBS if k.strict is not None and k.name in default}
    )


def permits(given: Mapping[str, Any], config: Config) -> bool:
    """Whether what was given of a Task permits a config; what was left out permits all."""
    rows = ((BY_NAME[name].permitted, value) for name, value in config.items() if name in BY_NAME)
    return all(permitted is None or permitted(given, value) for permitted, value in rows)


def workers(config: Mapping[str, Value]) -> int:
    """Of a config's loader; 0 where it has none, or nothing is said of them."""
    return int(config.get(WORKERS) or 0)


def burden(config: Config, default: Config) -> int:
    """How much a config asks of a script: of configs that tie the lightest is advised."""
    return sum(
        BY_NAME[name].weight(value) if name in BY_NAME else 1
        for name, value in config.changed(default).items()
    )


def described(config: Config, default: Config = TORCH, *, nothing: str = "torch default") -> str:
    """What a config does differently: 'bf16, channels_last', or `nothing`."""
    return ", ".join(_described(*pair) for pair in config.changed(default).items()) or nothing


def _described(name: str, value: Value) -> str:
    knob = BY_NAME.get(name)
    if knob is not None and knob.shown is not None:
        return knob.shown(value)
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name}={value}"


def refusal(record: Record) -> str:
    """Why a record may not be used: a value that its knob cannot have; '' where there is none."""
    chosen = [record.baseline, *(one.choice for one in record.winners), *record.raced]
    for choice in chosen:
        if choice.config.batch != choice.batch:
            return f"batch {choice.config.batch} in a config, {choice.batch} of its measurement"
    fixed = [record.baseline, *(one.choice for one in record.winners if not one.free)]
    if any(choice.batch != record.batch for choice in fixed):
        return f"batch {record.batch}, and its choices are of another"
    configs = [choice.config for choice in chosen]
    configs += [record.input, *(part.knob for part in record.parts)]
    configs += [trial.config for trial in record.trials]
    seen = {(name, type(value), value) for config in configs for name, value in config.items()}
    for name, _kind, value in sorted(seen, key=repr):
        knob = BY_NAME.get(name)
        if knob is None:
            return f"knob {name[:40]!r} is not known to this version of advisor"
        if not knob.domain.holds(value):
            return f"{name} {value!r:.60}: expected {knob.domain}"
    default = record.baseline.config
    for one in record.winners:
        if not follows(one.use, one.choice.config, default):
            return f"the winner for {one.use} needs more than that"
    return ""
