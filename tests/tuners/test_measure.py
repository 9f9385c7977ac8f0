"""When steps have settled, by a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from advisor.tuners.measure.timing import WARM_STEPS, Clock, warm_up


class FakeClock(Clock):
    """Time moves only when a step runs; a device may work on behind the host."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.time = self.device = 0.0

    def queue(self, seconds: float) -> None:
        self.device = max(self.device, self.time) + seconds

    def synchronize(self) -> None:
        self.time = max(self.time, self.device)

    def now(self) -> float:
        return self.time


def paying(clock: FakeClock, *costs: float) -> tuple[Callable[[], None], list[float]]:
    """A step with these costs, then 0.02 s each; what the steps so far took."""
    left, took = list(costs), []

    def step() -> None:
        took.append(left.pop(0) if left else 0.02)
        clock.queue(took[-1])

    return step, took


def test_warm_up_outlasts_an_algorithm_search() -> None:
    clock = FakeClock()
    step, took = paying(clock, 20.0, 0.3, 0.1)
    warm_up(step, clock, step)
    assert took == [20.0, 0.3, 0.1, *[0.02] * WARM_STEPS]


def test_what_comes_before_the_first_step_is_waited_for() -> None:
    clock = FakeClock()
    step, took = paying(clock)
    warm_up(step, clock, lambda: clock.queue(7.0))
    assert clock.time == pytest.approx(7.0 + sum(took)) and len(took) == WARM_STEPS


def test_warm_up_of_steps_that_never_settle_ends() -> None:
    clock, draw = FakeClock(), random.Random(0)

    def step() -> None:
        clock.queue(draw.uniform(0.05, 0.5))

    warm_up(step, clock, step)
    assert clock.time < 3.0
