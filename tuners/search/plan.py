"""The plan of a tuning: its options, its clock, and its reports of progress."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from advisor.cache import kinds
from advisor.cache.config import Config
from advisor.cache.record import EFFORTS
from advisor.cache.task import checked, row
from advisor.errors import UsageError
from advisor.tuners.decisions import SLACK
from advisor.tuners.length import Length

if TYPE_CHECKING:
    from advisor.tuners.search.journal import JournaledTrial

MIN_BUDGET_S = 3.0  # smaller budgets are refused: a race of two configs takes two seconds
MAX_BUDGET_S = 30 * 86400.0
CHECK, EXPLAIN, VERIFY = "1m", "1m", "30s"  # budgets of these commands


class Price(kinds.Kind[float]):
    metavar = "MONEY/h"
    expected = "money per hour, as 2.5/h"

    def parse(self, value: object) -> float:
        return float(re.findall(r"\A(\d{1,9}(?:\.\d{1,9})?)(?:/h)?\Z", str(value))[0])


class Effort(NamedTuple):
    budget_s: float
    quick: bool = False  # of torch.compile only what takes seconds
    full: bool = False  # also what takes minutes (max-autotune)


_EFFORTS = {
    "quick": Effort(60.0, quick=True),
    "normal": Effort(300.0),
    "exhaustive": Effort(3600.0, full=True),
}


def suffices(found: str, wanted: str) -> bool:
    """Whether the effort `found` is at least the effort `wanted`; False for an unknown effort."""
    return found in EFFORTS and EFFORTS.index(found) >= EFFORTS.index(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much one call of tune measures, and for which job. Made by `Plan.of`, which checks."""

    effort: str = row(
        kinds.SingleChoice(EFFORTS),
        "quick: a minute, compiling only what takes seconds; normal: five minutes; exhaustive: an "
        "hour, also what takes minutes to compile.",
        "normal",
    )
    budget_s: float | None = row(
        kinds.Duration(),
        "Wall time of all measuring, kept within 10%, from the first steps on; a look at several "
        "ranks and saving compiled code come after it. Default: 1m, 5m or 1h by effort.",
        None,
        keyword="budget",
        printed=False,
    )
    trials: int | None = row(kinds.Whole(), "Most configs to try.", None, printed=False)
    steps: int | None = row(
        kinds.Whole(),
        "Length of the job that the advice is for, in steps at your batch; default: no end.",
        None,
    )
    duration_s: float | None = row(
        kinds.Duration(), "Length of the job as a time, not in steps.", None, keyword="duration"
    )
    seed: int = row(kinds.Whole(0), "Seed of all randomness.", 0, printed=False)
    force: bool = row(
        kinds.Switch(),
        "Measure again although there is a record.",
        False,
        option="",
        switches={"--force": True},
        printed=False,
    )
    price: float | None = row(Price(), "What the machine costs, as 2.5/h.", None, printed=False)

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Plan:
        """A plan from keyword arguments; None means the default. Raises UsageError if a value is
        outside its domain, or two do not go together."""
        plan = cls(**checked(cls, given))
        if plan.steps is not None and plan.duration_s is not None:
            raise UsageError(
                f"steps {plan.steps} and duration {plan.duration_s:g}s: a job has one length; "
                "give one of them"
            )
        if not MIN_BUDGET_S <= plan.seconds <= MAX_BUDGET_S:
            raise UsageError(
                f"budget {plan.seconds:g}s: expected from {MIN_BUDGET_S:g}s, the shortest race, "
                "to 30 days; 30s or more is sensible"
            )
        return plan

    @property
    def much(self) -> Effort:
        return _EFFORTS[self.effort]

    @property
    def seconds(self) -> float:
        return self.much.budget_s if self.budget_s is None else self.budget_s

    def length(self, batch: int) -> Length | None:
        if self.steps is None and self.duration_s is None:
            return None
        return Length(batch=batch, steps=self.steps or 0, seconds=self.duration_s or 0.0)


class Clock:
    """Counts down a budget: wall seconds of all measuring, of which `reserve_s` are kept back until
    `release`. `now` is a wall clock in seconds."""

    def __init__(
        self, budget_s: float, *, reserve_s: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget_s, self._reserve_s = budget_s, reserve_s
        self.now = now
        self._began = now()

    @property
    def spent_s(self) -> float:
        return self.now() - self._began

    @property
    def left_s(self) -> float:
        return max(0.0, self.budget_s - self._reserve_s - self.spent_s)

    @property
    def larger(self) -> str:
        """What to do if the budget was too small."""
        return f"give a larger --budget, such as {2 * self.budget_s:g}s"

    def release(self) -> None:
        """Let the reserve be spent."""
        self._reserve_s = 0.0

    @property
    def deadline_s(self) -> float:
        """Seconds until a visit is given up: the time left, plus SLACK of the budget."""
        left_s = self.budget_s - self._reserve_s - self.spent_s
        return max(0.1, left_s + SLACK * self.budget_s)


class Progress:
    """Receives reports while `tune` works; every method may be overridden."""

    def visited(self, done: JournaledTrial, what: str, best: Config, left_s: float) -> None:
        """A config was measured; `what` describes it. `best` is the fastest config so far that
        trains like fp32."""

    def phase(self, what: str) -> None:
        """The next part of the work begins."""

    def notice(self, text: str) -> None:
        """Something the user should know."""

    def warning(self, text: str) -> None:
        """Something is not as the user asked."""
