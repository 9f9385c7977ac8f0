"""First steps in fresh processes: what is measured, what is afforded, what is taken otherwise."""

from __future__ import annotations

from pathlib import Path

from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.tuners.measure.first_step import ANEW, Compiled, Starts

DEFAULT = Config(batch_size=4, compile="none", precision="default")
COMPILED = DEFAULT.replace(compile="default", precision="bf16")
OTHER = COMPILED.replace(precision="tf32")


def trial(config: Config, first_step_s: float) -> Trial:
    return Trial(
        number=0,
        config=config,
        measurement=Measurement(outcome="ok", first_step_s=first_step_s),
        stage="compute",
        origin="guess",
        seconds=1.0,
    )


class Simulated:
    """Every start takes a second more than the slowest trial did; `time` is what is left."""

    def __init__(self, time: float, fails: tuple[Config, ...] = ()) -> None:
        self.time, self.fails = time, fails
        self.started: list[Config] = []

    def start(self, config: Config, *, deadline_s: float, compiled: Compiled = ANEW) -> Measurement:
        self.started.append(config)
        first = {DEFAULT: 1.5, COMPILED: 31.0}[config]
        self.time -= first
        if config in self.fails:
            return Measurement(outcome="timed_out", reason="simulated")
        return Measurement(outcome="ok", first_step_s=first)

    def save(self, config: Config, file: Path) -> None:
        raise AssertionError("nothing is kept")

    def starts(self) -> Starts:
        trials = [trial(DEFAULT, 0.5), trial(OTHER, 30.0), trial(COMPILED, 3.0)]
        return Starts(self, trials, process_s=2.0, left_s=lambda: self.time)


def test_what_there_is_time_for_is_measured_the_default_first() -> None:
    runner = Simulated(100.0)
    starts = runner.starts()
    starts.measure(DEFAULT, [COMPILED, DEFAULT])
    starts.measure(DEFAULT, [COMPILED])
    assert runner.started == [DEFAULT, COMPILED]
    assert starts.of(COMPILED, DEFAULT) == 31.0
    # Not started itself: what compiled alike, and what every fresh process pays.
    assert starts.of(OTHER, DEFAULT) == 30.0 + 1.0


def test_what_takes_too_long_is_taken_from_the_trials() -> None:
    runner = Simulated(20.0)
    starts = runner.starts()
    starts.measure(DEFAULT, [COMPILED])
    assert runner.started == [DEFAULT]
    # Not its own 3 s, for which another trial had paid.
    assert starts.of(COMPILED, DEFAULT) == 31.0


def test_nothing_is_compared_with_a_default_that_was_not_started() -> None:
    for runner in (Simulated(1.0), Simulated(100.0, fails=(DEFAULT,))):
        starts = runner.starts()
        starts.measure(DEFAULT, [COMPILED])
        assert starts.fresh == {} and COMPILED not in runner.started
        assert (starts.of(DEFAULT, DEFAULT), starts.of(COMPILED, DEFAULT)) == (0.5, 30.0)
