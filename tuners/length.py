"""What a config is worth over a job of a given length: arithmetic, nothing is measured here.

A job of N steps takes `first_step_s + (N - 1) * step_s` seconds: what algorithm search,
compilation and graph capture cost before the first step counts once, what they gain every step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from advisor.cache.config import Config, Value
from advisor.cache.record import Trial

WARM = 3.0
"""As many times quicker a config is built again: what it compiled is in caches on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a config trains: seconds until its first step is done, then seconds per step."""

    batch: int
    first_step_s: float
    step_s: float

    def time_s(self, steps: float) -> float:
        """Seconds of that many steps, one at least."""
        return self.first_step_s + max(0.0, steps - 1) * self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long a job is: `steps` at a batch of `batch`, or `seconds`; the other one is 0.

    At another batch the job is as many samples, hence fewer or more steps.

    Raises:
        ValueError: not exactly one of the two is above 0.
    """

    batch: int
    steps: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.steps > 0) == (self.seconds > 0) or self.batch < 1:
            raise ValueError(f"{self}: expected either steps or seconds, at a batch of at least 1")

    def samples(self, pace: Pace) -> float:
        """Samples that are trained on."""
        if self.steps:
            return float(self.steps * self.batch)
        return pace.batch * max(0.0, self.seconds - pace.first_step_s) / pace.step_s

    def time_s(self, pace: Pace) -> float:
        """Seconds that the job takes."""
        if self.steps:
            return pace.time_s(self.steps * self.batch / pace.batch)
        return self.seconds

    def rate(self, pace: Pace) -> float:
        """Samples per second over the whole job, its first step included: to be maximised."""
        return self.samples(pace) / self.time_s(pace)


def break_even(paces: Sequence[Pace]) -> list[tuple[int, int]]:
    """The lower envelope of time over steps: (from which step on, index of the fastest pace).

    The first pair is from step 1; of equal paces the first one given is taken. All paces are at
    one batch. What is never the fastest does not appear.
    """
    if not paces:
        return []
    order = range(len(paces))
    here = min(order, key=lambda i: (paces[i].first_step_s, paces[i].step_s, i))
    found = [(1, here)]
    while True:
        starts = [
            (_overtakes(paces[here], paces[i]), i)
            for i in order
            if paces[i].step_s < paces[here].step_s
        ]
        if not starts:
            return found
        # Where several overtake at one step, the one that is the fastest there.
        start = min(starts)[0]
        at_once = [i for first, i in starts if first == start]
        here = min(at_once, key=lambda i: (paces[i].time_s(start), paces[i].step_s, i))
        found.append((start, here))


def _overtakes(slow: Pace, fast: Pace) -> int:
    """The first number of steps at which `fast` takes less time than `slow`."""
    start = (fast.first_step_s - slow.first_step_s) / (slow.step_s - fast.step_s)
    return max(1, math.floor(start) + 2)


def first_step_seen(trials: Sequence[Trial], config: Config, paying: Collection[str]) -> float:
    """Seconds of the slowest first step among trials that pay for the same things; 0 for none.

    A trial's own number is as it fell: what an earlier trial had searched, or compiled into the
    compiler's cache on disk, was not paid again. Those of the same batch that pay for nothing else
    than the config does, by the values of the `paying` knobs, tell what it costs at least, and the
    slowest of them is the one that paid for most. The first trial is torch's default.
    """

    def pays(other: Config) -> set[tuple[str, Value]]:
        changed = other.changed(trials[0].config)
        return {(name, changed[name]) for name in paying if name in changed}

    return max(
        (
            trial.measurement.first_step_s
            for trial in trials
            if trial.stage == "compute"
            and trial.measurement.first_step_s > 0
            and trial.config.batch == config.batch
            and pays(trial.config) <= pays(config)
        ),
        default=0.0,
    )
