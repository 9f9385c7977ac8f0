"""Compares configs of models that draw random numbers, as dropout does, by means over many draws.

Compiled code draws other masks than eager code does. So each tensor's mean gradient is compared
with fp32's along one direction, fp32's own mean: its slope is 1, within a standard error known from
the draws. More are made until a fault of a tenth in one layer would stand out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.tuners import decisions as limits
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Off:
    """How far something is off, and may be, besides its standard error.

    Attributes:
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
    def unsure(self) -> float:
        return limits.STANDARD_ERRORS * self.error

    def exceeds(self, times: int = 1) -> bool:
        return abs(self.off) > self.limit + times * self.unsure

    def __str__(self) -> str:
        off = f"{self.off:+.1%} off, give or take {self.unsure:.1%}"
        return f"{self.name} is {off}{self.beside}; {self.limit:.1%} allowed"


class _Drawn:
    """Draws of a config; a round is one draw at each point.

    Attributes:
        shift: of each tensor the squared distance of its means from fp32's, without the draws' own
            noise.
    """

    def __init__(self, points: int) -> None:
        self.rounds = 0
        self.shift = torch.zeros(())
        self._halves: list[tuple[Named, Named]] = [({}, {}) for _ in range(points)]
        self._before: list[Named] = [{} for _ in range(points)]
        self._along: list[Tensor] = []
        self._spreads: list[Tensor] = []
        self._losses: list[float] = []

    def add(self, sample: Sample, point: int, direction: Named | None = None) -> None:
        """Add a draw; of each round all points, in their order."""
        half, tensors = self._halves[point][self.rounds % 2], sample.tensors
        if not half:
            half.update({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
        torch._foreach_add_([half[name] for name in tensors], list(tensors.values()))
        if direction:
            self._along.append(dots(tensors, direction))
        if self.rounds % 2:
            self._spreads.append(norms(sample.outputs, self._before[point]).square() / 2)
        self._before[point] = sample.outputs
        self._losses.append(math.nan if sample.loss is None else sample.loss)
        self.rounds += point == len(self._halves) - 1

    def means(self) -> list[tuple[Named, Named]]:
        """Of each point the means of both halves; `rounds` is even."""
        found = []
        for halves in self._halves:
            first, second = (
                dict(zip(h, torch._foreach_div(list(h.values()), self.rounds / 2), strict=True))
                for h in halves
            )
            found.append((first, second))
        return found

    def compare_means(self, fp32: Sequence[tuple[Named, Named]]) -> None:
        """Set `shift`, and drop the sums."""
        for pair in zip(self.means(), fp32, strict=True):
            ours, theirs = ({n: a[n] - b[n] for n in b} for a, b in zip(*pair, strict=True))
            self.shift = self.shift + dots(ours, theirs)
        self._halves = [({}, {}) for _ in fp32]

    @property
    def along(self) -> Tensor:
        """(round, point, tensor) scalar products with fp32's mean of this point."""
        return self._by_point(self._along)

    @property
    def spreads(self) -> Tensor:
        """(round / 2, point, output) half the squared distances of two draws."""
        return self._by_point(self._spreads)

    @property
    def losses(self) -> Tensor:
        """(round, point); not a number where a loss is not known."""
        return torch.tensor(self._losses, dtype=torch.float64).view(-1, len(self._halves))

    def _by_point(self, found: Sequence[Tensor]) -> Tensor:
        return torch.stack([*found]).view(-1, len(self._halves), len(found[0]))


class Draws:
    """Compares means over as many draws as a verdict takes."""

    def __init__(self, sampler: Sampler, fp32: Config, tolerance: float) -> None:
        self._sampler, self._fp32, self._tolerance = sampler, fp32, tolerance
        self._points = sampler.subject.points
        self._rounds = max(2, limits.DRAWS // self._points)
        self._own = _Drawn(self._points)
        # fp32's first sample at each point; of each tensor there its square, and rounding's.
        self._samples: list[Sample] = []
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
        """Draw until there is a verdict. Both sides draw by the same seeds: masks that are equal in
        both, as between number formats, leave little to chance."""
        suspects, began = set[str](), self._rounds
        while True:
            self._extend()
            drawn = self._draw(config)
            if blames == "format":
                self._formats[config, self._rounds] = drawn
            if not bool(drawn.along.isfinite().all() and drawn.spreads.isfinite().all()):
                return not_finite(blames)
            found = self._off(drawn, plain, blames)
            beyond = [one for one in found if one.exceeds()]
            if beyond and blames == "format" and self._coarse is None:
                # Rounded weights may take as much from fp32's own gradient.
                self._coarse = self._draw(self._fp32, 2 * self._points)
                continue
            # Other draws need not confirm what is far off.
            sure = self._rounds >= limits.SURE_ROUNDS
            if again := [o for o in beyond if o.name in suspects or (sure and o.exceeds(2))]:
                worst = max(again, key=lambda one: abs(one.off) / (one.limit + one.unsure))
                reason = self._said(worst)
                self._rounds = began
                return wrong(reason, blames)
            unsure = max(found, key=lambda one: one.unsure / one.known)
            doubt = unsure.unsure / unsure.known
            if not beyond and doubt <= 1:
                return self._fine(found)
            more = 2.0 if beyond else max(2.0, doubt**2)
            if why := self._no_more(config, more):
                reason = self._said(beyond[0] if beyond else unsure)
                return Compared(outcome=UNVERIFIED, reason=f"{reason}; {why}")
            suspects = {one.name for one in beyond}
            # As many as it takes at once, but no more than twice too few: all are drawn anew.
            self._rounds = min(
                self._rounds * 2 ** int(math.log2(more)), limits.MOST_DRAWS // self._points
            )

    def _said(self, one: _Off) -> str:
        return f"{one}, over {self._rounds * self._points} draws"

    def _no_more(self, config: Config, times: float) -> str:
        """Why so many times as many draws, which a verdict needs, cannot be made; or ''."""
        now = self._rounds * self._points
        needed = times * now
        # That estimate is a rough one itself.
        if needed > 2 * limits.MOST_DRAWS or 2 * now > limits.MOST_DRAWS:
            return f"more than {limits.MOST_DRAWS} draws would be needed"
        took_s = needed * (self._sampler.took_s[config] + self._sampler.took_s[self._fp32])
        if took_s > self._sampler.left_s():
            return f"about {needed:.0f} draws would be needed, {took_s:.0f} s"
        return ""

    def _fine(self, found: Sequence[_Off]) -> Compared:
        slopes = [one for one in found if one.known == limits.SLOPE_KNOWN]
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
        self._halves = own.means()
        self._directions = [{n: (a[n] + b[n]) / 2 for n in a} for a, b in self._halves]
        self._signal = torch.stack([dots(a, b) for a, b in self._halves])
        self._formats.clear()  # which were compared with fewer

    def _of_format(self, plain: Config) -> _Drawn:
        key = plain, self._rounds
        if key not in self._formats:
            self._formats[key] = self._draw(plain)
        return self._formats[key]

    def _draw(self, config: Config, offset: int = 0) -> _Drawn:
        drawn = _Drawn(self._points)
        for number in range(self._rounds, 2 * self._rounds):
            for point, direction in enumerate(self._directions):
                seed = number * self._points + point
                drawn.add(self._sampler.sample(config, point + offset, seed), point, direction)
        drawn.compare_means(self._halves)
        return drawn

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
        half = self._points // 2
        if blames == "format":  # nothing is stale because of a format
            than = self._of_format(self._fp32)
            found = self._format_slopes(drawn, than, self._share(plain, drawn), slice(half))
        else:
            than, found = self._of_format(plain), []
            share = self._share(plain, than)
            # Also at the kept and at the disturbed weights alone, where a stale value shows.
            for group in (slice(None), slice(half), slice(half, None)):
                needed = group == slice(None)
                found += self._slopes(drawn, than, limits.CODE_SLOPE, share, group, needed)
        return found + self._spreads(drawn) + self._loss(drawn)

    def _slopes(
        self,
        drawn: _Drawn,
        than: _Drawn,
        limit: Tensor | float,
        share: Tensor,
        points: slice,
        needed: bool = False,
    ) -> list[_Off]:
        """Of each tensor, unless it is mere rounding or the format takes it far off. `needed`: they
        must be known for a verdict, where the gradient is not much smaller than usual."""
        outputs, signal = len(self._samples[0].outputs), self._strength(points)
        apart = drawn.along - than.along
        off = apart.mean(0)[points].sum(0) / signal
        error = (apart.var(0) / len(apart))[points].sum(0).sqrt() / signal
        ours, theirs = (one.along.mean(0)[points].sum(0) / signal - 1 for one in (drawn, than))
        counts = torch.tensor([one.numel() for one in self._directions[0].values()])
        # Rounding has a part along the gradient by chance, the larger the fewer its elements.
        allowed = limit + limits.STANDARD_ERRORS * share * (2 / counts).sqrt()
        rounding = torch.stack(self._noise).sum(0) > torch.stack(self._energy).sum(0) / 4
        element = (self._signal.sum(0).clamp(min=0) / counts).sqrt()
        matters = element > limits.SMALL_GRADIENT * element[outputs:].median()
        matters[:outputs] = False
        return [
            _Off(
                name=f"the slope of {self._samples[0].label(name)}",
                off=float(off[at]),
                error=float(error[at]),
                limit=float(allowed[at]),
                known=limits.SLOPE_KNOWN if needed and matters[at] else math.inf,
                beside=f" ({float(ours[at]):+.1%} from fp32, {float(theirs[at]):+.1%} without it)",
            )
            for at, name in enumerate(self._directions[0])
            if not rounding[at] and share[at] <= 0.5
        ]

    def _format_slopes(
        self, drawn: _Drawn, than: _Drawn, share: Tensor, points: slice
    ) -> list[_Off]:
        """Of all gradients together, and of each tensor: as far as rounded weights take them."""
        first, signal = len(self._samples[0].outputs), self._strength(points)
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
            limit=limits.FORMAT_SLOPE + limits.SENSITIVE * max(0.0, lost_whole) * (off < 0),
            known=limits.SLOPE_KNOWN,
        )
        alone = limits.FORMAT_TENSOR_SLOPE + limits.SENSITIVE * lost
        return [together, *self._slopes(drawn, than, alone, share, points)]

    def _spreads(self, drawn: _Drawn) -> list[_Off]:
        """By logarithms: a rare draw far from the others weighs no more than they do."""
        found = []
        for at, (name, output) in enumerate(self._samples[0].outputs.items()):
            own = self._own.spreads[..., at]
            # One number's variance is too unsure to tell anything.
            if output.numel() < 2 or not float(own.mean()):
                continue
            least = 1e-3 * own.mean(0)
            logs = (one.maximum(least).log() for one in (drawn.spreads[..., at], own))
            off, error = _difference(*logs)
            limit, known = math.log1p(limits.SPREAD), limits.SPREAD_KNOWN
            what = f"the variance of the {name} over draws, as a logarithm,"
            found.append(_Off(name=what, off=off, error=error, limit=limit, known=known))
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
