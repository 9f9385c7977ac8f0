"""Samples per second over a whole job, the time of the first step included."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from advisor.cache.config import Config, Value
from advisor.cache.record import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a config trains."""

    batch: int
    first_step_s: float
    step_s: float

    def time_s(self, steps: float) -> float:
        """Seconds of a number of steps, at least one."""
        return self.first_step_s + max(0.0, steps - 1) * self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long a job is: `steps` at a batch of `batch`, or `seconds`; the other of the two is 0. At
    another batch, a job given in steps has the same number of samples."""

    batch: int
    steps: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.steps else f"{self.seconds:g} s"

    def rate(self, pace: Pace) -> float:
        """Samples per second over the whole job."""
        if self.steps:
            samples = self.steps * self.batch
            return samples / pace.time_s(samples / pace.batch)
        steps = max(0.0, self.seconds - pace.first_step_s) / pace.step_s
        return pace.batch * steps / self.seconds


def break_even(paces: Sequence[Pace]) -> list[tuple[int, int]]:
    """Return pairs (number of steps, index of the pace that is fastest from this number on), from 1
    step on. Of equal paces the first counts. All paces have the same batch."""
    found, start, left = [], 1, list(enumerate(paces))
    while left:
        here, slow = min(left, key=lambda one: (one[1].time_s(start), one[1].step_s))
        found.append((start, here))
        left = [one for one in left if one[1].step_s < slow.step_s]
        start = min((_overtakes(slow, fast) for _, fast in left), default=0)
    return found


def _overtakes(slow: Pace, fast: Pace) -> int:
    """The first number of steps at which `fast` takes less time than `slow`."""
    start = (fast.first_step_s - slow.first_step_s) / (slow.step_s - fast.step_s)
    return max(1, math.floor(min(start, sys.float_info.max)) + 2)


def first_step_seen(trials: Sequence[Trial], config: Config, paying: Collection[str]) -> float:
    """Seconds of the first step of a config that starts from empty caches; 0 if not known.

    A trial reuses what an earlier trial searched or compiled. So the result is the slowest first
    step among trials of the same batch whose `paying` knobs each have the config's value or torch's
    default. The first trial is torch's default.
    """

    def pays(other: Config) -> set[tuple[str, Value]]:
        return {pair for pair in other.changed(trials[0].config).items() if pair[0] in paying}

    alike = (
        one.measurement.first_step_s
        for one in trials
        if one.stage == "compute"
        and one.config.batch == config.batch
        and pays(one.config) <= pays(config)
    )
    return max(alike, default=0.0)
