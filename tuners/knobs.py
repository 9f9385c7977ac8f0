"""Every knob in one table: its values, when it is active, and how it acts.

A knob acts on the process (`flags`), the model, the batch, the optimizer's or the loader's keyword
arguments, or the forward pass (`autocast`, `scaled`). To add one, add a row to KNOBS: the space,
the worker, the records, `advisor show` and a training script's `Advice` all read this table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from advisor.cache.config import Value
from advisor.cache.record import Record
from advisor.tuners.tf32 import set_float32

COMPUTE, INPUT = "compute", "input"

PRECISIONS = ("default", "tf32", "bf16", "fp16", "fp32")
PERMITTED = ("default", "tf32", "bf16", "fp16")
"""What a careful user accepts for training; strict fp32 is a reference, chosen if asked for."""


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
    dimensions: int = 4
    """Of one batch: 4 is NCHW, 5 is NCDHW."""
    convolves: bool = True
    training: bool = True
    batches: tuple[int, ...] = (1,)
    """Batch sizes to try, the user's own first."""
    deterministic: bool = False
    precisions: tuple[str, ...] = PERMITTED
    full: bool = False
    compilers: tuple[str, ...] = ()
    """Ways to compile that may be tried, cheapest first."""
    step_graph: bool = True
    """Whether the script can have its whole step captured."""


@dataclass(frozen=True, slots=True)
class Domain:
    """The values that a knob can have at all, anywhere: `values`, or whole numbers to `most`."""

    values: tuple[Value, ...] = ()
    most: int = 0

    def holds(self, value: Value) -> bool:
        if self.most:
            return type(value) is int and 1 <= value <= self.most
        return any(value == one and type(value) is type(one) for one in self.values)

    def __str__(self) -> str:
        return f"1 to {self.most}" if self.most else ", ".join(map(str, self.values))


SWITCH = Domain((False, True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that can be tuned."""

    name: str
    summary: str
    domain: Domain = SWITCH
    """What a record may hold; anything else in one is refused."""
    values: Callable[[Situation], tuple[Value, ...]]
    """torch's own behaviour first; one value: fixed; none: the knob is absent here."""
    conflicts: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """Values of other knobs with which only the first value here is sound."""
    dear: bool = False
    """Each value but the first costs many seconds before its first step: tried on leaders only."""
    first_step: bool = False
    """Values but the first pay before the first step: algorithm search, compilation, capture."""
    carries: bool = False
    """Whether a record of another shape or device may be followed in it unmeasured: no more memory,
    no other numbers than were verified there, nothing that can fail."""
    stage: str = COMPUTE
    """COMPUTE is measured on a batch on the device, INPUT on a real DataLoader afterwards."""
    flags: Callable[[Value], None] | None = None
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
    return tuple(p for p in possible if p == "default" or p in here.precisions)


def _set_precision(value: Value) -> None:
    # Autocast runs over TF32 for what it leaves in float32, as in the measured tables.
    set_float32("tf32" if value in ("bf16", "fp16") else str(value))


def _autocast(value: Value) -> torch.dtype | None:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(value))


_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By number of dimensions."""


def _lay_out_model(model: nn.Module, value: Value) -> nn.Module:
    # Not model.to(memory_format=...): that raises on a model with both 4-D and 5-D weights.
    # Not contiguous(): it leaves a tensor of one channel as it is, and cuDNN goes by the strides.
    if value:
        for tensor in (*model.parameters(), *model.buffers()):
            layout = _LAYOUTS.get(tensor.dim())
            if layout is not None:
                tensor.data = tensor.data.to(memory_format=layout)
    return model


def _batch_layout(tensor: Tensor, value: Value) -> torch.memory_format | None:
    return _LAYOUTS.get(tensor.dim()) if value and tensor.is_floating_point() else None


def _set_benchmark(value: Value) -> None:
    torch.backends.cudnn.benchmark = bool(value)


def _set_deterministic(value: Value) -> None:
    # https://docs.pytorch.org/docs/stable/notes/randomness.html: all of what training needs.
    if value:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Only where it changes something: the setter imports torch.compile's machinery, for seconds.
    if torch.are_deterministic_algorithms_enabled() != bool(value):
        torch.use_deterministic_algorithms(bool(value))
    torch.backends.cudnn.deterministic = bool(value)


def _set_cudnn(value: Value) -> None:
    torch.backends.cudnn.enabled = bool(value)


COMPILE_MODES = ("cudagraphs", "reduce-overhead", "default")
"""By the seconds they cost on an H200: 3-4, 19-32 and 15-32 for ResNet-50 (FACTS)."""
COMPILE_MODES_FULL = (*COMPILE_MODES, "max-autotune-no-cudagraphs", "max-autotune")
"""Autotuning ran over eight minutes on ResNet-50."""
GRAPHED_MODES = ("cudagraphs", "reduce-overhead", "max-autotune")
"""Those that replay CUDA graphs of the forward and the backward pass."""


def _compile(model: nn.Module, value: Value) -> nn.Module:
    # In place, not torch.compile(model): the names in state_dict() stay what they are.
    if value == "cudagraphs":
        model.compile(backend="cudagraphs")
    elif value != "none":
        model.compile(mode=str(value))
    return model


def _set_threads(value: Value) -> None:
    torch.set_num_threads(int(value or 1))


def _threads(here: Situation) -> tuple[Value, ...]:
    if here.device != "cpu":
        return ()
    others = {here.cores, max(1, here.cores // 2), max(1, here.cores // 4), 1}
    return (here.threads, *sorted(others - {here.threads}, reverse=True))


def _off_on(active: Callable[[Situation], bool]) -> Callable[[Situation], tuple[Value, ...]]:
    return lambda here: (False, True) if active(here) else ()


KNOBS: tuple[Knob, ...] = (
    Knob(
        name="precision",
        summary="number format: torch's default, TF32, bf16 or fp16 autocast, or strict fp32",
        domain=Domain(PRECISIONS),
        carries=True,
        values=_precisions,
        flags=_set_precision,
        autocast=_autocast,
        scaled=lambda value: value == "fp16",
    ),
    Knob(
        name="channels_last",
        summary="channels-last memory format of weights and inputs (NHWC, NDHWC)",
        carries=True,
        values=_off_on(lambda here: here.convolves and here.dimensions in (4, 5)),
        model=_lay_out_model,
        layout=_batch_layout,
    ),
    Knob(
        name="cudnn_benchmark",
        summary="search for the fastest cuDNN algorithm at the first step of each shape",
        # Searching by time picks differently from run to run, so it is not deterministic.
        values=lambda here: (
            ((False,) if here.deterministic else (False, True))
            if here.device == "cuda" and here.convolves
            else ()
        ),
        first_step=True,
        flags=_set_benchmark,
    ),
    Knob(
        name="cudnn_deterministic",
        summary="deterministic algorithms only (fixed by --deterministic)",
        carries=True,
        values=lambda here: (here.deterministic,),
        flags=_set_deterministic,
    ),
    Knob(
        name="cudnn_enabled",
        summary="cuDNN at all (off is tried with --effort exhaustive only)",
        carries=True,
        values=lambda here: (
            ((True, False) if here.full else (True,)) if here.device == "cuda" else ()
        ),
        flags=_set_cudnn,
    ),
    Knob(
        name="batch_size",
        summary="samples per step",
        domain=Domain(most=2**24),
        values=lambda here: here.batches,
        loader=lambda value: {"batch_size": value},
    ),
    Knob(
        name="fused_optimizer",
        summary="one fused kernel for the optimizer step (torch's default on CUDA is foreach)",
        carries=True,
        values=_off_on(lambda here: here.device == "cuda" and here.training),
        # A first step that the GradScaler skips leaves fused SGD's momentum uninitialised
        # (torch/optim/sgd.py, _fused_sgd: empty_like, then the kernel returns on found_inf);
        # ResNet-50's loss became NaN on an H200.
        conflicts={"precision": ("fp16",)},
        optimizer=lambda value: {"fused": True} if value else {},
    ),
    Knob(
        name="compile",
        summary="torch.compile mode, or its backend cudagraphs",
        domain=Domain(("none", *COMPILE_MODES_FULL)),
        values=lambda here: ("none", *here.compilers) if here.compilers else (),
        dear=True,
        first_step=True,
        model=_compile,
        graphs=lambda value: value in GRAPHED_MODES,
    ),
    Knob(
        name="step_graph",
        summary="the whole training step as one CUDA graph, through advice.capture",
        values=_off_on(lambda here: here.device == "cuda" and here.training and here.step_graph),
        # A GradScaler waits for the device at each step; graphs do not nest; the fused optimizer
        # is part of it: it alone reads its learning rate from the device.
        conflicts={"precision": ("fp16",), "compile": GRAPHED_MODES, "fused_optimizer": (True,)},
        optimizer=lambda value: {"fused": True} if value else {},
        captured=bool,
    ),
    Knob(
        name="threads",
        summary="CPU threads inside one operation",
        domain=Domain(most=2**12),
        values=_threads,
        first_step=True,  # they are started then
        flags=_set_threads,
    ),
    Knob(
        name="pin_memory",
        summary="page-locked host memory with asynchronous copies to the device",
        carries=True,
        values=_off_on(lambda here: here.device == "cuda"),
        stage=INPUT,
        loader=lambda value: {"pin_memory": bool(value)},
        non_blocking=bool,
    ),
)

BY_NAME = {knob.name: knob for knob in KNOBS}
PAYING = tuple(knob.name for knob in KNOBS if knob.first_step)


def refusal(record: Record) -> str:
    """Why a record may not be used: a value that its knob cannot have; '' where there is none."""
    chosen = [record.baseline, record.at_batch, *([record.free] if record.free else [])]
    chosen += record.raced
    for choice in chosen:
        if choice.config.get("batch_size") != choice.batch:
            batch = choice.config.get("batch_size")
            return f"batch_size {batch!r} in a config, batch {choice.batch} of its measurement"
    if not record.batch == record.baseline.batch == record.at_batch.batch:
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
    return ""
