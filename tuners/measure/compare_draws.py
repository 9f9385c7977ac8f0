"""Compares configs of models that draw random numbers, as dropout does, by means over many draws.

Compiled code draws other masks than eager code does. So for each tensor the mean gradient is held
against fp32's along one direction, fp32's own mean: its slope is 1, give or take a standard error
that is known from the draws. More are made until a fault of a tenth in one layer would stand out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.tuners.measure.place import UNVERIFIED, Compared
from advisor.tuners.measure.samples import (
    ERRORS,
    FORMAT_SLOPE,
    FORMAT_TENSOR,
    SENSITIVE,
    SLOPE,
    Named,
    Sample,
    Sampler,
    dots,
    fp32_not_finite,
    label,
    norms,
    not_finite,
)

FEWEST, MOST = 16, 512
"""Draws of each config: as many at first, doubled up to the last."""
SURE = 8
"""Rounds from which standard errors are known well enough to trust twice ERRORS of them at once;
else what is off must be so in other draws too."""
TELLS = 0.07
"""ERRORS standard errors of a slope that let a fault of a tenth stand out of SLOPE."""
SPREAD, SPREAD_TELLS = 0.25, 0.5
"""Part by which the outputs' variance over draws may be off, and ERRORS standard errors of its
logarithm that let dropout at twice its rate, which doubles the variance, stand out."""
MATTERS = 1e-2
"""Part of the usual gradient, per element, below which a tensor's mean gradient may stay unsure."""
OWN_SEEDS = 1_000_003
"""The first seed of fp32's draws. The others' must not have the same masks: what is held against
the mean of its own draws seems larger along it."""


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def finite(self) -> bool:
        """Every output and gradient is."""
        return bool(self.along.isfinite().all() and self.spreads.isfinite().all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Off:
    """How far something is off: a slope, the loss, the logarithm of a spread.

    Attributes:
        limit: that it may be off beside its standard error.
        tells: ERRORS standard errors that allow a verdict; infinite where it needs none.
        beside: more figures of it, for people.
        tensor: that it is of, where it is of one.
    """

    name: str
    off: float
    error: float
    limit: float
    tells: float = math.inf
    beside: str = ""
    tensor: str = ""

    @property
    def beyond(self) -> bool:
        """It is off by more than chance."""
        return abs(self.off) > self.limit + ERRORS * self.error

    @property
    def far(self) -> bool:
        """It is off by so much that other draws need not say so too."""
        return abs(self.off) > self.limit + 2 * ERRORS * self.error

    @property
    def doubt(self) -> float:
        """Its standard error, as a part of what allows a verdict."""
        return ERRORS * self.error / self.tells

    def __str__(self) -> str:
        unsure = f"give or take {ERRORS * self.error:.1%}"
        return (
            f"{self.name} is {self.off:+.1%} off, {unsure}{self.beside}; {self.limit:.1%} allowed"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A config that is held against another one, by the same seeds: masks that are the same in
    both, as between number formats, leave little to chance.

    Attributes:
        format: whose rounding there is between them.
        limit: that slopes may be off.
        blames: what is wrong where they are.
    """

    config: Config
    than: Config
    format: Config
    limit: float
    blames: str


class _Sums:
    """Sums of a config's draws in two halves, and scalars of each draw."""

    def __init__(self, points: int) -> None:
        self.halves: list[tuple[Named, Named]] = [({}, {}) for _ in range(points)]
        self.spreads: list[Tensor] = []
        self.losses: list[float] = []
        self.rounds = 0
        self._before: list[Named] = [{} for _ in range(points)]

    def add(self, sample: Sample, point: int) -> None:
        """Add a draw; of each round all points, in their order."""
        half, tensors = self.halves[point][self.rounds % 2], sample.tensors
        if not half:
            half.update({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
        torch._foreach_add_([half[name] for name in tensors], list(tensors.values()))
        if self.rounds % 2:
            self.spreads.append(norms(sample.outputs, self._before[point]).square() / 2)
        self._before[point] = sample.outputs
        self.losses.append(math.nan if sample.loss is None else sample.loss)
        self.rounds += point == len(self.halves) - 1

    def means(self, point: int) -> tuple[Named, Named]:
        """Those of both halves; `rounds` is even."""
        first, second = (
            dict(zip(half, torch._foreach_div(list(half.values()), self.rounds / 2), strict=True))
            for half in self.halves[point]
        )
        return first, second

    def drawn(self, along: list[Tensor], shift: Tensor) -> _Drawn:
        """What is kept of them."""
        by_point = (-1, len(self.halves))
        return _Drawn(
            along=torch.stack(along).unflatten(0, by_point),
            shift=shift,
            spreads=torch.stack(self.spreads).unflatten(0, by_point),
            losses=torch.tensor(self.losses, dtype=torch.float64).view(by_point),
        )


class Draws:
    """The Way of subjects that draw random numbers."""

    def __init__(self, sampler: Sampler, fp32: Config, tolerance: float) -> None:
        self._sampler, self._fp32, self._tolerance = sampler, fp32, tolerance
        self._points = sampler.subject.points
        self._rounds = max(2, FEWEST // self._points)
        self._own = _Sums(self._points)
        self._samples: list[Sample] = []
        self._energy: list[Tensor] = []
        self._noise: list[Tensor] = []
        self._formats: dict[tuple[Config, int], _Drawn] = {}
        self._shares: dict[Config, Tensor] = {}
        self._coarse: _Drawn | None = None

    def check_format(self, plain: Config) -> Compared:
        """See Way."""
        self._extend()
        if not bool(self._signal.isfinite().all()):
            return fp32_not_finite()
        if plain == self._fp32:
            return Compared(outcome="ok", reason="strict fp32")
        pair = _Pair(
            config=plain, than=self._fp32, format=plain, limit=FORMAT_SLOPE, blames="format"
        )
        return self._check(pair)

    def check_code(self, candidate: Config, plain: Config) -> Compared:
        """See Way."""
        pair = _Pair(config=candidate, than=plain, format=plain, limit=SLOPE, blames="code")
        return self._check(pair)

    def _check(self, pair: _Pair) -> Compared:
        """A verdict, by as many draws as it takes."""
        suspects, began = set[str](), self._rounds
        while True:
            self._extend()
            drawn = self._draw(pair.config)
            if pair.blames == "format":
                self._formats[pair.config, self._rounds] = drawn
            if not drawn.finite:
                return not_finite(pair.blames)
            found = self._off(drawn, pair)
            beyond = [one for one in found if one.beyond]
            if beyond and pair.blames == "format" and self._coarse is None:
                # Rounded weights may take as much from fp32's own gradient.
                self._coarse = self._draw(self._fp32, 2 * self._points)
                continue
            sure = self._rounds >= SURE
            if again := [one for one in beyond if one.name in suspects or (sure and one.far)]:
                worst = max(again, key=lambda one: abs(one.off) / (one.limit + ERRORS * one.error))
                reason = self._said(worst)
                self._rounds = began
                return Compared(outcome="wrong", reason=reason, blames=pair.blames)
            worst = max(found, key=lambda one: one.doubt)
            if not beyond and worst.doubt <= 1:
                return self._fine(found)
            reason = self._said(beyond[0] if beyond else worst)
            if why := self._no_more(pair.config, 2 if beyond else max(2, worst.doubt**2)):
                return Compared(outcome=UNVERIFIED, reason=f"{reason}; {why}")
            suspects = {one.name for one in beyond}
            # As many as it takes at once, but no more than twice too few: all are drawn anew.
            times = 2 if beyond else max(2, 2 ** int(math.log2(max(1.0, worst.doubt**2))))
            self._rounds = min(self._rounds * times, MOST // self._points)

    def _said(self, one: _Off) -> str:
        return f"{one}, over {self._rounds * self._points} draws"

    def _no_more(self, config: Config, times: float) -> str:
        """Why so many times as many draws, which a verdict needs, cannot be made; or ''."""
        needed = times * self._rounds * self._points
        # That estimate is a rough one itself.
        if needed > 2 * MOST or 2 * self._rounds * self._points > MOST:
            return f"more than {MOST} draws would be needed"
        took_s = needed * (self._sampler.took_s(config) + self._sampler.took_s(self._fp32))
        if took_s > self._sampler.left_s():
            return f"about {needed:.0f} draws would be needed, {took_s:.0f} s"
        return ""

    def _fine(self, found: list[_Off]) -> Compared:
        slopes = [one for one in found if one.tells == TELLS]
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
                    self._see_rounding(sample, point, seed)
                own.add(sample, point)
        halves = [own.means(point) for point in range(self._points)]
        self._halves = halves
        self._directions = [{name: (a[name] + b[name]) / 2 for name in a} for a, b in halves]
        self._signal = torch.stack([dots(a, b) for a, b in halves])
        self._formats.clear()  # which were held against fewer

    def _see_rounding(self, sample: Sample, point: int, seed: int) -> None:
        """Which tensors are nothing but rounding, as the gradient of a bias before a BatchNorm."""
        nudged = self._sampler.sample(self._fp32, point + self._points, seed)
        self._samples.append(sample)
        self._energy.append(dots(sample.tensors, sample.tensors))
        self._noise.append(norms(nudged.tensors, sample.tensors).square())

    def _of_format(self, plain: Config) -> _Drawn:
        key = plain, self._rounds
        if key not in self._formats:
            self._formats[key] = self._draw(plain)
        return self._formats[key]

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
            energy = torch.stack(self._energy).sum(0).clamp(min=1e-30)
            self._shares[plain] = (torch.stack(noise).sum(0) / energy).sqrt()
        signal = self._signal.sum(0).clamp(min=1e-30)
        return self._shares[plain].minimum((drawn.shift.clamp(min=0) / signal).sqrt())

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
        return sums.drawn(along, shift)

    def _off(self, drawn: _Drawn, pair: _Pair) -> list[_Off]:
        """Of all points' slopes; of those at the kept weights, and at the disturbed ones, as one
        of these alone shows what is stale; of the outputs' spread, and the loss."""
        than = self._of_format(pair.than)
        share = self._share(pair.format, drawn if pair.config == pair.format else than)
        half, every = self._points // 2, list(range(self._points))
        if pair.blames == "format":  # what is stale is no fault of a format
            found = self._format_slopes(drawn, than, share, every[:half])
            return found + self._spreads(drawn) + self._loss(drawn)
        found = self._slopes(drawn, than, pair.limit, share, every)
        for group in (every[:half], every[half:]):
            alone = self._slopes(drawn, than, pair.limit, share, group)
            found += [replace(one, tells=math.inf) for one in alone]
        return found + self._spreads(drawn) + self._loss(drawn)

    def _slopes(
        self, drawn: _Drawn, than: _Drawn, limit: float, share: Tensor, points: list[int]
    ) -> list[_Off]:
        """Without tensors that are nothing but rounding, or that the format takes far off."""
        signal = self._signal[points].sum(0).clamp(min=1e-30)
        apart = drawn.along - than.along
        off = apart.mean(0)[points].sum(0) / signal
        error = (apart.var(0) / len(apart))[points].sum(0).sqrt() / signal
        ours, theirs = (one.along.mean(0)[points].sum(0) / signal - 1 for one in (drawn, than))
        counts = torch.tensor([one.numel() for one in self._directions[0].values()])
        # Rounding has a part along the gradient by chance, the larger the fewer its elements.
        limits = limit + ERRORS * share * (2 / counts).sqrt()
        rounding = torch.stack(self._noise).sum(0) > torch.stack(self._energy).sum(0) / 4
        matters = self._matters(counts)
        return [
            _Off(
                name=f"the slope of {label(name, self._samples[0])}",
                tensor=name,
                off=float(off[at]),
                error=float(error[at]),
                limit=float(limits[at]),
                tells=TELLS if matters[at] else math.inf,
                beside=f" ({float(ours[at]):+.1%} from fp32, {float(theirs[at]):+.1%} without it)",
            )
            for at, name in enumerate(self._directions[0])
            if not rounding[at] and share[at] <= 0.5
        ]

    def _format_slopes(
        self, drawn: _Drawn, than: _Drawn, share: Tensor, points: list[int]
    ) -> list[_Off]:
        """Of all gradients together, and of each tensor: as far as rounded weights take them."""
        first = len(self._samples[0].outputs)
        signal = self._signal[points].sum(0).clamp(min=1e-30)
        whole = signal[first:].sum()
        lost, lost_whole = torch.zeros_like(signal), 0.0
        if self._coarse is not None:
            left = (self._coarse.along.mean(0) - than.along.mean(0))[points].sum(0)
            lost, lost_whole = (left / signal).abs(), -float(left[first:].sum() / whole)
        apart = (drawn.along - than.along)[:, points, first:].sum((1, 2)) / whole
        off = float(apart.mean())
        limit = FORMAT_SLOPE + SENSITIVE * max(0.0, lost_whole) * (off < 0)
        found = [
            _Off(
                name="the slope of all gradients",
                off=off,
                error=float((apart.var() / len(apart)).sqrt()),
                limit=limit,
                tells=TELLS,
            )
        ]
        alone = self._slopes(drawn, than, FORMAT_TENSOR, share, points)
        more = dict(zip(self._directions[0], lost.tolist(), strict=True))
        for one in alone:
            limit = one.limit + SENSITIVE * more[one.tensor]
            found.append(replace(one, tells=math.inf, limit=limit))
        return found

    def _matters(self, counts: Tensor) -> Tensor:
        """Whether a tensor's mean gradient is not much smaller, per element, than usual."""
        element = (self._signal.sum(0).clamp(min=0) / counts).sqrt()
        outputs = len(self._samples[0].outputs)
        found = element > MATTERS * element[outputs:].median()
        found[:outputs] = False
        return found

    def _spreads(self, drawn: _Drawn) -> list[_Off]:
        """By logarithms: a rare draw far from the others weighs no more than they do."""
        found = []
        for at, (name, output) in enumerate(self._samples[0].outputs.items()):
            own = torch.stack(self._own.spreads).unflatten(0, (-1, self._points))[..., at]
            # One number's variance is too unsure to tell anything.
            if output.numel() < 2 or not float(own.mean()):
                continue
            least = 1e-3 * own.mean(0)
            logs = [one.maximum(least).log() for one in (drawn.spreads[..., at], own)]
            errors = [float((one.var(0) / len(one)).sum().sqrt()) / self._points for one in logs]
            found.append(
                _Off(
                    name=f"the variance of the {name} over draws, as a logarithm,",
                    off=float(logs[0].mean() - logs[1].mean()),
                    error=math.hypot(*errors),
                    limit=math.log1p(SPREAD),
                    tells=SPREAD_TELLS,
                )
            )
        return found

    def _loss(self, drawn: _Drawn) -> list[_Off]:
        own = torch.tensor(self._own.losses, dtype=torch.float64).view(-1, self._points)
        known = (~own.isnan()).all(0)
        if not bool(known.any()):
            return []
        pair = [drawn.losses[:, known], own[:, known]]
        scale = float(pair[1].mean().abs()) or 1.0
        errors = [float((one.var(0) / len(one)).sum().sqrt()) / one.shape[1] for one in pair]
        off = float(pair[0].mean() - pair[1].mean()) / scale
        error = math.hypot(*errors) / scale
        return [_Off(name="the loss", off=off, error=error, limit=self._tolerance)]
