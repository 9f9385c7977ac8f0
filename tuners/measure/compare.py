"""Compares a config's training with strict fp32: every gradient, for the same weights and batches.

A config's number format alone ('plain') is compared with fp32 once. Compiled code is compared with
'plain'. A fault in one layer scales its gradient (the *slope*, the part along fp32's gradient, is
not 1), or adds errors that the format alone does not have.

Compiled code may draw other random numbers than uncompiled code. So a model with dropout is
compared by means over draws, as many as show a fault of 10% in one layer beyond the standard error.
Any other model is compared by one pass at each point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.tuners import decisions as limits
from advisor.tuners.faults import failure
from advisor.tuners.knobs import FORMATS, INPUT, KNOBS
from advisor.tuners.measure.runner import NO_TIME, UNVERIFIED, Compared
from advisor.tuners.measure.samples import TINY, Draws, NoTime, Reference, RepeatableStep, Unsuited


def plain_of(candidate: Config, fp32: Config) -> Config:
    """Strict fp32 with a config's number format and nothing else of it."""
    return fp32.replace(**candidate.only(*FORMATS))


def passes(config: Config) -> Config:
    """The part of a config that decides the results of a forward and backward pass."""
    computing = (
        knob.name
        for knob in KNOBS
        if knob.stage != INPUT
        and any((knob.model, knob.blocks, knob.layers, knob.autocast, knob.flag, knob.captured))
    )
    return config.only(*computing)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """How far one quantity is off."""

    name: str
    off: float
    limit: float  # how far it may be off, plus `unsure`
    error: float = 0.0  # standard error of `off`
    fault: float = math.inf  # the smallest fault that `error` must not hide; inf: no limit on it
    beside: str = ""  # more figures, as text

    @property
    def unsure(self) -> float:
        return limits.STANDARD_ERRORS * self.error

    @property
    def doubt(self) -> float:  # above 1 a fault would not stand out yet
        return self.unsure / (self.fault * (1 - limits.ALLOWED))

    @property
    def part(self) -> float:  # `off` as part of the allowed one; above 1 it is wrong
        return abs(self.off) / max(self.limit + self.unsure, TINY)

    def __str__(self) -> str:
        give = f" ± {self.unsure:.1%}" if self.error else ""
        allowed = f"at most {self.limit:.1%}{' more' if give else ''} is allowed"
        return f"{self.name} is {self.off:+z.1%}{give} off{self.beside}; {allowed}"


class References:
    """Compares configs with samples of strict fp32 and of number formats, which are made once.
    `summed`: see Reference."""

    def __init__(
        self,
        subject: RepeatableStep,
        fp32: Config,
        *,
        tolerance: float,
        summed: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._subject, self._tolerance = subject, tolerance  # relative, of the loss
        self._reference = Reference(subject, fp32, summed)
        self._formats: dict[Config, Compared] = {}
        self._coarse: Draws | None = None

    def compare(self, candidate: Config, *, left_s: Callable[[], float]) -> Compared:
        """Compare a config with strict fp32 while `left_s` gives time."""
        self._reference.left_s = left_s
        try:
            return self._compare(candidate, plain_of(candidate, self._reference.fp32))
        except Unsuited as exc:
            return Compared("wrong", str(exc) or "fp16 overflows", "format")
        except NoTime:
            return Compared(UNVERIFIED, NO_TIME)
        except Exception as exc:  # whatever a config raises
            exc.__traceback__ = None  # its frames hold tensors
            return Compared(*failure(exc))

    def _compare(self, candidate: Config, plain: Config) -> Compared:
        if plain not in self._formats:
            self._formats[plain] = self._check(plain, plain)
        found = self._formats[plain]
        if found.ok and passes(candidate) != passes(plain):
            found = self._check(candidate, plain)
        if not found.ok:
            return found
        part, name = self._subject.optimizer_error(candidate)
        if part <= limits.UPDATE_OFF:
            return found
        reason = f"its optimizer's update of {name} is {part:.2%} off from the script's own"
        return Compared("wrong", reason, "optimizer")

    def _check(self, config: Config, plain: Config) -> Compared:
        """Draw until there is a verdict: on the format if `config` is `plain`, else on code."""
        blames, suspects = "format" if config == plain else "code", set[str]()
        reference, began = self._reference, self._reference.rounds
        while True:
            reference.extend()
            if not bool(reference.signal.isfinite().all()):
                return Compared(UNVERIFIED, "strict fp32 is not finite either")
            if config == reference.fp32:
                return Compared("ok", "strict fp32")
            drawn = reference.of(config) if config == plain else reference.draw(config)
            if not bool(drawn.projections.isfinite().all() and drawn.variances.isfinite().all()):
                return Compared("wrong", "an output or a gradient is not finite", blames)
            found = self._figures(drawn, config, plain)
            beyond = [one for one in found if not one.part <= 1]
            if beyond and not reference.draws and config != plain:
                beyond = self._lasting(beyond, config, plain)
                found = [one for one in found if one.part <= 1 or one in beyond]
            if beyond and config == plain and self._coarse is None:
                # Rounding the weights may change fp32's own gradient as much.
                self._coarse = reference.draw(reference.fp32, 2 * limits.POINTS)
                continue
            # New draws must show the same fault.
            if sure := [o for o in beyond if o.name in suspects or not reference.draws]:
                reference.rounds = began
                return Compared("wrong", self._said(max(sure, key=lambda one: one.part)), blames)
            unsure = max(found, key=lambda one: one.doubt)
            if not beyond and unsure.doubt <= 1:
                clear = [one for one in found if one.unsure <= one.limit] or found
                return Compared("ok", self._said(max(clear, key=lambda one: one.part)))
            more = 2.0 if beyond else max(2.0, unsure.doubt**2)
            if why := self._no_more(config, more):
                return Compared(UNVERIFIED, f"{self._said((beyond or [unsure])[0])}; {why}")
            suspects = {one.name for one in beyond}
            # All are drawn anew, so make as many as are needed, rounded down to a power of 2.
            more = 2 ** int(math.log2(more))
            reference.rounds = min(reference.rounds * more, limits.MOST_DRAWS // limits.POINTS)

    def _lasting(self, beyond: list[_Figure], config: Config, plain: Config) -> list[_Figure]:
        """The figures that are off to the same side with weights that are rounded otherwise: the
        effect of a fault stays, and that of rounding in a deep network changes."""
        ours, than = (self._reference.draw(one, 2 * limits.POINTS) for one in (config, plain))
        again = self._figures(ours, config, plain, than)
        sides = {(one.name, one.off < 0) for one in again if not one.part <= 1}
        return [one for one in beyond if (one.name, one.off < 0) in sides]

    def _said(self, one: _Figure) -> str:
        draws = self._reference.rounds * limits.POINTS
        return f"{one} ({draws} draws of random numbers)" if self._reference.draws else str(one)

    def _no_more(self, config: Config, times: float) -> str:
        """Why `times` as many draws, which a verdict needs, cannot be made; '' if they can."""
        reference, now = self._reference, self._reference.rounds * limits.POINTS
        needed = times * now
        # The estimate is rough: hence twice.
        if needed > 2 * limits.MOST_DRAWS or 2 * now > limits.MOST_DRAWS:
            return f"more than {limits.MOST_DRAWS} draws would be needed"
        needed_s = needed * (reference.took_s[config] + reference.took_s[reference.fp32])
        if reference.is_late(needed_s):
            return f"about {needed:.0f} draws would be needed, {needed_s:.0f} s"
        return ""

    def _figures(
        self, drawn: Draws, config: Config, plain: Config, than: Draws | None = None
    ) -> list[_Figure]:
        """The figures of a config; `than`: passes of `plain` if not those at the usual points."""
        every, half = slice(None), limits.POINTS // 2
        kept, disturbed = slice(half), slice(half, None)
        draws, share = self._reference.draws, self._reference.share(plain)
        if config == plain:  # a number format makes no value stale
            found = self._of_format(drawn, share, kept)
        else:
            found, than = [], than or self._reference.of(plain)
            # Also at the kept and at the disturbed points alone, where a stale value shows.
            for points in (every, kept, disturbed):
                most = share[points].amax(0)
                allowed = torch.full_like(most, limits.ALLOWED * limits.FAULT)
                if not draws:  # rounding may lie along the gradient by itself
                    allowed += most
                allowed[most > limits.LOST] = math.inf
                fault = limits.FAULT if points == every else math.inf
                found += self._slopes(drawn, than, allowed, share, points, fault)
                if not draws and points != every:
                    found += self._distances(drawn, share, points)
        return found + self._spreads(drawn) + self._loss(drawn)

    def _of_format(self, drawn: Draws, share: Tensor, points: slice) -> list[_Figure]:
        """Slopes of all gradients together, and of each tensor."""
        reference, gradients = self._reference, slice(self._reference.outputs, None)
        than, signal = reference.of(reference.fp32), reference.signal[points].sum(0).clamp(min=TINY)
        lost = torch.zeros_like(signal)
        if self._coarse is not None:
            lost = (than.projections.mean(0) - self._coarse.projections.mean(0))[points].sum(0)
        whole = signal[gradients].sum()
        moved = (drawn.projections - than.projections)[:, points, gradients] / whole
        off, error = map(float, _mean(moved.sum(2)))
        rounded = abs(float(lost[gradients].sum() / whole))
        limit = limits.FAULT / 2 + limits.ROUNDINGS * rounded
        name = "the slope of all gradients"
        most = reference.outputs + int(moved.mean(0).sum(0).abs().argmax())
        beside = f", most of it in {reference.label(most)}" if abs(off) > limit else ""
        figure = _Figure(
            name=name, off=off, error=error, limit=limit, fault=limits.FAULT, beside=beside
        )
        allowed = limits.LOST + limits.ROUNDINGS * (lost / signal).abs()
        allowed[reference.rounding[points].amax(0) > limits.LOST] = math.inf
        return [figure, *self._slopes(drawn, than, allowed, share, points)]

    def _slopes(
        self,
        drawn: Draws,
        than: Draws,
        allowed: Tensor,
        share: Tensor,
        points: slice,
        fault: float = math.inf,
    ) -> list[_Figure]:
        """Slopes of tensors with a limit whose mean stands out of single draws, and is not lost in
        `than`. `fault` is not for the smallest tensors, which are 1% of the gradient together."""
        reference = self._reference
        signal, single = reference.signal[points].sum(0), reference.size[points].square().sum(0)
        stands_out, signal = signal > limits.NEGLIGIBLE * single, signal.clamp(min=TINY)
        off, error = _mean((drawn.projections - than.projections)[:, points] / signal)
        theirs, unsure = _mean(than.projections[:, points] / signal)
        theirs -= 1
        ours = theirs + off
        # Code may come nearer to fp32, by as much as the format alone is surely off.
        sure = (theirs.abs() - limits.STANDARD_ERRORS * math.sqrt(2) * unsure).clamp(min=0)
        back = -theirs.sign() * sure
        off -= off.clamp(back.clamp(max=0), back.clamp(min=0))
        # By chance, rounding has a part along the gradient: larger for tensors of few elements.
        elements = reference.counts[points].sum(0)
        limit = allowed + limits.STANDARD_ERRORS * share[points].amax(0) * (2 / elements).sqrt()
        known = limit.isfinite() & stands_out & (theirs.abs() <= limits.LOST)
        least = reference.signal.sum(0)[reference.outputs :].clamp(min=0).sort()
        some = least.values.cumsum(0) > limits.NEGLIGIBLE * least.values.sum()
        matters = torch.zeros_like(known)
        matters[reference.outputs + least.indices] = some
        return [
            _Figure(
                name=f"the slope of {reference.label(at)}",
                off=float(off[at]),
                error=float(error[at]),
                limit=float(limit[at]),
                fault=fault if matters[at] else math.inf,
                beside=f" ({ours[at]:+z.1%} from fp32, {theirs[at]:+z.1%} by its format alone)",
            )
            for at in known.nonzero().flatten().tolist()
        ]

    def _distances(self, drawn: Draws, share: Tensor, points: slice) -> list[_Figure]:
        """Distances of tensors from fp32's, each at its best point: a fault shows at all points."""
        distances, share = torch.stack(drawn.distances)[points], share[points]
        lost, usual = share > limits.LOST, self._reference.usual[points]
        # If fp32 itself is nothing but rounding errors, other code may make other ones.
        alone = limits.STANDARD_ERRORS * limits.ROUNDINGS * share
        alone = alone.maximum(limits.NEGLIGIBLE * usual)
        allowed = (limits.ROUNDINGS * share + limits.NEGLIGIBLE).where(~lost, alone)
        least, unit = (distances / allowed).argmin(0), usual.where(lost, 1.0)
        return [
            _Figure(
                name=self._reference.label(at),
                off=float(distances[point, at] / unit[point, at]),
                limit=float(allowed[point, at] / unit[point, at]),
                beside=", as part of a usual gradient"
                if lost[point, at]
                else f" fp32, {float(share[point, at]):.2%} in its number format alone",
            )
            for at, point in enumerate(least.tolist())
        ]

    def _spreads(self, drawn: Draws) -> list[_Figure]:
        """Variances over draws, as logarithms: an outlier weighs no more than other draws."""
        reference, found = self._reference, []
        for at in range(reference.outputs if reference.draws else 0):
            own = reference.own.variances[..., at]
            # The variance of a single number is too uncertain.
            if reference.single[at] or not float(own.mean()):
                continue
            least = 1e-3 * own.mean(0)
            logs = (one.maximum(least).log2() for one in (drawn.variances[..., at], own))
            off, error = _difference(*logs)
            name = f"log2 of the variance of {reference.label(at)} over draws"
            found.append(_Figure(name=name, off=off, error=error, limit=limits.ALLOWED, fault=1.0))
        return found

    def _loss(self, drawn: Draws) -> list[_Figure]:
        own = self._reference.own.losses
        known = (~own.isnan()).all(0)
        if not bool(known.any()):
            return []
        scale = float(own[:, known].mean().abs()) or 1.0
        off, error = _difference(drawn.losses[:, known] / scale, own[:, known] / scale)
        return [_Figure(name="the loss", off=off, error=error, limit=self._tolerance)]


def _mean(samples: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over rounds of the sum over points, and its standard error (0 for one round)."""
    rounds = len(samples)
    error = (samples.var(0, correction=min(1, rounds - 1)) / rounds).sum(0).sqrt()
    return samples.mean(0).sum(0), error


def _difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The difference of the means of two (round, point) samples, and its standard error."""
    (own, error), (other, beside) = (_mean(one / one.shape[1]) for one in (ours, theirs))
    return float(own - other), math.hypot(error, beside)
