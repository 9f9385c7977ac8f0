"""How steps are timed, on a clock that needs no device."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.tuners.measure.timing import median_interval, time_steps, warm_up


class FakeClock:
    """Time moves only when a step runs."""

    def __init__(self) -> None:
        self.time = 0.0
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1

    def now(self) -> float:
        return self.time

    def mark(self) -> object:
        return self.time

    def between(self, start: object, end: object) -> float:
        assert isinstance(start, float) and isinstance(end, float)
        return (end - start) / 2


def test_steady_steps_end_early_and_exactly() -> None:
    clock = FakeClock()

    def step() -> None:
        clock.time += 0.01

    timing = time_steps(step, clock, seconds=60.0, first_s=3.0, expected_s=0.01)
    assert timing.step_s == pytest.approx(0.01)
    assert timing.gpu_s == pytest.approx(0.005)
    assert timing.first_step_s == 3.0
    assert timing.steps == 60 and len(timing.blocks) == 6


def test_noisy_steps_use_their_time_and_no_more() -> None:
    clock, draw = FakeClock(), random.Random(0)

    def step() -> None:
        clock.time += 0.02 * draw.lognormvariate(0, 1.0)

    timing = time_steps(step, clock, seconds=2.0, first_s=0.0, expected_s=0.02)
    assert 2.0 <= clock.time < 3.5
    assert timing.low_s < timing.step_s < timing.high_s


def test_the_host_waits_for_the_device_at_block_ends_only() -> None:
    clock = FakeClock()

    def step() -> None:
        clock.time += 0.001

    timing = time_steps(step, clock, seconds=60.0, first_s=0.0, expected_s=0.001)
    assert clock.synchronized == len(timing.blocks) + 1


def test_slow_steps_still_have_a_spread() -> None:
    clock = FakeClock()

    def step() -> None:
        clock.time += 5.0

    timing = time_steps(step, clock, seconds=1.0, first_s=0.0, expected_s=5.0)
    assert len(timing.blocks) == 2


def test_warm_up_outlasts_an_algorithm_search() -> None:
    clock = FakeClock()
    costs = iter([20.0, 0.3, 0.1, 0.02, 0.02, 0.02])

    def step() -> None:
        clock.time += next(costs)

    assert warm_up(step, clock) == pytest.approx((20.0, 0.02))


def test_warm_up_of_steps_that_never_settle_ends() -> None:
    clock, draw = FakeClock(), random.Random(0)

    def step() -> None:
        clock.time += draw.uniform(0.05, 0.5)

    warm_up(step, clock)
    assert clock.time < 3.0


@given(st.lists(st.floats(0.001, 10), min_size=2, max_size=40))
def test_interval_holds_the_median_and_is_made_of_values(values: list[float]) -> None:
    low, high = median_interval(values)
    ordered = sorted(values)
    assert low in values and high in values
    assert low <= ordered[len(values) // 2] <= high or low <= ordered[(len(values) - 1) // 2]


def test_interval_covers_the_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    inside = 0
    for _ in range(2000):
        low, high = median_interval([draw.gauss(0, 1) for _ in range(12)])
        inside += low <= 0 <= high
    assert inside / 2000 >= 0.94
