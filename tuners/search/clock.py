"""The time of one tuning: a single budget, without shares."""

from __future__ import annotations

import time
from collections.abc import Callable

from advisor.tuners.decisions import SLACK


class Clock:
    """Counts down one budget.

    Args:
        budget_s: wall seconds of all measuring.
        reserve_s: of these, what is kept for later until `release`.
        now: wall clock in seconds.
    """

    def __init__(
        self,
        budget_s: float,
        *,
        reserve_s: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget_s, self._reserve_s = budget_s, reserve_s
        self.now = now
        self._began = now()

    @property
    def spent_s(self) -> float:
        """Seconds of the budget that are gone."""
        return self.now() - self._began

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left; 0 where it is overrun."""
        return max(0.0, self.budget_s - self._reserve_s - self.spent_s)

    def release(self) -> None:
        """What was kept may be spent."""
        self._reserve_s = 0.0

    @property
    def deadline_s(self) -> float:
        """Seconds after which what runs now is given up: what is left, and some slack."""
        left_s = self.budget_s - self._reserve_s - self.spent_s
        return max(0.1, left_s + SLACK * self.budget_s)
