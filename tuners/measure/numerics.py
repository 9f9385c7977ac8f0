"""Whether a config trains like strict fp32: the same weights, batches and random numbers.

Two comparisons. The config against its own number format without the rest of it (compilation, a
graph, a memory format): the same but for rounding. That format, eagerly, against strict fp32:
within a few times of what rounding every result of fp32 to it does to this model, as TorchBench's
`same()` measures a candidate's error in units of its number format's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.tuners import fp8, tf32
from advisor.tuners.measure.observe import BATCHES, Named, NoScale, Observer, Trace
from advisor.tuners.measure.randomness import Rounding, amplitude
from advisor.tuners.measure.workload import Workload

MOST_STEPS, LEAST_STEPS = 24, 2 * BATCHES
FP32 = 2.5
"""As many times as long as torch's default takes strict fp32, where there are convolutions."""
TOLERANCE = 0.02
"""Distance of loss curves that is always allowed, as a fraction of fp32's loss."""
SPREADS = 2.0
"""Beyond the tolerance: as many times what rounding does to the loss curve."""
ROUNDINGS, CHANCES = 3.0, 10.0
"""Beyond the limits below: as many times what rounding does to the same tensor, and to one that is
nothing but rounding. bf16 on a CPU did 0.6 to 1.4 times that to the worst gradients and updates of
a transformer, of ResNet-18 and of small networks; float32 in another order twice to the latter."""
OPTIMIZER_TOLERANCE = 1e-4
"""Part of an update that the optimizer may make of its own: fused kernels round otherwise. AdamW's
weight decay is five times that at a weight of 0.05, lr 1e-4."""
SKIPS = 1
"""Steps that a GradScaler may skip after its scale search."""
ROUNDED = 3
"""Times more that the gradients of fp32 are taken with rounding."""
DRAWS = 12
"""Draws of a model's own randomness, of the config and of fp32 each."""
DRAW_SIGMAS, DRAW_FACTOR = 5.0, 1.15
"""How far apart the variances of their outputs may be: standard errors, and a factor beyond."""
MEAN = 0.05
"""Part of the outputs' mean by which two of them may differ beyond chance."""
FIXED_STEPS = 2 * DRAWS + 12
"""Steps of a comparison beside those that are asked for, about, in each of its runs."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Relative L2 distances that are always allowed."""

    outputs: float
    gradients: float
    updates: float


FORMAT = Limits(outputs=0.02, gradients=0.03, updates=0.1)
SAME = Limits(outputs=1e-4, gradients=1e-3, updates=1e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A distance between two runs: relative to the tensor, and as a share of what is allowed."""

    share: float
    distance: float
    what: str
    name: str
    allowed: float
    sure: bool
    """More than rounding, as the gradient of a bias before a BatchNorm is not."""


@dataclass(frozen=True, slots=True)
class Distances:
    """Of every tensor: from a config to its number format, from that to strict fp32, and from the
    config to fp32."""

    same: list[Seen]
    format: list[Seen]
    whole: list[Seen]

    @classmethod
    def of(
        cls, reference: Trace, rounded: Sequence[Trace], plain: Trace, candidate: Trace
    ) -> Distances:
        """Those of all points; see `judge`."""
        return cls(
            same=_distances(plain, candidate, reference, rounded, SAME),
            format=_distances(reference, plain, reference, rounded, FORMAT),
            whole=_distances(reference, candidate, reference, rounded, FORMAT),
        )

    @classmethod
    def lasting(cls, several: Sequence[Distances]) -> Distances:
        """What most of several batches show of each tensor.

        A fault is in every batch, or in all but the first. Rounding is in few what it is in none
        of its draws: ResNet-50's first bias was 72% off in one batch, its draws 20%.
        """
        return cls(
            same=_lasting([one.same for one in several]),
            format=_lasting([one.format for one in several]),
            whole=_lasting([one.whole for one in several]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Configs:
    """`plain`: the candidate's number format without the rest of it; may be one of the others."""

    fp32: Config
    candidate: Config
    plain: Config


def judge(
    reference: Trace,
    rounded: Sequence[Trace],
    plain: Trace,
    candidate: Trace,
    tolerance: float = TOLERANCE,
    distances: Distances | None = None,
) -> tuple[bool, str]:
    """Whether a run is as good as fp32's, and a line that says how near it is.

    Args:
        reference: strict fp32; `rounded` the same with every result rounded.
        plain: the candidate's number format, eagerly; may be the reference or the candidate.
        candidate: the config.
        tolerance: fraction of fp32's loss that is always allowed.
        distances: where they are known; else those of the traces.
    """
    if not _finite(reference):
        return False, "fp32 is not finite either: the loss, a gradient or a weight"
    for trace in (plain, candidate):
        if not all(map(math.isfinite, trace.losses)):
            return False, "the loss is not finite"
        if not trace.finite:
            return False, "an output, a gradient or a weight is not finite"
        if trace.skipped > SKIPS:
            return False, f"the GradScaler skipped {trace.skipped} steps: fp16 overflows here"
    scale = statistics.fmean(map(abs, reference.losses)) or 1.0
    spread = max((_apart(reference, other) for other in rounded), default=0.0) / scale
    distance = _apart(reference, candidate) / scale
    allowed = max(tolerance, SPREADS * spread)
    said = f"loss within {distance:.2%} of fp32 over {len(candidate.losses)} steps"
    apart = distances or Distances.of(reference, rounded, plain, candidate)
    pairs = ((apart.same, "its number format uncompiled"), (apart.format, "fp32"))
    for seen, than in pairs:
        said_wrong = _beyond([one for one in seen if one.what != "update"], than)
        if said_wrong:
            return False, said_wrong
    part, name = candidate.optimizer
    if part > OPTIMIZER_TOLERANCE:
        return False, f"its optimizer's updates differ from PyTorch's by {part:.2%} ({name})"
    if distance > allowed:
        return False, f"{said}, {allowed:.2%} allowed"
    for seen, than in pairs:
        said_wrong = _beyond(seen, than)
        if said_wrong:
            return False, said_wrong
    gradients = [one for one in apart.whole if one.what == "gradient"]
    worst = max([one for one in gradients if one.sure] or gradients, key=lambda one: one.share)
    said += f", worst gradient {worst.distance:.1%} ({worst.name}; {worst.allowed:.1%} allowed)"
    if reference.moved:
        said += f", updates {_overall(reference.moved, candidate.moved):.1%}"
    return True, said


def _beyond(seen: list[Seen], than: str) -> str:
    """What differs the most beyond its limit; '' where nothing does."""
    # A gradient names the parameter; what it did to the outputs does not.
    worst = max(seen, key=lambda one: (one.share > 1 and one.what == "gradient", one.share))
    if worst.share <= 1:
        return ""
    return (
        f"its {worst.what} of {worst.name} differs from {than}'s by {worst.distance:.1%}, "
        f"{worst.allowed:.1%} allowed"
    )


def _finite(trace: Trace) -> bool:
    return trace.finite and all(map(math.isfinite, trace.losses))


def _apart(ours: Trace, theirs: Trace) -> float:
    """Largest difference of mean losses over a pass through all batches."""
    passes = range(0, max(1, len(ours.losses) - BATCHES + 1), BATCHES)
    return max(
        abs(
            statistics.fmean(ours.losses[at : at + BATCHES])
            - statistics.fmean(theirs.losses[at : at + BATCHES])
        )
        for at in passes
    )


def _distances(
    ours: Trace, theirs: Trace, reference: Trace, rounded: Sequence[Trace], limits: Limits
) -> list[Seen]:
    """Of all tensors; `reference` and `rounded` tell what rounding does to each."""
    found: list[Seen] = []
    for what, limit in (
        ("value", limits.outputs),
        ("gradient", limits.gradients),
        ("update", limits.updates),
    ):
        for at in range(1 if what == "update" else len(reference.points)):
            held = [_held(trace, what, at) for trace in (ours, theirs, reference)]
            noisy = [_held(trace, what, at) for trace in rounded]
            found += _of_group(what, limit, held, noisy)
    return found


def _lasting(several: Sequence[list[Seen]]) -> list[Seen]:
    found: dict[tuple[str, str], list[Seen]] = {}
    for one in itertools.chain(*several):
        found.setdefault((one.what, one.name), []).append(one)
    ordered = (sorted(group, key=lambda one: -one.share) for group in found.values())
    return [group[len(group) // 2] for group in ordered]


def _held(trace: Trace, what: str, at: int) -> Named:
    if what == "update":
        return trace.moved
    return trace.points[at].gradients if what == "gradient" else trace.points[at].outputs


def _of_group(what: str, limit: float, held: list[Named], noisy: list[Named]) -> list[Seen]:
    ours, theirs, reference = held
    apart = _norms(theirs, ours)
    size = _norms(reference)
    spread = [_norms(other, reference) for other in noisy]
    noise = {name: max((one[name] for one in spread), default=0.0) for name in reference}
    shares = [noise[name] / size[name] for name in size if size[name] > 0]
    usual = statistics.median(shares) if shares else 0.0
    count = sum(tensor.numel() for tensor in reference.values())
    root = math.sqrt(sum(one**2 for one in size.values()) / max(count, 1))
    found = []
    for name, tensor in reference.items():
        # What is nought but for rounding, as a bias before a BatchNorm has its gradient, is held
        # against the usual element.
        least = usual * root * math.sqrt(tensor.numel())
        sure = noise[name] < size[name] / 2
        times = ROUNDINGS if sure else CHANCES
        allowed = max(limit * size[name], times * max(noise[name], usual * size[name], least))
        scale = max(size[name], least) or 1.0
        found.append(
            Seen(
                share=apart[name] / allowed if allowed else math.inf if apart[name] else 0.0,
                distance=apart[name] / scale,
                what=what,
                name=name,
                allowed=allowed / scale,
                sure=sure,
            )
        )
    return found


def _overall(ours: Named, theirs: Named) -> float:
    size = math.hypot(*_norms(ours).values())
    return math.hypot(*_norms(theirs, ours).values()) / (size or 1.0)


def _norms(ours: Named, theirs: Named | None = None) -> dict[str, float]:
    """L2 norms by name, or of what two have apart; asked of the device once for all of them."""
    tensors = list(ours.values())
    if not tensors:
        return {}
    if theirs is not None:
        tensors = list(torch._foreach_sub(tensors, [theirs[name] for name in ours]))
    norms = torch.stack(torch._foreach_norm(tensors)).tolist()
    return dict(zip(ours, norms, strict=True))


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


@dataclass(frozen=True, slots=True)
class Coarseness:
    """What a workload rounds to: its results, relatively, and which layers' products are in fp8, by
    the shapes of their weights."""

    results: float
    layers: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, workload: Workload) -> Coarseness:
        """Its flags are those set last."""
        advice = workload.advice
        on = advice.device.type == "cuda" and "tf32" in tf32.describe()
        return cls(amplitude(advice.autocast_dtype, tf32=on), fp8.converted(workload.model))


class References:
    """Runs that several configs are held against, made once: strict fp32's and number formats'.

    What is kept of them lies on the host, where it is nobody's leftover on the device.

    Args:
        draws: whether a step of the workload draws random numbers.
    """

    def __init__(self, *, draws: bool) -> None:
        self.draws = draws
        self._kept: dict[Hashable, list[Trace]] = {}

    def get(self, key: Hashable, make: Callable[[], list[Trace]]) -> list[Trace]:
        """What `make` gave for this key before, or gives now."""
        if key not in self._kept:
            made = make()
            self._kept[key] = [trace.to(torch.device("cpu")) for trace in made]
            return made
        device = torch.device("cuda") if torch.cuda.is_initialized() else torch.device("cpu")
        return [trace.to(device) for trace in self._kept[key]]


def check(
    build: Callable[[Config], Workload],
    configs: Configs,
    steps: int,
    known: References,
    tolerance: float = TOLERANCE,
) -> tuple[bool, str]:
    """Judge a config.

    Args:
        build: gives a fresh, watched workload. What it gave before is used no more.
        steps: of each run.
        known: of earlier comparisons of this workload.
        tolerance: as in `judge`.
    """

    def traced(config: Config) -> tuple[Trace, Coarseness]:
        workload = build(config)
        rounding = Coarseness.of(workload)
        observer = Observer(workload)
        del workload
        return observer.trace(steps), rounding

    def rounded(coarseness: Coarseness) -> list[Trace]:
        rounding = Rounding(coarseness.results, coarseness.layers)
        return _rounded(Observer(build(configs.fp32), rounding=rounding, seed=104729), steps)

    (fp32,) = known.get(("fp32", configs.fp32, steps), lambda: [traced(configs.fp32)[0]])
    try:
        candidate, rounding = traced(configs.candidate)
        plain = candidate
        if configs.plain == configs.fp32:
            plain = fp32
        elif configs.plain != configs.candidate:
            key = ("plain", configs.plain, steps)
            (plain,) = known.get(key, lambda: [traced(configs.plain)[0]])
    except NoScale as exc:
        return False, str(exc)
    noisy = known.get(("rounded", configs.fp32, rounding, steps), lambda: rounded(rounding))
    good, reason = judge(fp32, noisy, plain, candidate, tolerance)
    if not good or not known.draws:
        return good, reason
    own = Observer(build(configs.fp32)).draws(DRAWS)
    said = compare_draws(own, Observer(build(configs.candidate)).draws(DRAWS))
    return (False, said) if said else (True, reason)


def _rounded(observer: Observer, steps: int) -> list[Trace]:
    """One run, and its points anew: in a small model a rounding turns few ReLUs, or none."""
    first = observer.trace(steps)
    return [first, *(dataclasses.replace(first, points=observer.points()) for _ in range(ROUNDED))]


def compare_draws(reference: Tensor, candidate: Tensor) -> str:
    """Why two samples of outputs, one row a draw, are not of the same randomness; '' if they are.

    The variance over draws follows the rate of dropout: p / (1 - p) of each input. Its standard
    error is that of the draws' own distances from their mean, which holds what elements have in
    common.
    """
    if not bool(candidate.isfinite().all()):
        return "with its own random numbers an output is not finite"
    scatter = [sample - sample.mean(0) for sample in (reference.double(), candidate.double())]
    energies = [part.square().sum(1) for part in scatter]
    ours, theirs = (float(energy.mean()) for energy in energies)
    if ours <= 0 or theirs <= 0:
        if ours == theirs:
            return ""
        return "its randomness is missing" if ours else "it draws random numbers, fp32 does not"
    # Logarithms: a rare draw far from the others is to weigh no more than they do.
    logs = [energy.clamp(min=1e-3 * float(energy.mean())).log() for energy in energies]
    error = math.hypot(*(float(log.std()) / math.sqrt(len(log)) for log in logs))
    apart = float(logs[1].mean() - logs[0].mean())
    if abs(apart) > math.log(DRAW_FACTOR) + DRAW_SIGMAS * error:
        return (
            f"its random numbers scatter the outputs {math.exp(apart / 2):.2f} times as far "
            "as fp32's: another dropout rate?"
        )
    shift = float((candidate.double().mean(0) - reference.double().mean(0)).square().sum())
    if shift > 4 * (ours + theirs) / len(reference) + (MEAN * _norm(reference.mean(0))) ** 2:
        return "with its own random numbers the outputs' mean is another than fp32's"
    return ""


def steps_within(seconds: float, step_s: float, fp32: float = FP32) -> int:
    """Steps for which all runs fit; 0 where too few do."""
    each_s = seconds_of(1, step_s, fp32) - seconds_of(0, step_s, fp32)
    steps = int(seconds / max(each_s, 1e-9))
    steps = min(MOST_STEPS, steps - FIXED_STEPS // 4) // BATCHES * BATCHES
    return steps if steps >= LEAST_STEPS else 0


def seconds_of(steps: int, step_s: float, fp32: float = FP32) -> float:
    """What all runs of a comparison of so many steps take, where torch's default takes `step_s` and
    strict fp32 `fp32` times that.

    Two runs as fast as the default, fp32's, and fp32's with rounding, which takes twice that.
    """
    runs = 2 * 1 + fp32 + 2 * fp32
    return runs * (steps + FIXED_STEPS // 4) * step_s
