"""From how many steps on which config pays: a record's answers by the length of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from advisor.cache.config import Config
from advisor.cache.record import CAPTURE, Choice, Record
from advisor.tuners.length import Length, Pace, break_even, first_step_seen

ONCE = 1.03
"""A config that was measured once counts as this much slower than the low end of its interval."""

SHORTEST_S, LONGEST_S = 1e-12, 1e9
"""A record with other times of a step is not reckoned with: no clock has measured them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How fast a config trains in the steady state. `raced`: in turn with the default, not once;
    `faster`: whether that race was sure that it beats the default at the same batch."""

    config: Config
    samples_per_s: float
    low: float
    high: float
    peak_bytes: int
    raced: bool = False
    faster: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A config that may be served, and how it trains. `raced`: as in `Measured`; `fresh`: its first
    step was measured, not taken to be the slowest one seen."""

    config: Config
    pace: Pace
    peak_bytes: int
    raced: bool
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """From `steps` on, this candidate takes the least time; `seconds` is when that is reached."""

    steps: int
    seconds: float
    candidate: Candidate


def measured(record: Record, batch: int) -> dict[Config, Measured]:
    """Every config that ran at a batch: as the race has it, else as its trial."""
    found = {
        trial.config: Measured(
            config=trial.config,
            samples_per_s=trial.measurement.samples_per_s,
            low=trial.measurement.low,
            high=trial.measurement.high,
            peak_bytes=trial.measurement.peak_bytes,
        )
        for trial in record.trials
        if trial.stage == "compute"
        and trial.measurement.ok
        and trial.origin != "reference"
        and trial.config.batch == batch
    }
    for choice in _choices(record):
        if choice.batch == batch:
            found[choice.config] = Measured(
                config=choice.config,
                samples_per_s=choice.samples_per_s,
                low=choice.low,
                high=choice.high,
                peak_bytes=choice.peak_bytes,
                raced=True,
                faster=choice.speedup_low > 1 and batch == record.batch,
            )
    return found


def candidates(record: Record, batch: int, sound: Callable[[Config], bool]) -> list[Candidate]:
    """What a record knows at one batch size, torch's default first; empty without the default."""
    first_steps = _FirstSteps(record)
    found = [first_steps.candidate(one, rate, batch) for one, rate in _steady(record, batch, sound)]
    if not found or found[0] is None:
        return []
    return [one for one in found if one is not None]


def _steady(
    record: Record, batch: int, sound: Callable[[Config], bool]
) -> list[tuple[Measured, float]]:
    """The default, and what may be faster, each with the samples/s to reckon with."""
    known = measured(record, batch)
    base = known.pop(record.baseline.config.at(batch), None)
    if base is None:
        return []
    # In the steady state the advice is the best: the race was not sure of what seems faster.
    best = record.winner(CAPTURE)
    most = best.samples_per_s if best.batch == batch and not length_of(record) else float("inf")
    advised = {one.choice.config for one in record.winners}
    found = [(base, base.samples_per_s)]
    for config, one in known.items():
        rate = min(most, one.samples_per_s if one.raced else one.low / ONCE)
        if one.raced:
            counts = batch != record.batch or one.faster or config in advised
        else:
            counts = rate > base.samples_per_s
        if counts and sound(config):
            found.append((one, rate))
    return found


class _FirstSteps:
    """What the first step of each config costs a process that starts with it."""

    def __init__(self, record: Record) -> None:
        from advisor.tuners.knobs import FIRST_STEP_COSTS

        self._trials = record.trials
        default = record.baseline.config
        # In a script that runs already every change pays for itself, and the baseline for nothing.
        self._paying = tuple(default) if record.key.task.command else FIRST_STEP_COSTS
        self._fresh = {c.config: c.first_step_s for c in _choices(record) if c.first_step_s > 0}
        # What every fresh process pays, and what the trials of one process paid only once.
        self._loading = max(0.0, self._fresh.get(default, 0.0) - self._slowest(default))

    def _slowest(self, config: Config) -> float:
        return first_step_seen(self._trials, config, self._paying)

    def candidate(self, one: Measured, rate: float, batch: int) -> Candidate | None:
        """None if its first step or its rate is not known."""
        slowest = self._slowest(one.config)
        first_step_s = self._fresh.get(one.config) or (slowest and slowest + self._loading)
        if not first_step_s or rate <= 0:
            return None
        pace = Pace(batch=batch, first_step_s=first_step_s, step_s=batch / rate)
        if not all(SHORTEST_S < seconds < LONGEST_S for seconds in (pace.step_s, first_step_s)):
            return None
        return Candidate(
            config=one.config,
            pace=pace,
            peak_bytes=one.peak_bytes,
            raced=one.raced,
            fresh=one.config in self._fresh,
        )


def table(record: Record, sound: Callable[[Config], bool]) -> list[BreakEven]:
    """Which config is the best from how many steps on, at the user's batch."""
    known = candidates(record, record.batch, sound)
    return [
        BreakEven(steps=steps, seconds=known[i].pace.time_s(steps), candidate=known[i])
        for steps, i in break_even([one.pace for one in known])
    ]


def length_of(record: Record) -> Length | None:
    """The job that a record's advice was chosen for; None for the steady state."""
    made = record.provenance
    if not (made.steps or made.duration_s):
        return None
    return Length(batch=record.batch, steps=made.steps, seconds=made.duration_s)


def _choices(record: Record) -> list[Choice]:
    return [record.baseline, *(one.choice for one in record.winners), *record.raced]
