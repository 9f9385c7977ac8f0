"""Compares how a config trains with strict fp32: the same weights and batches, every gradient.

Two parts of a config can be wrong. Its number format, without the rest of it ('plain'), is held
against fp32 once. What compiles or captures it is held against that format: a fault in one layer
scales that layer's gradient (its *slope*, the part along fp32's gradient, is not 1), or adds errors
that the format by itself does not have. Of models that draw random numbers, as dropout does, only
means over many draws are alike: `compare_draws`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from advisor.cache.config import Config
from advisor.tuners.act.pilot.orders import told
from advisor.tuners.knobs import FORMATS, INPUT, KNOBS
from advisor.tuners.measure.compare_draws import Draws
from advisor.tuners.measure.compare_exact import Exact
from advisor.tuners.measure.place import UNVERIFIED, Compared
from advisor.tuners.measure.samples import (
    Named,
    NoTime,
    Overflow,
    Sample,
    Sampler,
    Subject,
    move,
    sampled,
)

__all__ = [
    "Named",
    "Overflow",
    "References",
    "Sample",
    "Subject",
    "move",
    "passes",
    "plain_of",
    "sampled",
]

OPTIMIZER = 1e-4
"""Part of an update that an optimizer may make of its own: fused kernels round otherwise. AdamW's
weight decay is five times that at a weight of 0.05, lr 1e-4."""


def plain_of(candidate: Config, fp32: Config) -> Config:
    """Strict fp32 with a config's number format and nothing else of it."""
    return fp32.replace(**candidate.only(*FORMATS))


def passes(config: Config) -> Config:
    """What of a config decides what a forward and backward pass computes."""
    return config.only(
        *(
            knob.name
            for knob in KNOBS
            if knob.stage != INPUT
            and (knob.model or knob.layers or knob.autocast or knob.flag or knob.captured)
        )
    )


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
        if part <= OPTIMIZER:
            return found
        reason = f"its optimizer changes {name} by {part:.2%} otherwise than the script's own"
        return Compared(outcome="wrong", reason=reason, blames="optimizer")
