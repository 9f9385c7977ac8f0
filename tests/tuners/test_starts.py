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
        self.how: list[Compiled] = []

    def start(self, config: Config, *, deadline_s: float, compiled: Compiled = ANEW) -> Measurement:
        self.started.append(config)
        self.how.append(compiled)
        warm = compiled.loads is not None or not compiled.anew
        first = 3.0 if warm else {DEFAULT: 1.5, COMPILED: 31.0}[config]
        self.time -= first
        if compiled.saves is not None:
            compiled.saves.write_text("its own")
        if config in self.fails:
            return Measurement(outcome="timed_out", reason="simulated")
        return Measurement(outcome="ok", first_step_s=first)

    def save(self, config: Config, file: Path) -> None:
        assert config == COMPILED
        file.write_text("all that was raced")

    def starts(self, folder: Path | None = None) -> Starts:
        trials = [trial(DEFAULT, 0.5), trial(OTHER, 30.0), trial(COMPILED, 3.0)]
        return Starts(self, trials, process_s=2.0, left_s=lambda: self.time, folder=folder)


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


def kept(time: float, folder: Path) -> tuple[Simulated, Starts]:
    """What comes of a tuning with so much time for first steps."""
    runner = Simulated(time)
    starts = runner.starts(folder)
    starts.save_raced([DEFAULT, COMPILED])
    starts.measure(DEFAULT, [COMPILED])
    starts.keep(DEFAULT, [COMPILED, DEFAULT])
    return runner, starts


def test_artifacts_of_a_first_step_are_kept_and_measured(tmp_path: Path) -> None:
    runner, starts = kept(100.0, tmp_path)
    assert runner.started == [DEFAULT, COMPILED, COMPILED]
    assert starts.artifacts[COMPILED].read_text() == "its own"
    assert runner.how[-1] == Compiled(loads=starts.artifacts[COMPILED])
    assert (starts.fresh[COMPILED], starts.loaded) == (31.0, {COMPILED: 3.0})


def test_without_time_to_compile_anew_they_are_of_what_was_compiled_before(tmp_path: Path) -> None:
    runner, starts = kept(25.0, tmp_path)
    assert [one.anew for one in runner.how] == [True, False, True]
    assert starts.artifacts[COMPILED].read_text() == "its own"
    assert COMPILED not in starts.fresh and starts.loaded == {COMPILED: 3.0}


def test_without_any_time_they_are_of_all_that_was_raced(tmp_path: Path) -> None:
    runner, starts = kept(5.0, tmp_path)
    assert runner.started == [DEFAULT] and starts.loaded == {}
    assert starts.artifacts[COMPILED].read_text() == "all that was raced"


def test_no_artifacts_are_kept_where_none_are_wanted() -> None:
    runner = Simulated(100.0)
    starts = runner.starts()
    starts.save_raced([COMPILED])
    starts.measure(DEFAULT, [COMPILED])
    starts.keep(DEFAULT, [COMPILED])
    assert starts.artifacts == {} and {one.saves for one in runner.how} == {None}
