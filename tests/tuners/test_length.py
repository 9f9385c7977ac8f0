"""Throughput of a config over a whole job, break-even and first-step costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.tuners.knobs import FIRST_STEP_COSTS
from advisor.tuners.length import Length, Pace, break_even, first_step_seen
from tests.builders import measured

PLAIN = Pace(batch=64, first_step_s=2.0, step_s=0.5)
DOUBLE_BATCH = Pace(batch=128, first_step_s=3.0, step_s=0.75)


@pytest.mark.parametrize(
    ("job", "pace", "rate"),
    [
        (Length(batch=64, steps=5), PLAIN, 80.0),
        # A fraction of a step counts as one step. Twice the batch needs half the steps.
        (Length(batch=64, steps=1), DOUBLE_BATCH, 64 / 3.0),
        (Length(batch=64, steps=5), DOUBLE_BATCH, 320.0 / (3.0 + 1.5 * 0.75)),
        (Length(batch=1, steps=1), PLAIN, 1 / 2.0),
        (Length(batch=64, seconds=10.0), PLAIN, 64 * 8.0 / 0.5 / 10.0),
        (Length(batch=64, seconds=10.0), DOUBLE_BATCH, 128 * 7.0 / 0.75 / 10.0),
        # The job ends before the first step.
        (Length(batch=64, seconds=1.5), PLAIN, 0.0),
    ],
)
def test_rate_covers_the_whole_job(job: Length, pace: Pace, rate: float) -> None:
    assert job.rate(pace) == pytest.approx(rate)


def pace(first_step_s: float, step_s: float) -> Pace:
    return Pace(batch=1, first_step_s=first_step_s, step_s=step_s)


@given(
    st.lists(
        st.builds(pace, st.integers(0, 60).map(float), st.integers(1, 12).map(float)),
        min_size=1,
        max_size=6,
    )
)
@example([pace(0.0, 10.0), pace(20.0, 5.0), pace(41.0, 1.0)])  # the second is best at 6 steps only
def test_break_even_is_the_lower_envelope(paces: list[Pace]) -> None:
    table = break_even(paces)
    assert break_even([]) == []
    assert [start for start, _ in table] == sorted({start for start, _ in table})
    for steps in range(1, 130):
        _, best = [row for row in table if row[0] <= steps][-1]
        assert paces[best].time_s(steps) == min(one.time_s(steps) for one in paces)


BASE = Config(batch_size=64, compile="none", cudnn_benchmark=False, precision="default")


def test_first_step_seen_is_the_slowest_with_the_same_cost_knobs() -> None:
    cost_knobs = ("compile", "cudnn_benchmark")
    benchmark = BASE.replace(cudnn_benchmark=True)
    compiled = BASE.replace(compile="default")
    both = compiled.replace(cudnn_benchmark=True)
    seen = [(BASE, 1.0), (BASE.replace(precision="tf32"), 2.0), (benchmark, 4.0), (compiled, 9.0)]
    trials = [measured(c, 1.0, s) for c, s in (*seen, (both, 3.0), (BASE.at(8), 50.0))]
    trials.append(measured(BASE, 1.0, 60.0, stage="input"))
    assert first_step_seen(trials, BASE, cost_knobs) == 2.0
    assert first_step_seen(trials, benchmark, cost_knobs) == 4.0
    assert first_step_seen(trials, compiled, cost_knobs) == 9.0
    assert first_step_seen(trials, both, cost_knobs) == 9.0
    # Another compile mode has another cost.
    assert first_step_seen(trials, BASE.replace(compile="cudagraphs"), cost_knobs) == 2.0
    assert [first_step_seen(trials, BASE.at(batch), cost_knobs) for batch in (8, 16)] == [50.0, 0.0]
    # Without cost knobs, all configs count.
    assert first_step_seen(trials, BASE, ()) == 9.0
    crashed = [replace(one, measurement=Measurement(outcome="crashed")) for one in trials]
    assert first_step_seen(crashed, BASE, cost_knobs) == 0.0
    # A config with threads says nothing about one without.
    threads = [measured(BASE.replace(threads=n), 1.0, s) for n, s in ((1, 0.002), (2, 0.15))]
    seen = [first_step_seen(threads, one.config, FIRST_STEP_COSTS) for one in threads]
    assert seen == [0.002, 0.15]
