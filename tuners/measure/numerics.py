"""Whether a config trains like strict fp32: the same weights and batches, some tens of steps.

Training is chaotic: loss curves part by themselves, whatever the number format. So the distance to
fp32 is held against the distances that fp32 keeps from itself, once with other data order and
random numbers, once from weights rounded to bf16: what such a rounding does to a model, a number
format may do too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from advisor.tuners.measure.workload import Workload

BATCHES = 4
"""Different batches that every run cycles through."""
MOST_STEPS, LEAST_STEPS = 24, 2 * BATCHES
TOLERANCE = 0.02
"""Distance of loss curves that is always allowed, as a fraction of fp32's loss."""
OUTPUT_TOLERANCE = 0.15
"""Relative L2 distance of the first outputs that is always allowed: bf16 has 8 bits."""
UPDATE_TOLERANCE = 0.7
"""The same of what training did to the weights: 1 is no likeness at all. At a small learning rate
the loss hardly moves in some tens of steps, but a wrong gradient shows here."""
SAMPLED = 4_000_000
"""Weights that are compared, evenly taken from all."""
SKIPS = 1
"""Steps that a GradScaler may skip after its first scale search."""
SCALE_STEPS = 20
"""Halvings from 65536 after which no loss scale is found."""
SPREADS = 2.0
"""Beyond the tolerance: as many times fp32's own spread."""
ROUNDINGS = 4.0
"""The same for outputs and updates: a format rounds at every operation, the disturbed run once.
ResNet-50 in bf16, 8 images of 64x64 on a CPU: outputs 1.8 times, updates 1.03 times the spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One short training run: the loss of each step, the outputs of the first, and how far the
    weights moved."""

    losses: tuple[float, ...]
    outputs: tuple[Tensor, ...]
    moved: tuple[Tensor, ...]
    finite: bool
    """The weights are, at the end."""
    skipped: int
    """Steps that the GradScaler skipped after its first scale search."""


def trace(workload: Workload, steps: int) -> Trace:
    """Train for some steps; the workload is to be built with `watch=True`."""
    losses: list[float] = []
    skipped = 0
    scaler = workload.advice.scaler
    weights = [p for p in workload.model.parameters() if p.requires_grad]
    stride = max(1, sum(p.numel() for p in weights) // SAMPLED)
    start = [_sampled(p, stride) for p in weights]
    for _ in range(steps):
        before = scaler.get_scale()
        workload.step()
        assert workload.loss is not None
        losses.append(float(workload.loss))
        skipped += scaler.get_scale() < before
    finite = all(bool(p.isfinite().all()) for p in workload.model.parameters())
    return Trace(
        losses=tuple(losses),
        outputs=tuple(workload.outputs),
        moved=tuple(_sampled(p, stride) - w for p, w in zip(weights, start, strict=True)),
        finite=finite,
        skipped=skipped,
    )


def _sampled(weight: Tensor, stride: int) -> Tensor:
    # contiguous(): in one order, whatever the memory format.
    return weight.detach().contiguous().flatten()[::stride].float().cpu().clone()


def judge(
    reference: Trace,
    reordered: Trace,
    rounded: Trace,
    candidate: Trace,
    tolerance: float = TOLERANCE,
) -> tuple[bool, str]:
    """Whether a run is as good as fp32's, and a line that says how near it is.

    Args:
        reference: strict fp32; `reordered` and `rounded` the same, disturbed.
        candidate: the config, on the reference's order and random numbers.
        tolerance: fraction of fp32's loss that is always allowed.
    """
    if not all(map(math.isfinite, reference.losses)):
        return False, "the loss is not finite in fp32 either"
    if not all(map(math.isfinite, candidate.losses)):
        return False, "the loss is not finite"
    if not candidate.finite:
        return False, "weights are not finite after some steps"
    if candidate.skipped > SKIPS:
        return False, f"the GradScaler skipped {candidate.skipped} steps: fp16 overflows here"
    scale = statistics.fmean(map(abs, reference.losses)) or 1.0
    spread = max(_apart(reference, other) for other in (reordered, rounded)) / scale
    distance = _apart(reference, candidate) / scale
    allowed = max(tolerance, SPREADS * spread)
    said = f"loss within {distance:.2%} of fp32 over {len(candidate.losses)} steps"
    if distance > allowed:
        return False, f"{said}, {allowed:.2%} allowed"
    errors = []
    for part, allowed in (("outputs", OUTPUT_TOLERANCE), ("moved", UPDATE_TOLERANCE)):
        ours: tuple[Tensor, ...] = getattr(reference, part)
        own = max(
            SPREADS * _relative(ours, getattr(reordered, part)),
            ROUNDINGS * _relative(ours, getattr(rounded, part)),
        )
        errors.append(_relative(ours, getattr(candidate, part)))
        if not errors[-1] <= max(allowed, own):
            what = "first outputs" if part == "outputs" else "weight updates"
            return False, f"its {what} differ from fp32's by {errors[-1]:.0%}"
    return True, f"{said}, first outputs within {errors[0]:.2%}, updates within {errors[1]:.1%}"


def _apart(ours: Trace, theirs: Trace) -> float:
    """Largest difference of mean losses over a pass through all batches, where order cancels."""
    passes = range(0, len(ours.losses) - BATCHES + 1, BATCHES)
    return max(
        abs(
            statistics.fmean(ours.losses[at : at + BATCHES])
            - statistics.fmean(theirs.losses[at : at + BATCHES])
        )
        for at in passes
    )


def _relative(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    difference = sum(float((a - b).square().sum()) for a, b in zip(ours, theirs, strict=True))
    size = sum(float(a.square().sum()) for a in ours)
    return math.sqrt(difference / size) if size else math.sqrt(difference)


def check(
    build: Callable[..., Workload], steps: int, tolerance: float = TOLERANCE
) -> tuple[bool, str]:
    """Judge a config. `build('candidate' or 'fp32', order=0, rounded=False)` gives a fresh, watched
    workload."""
    candidate = build("candidate")
    if candidate.advice.scaler.is_enabled():
        scale = _searched_scale(candidate)
        if scale == 0.0:
            return (
                False,
                f"the GradScaler skipped {SCALE_STEPS} steps in a row: fp16 overflows here",
            )
        candidate = build("candidate")
        state = candidate.advice.scaler.state_dict()
        candidate.advice.scaler.load_state_dict(state | {"scale": scale})
    traced = trace(candidate, steps)
    reference = trace(build("fp32"), steps)
    reordered = trace(build("fp32", order=1), steps)
    rounded = trace(build("fp32", rounded=True), steps)
    return judge(reference, reordered, rounded, traced, tolerance)


def _searched_scale(workload: Workload) -> float:
    """The loss scale at which the GradScaler first skips no step; 0 where it finds none.

    Its search at the start is no fault, but a run that has it lags behind one that has not.
    """
    scaler = workload.advice.scaler
    for _ in range(SCALE_STEPS):
        before = scaler.get_scale()
        workload.step()
        if scaler.get_scale() >= before:
            return float(before)
    return 0.0


def steps_within(seconds: float, step_s: float) -> int:
    """Steps for which four runs fit, fp32's taking about 2.5 times as long; 0 where too few do."""
    steps = int(seconds / ((3 * 2.5 + 1) * max(step_s, 1e-9)))
    steps = min(MOST_STEPS, steps) // BATCHES * BATCHES
    return steps if steps >= LEAST_STEPS else 0
