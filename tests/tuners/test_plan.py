"""Options, budget and decision constants of a tuning."""

from __future__ import annotations

import pytest

from advisor.cache.record import EFFORTS
from advisor.cache.task import shell
from advisor.errors import UsageError
from advisor.tuners import decisions
from advisor.tuners.length import Length
from advisor.tuners.search.plan import Clock, Plan, suffices


def test_options_set_the_plan() -> None:
    plan = Plan.of({"budget": "5m", "duration": "2h", "trials": "7", "steps": None})
    assert (plan.seconds, plan.trials) == (300.0, 7)
    assert plan.length(8) == Length(seconds=7200.0, batch=8)
    assert Plan.of({"steps": 500}).length(8) == Length(steps=500, batch=8)
    assert Plan.of({}).length(8) is None and Plan.of({"budget": 90}).seconds == 90.0
    # The printed command has the options that the advice depends on, and no limits.
    given = {"effort": "quick", "steps": 500, "budget": 9, "trials": 3, "seed": 4, "force": True}
    assert shell(Plan.of(given)) == ["--effort", "quick", "--steps", "500"]
    assert shell(Plan.of({"duration": "90s"})) == ["--duration", "90s"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 3, "duration": "1h"}, "one length"),
        ({"budget": 2.9}, "budget 2.9s: expected from 3s"),
        ({"budget": "721h"}, "30 days"),
        ({"budget": "soon"}, "'soon'"),
        ({"trials": 0}, "trials 0"),
        ({"steps": 0}, "steps 0"),
        ({"seed": -1}, "seed -1"),
        ({"effort": "heroic"}, "quick, normal, exhaustive"),
        ({"bugdet": 3}, "bugdet"),
    ],
)
def test_invalid_options_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan.of(given)


def test_effort_suffices_for_lower_efforts() -> None:
    assert all(Plan(effort=name).seconds for name in EFFORTS)
    assert suffices("exhaustive", "quick") and suffices("normal", "normal")
    assert not suffices("quick", "normal") and not suffices("heroic", "quick")


def test_clock_counts_down_one_budget() -> None:
    time = 0.0
    clock = Clock(100.0, reserve_s=20.0, now=lambda: time)
    assert (clock.left_s, clock.deadline_s) == (80.0, 85.0)
    time = 82.0
    assert (clock.left_s, clock.spent_s) == (0.0, 82.0)
    assert clock.deadline_s == pytest.approx(3.0)
    clock.release()
    assert (clock.left_s, clock.deadline_s) == (18.0, pytest.approx(23.0))
    time = 200.0
    assert clock.left_s == 0.0 and clock.deadline_s == 0.1


def test_there_are_at_most_40_decision_constants() -> None:
    assert sum(name.isupper() for name in vars(decisions)) <= 40
