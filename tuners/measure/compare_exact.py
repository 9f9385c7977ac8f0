"""Compares configs of models that draw no random numbers: one sample at each point tells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from advisor.cache.config import Config
from advisor.tuners.knobs import described
from advisor.tuners.measure.place import Compared
from advisor.tuners.measure.samples import (
    COHERENT,
    ERRORS,
    FORMAT_SLOPE,
    FORMAT_TENSOR,
    NUDGE,
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

ROUNDINGS, ROUNDINGS_ALONE = 2.5, 10.0
"""Times that an error may be as large as the format's, or as rounding, where a tensor is nothing
but that. Two orders of summation of bf16 differ by up to 1.4 times, of fp32's rounding by two."""
ALWAYS = 1e-3
"""Part of a tensor that may always be off."""

T = TypeVar("T")

ALL = -1
"""In place of a tensor's number: all gradients as one vector."""


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
    """A tensor beyond its limit by this factor; of ALL the slope is `whole`."""

    factor: float
    tensor: int
    point: int
    limit: float
    whole: float = 1.0


class Exact:
    """The Way of subjects that draw no random numbers: one sample each tells."""

    def __init__(self, sampler: Sampler, fp32: Config, tolerance: float) -> None:
        self._sampler, self._fp32, self._tolerance = sampler, fp32, tolerance
        self._points: list[_Point] = []
        self._plain: dict[Config, list[_Against]] = {}
        self._rounded: list[_Against] = []

    def check_format(self, plain: Config) -> Compared:
        """See Way."""
        count = self._sampler.subject.points
        for point in range(len(self._points), count):
            self._points.append(self._reference(point))
        self._names = list(self._points[0].tensors)
        if not all(map(math.isfinite, (s for one in self._points for s in one.size))):
            return fp32_not_finite()
        held = self._plain[plain] = self._held(plain)
        if not all(one.finite for one in held):
            return not_finite("format")
        kept = held[: max(1, count // 2)]
        faults = list(self._off_format(kept, None))
        if faults:
            faults = list(self._off_format(kept, self._coarse(len(kept))))
        if worst := self._worst(iter(faults)):
            return self._wrong(worst, plain, plain, "format")
        return self._loss(held, "format") or self._fine(held)

    def _coarse(self, count: int) -> list[_Against]:
        """fp32 at weights that are rounded about as a number format does."""
        offset = 2 * self._sampler.subject.points
        if not self._rounded:
            samples = [self._sampler.sample(self._fp32, at + offset, at) for at in range(count)]
            self._rounded = [
                self._against(sample, point)
                for sample, point in zip(samples, self._points, strict=False)
            ]
        return self._rounded

    def _off_format(
        self, kept: Sequence[_Against], coarse: Sequence[_Against] | None
    ) -> Iterator[_Fault]:
        """Slopes at the kept weights that a format may not have: of all gradients together, and of
        each tensor. `coarse`: what rounded weights do to fp32's own."""
        points = self._points[: len(kept)]
        whole = statistics.fmean(map(self._whole_slope, kept, points))
        lost = 1 - statistics.fmean(map(self._whole_slope, coarse, points)) if coarse else 0.0
        least = 1 - FORMAT_SLOPE - SENSITIVE * max(0.0, lost)
        if whole > 1 + FORMAT_SLOPE or whole < least:
            factor = abs(whole - 1) / FORMAT_SLOPE
            yield _Fault(factor, ALL, 0, 1 - least if whole < 1 else FORMAT_SLOPE, whole)
        for tensor in range(len(self._names)):
            share = max(
                self._shares(one, point)[tensor] for one, point in zip(kept, points, strict=True)
            )
            if share > 0.5:
                continue
            slope = statistics.fmean(one.slopes[tensor] for one in kept)
            lost = 1 - statistics.fmean(one.slopes[tensor] for one in coarse) if coarse else 0.0
            allowed = FORMAT_TENSOR + SENSITIVE * abs(lost)
            if abs(slope - 1) > allowed:
                yield _Fault(abs(slope - 1) / allowed, tensor, 0, allowed)

    @staticmethod
    def _whole_slope(one: _Against, point: _Point) -> float:
        """The slope of all gradients as one vector."""
        first = len(point.sample.outputs)
        pairs = list(zip(one.slopes, point.size, strict=True))[first:]
        whole = math.fsum(size * size for _slope, size in pairs)
        return math.fsum(slope * size * size for slope, size in pairs) / whole if whole else 1.0

    def check_code(self, candidate: Config, plain: Config) -> Compared:
        """See Way."""
        held, than = self._held(candidate), self._plain[plain]
        if not all(one.finite for one in held):
            return not_finite("code")
        apart = [self._apart(held, than, at) for at in range(len(held))]
        if worst := self._worst(self._off(held, than)) or self._worst(self._lasting(apart)):
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
        """A config's samples, held against fp32's."""
        found = []
        for at, point in enumerate(self._points):
            own = config == self._fp32
            sample = point.sample if own else self._sampler.sample(config, at, at)
            found.append(self._against(sample, point))
        return found

    @staticmethod
    def _against(sample: Sample, point: _Point) -> _Against:
        apart = [0.0] * len(point.size)
        if sample is not point.sample:
            apart = norms(sample.tensors, point.tensors).tolist()
        along = dots(sample.tensors, point.tensors).tolist()
        slopes = [
            dot / size**2 if size else 1.0 for dot, size in zip(along, point.size, strict=True)
        ]
        return _Against(slopes=slopes, apart=apart, loss=sample.loss)

    def _shares(self, than: _Against, point: _Point) -> list[float]:
        """What the format, or rounding, does to each tensor, as parts of its size: at least the
        usual one, unless it is nothing but that."""
        pairs = zip(than.apart, point.noise, point.size, strict=True)
        shares = [max(apart, noise) / size if size else math.inf for apart, noise, size in pairs]
        usual = statistics.median(shares)
        return [max(share, min(usual, 0.5)) for share in shares]

    def _off(self, held: Sequence[_Against], than: Sequence[_Against]) -> Iterator[_Fault]:
        """Tensors whose slopes are off from others: over all points, at the kept weights or at the
        disturbed ones, as one of these alone shows what is stale."""
        every = list(range(len(held)))
        shares = [self._shares(than[at], self._points[at]) for at in every]
        for group in (every, *_halves(every)):
            for tensor, name in enumerate(self._names):
                share = max(shares[at][tensor] for at in group)
                if share > 0.5:
                    continue
                off = [held[at].slopes[tensor] - than[at].slopes[tensor] for at in group]
                # Rounding has a part along the gradient by chance, the larger the fewer elements.
                elements = self._points[0].tensors[name].numel() * len(group)
                limit = SLOPE + COHERENT * share
                allowed = limit + ERRORS * share * math.sqrt(2 / elements)
                if (mean := abs(statistics.fmean(off))) > allowed:
                    worst = max(group, key=lambda at: abs(off[group.index(at)]))
                    yield _Fault(mean / allowed, tensor, worst, allowed)

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

    def _lasting(self, faults: Sequence[dict[int, _Fault]]) -> Iterator[_Fault]:
        """Faults that all points of the kept weights have, or all of the disturbed ones."""
        for group in _halves(faults):
            for tensor in group[0]:
                if all(tensor in one for one in group):
                    yield min((one[tensor] for one in group), key=lambda one: one.factor)

    def _worst(self, faults: Iterator[_Fault]) -> _Fault | None:
        # A gradient names the parameter; what it did to the outputs does not.
        outputs = len(self._points[0].sample.outputs)
        return max(faults, key=lambda one: (one.tensor >= outputs, one.factor), default=None)

    def _wrong(self, fault: _Fault, candidate: Config, plain: Config, blames: str) -> Compared:
        """A verdict with the distances of the three from each other."""
        if fault.tensor == ALL:
            said = f"all gradients together are {fault.whole:.3f} times as large along fp32's"
            return Compared("wrong", f"{said}; {fault.limit:.0%} off allowed", blames)
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
        known = [(ours, own) for ours, own in pairs if ours is not None and own is not None]
        if not known:
            return None
        ours, own = (statistics.fmean(part) for part in zip(*known, strict=True))
        off = abs(ours - own) / (abs(own) or 1.0)
        if off <= self._tolerance:
            return None
        reason = f"its loss is {off:.2%} off fp32's, {self._tolerance:.2%} allowed"
        return Compared(outcome="wrong", reason=reason, blames=blames)

    def _fine(self, held: Sequence[_Against]) -> Compared:
        shares = {
            self._names[tensor]: apart / size
            for one, point in zip(held, self._points, strict=True)
            for tensor, (apart, size) in enumerate(zip(one.apart, point.size, strict=True))
            if point.noise[tensor] < size / 2 and size > 100 * point.floor[tensor]
        }
        worst = max(shares, key=lambda name: shares[name], default="")
        if not worst:
            return Compared(outcome="ok", reason="nothing but rounding")
        said = label(worst, self._points[0].sample)
        return Compared(outcome="ok", reason=f"at most {shares[worst]:.1%} off fp32 ({said})")


def _halves(points: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Those at the kept weights, those at the disturbed ones."""
    return points[: len(points) // 2], points[len(points) // 2 :]
