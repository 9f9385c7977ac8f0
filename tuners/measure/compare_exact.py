"""Compares configs of models that draw no random numbers: one sample at each point tells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.tuners import decisions as limits
from advisor.tuners.knobs import described
from advisor.tuners.measure.place import Compared
from advisor.tuners.measure.samples import FP32_NOT_FINITE, NOT_FINITE, Sampler, wrong


@dataclass(frozen=True, slots=True)
class _Against:
    """A config's samples against fp32's, by (point, tensor): slopes and L2 distances."""

    slopes: Tensor
    apart: Tensor
    losses: list[float | None]


_Fault = tuple[float, int, int, float]  # by what factor a tensor is beyond its limit, at a point


class Exact:
    """Compares one sample for each point."""

    def __init__(self, sampler: Sampler, fp32: Config, tolerance: float) -> None:
        self._sampler, self._fp32, self._tolerance = sampler, fp32, tolerance
        self._half = sampler.subject.points // 2  # so many have the kept weights
        self._groups = slice(self._half), slice(self._half, None)
        # Of fp32, by point; of its tensors there the size, what rounding alone does to them, and
        # what counts as nothing.
        self._samples: list[tuple[Tensor, float | None]] = []
        self._rounding: list[tuple[Tensor, Tensor, Tensor]] = []
        self._plain: dict[Config, _Against] = {}
        self._coarse: _Against | None = None

    def check_format(self, plain: Config) -> Compared:
        """Whether a number format trains as strict fp32 does."""
        for point in range(len(self._rounding), self._sampler.subject.points):
            self._add_reference(point)
        self._size, self._noise, self._floor = map(torch.stack, zip(*self._rounding, strict=True))
        if not bool(self._size.isfinite().all()):
            return FP32_NOT_FINITE
        held = self._plain[plain] = self._held(plain)
        if not bool(held.apart.isfinite().all()):
            return wrong(NOT_FINITE, "format")
        slope, limit = self._whole_slope(held), limits.FORMAT_SLOPE
        if slope < 1 - limit:
            if self._coarse is None:
                offset = 2 * self._sampler.subject.points
                self._coarse = self._held(self._fp32, offset, self._half)
            # Rounded weights may take as much from fp32's own gradient.
            limit += limits.SENSITIVE * max(0.0, 1 - self._whole_slope(self._coarse))
        if abs(slope - 1) > limit:
            said = f"all gradients together are {slope:.3f} times as large along fp32's"
            return wrong(f"{said}; {limit:.0%} off allowed", "format")
        return self._loss(held, "format") or self._fine(held)

    def check_code(self, candidate: Config, plain: Config) -> Compared:
        """Whether a config trains as its number format by itself does."""
        held, than = self._held(candidate), self._plain[plain]
        if not bool(held.apart.isfinite().all()):
            return wrong(NOT_FINITE, "code")
        shares = self._shares(than)
        if faults := self._off(held, than, shares) or self._apart(held, than, shares):
            return self._wrong(faults, candidate, plain)
        return self._loss(held, "code") or self._fine(held)

    def _add_reference(self, point: int) -> None:
        sampler = self._sampler
        vector, loss = sampler.sample(self._fp32, point, point)
        nudged, _ = sampler.sample(self._fp32, point + sampler.subject.points, point)
        self._counts = torch.tensor(sampler.sizes)
        size = sampler.norms(vector)
        usual = float(size.norm()) / math.sqrt(len(vector))
        floor = limits.NUDGE * usual * self._counts.double().sqrt()
        self._samples.append((vector, loss))
        self._rounding.append((size, sampler.norms(nudged - vector), floor))

    def _held(self, config: Config, offset: int = 0, points: int | None = None) -> _Against:
        """Samples of a config at the first points, against fp32's."""
        slopes, apart, losses = [], [], []
        for point, fp32 in enumerate(self._samples[:points]):
            own = config == self._fp32 and not offset
            vector, loss = fp32 if own else self._sampler.sample(config, point + offset, point)
            size = self._size[point]
            slope = self._sampler.dots(vector, fp32[0]) / size.square()
            slopes.append(slope.where(size > 0, 1.0))
            apart.append(self._sampler.norms(vector - fp32[0]))
            losses.append(loss)
        return _Against(torch.stack(slopes), torch.stack(apart), losses)

    def _shares(self, than: _Against) -> Tensor:
        """The format's or rounding's error in each tensor as a share of it, at each point: at least
        the usual share, except in tensors that are nothing but rounding."""
        shares = than.apart.fmax(self._noise) / self._size
        shares = shares.where(self._size > 0, math.inf)
        usual = torch.tensor([[min(statistics.median(row), 0.5)] for row in shares.tolist()])
        return shares.maximum(usual)

    def _whole_slope(self, held: _Against) -> float:
        """The slope of all gradients as one vector, in the mean over the kept weights' points."""
        half, first = self._half, self._sampler.outputs
        energy = self._size[:half, first:].square()
        slope = (held.slopes[:half, first:] * energy).sum(1) / energy.sum(1)
        return float(slope.where(energy.sum(1) > 0, 1.0).mean())

    def _off(self, held: _Against, than: _Against, shares: Tensor) -> list[_Fault]:
        """Tensors whose slopes differ from the format's: over all points, at the kept weights or at
        the disturbed ones, since a stale value shows at one of these alone."""
        faults = []
        for group in (slice(None), *self._groups):
            off, share = (held.slopes - than.slopes)[group], shares[group].amax(0)
            # Rounding has a part along the gradient by chance, the larger the fewer elements.
            chance = limits.STANDARD_ERRORS * share * (2 / (self._counts * len(off))).sqrt()
            allowed = limits.CODE_SLOPE + limits.COHERENT * share + chance
            mean = off.mean(0).abs()
            for at in ((share <= 0.5) & (mean > allowed)).nonzero().flatten().tolist():
                point = (group.start or 0) + int(off[:, at].abs().argmax())
                factor = float(mean[at] / allowed[at])
                faults.append((factor, at, point, float(allowed[at])))
        return faults

    def _apart(self, held: _Against, than: _Against, shares: Tensor) -> list[_Fault]:
        """Tensors farther from fp32's than the format takes them, at all points of the kept weights
        or at all of the disturbed ones."""
        alone = than.apart.fmax(self._noise).fmax(self._floor)
        allowed = (limits.ROUNDINGS * shares + limits.ALWAYS_OFF) * self._size
        allowed = allowed.where(shares <= 0.5, limits.ROUNDINGS_ALONE * alone)
        beyond, factors = held.apart > allowed, held.apart / allowed
        faults = []
        for group in self._groups:
            for at in beyond[group].all(0).nonzero().flatten().tolist():
                point = (group.start or 0) + int(factors[group, at].argmin())
                size = float(self._size[point, at])
                limit = float(allowed[point, at]) / size if size else 0.0
                faults.append((float(factors[point, at]), at, point, limit))
        return faults

    def _wrong(self, faults: Sequence[_Fault], candidate: Config, plain: Config) -> Compared:
        """The verdict on the worst fault, with the distances of the three from each other."""
        # A gradient names the parameter; what it did to the outputs does not.
        sampler = self._sampler
        _, tensor, point, limit = max(faults, key=lambda one: (one[1] >= sampler.outputs, one[0]))
        name, size = sampler.names[tensor], float(self._size[point, tensor]) or 1.0
        fp32 = self._samples[point][0].split(sampler.sizes)[tensor]
        theirs, ours = (
            sampler.subject.sample(one, point, point).tensors[name] for one in (plain, candidate)
        )
        pairs = ((ours, fp32), (theirs, fp32), (ours, theirs))
        of_fp32, alone, between = (float((a - b).norm()) / size for a, b in pairs)
        format_ = described(plain.changed(self._fp32), nothing="fp32")
        slope = float(torch.dot(ours, fp32)) / size**2
        reason = (
            f"{sampler.label(tensor)} is {of_fp32:.2%} off fp32, {format_} alone {alone:.2%}, "
            f"{between:.2%} between these two; {slope:.3f} times as large along it; "
            f"{limit:.2%} allowed"
        )
        return wrong(reason, "code")

    def _loss(self, held: _Against, blames: str) -> Compared | None:
        pairs = zip(held.losses, (loss for _, loss in self._samples), strict=True)
        known = [(ours, own) for ours, own in pairs if ours is not None and own is not None]
        if not known:
            return None
        ours, own = (statistics.fmean(part) for part in zip(*known, strict=True))
        off = abs(ours - own) / (abs(own) or 1.0)
        if off <= self._tolerance:
            return None
        return wrong(f"its loss is {off:.2%} off fp32's, {self._tolerance:.2%} allowed", blames)

    def _fine(self, held: _Against) -> Compared:
        known = (self._noise < self._size / 2) & (self._size > 100 * self._floor)
        shares = (held.apart / self._size).where(known, -1.0).amax(0)
        worst = int(shares.argmax())
        if shares[worst] < 0:
            return Compared(outcome="ok", reason="nothing but rounding")
        off, name = float(shares[worst]), self._sampler.label(worst)
        return Compared(outcome="ok", reason=f"at most {off:.1%} off fp32 ({name})")
