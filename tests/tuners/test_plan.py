"""The options of a tuning, and how its time is divided."""

from __future__ import annotations

import pytest

from advisor.cache.record import EFFORTS
from advisor.cache.task import rows, shell
from advisor.errors import UsageError
from advisor.tuners.length import Length
from advisor.tuners.search.plan import RACE, SEARCH, Clock, Plan, parts, suffices


def test_a_plan_is_made_of_what_was_given() -> None:
    plan = Plan.of(
        {"effort": "quick", "budget": "5m", "duration": "2h", "trials": "7", "steps": None}
    )
    assert (plan.seconds, plan.duration_s, plan.trials) == (300.0, 7200.0, 7)
    assert Plan.of({}).seconds == 300.0 and Plan.of({"budget": 90}).seconds == 90.0
    assert not any(one.decides for one in rows(Plan).values())
    # What is printed for copying: what the advice depends on, not how long it took.
    given = {"effort": "quick", "steps": 500, "budget": 9, "trials": 3, "seed": 4, "force": True}
    assert shell(Plan.of(given)) == ["--effort", "quick", "--steps", "500"]
    assert shell(Plan.of({"duration": "90s"})) == ["--duration", "90s"]


@pytest.mark.parametrize(
    ("given", "said"),
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
def test_what_is_refused_says_why(given: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Plan.of(given)


def test_efforts_are_those_of_the_record() -> None:
    budgets = [Plan(effort=name).seconds for name in EFFORTS]
    assert budgets == [60.0, 300.0, 3600.0]
    assert [Plan(effort=name).much.quick for name in EFFORTS] == [True, False, False]
    assert suffices("exhaustive", "quick") and suffices("normal", "normal")
    assert not suffices("quick", "normal") and not suffices("heroic", "quick")


def test_a_job_has_its_length_from_the_plan() -> None:
    assert Plan.of({"steps": 500}).length(8) == Length(steps=500, batch=8)
    assert Plan.of({"duration": "1m"}).length(8) == Length(seconds=60.0, batch=8)
    assert Plan.of({}).length(8) is None


def test_parts_end_with_the_budget() -> None:
    time = 0.0
    clock = Clock(100.0, now=lambda: time)
    search = clock.search()
    assert search.left_s == 100.0 * SEARCH
    time = 80.0  # it took longer: what follows has less
    race = clock.part(0.5, reserve=0.25)
    assert (search.left_s, race.left_s, race.reserve_s) == (100 * SEARCH - 80, 10.0, 5.0)
    time = 120.0
    assert clock.left_s == -20.0 and clock.part(0.5).left_s == 0.0
    # Earlier runs count, but leave what follows the search its time.
    again = Clock(100.0, now=lambda: time)
    again.resume(1e6)
    assert again.search().left_s == pytest.approx(0.0, abs=1e-9) and again.left_s == pytest.approx(
        100 * (1 - SEARCH)
    )


def test_a_budget_is_planned_as_it_is_spent() -> None:
    planned = parts(300.0)
    assert list(planned) == ["search", "race", "comparison with fp32", "first steps"]
    assert sum(planned.values()) == pytest.approx(300.0)
    loads = parts(400.0, loads=True)
    assert loads == planned | {"loader": pytest.approx(100.0)} and list(loads)[-2] == "loader"
    time = 0.0
    clock = Clock(300.0, now=lambda: time)
    time = planned["search"]
    assert clock.part(RACE).left_s == pytest.approx(planned["race"])


def test_what_is_kept_for_the_loader_is_kept_however_late_it_begins() -> None:
    time = 0.0
    clock = Clock(40.0, kept_s=10.0, now=lambda: time)
    assert clock.left_s == 30.0
    time = 32.0
    assert clock.left_s < 0
    assert clock.kept().left_s == 10.0


def test_an_advised_budget_is_clearly_more_than_the_one_that_was_given() -> None:
    clock = Clock(40.0, kept_s=10.0)
    assert clock.advised(30.0) == clock.advised(1.0) == "60s"
    assert clock.advised(90.0) == "120s", "a quarter of it is the loader's"
