"""Compares configs of models that draw random numbers, as dropout does, by means over many draws.

Compiled code draws other masks than eager code does. So each tensor's mean gradient is compared
with fp32's along one direction, fp32's own mean: its slope is 1, within a standard error known from
the draws. More are made until a fault of a tenth in one layer would stand out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.tuners.decisions import (
    CODE_SLOPE,
    DRAWS,
    FORMAT_SLOPE,
    FORMAT_TENSOR_SLOPE,
    MOST_DRAWS,
    SENSITIVE,
    SLOPE_KNOWN,
    SMALL_GRADIENT,
    SPREAD,
    SPREAD_KNOWN,
    STANDARD_ERRORS,
    SURE_ROUNDS,
)
from advisor.tuners.measure.place import UNVERIFIED, Compared
from advisor.tuners.measure.samples import (
    FP32_NOT_FINITE,
    Named,
    Sample,
    Sampler,
    dots,
    norms,
    not_finite,
    wrong,
)

OWN_SEEDS = 1_000_003
"""The first seed of fp32's own draws. The others must not share their masks: a mean would seem too
large along the mean of the same draws."""
TINY = 1e-30
"""Instead of 0 in a denominator."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Draws of a config, by (round, point, ...); a round is one draw at each point.

    Attributes:
        along: (..., tensor) scalar products with fp32's mean of this point.
        shift: (tensor) squared distance of the means from fp32's, without the draws' own noise.
        spreads: (round / 2, point, output) half the squared distances of two draws.
        losses: not a number where a loss is not known.
    """

    along: Tensor
    shift: Tensor
    spreads: Tensor
    losses: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Off:
    """How far something is off: a slope, the loss, the logarithm of a spread.

    Attributes:
        limit: how far it may be off, beside its standard error.
        known: the allowed standard errors must be below this for a verdict; infinite: never needed.
        beside: more figures, for people.
    """

    name: str
    off: float
    error: float
    limit: float
    known: float = math.inf
    beside: str = ""

    @property
    def allowed(self) -> float:
        return self.limit + STANDARD_ERRORS * self.error

    @property
    def beyond(self) -> bool:
        return abs(self.off) > self.allowed

    @property
    def far(self) -> bool:
        """Off by so much that other draws need not confirm it."""
        return abs(self.off) > self.allowed + STANDARD_ERRORS * self.error

    @property
    def doubt(self) -> float:
        """Its standard error, as a part of what a verdict needs."""
        return STANDARD_ERRORS * self.error / self.known

    def __str__(self) -> str:
        unsure = f"give or take {STANDARD_ERRORS * self.error:.1%}"
        return (
            f"{self.name} is {self.off:+.1%} off, {unsure}{self.beside}; {self.limit:.1%} allowed"
        )


class _Sums:
    """Sums of a config's draws in two halves, and scalars of each draw."""

    def __init__(self, points: int) -> None:
        self.rounds = 0
        self._halves: list[tuple[Named, Named]] = [({}, {}) for _ in range(points)]
        self._before: list[Named] = [{} for _ in range(points)]
        self._spreads: list[Tensor] = []
        self._losses: list[float] = []

    def add(self, sample: Sample, point: int) -> None:
        """Add a draw; of each round all points, in their order."""
        half, tensors = self._halves[point][self.rounds % 2], sample.tensors
        if not half:
            half.update({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
        torch._foreach_add_([half[name] for name in tensors], list(tensors.values()))
        if self.rounds % 2:
            self._spreads.append(norms(sample.outputs, self._before[point]).square() / 2)
        self._before[point] = sample.outputs
        self._losses.append(math.nan if sample.loss is None else sample.loss)
        self.rounds += point == len(self._halves) - 1

    def means(self, point: int) -> tuple[Named, Named]:
        """The means of both halves; `rounds` is even."""
        first, second = (
            dict(zip(half, torch._foreach_div(list(half.values()), self.rounds / 2), strict=True))
            for half in self._halves[point]
        )
        return first, second

    @property
    def spreads(self) -> Tensor:
        shape = (-1, len(self._halves), len(self._spreads[0]))
        return torch.stack(self._spreads).view(shape)

    @property
    def losses(self) -> Tensor:
        return torch.tensor(self._losses, dtype=torch.float64).view(-1, len(self._halves))


class Draws:
    """Compares means over as many draws as a verdict takes."""

    def __init__(self, sampler: Sampler, fp32: Config, tolerance: float) -> None:
        self._sampler, self._fp32, self._tolerance = sampler, fp32, tolerance
        self._points = sampler.subject.points
        self._rounds = max(2, DRAWS // self._points)
        self._own = _Sums(self._points)
        self._samples: list[Sample] = []
        """fp32's first at each point; of each tensor there its square, and rounding's."""
        self._energy: list[Tensor] = []
        self._noise: list[Tensor] = []
        self._formats: dict[tuple[Config, int], _Drawn] = {}
        self._shares: dict[Config, Tensor] = {}
        self._coarse: _Drawn | None = None

    def check_format(self, plain: Config) -> Compared:
        """Whether a number format trains as strict fp32 does."""
        self._extend()
        if not bool(self._signal.isfinite().all()):
            return FP32_NOT_FINITE
        if plain == self._fp32:
            return Compared(outcome="ok", reason="strict fp32")
        return self._check(plain, plain, "format")

    def check_code(self, candidate: Config, plain: Config) -> Compared:
        """Whether a config trains as its number format by itself does."""
        return self._check(candidate, plain, "code")

    def _check(self, config: Config, plain: Config, blames: str) -> Compared:
        """A verdict by as many draws as it takes.

        Both sides draw by the same seeds: masks that are equal in both, as between number formats,
        leave little to chance.
        """
        suspects, began = set[str](), self._rounds
        while True:
            self._extend()
            drawn = self._draw(config)
            if blames == "format":
                self._formats[config, self._rounds] = drawn
            if not bool(drawn.along.isfinite().all() and drawn.spreads.isfinite().all()):
                return not_finite(blames)
            found = self._off(drawn, plain, blames)
            beyond = [one for one in found if one.beyond]
            if beyond and blames == "format" and self._coarse is None:
                # Rounded weights may take as much from fp32's own gradient.
                self._coarse = self._draw(self._fp32, 2 * self._points)
                continue
            sure = self._rounds >= SURE_ROUNDS
            if again := [one for one in beyond if one.name in suspects or (sure and one.far)]:
                reason = self._said(max(again, key=lambda one: abs(one.off) / one.allowed))
                self._rounds = began
                return wrong(reason, blames)
            unsure = max(found, key=lambda one: one.doubt)
            if not beyond and unsure.doubt <= 1:
                return self._fine(found)
            more = 2.0 if beyond else max(2.0, unsure.doubt**2)
            if why := self._no_more(config, more):
                reason = self._said(beyond[0] if beyond else unsure)
                return Compared(outcome=UNVERIFIED, reason=f"{reason}; {why}")
            suspects = {one.name for one in beyond}
            # As many as it takes at once, but no more than twice too few: all are drawn anew.
            self._rounds = min(self._rounds * 2 ** int(math.log2(more)), MOST_DRAWS // self._points)

    def _said(self, one: _Off) -> str:
        return f"{one}, over {self._rounds * self._points} draws"

    def _no_more(self, config: Config, times: float) -> str:
        """Why so many times as many draws, which a verdict needs, cannot be made; or ''."""
        now = self._rounds * self._points
        needed = times * now
        # That estimate is a rough one itself.
        if needed > 2 * MOST_DRAWS or 2 * now > MOST_DRAWS:
            return f"more than {MOST_DRAWS} draws would be needed"
        took_s = needed * (self._sampler.took_s(config) + self._sampler.took_s(self._fp32))
        if took_s > self._sampler.left_s():
            return f"about {needed:.0f} draws would be needed, {took_s:.0f} s"
        return ""

    def _fine(self, found: Sequence[_Off]) -> Compared:
        slopes = [one for one in found if one.known == SLOPE_KNOWN]
        said = f"compared over {self._rounds * self._points} draws"
        if slopes:
            said += f": {max(slopes, key=lambda one: abs(one.off))}"
        return Compared(outcome="ok", reason=said)

    def _extend(self) -> None:
        """Make as many draws of fp32 as others have; slopes are taken along their mean."""
        own = self._own
        if own.rounds >= self._rounds:
            return
        while own.rounds < self._rounds:
            for point in range(self._points):
                seed = OWN_SEEDS + own.rounds * self._points + point
                sample = self._sampler.sample(self._fp32, point, seed)
                if len(self._samples) <= point:
                    nudged = self._sampler.sample(self._fp32, point + self._points, seed)
                    self._samples.append(sample)
                    self._energy.append(dots(sample.tensors, sample.tensors))
                    self._noise.append(norms(nudged.tensors, sample.tensors).square())
                own.add(sample, point)
        self._halves = [own.means(point) for point in range(self._points)]
        self._directions = [{n: (a[n] + b[n]) / 2 for n in a} for a, b in self._halves]
        self._signal = torch.stack([dots(a, b) for a, b in self._halves])
        self._formats.clear()  # which were compared with fewer

    def _of_format(self, plain: Config) -> _Drawn:
        key = plain, self._rounds
        if key not in self._formats:
            self._formats[key] = self._draw(plain)
        return self._formats[key]

    def _draw(self, config: Config, offset: int = 0) -> _Drawn:
        sums, along = _Sums(self._points), []
        for number in range(self._rounds, 2 * self._rounds):
            for point in range(self._points):
                seed = number * self._points + point
                sample = self._sampler.sample(config, point + offset, seed)
                along.append(dots(sample.tensors, self._directions[point]))
                sums.add(sample, point)
        shift = torch.zeros_like(along[0])
        for point, own in enumerate(self._halves):
            pairs = zip(sums.means(point), own, strict=True)
            ours, theirs = ({name: a[name] - b[name] for name in b} for a, b in pairs)
            shift += dots(ours, theirs)
        by_round = torch.stack(along).view(-1, self._points, len(along[0]))
        return _Drawn(by_round, shift, sums.spreads, sums.losses)

    def _share(self, plain: Config, drawn: _Drawn) -> Tensor:
        """What a format does to each tensor, as a part of it; at most what it does to the means."""
        if plain not in self._shares:
            noise = self._noise
            if plain != self._fp32:
                # Of the same seeds, which most often draw the same masks.
                noise = [
                    norms(self._sampler.sample(plain, at, OWN_SEEDS + at).tensors, own.tensors) ** 2
                    for at, own in enumerate(self._samples)
                ]
            energy = torch.stack(self._energy).sum(0).clamp(min=TINY)
            self._shares[plain] = (torch.stack(noise).sum(0) / energy).sqrt()
        return self._shares[plain].minimum((drawn.shift.clamp(min=0) / self._strength()).sqrt())

    def _strength(self, points: slice = slice(None)) -> Tensor:
        """The square of each tensor's mean gradient, over points."""
        return self._signal[points].sum(0).clamp(min=TINY)

    def _off(self, drawn: _Drawn, plain: Config, blames: str) -> list[_Off]:
        """Slopes, the outputs' spread, and the loss. Slopes of code: over all points; and at the
        kept weights, and at the disturbed ones, since a stale value shows at one of these alone."""
        half = self._points // 2
        than = self._of_format(self._fp32 if blames == "format" else plain)
        if blames == "format":  # nothing is stale because of a format
            share = self._share(plain, drawn)
            found = self._format_slopes(drawn, than, share, slice(half))
        else:
            share = self._share(plain, than)
            found = list(self._slopes(drawn, than, CODE_SLOPE, share, slice(None)).values())
            for group in (slice(half), slice(half, None)):
                alone = self._slopes(drawn, than, CODE_SLOPE, share, group)
                found += [replace(one, known=math.inf) for one in alone.values()]
        return found + self._spreads(drawn) + self._loss(drawn)

    def _slopes(
        self, drawn: _Drawn, than: _Drawn, limit: float, share: Tensor, points: slice
    ) -> dict[int, _Off]:
        """By tensor, without those that are mere rounding or that the format takes far off."""
        signal = self._strength(points)
        apart = drawn.along - than.along
        off = apart.mean(0)[points].sum(0) / signal
        error = (apart.var(0) / len(apart))[points].sum(0).sqrt() / signal
        ours, theirs = (one.along.mean(0)[points].sum(0) / signal - 1 for one in (drawn, than))
        counts = torch.tensor([one.numel() for one in self._directions[0].values()])
        # Rounding has a part along the gradient by chance, the larger the fewer its elements.
        limits = limit + STANDARD_ERRORS * share * (2 / counts).sqrt()
        rounding = torch.stack(self._noise).sum(0) > torch.stack(self._energy).sum(0) / 4
        # A slope must be known unless its gradient is much smaller, per element, than usual.
        element = (self._signal.sum(0).clamp(min=0) / counts).sqrt()
        matters = element > SMALL_GRADIENT * element[len(self._samples[0].outputs) :].median()
        matters[: len(self._samples[0].outputs)] = False
        return {
            at: _Off(
                name=f"the slope of {self._samples[0].label(name)}",
                off=float(off[at]),
                error=float(error[at]),
                limit=float(limits[at]),
                known=SLOPE_KNOWN if matters[at] else math.inf,
                beside=f" ({float(ours[at]):+.1%} from fp32, {float(theirs[at]):+.1%} without it)",
            )
            for at, name in enumerate(self._directions[0])
            if not rounding[at] and share[at] <= 0.5
        }

    def _format_slopes(
        self, drawn: _Drawn, than: _Drawn, share: Tensor, points: slice
    ) -> list[_Off]:
        """Of all gradients together, and of each tensor: as far as rounded weights take them."""
        first = len(self._samples[0].outputs)
        signal = self._strength(points)
        whole = signal[first:].sum()
        lost, lost_whole = torch.zeros_like(signal), 0.0
        if self._coarse is not None:
            left = (self._coarse.along.mean(0) - than.along.mean(0))[points].sum(0)
            lost, lost_whole = (left / signal).abs(), -float(left[first:].sum() / whole)
        apart = (drawn.along - than.along)[:, points, first:].sum((1, 2)) / whole
        off = float(apart.mean())
        together = _Off(
            name="the slope of all gradients",
            off=off,
            error=float((apart.var() / len(apart)).sqrt()),
            limit=FORMAT_SLOPE + SENSITIVE * max(0.0, lost_whole) * (off < 0),
            known=SLOPE_KNOWN,
        )
        alone = self._slopes(drawn, than, FORMAT_TENSOR_SLOPE, share, points)
        return [
            together,
            *(
                replace(one, known=math.inf, limit=one.limit + SENSITIVE * float(lost[at]))
                for at, one in alone.items()
            ),
        ]

    def _spreads(self, drawn: _Drawn) -> list[_Off]:
        """By logarithms: a rare draw far from the others weighs no more than they do."""
        found = []
        for at, (name, output) in enumerate(self._samples[0].outputs.items()):
            own = self._own.spreads[..., at]
            # One number's variance is too unsure to tell anything.
            if output.numel() < 2 or not float(own.mean()):
                continue
            least = 1e-3 * own.mean(0)
            off, error = _difference(
                *(s.maximum(least).log() for s in (drawn.spreads[..., at], own))
            )
            found.append(
                _Off(
                    name=f"the variance of the {name} over draws, as a logarithm,",
                    off=off,
                    error=error,
                    limit=math.log1p(SPREAD),
                    known=SPREAD_KNOWN,
                )
            )
        return found

    def _loss(self, drawn: _Drawn) -> list[_Off]:
        own = self._own.losses
        known = (~own.isnan()).all(0)
        if not bool(known.any()):
            return []
        scale = float(own[:, known].mean().abs()) or 1.0
        off, error = _difference(drawn.losses[:, known], own[:, known])
        return [_Off(name="the loss", off=off / scale, error=error / scale, limit=self._tolerance)]


def _difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """How far the means of two (round, point) samples are apart, and its standard error."""
    errors = [float((s.var(0) / len(s)).sum().sqrt()) / s.shape[1] for s in (ours, theirs)]
    return float(ours.mean() - theirs.mean()), math.hypot(*errors)
