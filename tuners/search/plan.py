"""How much is measured: the options of one tuning, and what it reports."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from advisor.cache import kinds
from advisor.cache.config import Config
from advisor.cache.key import Key
from advisor.cache.record import EFFORTS, Trial
from advisor.cache.task import checked, row
from advisor.errors import UsageError
from advisor.tuners.length import Length

if TYPE_CHECKING:
    from advisor.tuners.measure.place import Compared
    from advisor.tuners.measure.worker.wire import Facts
    from advisor.tuners.search.ratio import Ratio
    from advisor.tuners.search.space import Space

LEAST_S = 3.0
"""A smaller budget is refused: the turns of a race between two configs alone take two seconds."""
MOST_S = 30 * 86400.0

EXPLAIN, VERIFY = "1m", "30s"
"""Budgets of explain and verify, all measuring counted."""


class Effort(NamedTuple):
    """`budget_s`: wall seconds of measuring; `quick`: of torch.compile only what takes seconds;
    `full`: also what takes minutes, as max-autotune."""

    budget_s: float
    quick: bool = False
    full: bool = False


_EFFORTS = dict(
    zip(EFFORTS, (Effort(60.0, quick=True), Effort(300.0), Effort(3600.0, full=True)), strict=True)
)


def suffices(found: str, wanted: str) -> bool:
    """Whether one effort is at least another; one of a name not known here is not."""
    return found in EFFORTS and EFFORTS.index(found) >= EFFORTS.index(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much one call of tune measures, and for which job. Made by `Plan.of`, which checks."""

    effort: str = row(
        kinds.Choice(EFFORTS),
        "quick: a minute, compiling only what takes seconds; normal: five minutes; exhaustive: an "
        "hour, also what takes minutes to compile.",
        "normal",
        decides=False,
        asked=False,
    )
    budget_s: float | None = row(
        kinds.Seconds(),
        "Wall time of all measuring, kept within 10%. It begins once the command, or Python and "
        "the model, has made its first steps. Default: 1m, 5m or 1h by effort.",
        None,
        keyword="budget",
        decides=False,
        asked=False,
        printed=False,
    )
    trials: int | None = row(
        kinds.Whole(),
        "Configs visited at most.",
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


class Progress:
    """What `tune` reports while it works; every method may be overridden."""

    def started(self, facts: Facts, key: Key, space: Space, resumed: int) -> None:
        """The workload runs; the first visit begins."""

    def doing(self, config: Config, what: str, best: Config | None, left_s: float) -> None:
        """A config is being built, measured or compared; `best` leads, if anything does."""

    def visited(
        self, trial: Trial, ratio: Ratio, compared: Compared | None, best: Config, left_s: float
    ) -> None:
        """A visit is over; `best` is the fastest config that is known to be right."""

    def making(self, data: str, most_s: float) -> AbstractContextManager[None]:
        """Entered while a dataset of that name is made, for so many seconds at most."""
        return contextlib.nullcontext()

    def phase(self, what: str) -> None:
        """Another part of the work begins."""

    def notice(self, text: str) -> None:
        """Something the user should know."""

    def warning(self, text: str) -> None:
        """Something that is not as it was asked for."""
