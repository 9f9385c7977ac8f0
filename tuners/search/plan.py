"""How much is measured: the options of one tuning, and how its time is divided."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from advisor.cache import kinds
from advisor.cache.config import Config
from advisor.cache.key import Key
from advisor.cache.record import EFFORTS, Trial
from advisor.cache.task import checked, row
from advisor.errors import UsageError
from advisor.tuners.length import Length

if TYPE_CHECKING:
    from advisor.tuners.measure.worker.wire import Facts
    from advisor.tuners.search.space import Space

LEAST_S = 3.0
"""A smaller budget is refused: the turns of a race between two configs alone take two seconds."""
MOST_S = 30 * 86400.0

EXPLAIN, VERIFY = "1m", "30s"
"""Budgets of explain and verify, all measuring counted."""

SEARCH = 0.55
"""Share of the budget until which configs are tried; the parts after it share what is left."""
RACE = 0.6
"""Of what the search left: the finalists, in turn."""
RESERVE = 0.15
"""Of the same: for a race that cannot tell yet."""
STARTS = 0.4
"""Of what the race left, where the length of the job decides: first steps."""
NUMERICS = 0.75
"""Of what these left: what was chosen, against strict fp32."""
COMPARED = (1 - SEARCH) * (1 - RACE / 2)
"""Of the budget, what a race leaves for a comparison that is known to take it."""
LARGER = 1.5
"""Times a budget that was not enough, that is advised instead of it."""
LOADER = 0.25
"""Of the whole budget, where there is data: its loader, once all else is chosen."""

TRIAL_S = (0.3, 2.0)
"""Timed seconds of one trial, least and most."""
SLACK_S, SLACK = 5.0, 0.1
"""A budget is kept within so many seconds, or this share of it, whichever is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """`budget_s`: wall seconds of measuring; `quick`: of torch.compile only what takes seconds;
    `full`: also what is known to be bad (cuDNN off) or takes minutes (max-autotune)."""

    budget_s: float
    quick: bool = False
    full: bool = False


_EFFORTS = dict(
    zip(
        EFFORTS,
        (
            Effort(budget_s=60.0, quick=True),
            Effort(budget_s=300.0),
            Effort(budget_s=3600.0, full=True),
        ),
        strict=True,
    )
)


def suffices(found: str, wanted: str) -> bool:
    """Whether one effort is at least another; one of a name not known here is not."""
    return found in EFFORTS and EFFORTS.index(found) >= EFFORTS.index(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much one call of tune measures, and for which job. Made by `Plan.of`, which checks."""

    effort: str = row(
        kinds.Choice(EFFORTS),
        "quick: a minute, compiled only what that takes seconds for; normal: five minutes; "
        "exhaustive: an hour, also what is known to be bad or takes minutes to compile.",
        "normal",
        decides=False,
        asked=False,
    )
    budget_s: float | None = row(
        kinds.Seconds(),
        "Wall time of all measuring: search, race, comparison with fp32, input, first steps; "
        "kept within 10% or 5 s. Starting Python and the model's first step come before it. "
        "Default: 1m, 5m or 1h by effort.",
        None,
        keyword="budget",
        decides=False,
        asked=False,
        printed=False,
    )
    trials: int | None = row(
        kinds.Whole(),
        "Configs tried at most, before the race.",
        None,
        decides=False,
        asked=False,
        printed=False,
    )
    steps: int | None = row(
        kinds.Whole(),
        "Length of the job that the advice is for, in steps at your batch; default: no end.",
        None,
        decides=False,
    )
    duration_s: float | None = row(
        kinds.Seconds(),
        "Length of the job as a time, instead of --steps.",
        None,
        keyword="duration",
        decides=False,
    )
    seed: int = row(
        kinds.Whole(0), "Seed of all randomness.", 0, decides=False, asked=False, printed=False
    )
    force: bool = row(
        kinds.Switch(),
        "Measure again although it is tuned.",
        False,
        option="",
        switches={"--force": True},
        decides=False,
        asked=False,
        printed=False,
    )

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Plan:
        """A plan from what was given by keyword; None is as good as left out.

        Raises:
            UsageError: a value is outside its domain, or two do not go together.
        """
        plan = cls(**checked(cls, given))
        if plan.steps is not None and plan.duration_s is not None:
            raise UsageError(
                f"steps {plan.steps} and duration {plan.duration_s:g}s: a job has one length; "
                "give one of them"
            )
        if not LEAST_S <= plan.seconds <= MOST_S:
            raise UsageError(
                f"budget {plan.seconds:g}s: expected from {LEAST_S:g}s, which is the shortest "
                "race, to 30 days; give at least 30s"
            )
        return plan

    @property
    def much(self) -> Effort:
        """What the effort means."""
        return _EFFORTS[self.effort]

    @property
    def seconds(self) -> float:
        """The budget, given or the effort's."""
        return self.much.budget_s if self.budget_s is None else self.budget_s

    def length(self, batch: int) -> Length | None:
        """Of the job, at the user's batch; None for the steady state."""
        if self.steps is None and self.duration_s is None:
            return None
        return Length(batch=batch, steps=self.steps or 0, seconds=self.duration_s or 0.0)


def parts(budget_s: float, *, loads: bool = False) -> dict[str, float]:
    """Seconds that each part of a tuning has of its budget; what one leaves, the next have too.

    `loads`: there is data, for whose loader a part is kept.
    """
    kept_s = LOADER * budget_s if loads else 0.0
    found, left_s = {}, budget_s - kept_s
    for what, share in (("search", SEARCH), ("race", RACE), ("comparison with fp32", NUMERICS)):
        found[what] = share * left_s
        left_s -= found[what]
    return found | ({"loader": kept_s} if loads else {}) | {"first steps": left_s}


def larger(budget_s: float, than_s: float) -> float:
    """A budget to advise that so many seconds are enough for: clearly more than one that was not,
    in whole ten seconds."""
    return 10.0 * math.ceil(max(budget_s, LARGER * than_s) / 10)


class Clock:
    """The time of one tuning, from now on: every part of it ends by this one clock.

    Args:
        whole_s: all of it.
        kept_s: of that, what nothing has before `kept` is asked for.
        now: wall clock in seconds.

    Attributes:
        budget_s: what may be spent by now.
    """

    def __init__(
        self, whole_s: float, *, kept_s: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.whole_s, self._kept_s = whole_s, kept_s
        self.budget_s = whole_s - kept_s
        self.now = now
        self._began = now()
        self._before = 0.0

    def resume(self, seconds: float) -> None:
        """Count what earlier runs of the same study took, at most the search's whole share."""
        self._before = min(seconds, SEARCH * self.budget_s)

    @property
    def spent_s(self) -> float:
        """Seconds of the budget that are gone."""
        return self._before + self.now() - self._began

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left; below 0 where it is overdrawn."""
        return self.budget_s - self.spent_s

    @property
    def slack_s(self) -> float:
        """By how much the budget may be overdrawn."""
        return max(SLACK_S, SLACK * self.budget_s)

    @property
    def trial_s(self) -> float:
        """Timed seconds of one trial."""
        least, most = TRIAL_S
        return min(most, max(least, self.budget_s / 120))

    def search(self) -> Part:
        """The time in which configs are tried."""
        return Part(self, SEARCH * self.budget_s)

    def kept(self) -> Part:
        """The part that was kept, and half of what was left: it has them from here on."""
        left_s = max(0.0, self.left_s)
        self.budget_s = self.whole_s
        return Part(self, self.spent_s + self._kept_s + left_s / 2)

    def advised(self, budget_s: float) -> str:
        """The budget to give where so many seconds, without what is kept, would do: '180s'."""
        share = 1 - self._kept_s / self.whole_s
        return f"{larger(budget_s / share, self.whole_s):.0f}s"

    def part(self, share: float = 1.0, *, reserve: float = 0.0) -> Part:
        """A share of what is left now, and another that the part may take if it must."""
        left = max(0.0, self.left_s)
        return Part(self, self.spent_s + share * left, reserve_s=reserve * left)


class Part:
    """A part of a tuning's time. `reserve_s`: seconds that it may be given beyond its end."""

    def __init__(self, clock: Clock, end_s: float, *, reserve_s: float = 0.0) -> None:
        self.clock = clock
        self._end_s = end_s
        self.reserve_s = reserve_s

    @property
    def left_s(self) -> float:
        """Seconds until its end; below 0 afterwards."""
        return self._end_s - self.clock.spent_s

    def share(self, fraction: float) -> Part:
        """The next part of this one."""
        return Part(self.clock, self.clock.spent_s + fraction * max(0.0, self.left_s))

    @property
    def deadline_s(self) -> float:
        """Seconds after which what runs now is to be given up, so that the whole budget holds."""
        return max(0.1, min(self.left_s + self.clock.slack_s / 2, self.clock.left_s + SLACK_S / 2))


class Progress:
    """What `tune` reports while it works; every method may be overridden."""

    def started(self, facts: Facts, key: Key, space: Space, resumed: int) -> None:
        """The workload runs; the search begins."""

    def tried(self, trial: Trial, spent_s: float) -> None:
        """A trial is over."""

    def building(self, configs: Sequence[Config], seconds: float) -> None:
        """These are being built at once, for so many seconds by now; called now and then."""

    def making(self, data: str, most_s: float) -> AbstractContextManager[None]:
        """Entered while a dataset of that name is made, for so many seconds at most."""
        return contextlib.nullcontext()

    def phase(self, what: str) -> None:
        """Another part of the work begins."""

    def notice(self, text: str) -> None:
        """Something the user should know."""

    def warning(self, text: str) -> None:
        """Something that is not as it was asked for."""
