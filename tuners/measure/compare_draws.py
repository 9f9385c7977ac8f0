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
from advisor.tuners.measure.samples import FP32_NOT_FINITE, NOT_FINITE, Sampler, wrong

OWN_SEEDS = 1_000_003
"""The first seed of fp32's own draws. The others must not share their masks: a mean would seem too
large along the mean of the same draws."""
TINY = 1e-30  # instead of 0 in a denominator


@dataclass(frozen=True, slots=True, kw_only=True)
class _Off:
    """How far something is off, its standard error, and how far it may be off besides."""

    name: str
    off: float
    error: float
    limit: float
    known: float = math.inf  # a verdict needs the allowed standard errors to be below
    beside: str = ""  # more figures, for people

    @property
    def unsure(self) -> float:
        return limits.STANDARD_ERRORS * self.error

    def exceeds(self, times: int = 1) -> bool:
        return abs(self.off) > self.limit + times * self.unsure

    def __str__(self) -> str:
        off = f"{self.off:+.1%} off, give or take {self.unsure:.1%}"
        return f"{self.name} is {off}{self.beside}; {self.limit:.1%} allowed"


class _Drawn:
    """Draws of a config, at each point in turn; a round is one at each."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self._points = sampler, sampler.subject.points
        self.count = 0
        self._sums = torch.zeros(())
        self._before: dict[int, Tensor] = {}
        self._along: list[Tensor] = []
        self._spreads: list[Tensor] = []
        self._losses: list[float] = []

    def add(self, vector: Tensor, loss: float | None, direction: Tensor | None = None) -> None:
        """Add a draw at the next point, whose mean in fp32 is `direction`."""
        sampler, point = self._sampler, self.count % self._points
        half = self.count // self._points % 2
        if not self._sums.dim():
            self._sums = vector.new_zeros(2, self._points, len(vector))
        self._sums[half, point] += vector
        if direction is not None:
            self._along.append(sampler.dots(vector, direction))
        outputs = vector[: sum(sampler.sizes[: sampler.outputs])].clone()
        if half:
            apart = sampler.norms(outputs - self._before[point], outputs=True)
            self._spreads.append(apart.square() / 2)
        self._before[point] = outputs
        self._losses.append(math.nan if loss is None else loss)
        self.count += 1

    def means(self, point: int) -> Tensor:
        """(2, elements): of the even rounds, and of as many odd ones."""
        return self._sums[:, point] / (self.count / self._points / 2)

    def compare_means(self, fp32: Sequence[Tensor]) -> None:
        """Set the squared distance of each tensor's means from fp32's, without the draws' own
        noise, and drop the sums."""
        apart = (self.means(point) - one for point, one in enumerate(fp32))
        self.shift = torch.stack([self._sampler.dots(*pair) for pair in apart]).sum(0)
        self._sums = torch.zeros(())

    @property
    def along(self) -> Tensor:
        """(round, point, tensor) scalar products with fp32's mean of this point."""
        return torch.stack(self._along).view(-1, self._points, len(self._along[0]))

    @property
    def spreads(self) -> Tensor:
        """(round / 2, point, output) half the squared distances of two draws."""
        return torch.stack(self._spreads).view(-1, self._points, len(self._spreads[0]))

    @property
    def losses(self) -> Tensor:
        """(round, point); not a number where a loss is not known."""
        return torch.tensor(self._losses, dtype=torch.float64).view(-1, self._points)


class Draws:
    """Compares means over as many draws as a verdict takes."""

    def __init__(self, sampler: Sampler, fp32: Config, tolerance: float) -> None:
        self._sampler, self._fp32, self._tolerance = sampler, fp32, tolerance
        self._points = sampler.subject.points
        self._rounds = max(2, limits.DRAWS // self._points)
        self._own = _Drawn(self._sampler)
        # fp32's first sample at each point; of each tensor there its square, and rounding's.
        self._samples: list[Tensor] = []
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
                return wrong(NOT_FINITE, blames)
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
                found_wrong = wrong(self._said(worst), blames)
                self._rounds = began
                return found_wrong
            unsure = max(found, key=lambda one: one.unsure / one.known)
            doubt = unsure.unsure / unsure.known
            if not beyond and doubt <= 1:
                slopes = [one for one in found if one.known == limits.SLOPE_KNOWN]
                said = f"compared over {self._rounds * self._points} draws"
                if slopes:
                    said += f": {max(slopes, key=lambda one: abs(one.off))}"
                return Compared(outcome="ok", reason=said)
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

    def _extend(self) -> None:
        """Make as many draws of fp32 as others have; slopes are taken along their mean."""
        own, sampler, points = self._own, self._sampler, self._points
        if own.count >= self._rounds * points:
            return
        while own.count < self._rounds * points:
            point, seed = own.count % points, OWN_SEEDS + own.count
            vector, loss = sampler.sample(self._fp32, point, seed)
            if len(self._samples) <= point:
                nudged, _ = sampler.sample(self._fp32, point + points, seed)
                self._samples.append(vector)
                self._energy.append(sampler.dots(vector, vector))
                self._noise.append(sampler.norms(nudged - vector).square())
            own.add(vector, loss)
        self._halves = [own.means(point) for point in range(points)]
        self._directions = [halves.mean(0) for halves in self._halves]
        self._signal = torch.stack([sampler.dots(*halves) for halves in self._halves])
        self._formats.clear()  # which were compared with fewer

    def _of_format(self, plain: Config) -> _Drawn:
        if (plain, self._rounds) not in self._formats:
            self._formats[plain, self._rounds] = self._draw(plain)
        return self._formats[plain, self._rounds]

    def _draw(self, config: Config, offset: int = 0) -> _Drawn:
        drawn = _Drawn(self._sampler)
        draws = self._rounds * self._points
        for seed in range(draws, 2 * draws):
            point = seed % self._points
            vector, loss = self._sampler.sample(config, point + offset, seed)
            drawn.add(vector, loss, self._directions[point])
        drawn.compare_means(self._halves)
        return drawn

    def _share(self, plain: Config, drawn: _Drawn) -> Tensor:
        """What a format does to each tensor, as a part of it; at most what it does to the means."""
        if plain not in self._shares:
            noise = self._noise
            if plain != self._fp32:
                # Of the same seeds, which most often draw the same masks.
                sampler = self._sampler
                noise = [
                    sampler.norms(sampler.sample(plain, at, OWN_SEEDS + at)[0] - own).square()
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
        needed: bool,
    ) -> list[_Off]:
        """Of each tensor, unless it is mere rounding or the format takes it far off. `needed`: they
        must be known for a verdict, where the gradient is not much smaller than usual."""
        outputs, signal = self._sampler.outputs, self._strength(points)
        apart = drawn.along - than.along
        off = apart.mean(0)[points].sum(0) / signal
        error = (apart.var(0) / len(apart))[points].sum(0).sqrt() / signal
        ours, theirs = (one.along.mean(0)[points].sum(0) / signal - 1 for one in (drawn, than))
        counts = torch.tensor(self._sampler.sizes)
        # Rounding has a part along the gradient by chance, the larger the fewer its elements.
        allowed = limit + limits.STANDARD_ERRORS * share * (2 / counts).sqrt()
        rounding = torch.stack(self._noise).sum(0) > torch.stack(self._energy).sum(0) / 4
        element = (self._signal.sum(0).clamp(min=0) / counts).sqrt()
        matters = element > limits.SMALL_GRADIENT * element[outputs:].median()
        matters[:outputs] = False
        return [
            _Off(
                name=f"the slope of {self._sampler.label(at)}",
                off=float(off[at]),
                error=float(error[at]),
                limit=float(allowed[at]),
                known=limits.SLOPE_KNOWN if needed and matters[at] else math.inf,
                beside=f" ({float(ours[at]):+.1%} from fp32, {float(theirs[at]):+.1%} without it)",
            )
            for at in range(len(counts))
            if not rounding[at] and share[at] <= 0.5
        ]

    def _format_slopes(
        self, drawn: _Drawn, than: _Drawn, share: Tensor, points: slice
    ) -> list[_Off]:
        """Of all gradients together, and of each tensor: as far as rounded weights take them."""
        first, signal = self._sampler.outputs, self._strength(points)
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
        return [together, *self._slopes(drawn, than, alone, share, points, False)]

    def _spreads(self, drawn: _Drawn) -> list[_Off]:
        """By logarithms: a rare draw far from the others weighs no more than they do."""
        found = []
        for at in range(self._sampler.outputs):
            own = self._own.spreads[..., at]
            # One number's variance is too unsure to tell anything.
            if self._sampler.sizes[at] < 2 or not float(own.mean()):
                continue
            least = 1e-3 * own.mean(0)
            logs = (one.maximum(least).log() for one in (drawn.spreads[..., at], own))
            off, error = _difference(*logs)
            limit, known = math.log1p(limits.SPREAD), limits.SPREAD_KNOWN
            what = f"the variance of {self._sampler.label(at)} over draws, as a logarithm,"
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
