"""What one call of tune is to do, and who watches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from advisor.cache.key import Key
from advisor.cache.record import Trial
from advisor.tuners.length import Length

if TYPE_CHECKING:
    from advisor.tuners.measure.worker.wire import Facts
    from advisor.tuners.search.space import Space


class Progress:
    """What `tune` reports while it works; every method may be overridden."""

    def started(self, facts: Facts, key: Key, space: Space, resumed: int) -> None:
        """The workload runs; the search begins."""

    def tried(self, trial: Trial, spent_s: float) -> None:
        """A trial is over."""

    def phase(self, what: str) -> None:
        """Another part of the work begins."""

    def notice(self, text: str) -> None:
        """Something the user should know."""

    def warning(self, text: str) -> None:
        """Something that is not as it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how much is measured, for which job."""

    effort: str
    length: Length | None
    """Of the job; None for the steady state."""
    process_s: float
    """What starting a worker took."""
    memory: int
    """Bytes that a config may take; 0 where that is not known."""
    budget_s: float
    trials: int | None
    seed: int
    force: bool
    host_cpu: str
    vocab: int
    tolerance: float | None
    """Of the comparison with fp32; None for none."""
