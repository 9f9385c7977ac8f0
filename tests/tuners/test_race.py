"""The arithmetic of a race, and in which order it measures."""

from __future__ import annotations

import math
from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.tuners.decide.race import (
    MIN_ROUNDS,
    MOST_ROUNDS,
    ROUNDS,
    TELLS,
    Ratio,
    _neighbours,
    paired,
    paired_ratio,
    race,
)
from advisor.tuners.search.plan import Clock
from tests.tuners.test_choose import BF16, DEFAULT, FAST, Steady, run


def turns(order: list[Config], configs: int) -> list[list[Config]]:
    return [order[at : at + configs] for at in range(0, len(order), configs)]


def test_within() -> None:
    assert Ratio(mean=2.0, low=1.9, high=2.1).within(0.0501)
    assert not Ratio(mean=2.0, low=1.9, high=2.2).within(0.0501)
    assert not Ratio(mean=2.0, low=1.8, high=2.1).within(0.0501)
    assert not Ratio(mean=1.0, low=0.0, high=math.inf).within(1.0)


def test_the_interval_is_students() -> None:
    found = paired_ratio([2.0, 2.0 * math.exp(0.1)], [1.0, 1.0])
    # Two turns: one degree of freedom, and a standard deviation of 0.1 over the root of two.
    half = 12.71 * 0.1 / math.sqrt(2) / math.sqrt(2)
    assert found.mean == pytest.approx(2.0 * math.exp(0.05))
    assert found.low == pytest.approx(found.mean * math.exp(-half))
    assert found.high == pytest.approx(found.mean * math.exp(half))

    long = paired_ratio([1.0, math.exp(0.1)] * 20, [1.0] * 40)
    half = 2.13 * 0.05 * math.sqrt(40 / 39) / math.sqrt(40)
    assert long.high == pytest.approx(long.mean * math.exp(half))


def test_one_turn_has_no_interval() -> None:
    assert paired_ratio([3.0], [2.0]) == Ratio(mean=pytest.approx(1.5), low=0.0, high=math.inf)
    assert paired([3.0, 3.0], [2.0]) == paired_ratio([3.0], [2.0])
    assert paired([], [2.0]) == Ratio(mean=1.0, low=0.0, high=math.inf)


@pytest.mark.parametrize(
    ("values", "correlation"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.0),
        ([2.0] * 8, 0.0),
        # (6.25 is the first's square; neighbours: 3.75 + 0.75 - 0.25 + 0.75 + 3.75 of 17.5.)
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 8.75 / 17.5),
        ([1.0, 2.0] * 3, 0.0),
        ([0.0] * 100 + [1.0] * 100, 0.9),
    ],
)
def test_correlation_of_neighbours(values: list[float], correlation: float) -> None:
    assert _neighbours(values, sum(values) / len(values)) == pytest.approx(correlation)


def test_there_and_back_every_time() -> None:
    runner = Steady({DEFAULT: 100.0, BF16: 100.0, FAST: 100.0}, noise=0.01)
    configs = [DEFAULT, BF16, FAST]
    race(runner, configs, runner.part(), drop=False)
    rounds = turns(runner.order, 3)
    assert MIN_ROUNDS < len(rounds) <= ROUNDS
    assert all(one == (configs if n % 2 == 0 else configs[::-1]) for n, one in enumerate(rounds))


def test_a_race_that_is_settled_ends() -> None:
    runner = Steady({DEFAULT: 100.0, FAST: 200.0})
    found = run(runner, [DEFAULT, FAST])
    assert {config: len(rates) for config, rates in found.items()} == {
        DEFAULT: MIN_ROUNDS,
        FAST: MIN_ROUNDS,
    }


def test_a_race_that_cannot_tell_ends_too() -> None:
    runner = Steady({DEFAULT: 100.0, FAST: 100.0}, noise=3.0)
    found = race(runner, [DEFAULT, FAST], runner.part(), drop=False)
    assert len(found[DEFAULT]) == len(found[FAST]) == MOST_ROUNDS


def test_the_time_ends_it() -> None:
    runner = Steady({DEFAULT: 100.0, FAST: 100.0}, noise=0.05)
    found = race(runner, [DEFAULT, FAST], runner.part(1.4), drop=False)
    assert runner.order == [DEFAULT, FAST, FAST, DEFAULT, DEFAULT]
    assert (len(found[DEFAULT]), len(found[FAST])) == (3, 2)


def test_no_turn_is_begun_that_the_end_would_cut_off() -> None:
    class Slow(Steady):
        """Turns take three seconds more than what is timed of them."""

        def measure(self, config: Config, **how: Any) -> Measurement:
            return super().measure(config, **how | {"seconds": 3.3})

    for seconds in range(20, 40):
        runner = Slow({DEFAULT: 100.0, FAST: 200.0, BF16: 150.0}, noise=0.05)
        found = race(runner, [DEFAULT, FAST, BF16], runner.part(float(seconds)), drop=False)
        assert set(found) == {DEFAULT, FAST, BF16}
        assert runner.time > seconds - 7


def test_where_time_is_short_it_goes_to_those_who_lead() -> None:
    others = {DEFAULT.replace(precision="tf32", threads=n): 110.0 + n for n in range(1, 7)}
    runner = Steady({DEFAULT: 100.0, **others, FAST: 200.0}, noise=0.2)
    found = race(runner, [DEFAULT, *others, FAST], runner.part(7.6))
    assert len(found[DEFAULT]) >= TELLS <= len(found[FAST])
    assert set(found) == {DEFAULT, *others, FAST}
    # With time for all nobody goes who may be the fastest.
    close = {DEFAULT: 100.0, BF16: 199.0, FAST: 200.0}
    found = race(runner := Steady(close, noise=0.2), list(close), runner.part(30.0))
    assert len(found[BF16]) >= TELLS


class Stalls(Steady):
    """From one turn of a config on a host is so busy that each takes a minute, not `turn_s`."""

    def __init__(self, turn: int, config: Config = DEFAULT, turn_s: float = 0.3) -> None:
        super().__init__({DEFAULT: 100.0, FAST: 200.0}, noise=0.05)
        self.turn, self.config, self.turn_s = turn, config, turn_s

    def measure(self, config: Config, **how: Any) -> Measurement:
        stalls = config == self.config and self.order.count(config) >= self.turn
        return super().measure(config, **how | {"seconds": 60.0 if stalls else self.turn_s})


def test_what_the_first_was_seen_to_do_counts_where_the_end_cuts_it_off() -> None:
    runner = Stalls(turn=3)
    found = race(runner, [DEFAULT, FAST], runner.part(20.0), drop=False)
    assert (len(found[DEFAULT]), len(found[FAST])) == (3, 4)
    assert runner.order[-1] == DEFAULT and runner.time < 30.0


def test_what_the_end_cuts_off_has_the_turns_that_it_had_and_what_hangs_has_none() -> None:
    """On a busy host a turn took over twice as long as its last, and its config lost the race."""
    for seconds, kept in ((60.0, 0), (25.0, 3)):
        runner = Stalls(turn=3, config=FAST, turn_s=3.0)
        found = race(runner, [DEFAULT, FAST], runner.part(seconds), drop=False)
        assert len(found.get(FAST, [])) == kept, (seconds, runner.order)
        assert len(found[DEFAULT]) >= 3


def test_the_first_may_take_what_the_whole_tuning_has_left() -> None:
    runner = Stalls(turn=0)
    part = Clock(100.0, now=runner.now).part(0.2)
    assert len(race(runner, [DEFAULT, FAST], part)[DEFAULT]) == 1
    runner = Stalls(turn=0)
    assert race(runner, [DEFAULT, FAST], runner.part(50.0)) == {}


def test_without_the_first_there_is_no_race() -> None:
    runner = Steady({DEFAULT: 0.0, FAST: 100.0})
    assert run(runner, [DEFAULT, FAST]) == {}
    assert runner.order == [DEFAULT]
