"""Compares how a config trains with strict fp32: the same weights and batches, every gradient.

A config's number format alone ('plain') is compared with fp32 once; code that is compiled or
captured is compared with that format. A fault in one layer scales its gradient (the *slope*, the
part along fp32's gradient, is not 1), or adds errors that the format by itself does not have. If a
model draws random numbers, as dropout does, only means over many draws tell: `compare_draws`.
"""

from __future__ import annotations

from collections.abc import Callable

from advisor.cache.config import Config
from advisor.tuners.act.pilot.orders import told
from advisor.tuners.decisions import UPDATE_OFF
from advisor.tuners.knobs import FORMATS, INPUT, KNOBS
from advisor.tuners.measure.compare_draws import Draws
from advisor.tuners.measure.compare_exact import Exact
from advisor.tuners.measure.place import UNVERIFIED, Compared
from advisor.tuners.measure.samples import NoTime, Overflow, Sampler, Subject, wrong


def plain_of(candidate: Config, fp32: Config) -> Config:
    """Strict fp32 with a config's number format and nothing else of it."""
    return fp32.replace(**candidate.only(*FORMATS))


def passes(config: Config) -> Config:
    """The part of a config that decides what a forward and backward pass computes."""
    computing = (
        knob.name
        for knob in KNOBS
        if knob.stage != INPUT
        and (knob.model or knob.layers or knob.autocast or knob.flag or knob.captured)
    )
    return config.only(*computing)


class References:
    """Samples of strict fp32 and of plain number formats, made once for several configs. The loss
    may always be off by the tolerance, as part of it."""

    def __init__(self, subject: Subject, fp32: Config, *, tolerance: float) -> None:
        self._subject, self._fp32, self._tolerance = subject, fp32, tolerance
        self._sampler = Sampler(subject)
        self._way: Exact | Draws | None = None
        self._formats: dict[Config, Compared] = {}

    def compare(self, candidate: Config, plain: Config, *, left_s: Callable[[], float]) -> Compared:
        """Compare a config with strict fp32 while seconds are left; `plain` as by `plain_of`."""
        self._sampler.left_s = left_s
        try:
            return self._compare(candidate, plain)
        except Overflow as exc:
            return wrong(str(exc) or "fp16 overflows", "format")
        except NoTime:
            return Compared(outcome=UNVERIFIED, reason="no time was left to compare it with fp32")
        except Exception as exc:  # whatever a config raises
            exc.__traceback__ = None  # its frames hold what was computed
            outcome, reason = told(exc)
            return Compared(outcome=outcome, reason=reason)

    def _compare(self, candidate: Config, plain: Config) -> Compared:
        if self._way is None:
            kind = Draws if self._subject.draws else Exact
            self._way = kind(self._sampler, self._fp32, self._tolerance)
        if plain not in self._formats:
            self._formats[plain] = self._way.check_format(plain)
        found = self._formats[plain]
        if found.ok and passes(candidate) != passes(plain):
            found = self._way.check_code(candidate, plain)
        if not found.ok:
            return found
        part, name = self._subject.optimizer_error(candidate)
        if part <= UPDATE_OFF:
            return found
        reason = f"its optimizer changes {name} by {part:.2%} otherwise than the script's own"
        return wrong(reason, "optimizer")
