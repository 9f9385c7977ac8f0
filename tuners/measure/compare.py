"""Compares how a config trains with strict fp32: the same weights and batches, every gradient.

Two parts of a config can be wrong. Its number format, without the rest of it ('plain'), is held
against fp32 once. What compiles or captures it is held against that format: a fault in one layer
scales that layer's gradient (its *slope*, the part along fp32's gradient, is not 1), or adds errors
that the format by itself does not have. Of models that draw random numbers, as dropout does, only
means over many draws are alike: `compare_draws`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.tuners.act.pilot.orders import told
from advisor.tuners.knobs import described
from advisor.tuners.measure.place import UNVERIFIED, Compared

SAMPLED = 2**16 + 1
"""Elements of one tensor that are compared, evenly taken from all."""
SLOPE, FORMAT_SLOPE = 0.03, 0.05
"""How far a slope may be off: a config's from its format's, a format's from fp32's."""
ERRORS = 4.0
"""Standard errors that are allowed beyond a limit."""
ROUNDINGS, ROUNDINGS_ALONE = 2.5, 10.0
"""Times that an error may be as large as the format's, or as rounding, where a tensor is nothing
but that. Two orders of summation of bf16 differ by up to 1.4 times, of fp32's rounding by two."""
ALWAYS = 1e-3
"""Part of a tensor that may always be off."""
OPTIMIZER = 1e-4
"""Part of an update that an optimizer may make of its own: fused kernels round otherwise. AdamW's
weight decay is five times that at a weight of 0.05, lr 1e-4."""
NUDGE = 1e-6
"""Relative change of weights that shows what rounding alone does to a tensor: eight units in the
last place of float32."""
SCALED, NOISE = 1.25, 0.1
"""How far weights are disturbed: each tensor by a factor, which slopes show, each element beyond
that, which errors show."""

Named = dict[str, Tensor]


class Overflow(Exception):
    """fp16 overflows at any loss scale."""


class NoTime(Exception):
    """The time is over before the comparison is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One forward and backward pass: what it returned and every parameter's gradient.

    Attributes:
        outputs, gradients: by name, each as `sampled` gives it, with memory of its own.
        loss: of this pass; None where it is not known.
    """

    outputs: Named
    gradients: Named
    loss: float | None = None

    @property
    def tensors(self) -> Named:
        """All of them; outputs by their names, which no parameter has."""
        return self.outputs | self.gradients


class Subject(Protocol):
    """A training step that can be made again under any config, at given weights and batches."""

    @property
    def points(self) -> int:
        """Pairs of weights and a batch: half at the kept weights, half at disturbed ones."""

    @property
    def draws(self) -> bool:
        """Whether a pass draws random numbers, as dropout does."""

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        """Make one pass, with the weights that `move` makes of the kept ones for this point.

        Args:
            point: below `points`; `points` more for the same with weights nudged.
            seed: of the random numbers.

        Raises:
            Overflow: no loss scale is found.
            Exception: anything else that a config raises.
        """

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        """The largest part of an update that a config's optimizer makes otherwise than the script's
        own from the same gradients, with the parameter's name; (0, '') where it has no own."""


@torch.no_grad()
def move(weights: Sequence[Tensor], point: int, points: int) -> None:
    """Change kept weights, in place, to those of a point, alike under every config.

    Values that were computed from the kept weights, as constants of compiled code, no longer fit.
    """
    disturbed, nudged = point % points >= points // 2, point >= points
    if not (disturbed or nudged):
        return
    seen: Counter[int] = Counter()
    for number, weight in enumerate(w for w in weights if w.is_floating_point()):
        draw = torch.Generator(weight.device).manual_seed(1 + number)
        # In their logical order, whatever the memory format.
        noise = 2 * torch.rand(weight.shape, generator=draw, device=weight.device) - 1
        if disturbed:
            # Up and down in turn, so that no activation grows with the depth.
            factor = SCALED if seen[weight.dim()] % 2 else 1 / SCALED
            seen[weight.dim()] += 1
            zeros = 0.2 * NOISE * noise * (weight == 0)
            weight.copy_(weight * (factor * (1 + NOISE * noise)) + zeros)
        if nudged:
            weight.mul_(1 + NUDGE * noise)


def sampled(tensor: Tensor) -> Tensor:
    """A float32 copy of at most SAMPLED elements, in logical order whatever the memory format."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    # Odd, so that it does not meet the same column of every row.
    stride = math.ceil(dense.numel() / SAMPLED) | 1 if dense.numel() > SAMPLED else 1
    return dense.contiguous().flatten()[::stride].to(torch.float32, copy=True)


def dots(ours: Named, theirs: Named) -> Tensor:
    """The scalar products of tensors of equal names, as float64 on the host."""
    return torch.stack([torch.dot(ours[name], theirs[name]) for name in theirs]).double().cpu()


def norms(ours: Named, theirs: Named) -> Tensor:
    """L2 norms of the differences of tensors of equal names, as float64 on the host."""
    apart = torch._foreach_sub([ours[name] for name in theirs], list(theirs.values()))
    return torch.stack(torch._foreach_norm(apart)).double().cpu()


class Sampler:
    """Makes samples of a subject for as long as there is time.

    Attributes:
        left_s: seconds that are left.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.left_s: Callable[[], float] = lambda: math.inf
        self._took_s: dict[Config, float] = {}

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        """Raises:
        NoTime: another one like the last of this config does not fit.
        """
        began = time.perf_counter()
        if self.left_s() < self._took_s.get(config, 0.0):
            raise NoTime
        found = self.subject.sample(config, point, seed)
        if any(t.is_cuda for t in found.tensors.values()):
            torch.cuda.synchronize()
        self._took_s[config] = time.perf_counter() - began
        return found


class Way(Protocol):
    """Compares samples: without random numbers, or over many draws of them."""

    def check_format(self, plain: Config) -> Compared:
        """Whether a number format trains as strict fp32 does."""

    def check_code(self, candidate: Config, plain: Config) -> Compared:
        """Whether a config trains as its number format by itself does."""


class References:
    """Samples of strict fp32 and of plain number formats, made once for several configs.

    Args:
        fp32: the unmodified script in strict fp32.
        tolerance: part of the loss by which it may always be off.
    """

    def __init__(self, subject: Subject, fp32: Config, *, tolerance: float) -> None:
        self._subject, self._fp32, self._tolerance = subject, fp32, tolerance
        self._sampler = Sampler(subject)
        self._way: Way | None = None
        self._formats: dict[Config, Compared] = {}

    def compare(self, candidate: Config, plain: Config, *, left_s: Callable[[], float]) -> Compared:
        """Compare a config with strict fp32, which it is not asked to be faster than.

        Args:
            plain: fp32 with the candidate's number format and nothing else of it.
            left_s: seconds that are left for it.
        """
        self._sampler.left_s = left_s
        try:
            return self._compare(candidate, plain)
        except Overflow as exc:
            return Compared(outcome="wrong", reason=str(exc) or "fp16 overflows", blames="format")
        except NoTime:
            return Compared(outcome=UNVERIFIED, reason="no time was left to compare it with fp32")
        except Exception as exc:  # whatever a config raises
            exc.__traceback__ = None  # its frames hold what was computed
            outcome, reason = told(exc)
            return Compared(outcome=outcome, reason=reason)

    def _compare(self, candidate: Config, plain: Config) -> Compared:
        if self._way is None:
            from advisor.tuners.measure.compare_draws import Draws

            kind = Draws if self._subject.draws else Exact
            self._way = kind(self._sampler, self._fp32, self._tolerance)
        if plain not in self._formats:
            self._formats[plain] = self._way.check_format(plain)
        found = self._formats[plain]
        if found.ok and candidate != plain:
            found = self._way.check_code(candidate, plain)
        if not found.ok:
            return found
        part, name = self._subject.optimizer_error(candidate)
        if part <= OPTIMIZER:
            return found
        reason = f"its optimizer changes {name} by {part:.2%} otherwise than the script's own"
        return Compared(outcome="wrong", reason=reason, blames="optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """fp32's sample at one point; of each tensor its size and what rounding alone does to it."""

    sample: Sample
    tensors: Named
    size: list[float]
    noise: list[float]
    floor: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Against:
    """Another sample at that point, held against fp32's: of each tensor its slope and distance."""

    slopes: list[float]
    apart: list[float]
    loss: float | None

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.apart))


@dataclass(frozen=True, slots=True)
class _Fault:
    """A tensor beyond its limit by this factor."""

    factor: float
    tensor: int
    point: int
    limit: float


class Exact:
    """The Way of subjects that draw no random numbers: one sample each tells."""

    def __init__(self, sampler: Sampler, fp32: Config, tolerance: float) -> None:
        self._sampler, self._fp32, self._tolerance = sampler, fp32, tolerance
        self._points: list[_Point] = []
        self._plain: dict[Config, list[_Against]] = {}

    def check_format(self, plain: Config) -> Compared:
        """See Way."""
        count = self._sampler.subject.points
        for point in range(len(self._points), count):
            self._points.append(self._reference(point))
        self._names = list(self._points[0].tensors)
        if not all(map(math.isfinite, (s for one in self._points for s in one.size))):
            return Compared(outcome=UNVERIFIED, reason="strict fp32 is not finite either")
        held = self._plain[plain] = self._held(plain)
        if not all(one.finite for one in held):
            return _not_finite("format")
        faults = [self._off(held, None, at) for at in range(count)]
        if worst := self._lasting(faults):
            return self._wrong(worst, plain, plain, "format")
        return self._loss(held, "format") or self._fine(held)

    def check_code(self, candidate: Config, plain: Config) -> Compared:
        """See Way."""
        held, than = self._held(candidate), self._plain[plain]
        if not all(one.finite for one in held):
            return _not_finite("code")
        points = range(len(held))
        slopes = [self._off(held, than, at) for at in points]
        apart = [self._apart(held, than, at) for at in points]
        if worst := self._lasting(slopes) or self._lasting(apart):
            return self._wrong(worst, candidate, plain, "code")
        return self._loss(held, "code") or self._fine(held)

    def _reference(self, point: int) -> _Point:
        sample = self._sampler.sample(self._fp32, point, point)
        tensors = sample.tensors
        nudged = self._sampler.sample(self._fp32, point + self._sampler.subject.points, point)
        size = torch.stack(torch._foreach_norm(list(tensors.values()))).tolist()
        noise = norms(nudged.tensors, tensors).tolist()
        counts = [tensor.numel() for tensor in tensors.values()]
        # What is nothing at all in fp32 is held against the usual element.
        usual = math.hypot(*size) / math.sqrt(sum(counts))
        floor = [NUDGE * usual * math.sqrt(count) for count in counts]
        return _Point(sample=sample, tensors=tensors, size=size, noise=noise, floor=floor)

    def _held(self, config: Config) -> list[_Against]:
        found = []
        for at, point in enumerate(self._points):
            if config == self._fp32:
                sample, apart = point.sample, [0.0] * len(point.size)
            else:
                sample = self._sampler.sample(config, at, at)
                apart = norms(sample.tensors, point.tensors).tolist()
            along = dots(sample.tensors, point.tensors).tolist()
            slopes = [
                dot / size**2 if size else 1.0 for dot, size in zip(along, point.size, strict=True)
            ]
            found.append(_Against(slopes=slopes, apart=apart, loss=sample.loss))
        return found

    def _shares(self, than: _Against, point: _Point) -> list[float]:
        """What the format, or rounding, does to each tensor, as parts of its size: at least the
        usual one, unless it is nothing but that."""
        pairs = zip(than.apart, point.noise, point.size, strict=True)
        shares = [max(apart, noise) / size if size else math.inf for apart, noise, size in pairs]
        usual = statistics.median(shares)
        return [max(share, min(usual, 0.5)) for share in shares]

    def _off(
        self, held: Sequence[_Against], than: Sequence[_Against] | None, at: int
    ) -> dict[int, _Fault]:
        """Tensors whose slopes are off from others, or from 1."""
        point = self._points[at]
        found = {}
        for tensor, share in enumerate(self._shares((than or held)[at], point)):
            if share > 0.5:
                continue
            wanted = 1.0 if than is None else than[at].slopes[tensor]
            # Rounding has a part along the gradient by chance, the larger the fewer its elements.
            chance = share * math.sqrt(2 / point.tensors[self._names[tensor]].numel())
            limit = (FORMAT_SLOPE if than is None else SLOPE) + ERRORS * chance
            off = abs(held[at].slopes[tensor] - wanted)
            if off > limit:
                found[tensor] = _Fault(off / limit, tensor, at, limit)
        return found

    def _apart(
        self, held: Sequence[_Against], than: Sequence[_Against], at: int
    ) -> dict[int, _Fault]:
        """Tensors that are farther from fp32's than the format takes them."""
        point = self._points[at]
        found = {}
        for tensor, share in enumerate(self._shares(than[at], point)):
            size, apart = point.size[tensor], held[at].apart[tensor]
            allowed = ROUNDINGS * share * size + ALWAYS * size
            if share > 0.5:
                most = max(than[at].apart[tensor], point.noise[tensor], point.floor[tensor])
                allowed = ROUNDINGS_ALONE * most
            if apart > allowed:
                limit = allowed / size if size else 0.0
                found[tensor] = _Fault(apart / allowed, tensor, at, limit)
        return found

    def _lasting(self, faults: Sequence[dict[int, _Fault]]) -> _Fault | None:
        """The worst fault that all points of the kept weights have, or all of the disturbed."""
        half = max(1, len(faults) // 2)
        found = []
        for group in (faults[:half], faults[half:]):
            for tensor in group[0] if group else ():
                if all(tensor in one for one in group):
                    found.append(min((one[tensor] for one in group), key=lambda one: one.factor))
        # A gradient names the parameter; what it did to the outputs does not.
        outputs = len(self._points[0].sample.outputs)
        return max(found, key=lambda one: (one.tensor >= outputs, one.factor), default=None)

    def _wrong(self, fault: _Fault, candidate: Config, plain: Config, blames: str) -> Compared:
        """A verdict with the distances of the three from each other."""
        name, point = self._names[fault.tensor], self._points[fault.point]
        theirs, ours = (
            self._sampler.subject.sample(one, fault.point, fault.point).tensors[name]
            for one in (plain, candidate)
        )
        size = point.size[fault.tensor] or 1.0
        fp32 = point.tensors[name]
        between = [float((a - b).norm()) / size for a, b in ((ours, fp32), (theirs, fp32))]
        format_ = described(plain.changed(self._fp32), nothing="fp32")
        reason = f"{label(name, point.sample)} is {between[0]:.2%} off fp32"
        if candidate != plain:
            apart = float((ours - theirs).norm()) / size
            reason += f", {format_} alone {between[1]:.2%}, {apart:.2%} between these two"
        slope = float(torch.dot(ours, fp32)) / size**2
        reason += f"; {slope:.3f} times as large along it; {fault.limit:.2%} allowed"
        return Compared(outcome="wrong", reason=reason, blames=blames)

    def _loss(self, held: Sequence[_Against], blames: str) -> Compared | None:
        pairs = [
            (one.loss, point.sample.loss) for one, point in zip(held, self._points, strict=True)
        ]
        known = [(ours, wanted) for ours, wanted in pairs if None not in (ours, wanted)]
        return check_loss(
            [ours for ours, _ in known if ours is not None],
            [wanted for _, wanted in known if wanted is not None],
            0.0,
            self._tolerance,
            blames,
        )

    def _fine(self, held: Sequence[_Against]) -> Compared:
        shares = {
            self._names[tensor]: apart / size
            for one, point in zip(held, self._points, strict=True)
            for tensor, (apart, size) in enumerate(zip(one.apart, point.size, strict=True))
            if size and point.noise[tensor] < size / 2
        }
        worst = max(shares, key=lambda name: shares[name], default="")
        if not worst:
            return Compared(outcome="ok", reason="nothing but rounding")
        said = label(worst, self._points[0].sample)
        return Compared(outcome="ok", reason=f"at most {shares[worst]:.1%} off fp32 ({said})")


def check_loss(
    ours: Sequence[float], wanted: Sequence[float], error: float, tolerance: float, blames: str
) -> Compared | None:
    """A verdict where mean losses are too far apart; `error`: the standard error of that."""
    if not ours:
        return None
    scale = abs(statistics.fmean(wanted)) or 1.0
    off = abs(statistics.fmean(ours) - statistics.fmean(wanted)) / scale
    allowed = tolerance + ERRORS * error / scale
    if off <= allowed:
        return None
    reason = f"its loss is {off:.2%} off fp32's, {allowed:.2%} allowed"
    return Compared(outcome="wrong", reason=reason, blames=blames)


def label(name: str, sample: Sample) -> str:
    """What a tensor is called in a sentence."""
    return f"the {name}" if name in sample.outputs else f"the gradient of {name}"


def _not_finite(blames: str) -> Compared:
    reason = "an output or a gradient is not finite"
    return Compared(outcome="wrong", reason=reason, blames=blames)
