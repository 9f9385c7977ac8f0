"""How steps are timed, on a clock that needs no device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from advisor.cache.record import BUSY
from advisor.tuners.measure.timing import (
    BEHIND,
    HOLD_S,
    CpuClock,
    CudaClock,
    busy_share,
    first_steps,
    median_interval,
    time_steps,
    warm_up,
)


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

    def hold(self, seconds: float) -> None:
        raise AssertionError("there is nothing to hold")


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


class QueueClock:
    """A device beside the host: a step is queued in a moment, and runs when its turn comes."""

    def __init__(self) -> None:
        self.time = self.device = self.held = 0.0

    def run(self, seconds: float) -> None:
        self.time += 0.001
        self.device = max(self.device, self.time) + seconds

    def synchronize(self) -> None:
        self.time = max(self.time, self.device)

    def now(self) -> float:
        return self.time

    def mark(self) -> object:
        return max(self.time, self.device)

    def between(self, start: object, end: object) -> float:
        assert isinstance(start, float) and isinstance(end, float)
        return end - start

    def hold(self, seconds: float) -> None:
        self.held += seconds
        self.device = max(self.device, self.time) + 2 * seconds


def test_a_device_is_busy_where_it_never_waits_for_the_host_for_long() -> None:
    def share(step: Callable[[QueueClock], None]) -> float:
        clock = QueueClock()
        timing = time_steps(lambda: step(clock), clock, seconds=60.0, first_s=0.0, expected_s=0.01)
        return busy_share(lambda: step(clock), clock, timing)

    def waited_for(clock: QueueClock) -> None:
        """As by fp16's scaler: the host reads a number once all gradients are there."""
        clock.run(0.02)
        clock.synchronize()
        clock.run(0.0001)

    def issued(clock: QueueClock) -> None:
        for _kernel in range(10):
            clock.run(0.0001)

    def slow(clock: QueueClock) -> None:
        clock.time += 8.0
        clock.run(0.1)
        held.append(clock.held)

    held: list[float] = []
    assert share(slow) < BUSY and held[-1] == HOLD_S
    assert share(lambda clock: clock.run(0.02)) == 1.0
    assert share(waited_for) > 0.95
    assert share(issued) == pytest.approx(0.1, abs=0.02)


@pytest.mark.gpu
def test_a_gpu_is_busy_though_a_step_waits_for_it_and_idle_though_all_of_a_step_does() -> None:
    device = torch.device("cuda")
    a, clock = torch.randn(8192, 8192, device=device), CudaClock(device)

    def waited_for() -> None:
        float((a @ a)[0, 0])
        a[0].add_(1)

    def issued() -> None:
        time.sleep(0.005)
        a[0].add_(1)

    def share(step: Callable[[], None]) -> float:
        _, settled_s = warm_up(step, clock)
        timing = time_steps(step, clock, seconds=1.0, first_s=0.0, expected_s=settled_s)
        assert timing.behind_s < BEHIND * timing.step_s
        return busy_share(step, clock, timing)

    assert share(waited_for) > BUSY
    assert share(issued) < 0.1


def test_a_device_without_a_clock_is_not_known_to_be_busy() -> None:
    steps: list[None] = []
    timing = time_steps(
        lambda: steps.append(None), CpuClock(), seconds=0.01, first_s=0.0, expected_s=0.01
    )
    count = len(steps)
    assert busy_share(lambda: steps.append(None), CpuClock(), timing) == 0.0
    assert len(steps) == count


def test_what_the_device_still_does_is_waited_for_and_nothing_of_before_counts() -> None:
    clock = QueueClock()
    clock.run(50.0)
    assert warm_up(lambda: clock.run(0.2), clock) == pytest.approx((0.201, 0.201))
    clock.run(50.0)
    assert first_steps(lambda: clock.run(0.2), clock) == pytest.approx((0.201, 0.201))
    clock.run(50.0)
    timing = time_steps(lambda: clock.run(0.02), clock, seconds=60.0, first_s=0.0, expected_s=0.02)
    assert list(timing.blocks) == pytest.approx([0.0202] * 6)
    assert timing.gpu_s == pytest.approx(0.0202, rel=0.02)


def test_first_steps_are_all_that_is_paid_once() -> None:
    clock = FakeClock()

    def paying(*costs: float) -> Callable[[], None]:
        left = list(costs)

        def step() -> None:
            clock.time += left.pop(0) if left else 0.1

        return step

    # A compilation, and two recordings after it.
    assert first_steps(paying(20.0, 3.1, 1.1), clock) == pytest.approx((24.0, 0.1))
    # A captured step: its warm-up, its capture and what is checked are `start`.
    assert first_steps(paying(), clock, paying(7.0)) == pytest.approx((7.0, 0.1))
    assert warm_up(paying(), clock, paying(7.0)) == pytest.approx((7.0, 0.1))


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
