"""What a config is worth over a job: the arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.tuners.length import Length, Pace, break_even, first_step_seen

PLAIN = Pace(batch=64, first_step_s=2.0, step_s=0.5)
TWICE = Pace(batch=128, first_step_s=3.0, step_s=0.75)


def test_pace() -> None:
    assert PLAIN.time_s(1) == 2.0
    assert PLAIN.time_s(3) == 3.0
    assert PLAIN.time_s(1.5) == 2.25
    # One step at least.
    assert PLAIN.time_s(0) == 2.0


def test_steps() -> None:
    job = Length(batch=64, steps=5)
    assert job.rate(PLAIN) == 80.0
    # At twice the batch it is half as many steps.
    assert job.rate(TWICE) == 320.0 / (3.0 + 1.5 * 0.75)
    assert Length(batch=1, steps=1).rate(PLAIN) == 1 / 2.0


def test_seconds() -> None:
    job = Length(batch=64, seconds=10.0)
    assert job.rate(PLAIN) == 64 * 8.0 / 0.5 / 10.0 == 102.4
    assert job.rate(TWICE) == pytest.approx(128 * 7.0 / 0.75 / 10.0)
    assert Length(batch=64, seconds=1.5).rate(PLAIN) == 0.0


def pace(first_step_s: float, step_s: float) -> Pace:
    return Pace(batch=1, first_step_s=first_step_s, step_s=step_s)


@pytest.mark.parametrize(
    ("paces", "rows"),
    [
        ([], []),
        ([(1, 1)], [(1, 0)]),
        # 4 + s/2 is less than 1 + s from s = 7 on, with the first step counted in both.
        ([(1, 1), (4, 0.5)], [(1, 0), (8, 1)]),
        # Never the fastest: as slow a step, or a first step as dear for a slower one.
        ([(1, 1), (2, 1), (1, 2)], [(1, 0)]),
        # Of equal ones the first given.
        ([(1, 1), (1, 1)], [(1, 0)]),
        ([(2, 2), (1, 1)], [(1, 1)]),
        ([(1, 1), (4, 0.5), (4, 0.25)], [(1, 0), (6, 2)]),
        ([(1, 1), (3, 0.5), (23, 0.25)], [(1, 0), (6, 1), (82, 2)]),
        # Two overtake at one step: the one that is the fastest there.
        ([(1, 1), (4, 0.5), (4.1, 0.48)], [(1, 0), (7, 2)]),
        ([(0, 1), (0, 1), (1, 0.5)], [(1, 0), (4, 2)]),
    ],
)
def test_break_even(paces: list[tuple[float, float]], rows: list[tuple[int, int]]) -> None:
    made = [pace(*one) for one in paces]
    found = break_even(made)
    for steps, index in found:
        times = [one.time_s(steps) for one in made]
        assert times[index] == min(times)
        if steps > 1:
            before = [one.time_s(steps - 1) for one in made]
            assert before[index] >= min(before)
    assert found == rows


BASE = Config(batch_size=64, compile="none", cudnn_benchmark=False, precision="default")


def trial(config: Config, first_step_s: float, stage: str = "compute") -> Trial:
    return Trial(
        number=0,
        config=config,
        measurement=Measurement(outcome="ok", first_step_s=first_step_s),
        stage=stage,
        origin="guess",
        seconds=1.0,
    )


def test_the_slowest_first_step_of_those_that_pay_for_nothing_else() -> None:
    paying = ("compile", "cudnn_benchmark")
    searching = BASE.replace(cudnn_benchmark=True)
    compiled = BASE.replace(compile="default")
    both = compiled.replace(cudnn_benchmark=True)
    trials = [
        trial(BASE, 1.0),
        trial(BASE.replace(precision="tf32"), 2.0),
        trial(searching, 4.0),
        trial(compiled, 9.0),
        trial(both, 3.0),
        trial(BASE.at(8), 50.0),
        trial(BASE, 60.0, "input"),
    ]
    assert first_step_seen(trials, BASE, paying) == 2.0
    assert first_step_seen(trials, searching, paying) == 4.0
    assert first_step_seen(trials, compiled, paying) == 9.0
    assert first_step_seen(trials, both, paying) == 9.0
    # Another mode is another price.
    assert first_step_seen(trials, BASE.replace(compile="cudagraphs"), paying) == 2.0
    assert first_step_seen(trials, BASE.at(8), paying) == 50.0
    assert first_step_seen(trials, BASE.at(16), paying) == 0.0
    # All pay alike where nothing is paid for.
    assert first_step_seen(trials, BASE, ()) == 9.0
    none = [replace(one, measurement=Measurement(outcome="crashed")) for one in trials]
    assert first_step_seen(none, BASE, paying) == 0.0
