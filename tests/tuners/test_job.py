"""Job lengths: which config is worth it from how many steps on."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.tuners.knobs import FIRST_STEP_COSTS
from advisor.tuners.length import Length, Pace, break_even, first_step_seen

EAGER = Pace(batch=64, first_step_s=0.5, step_s=0.030)
COMPILED = Pace(batch=64, first_step_s=25.5, step_s=0.010)


def test_a_short_job_is_no_place_to_compile() -> None:
    # 25 s more before the first step, 20 ms less at every step after it: even at 1,251 steps.
    for steps, better in ((1, EAGER), (500, EAGER), (1251, EAGER), (1252, COMPILED)):
        job = Length(steps=steps, batch=64)
        assert max((EAGER, COMPILED), key=job.rate) == better
    assert break_even([EAGER, COMPILED]) == [(1, 0), (1252, 1)]


def test_samples_a_second() -> None:
    steps = Length(steps=101, batch=64)
    assert steps.rate(EAGER) == pytest.approx(101 * 64 / (0.5 + 100 * 0.030))
    day = Length(seconds=60.5, batch=64)
    assert day.rate(EAGER) == pytest.approx(64 * 2000 / 60.5)
    # Not one step is done before it ends.
    assert Length(seconds=20, batch=64).rate(COMPILED) == 0


def test_another_batch_trains_on_as_many_samples() -> None:
    large = Pace(batch=256, first_step_s=0.5, step_s=0.060)
    job = Length(steps=400, batch=64)
    assert job.rate(large) == pytest.approx(400 * 64 / (0.5 + 99 * 0.060))
    # Less than one of its steps is still one step.
    assert Length(steps=1, batch=64).rate(large) == 64 / 0.5


def test_only_what_is_ever_fastest_counts() -> None:
    never = Pace(batch=64, first_step_s=24.0, step_s=0.029)
    assert break_even([EAGER, never, COMPILED]) == [(1, 0), (1252, 2)]
    assert break_even([]) == []
    assert break_even([EAGER, EAGER]) == [(1, 0)]
    # Quicker to start and quicker at every step: the other one never pays.
    assert break_even([EAGER, Pace(batch=64, first_step_s=0.4, step_s=0.02)]) == [(1, 1)]


paces = st.builds(
    Pace,
    batch=st.just(8),
    first_step_s=st.integers(0, 60).map(float),
    step_s=st.integers(1, 12).map(float),
)


@given(st.lists(paces, min_size=1, max_size=6))
@example(
    [
        Pace(batch=8, first_step_s=0.0, step_s=10.0),
        Pace(batch=8, first_step_s=20.0, step_s=5.0),  # the best of 6 steps, and of no other
        Pace(batch=8, first_step_s=41.0, step_s=1.0),
    ]
)
def test_it_is_the_lower_envelope(some: list[Pace]) -> None:
    table = break_even(some)
    assert table[0][0] == 1
    assert [start for start, _ in table] == sorted({start for start, _ in table})
    for steps in range(1, 130):
        _, taken = [row for row in table if row[0] <= steps][-1]
        assert some[taken].time_s(steps) == min(pace.time_s(steps) for pace in some)


def trial(first_step_s: float, stage: str = "compute", **config: object) -> Trial:
    return Trial(
        number=0,
        config=Config(config),  # type: ignore[arg-type]
        measurement=Measurement(outcome="ok", first_step_s=first_step_s),
        stage=stage,
        origin="guess",
        seconds=1.0,
    )


def test_what_an_earlier_trial_had_paid_is_counted() -> None:
    trials = [
        trial(0.3, precision="tf32", search=False, batch_size=64),
        trial(26.0, precision="tf32", search=True, batch_size=64),
        trial(0.05, precision="bf16", search=True, batch_size=64),
        trial(40.0, precision="bf16", search=True, batch_size=128),
        trial(99.0, stage="input", precision="bf16", search=True, batch_size=64),
    ]
    config = Config(precision="bf16", search=True, batch_size=64)
    assert first_step_seen(trials, config, ["search"]) == 26.0
    assert first_step_seen(trials, config.replace(search=False), ["search"]) == 0.3
    assert first_step_seen(trials, config.replace(batch_size=32), ["search"]) == 0.0


def test_what_was_compiled_once_is_not_free_for_the_next() -> None:
    plain = {"compile": "none", "search": False, "batch_size": 64}
    trials = [
        trial(0.3, **plain),
        trial(25.0, **plain | {"compile": "default"}),
        trial(1.2, **plain | {"compile": "default", "search": True}),
        trial(6.0, **plain | {"search": True}),
    ]
    paying = ["compile", "search"]
    both = Config(compile="default", search=True, batch_size=64)
    assert first_step_seen(trials, both, paying) == 25.0
    assert first_step_seen(trials, both.replace(compile="none"), paying) == 6.0


def test_what_starts_threads_does_not_tell_of_what_starts_none() -> None:
    trials = [
        trial(0.002, threads=1, batch_size=64),
        trial(0.150, threads=2, batch_size=64),
    ]
    assert "threads" in FIRST_STEP_COSTS
    assert first_step_seen(trials, trials[0].config, FIRST_STEP_COSTS) == 0.002
    assert first_step_seen(trials, trials[1].config, FIRST_STEP_COSTS) == 0.150
