"""The winner for each use, by what the race measured."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cache.config import Config
from advisor.cache.record import RACED, Choice
from advisor.errors import WorkerError
from advisor.tuners import knobs
from advisor.tuners.length import Length, Pace
from advisor.tuners.search import race
from advisor.tuners.search.ratio import Noise
from advisor.tuners.search.space import Space


class Judged(race.SearchResult):
    """With its winners by use."""

    def winner(self, use: str, *, free: bool = False) -> Choice:
        return next(one.choice for one in self.winners if (one.use, one.free) == (use, free))


def choose(*given: Any, **named: Any) -> Judged:
    found = race.choose(*given, **named)
    return Judged(baseline=found.baseline, winners=found.winners, raced=found.raced)


SPACE = Space(
    {
        "precision": ("default", "bf16"),
        "channels_last": (False, True),
        "batch_size": (64, 128, 256),
    }
)
DEFAULT = SPACE.default
FAST = DEFAULT.replace(precision="bf16", channels_last=True)
BF16 = DEFAULT.replace(precision="bf16")


def known(rates: dict[Config, float], turns: int = 6, scatter: float = 0.0) -> dict[Config, Any]:
    """What a race saw: turns that scatter about a rate, each config's in its own order."""
    draw = random.Random(1)
    return {
        c: [r * math.exp(draw.gauss(0, scatter)) for _ in range(turns)] for c, r in rates.items()
    }


def test_the_faster_config_is_chosen() -> None:
    rates = known({DEFAULT: 100.0, BF16: 130.0, FAST: 200.0}, scatter=0.01)
    verdict = choose(SPACE, rates, {FAST: 7})
    assert verdict.winner("loop").config == FAST
    assert verdict.winner("loop").speedup_low < 2.0 < verdict.winner("loop").speedup_high
    assert verdict.winner("loop").peak_bytes == 7
    assert verdict.baseline.config == DEFAULT


def test_of_what_ties_fewer_workers_are_advised() -> None:
    space = Space({"batch_size": (64,), "num_workers": (0, 4, 8, 16)})
    held, four, eight, all_of_them = (
        space.default.replace(num_workers=number) for number in (0, 4, 8, 16)
    )
    rates = {held: [100.0] * 4, four: [150.0] * 4, eight: [200.0] * 4, all_of_them: [200.5] * 4}
    assert choose(space, rates, {}).winner("loop").config == eight


def test_nothing_faster_means_the_default() -> None:
    rates = known({DEFAULT: 100.0, BF16: 100.5, FAST: 60.0})
    assert choose(SPACE, rates, {}).winner("loop").config == DEFAULT


def test_of_equals_the_one_that_changes_least() -> None:
    rates = known({DEFAULT: 100.0, BF16: 199.5, FAST: 200.0})
    assert choose(SPACE, rates, {}).winner("loop").config == BF16


def test_noise_does_not_buy_a_change() -> None:
    # FAST is ahead by 2% in turns that scatter by 10%: not told apart, so the simpler one it is.
    swing = [1.0, 0.9, 1.1, 1.0, 0.9, 1.1]
    rates = {
        DEFAULT: [100.0] * 6,
        BF16: [200.0 * s for s in swing],
        FAST: [204.0 * s for s in reversed(swing)],
    }
    assert choose(SPACE, rates, {}).winner("loop").config == BF16
    # What is ahead by 8% is not given away for that.
    ahead = rates | {FAST: [216.0 * s for s in reversed(swing)]}
    assert choose(SPACE, ahead, {}).winner("loop").config == FAST
    steady = rates | {BF16: [200.0] * 6, FAST: [204.0] * 6}
    assert choose(SPACE, steady, {}).winner("loop").config == FAST


def test_free_batch_is_the_smallest_near_the_best() -> None:
    rates = {
        DEFAULT: 100.0,
        FAST: 200.0,
        FAST.replace(batch_size=128): 392.0,
        FAST.replace(batch_size=256): 400.0,
    }
    verdict = choose(SPACE, known(rates), {})
    assert verdict.winner("loop", free=True).batch == 128
    assert verdict.winner("loop").batch == 64


def test_a_short_job_is_chosen_for_by_its_whole_time() -> None:
    rates = known({DEFAULT: 100.0, BF16: 150.0, FAST: 200.0})
    first = {DEFAULT: 1.0, BF16: 1.0, FAST: 30.0}

    def chosen(steps: int) -> Judged:
        job = Length(steps=steps, batch=64)

        def weigh(config: Config, rate: float) -> float:
            return job.rate(Pace(batch=64, first_step_s=first[config], step_s=64 / rate))

        return choose(SPACE, rates, {FAST: 7}, weigh)

    assert chosen(1).winner("loop").config == DEFAULT
    assert chosen(100).winner("loop").config == BF16
    verdict = chosen(1000)
    # What is told of it is the steady state, as ever.
    assert verdict.winner("loop") == choose(SPACE, rates, {FAST: 7}).winner("loop")
    assert verdict.winner("loop").samples_per_s == 200.0


CUDA = Space(
    {
        "precision": ("default", "tf32", "bf16", "fp16"),
        "compile": ("none", "default"),
        "step_graph": (False, True),
        "batch_size": (64, 128, 256),
    }
)
PLAIN = CUDA.default
TF32 = PLAIN.replace(precision="tf32")
LOOPED = PLAIN.replace(precision="bf16")
GRAPHED = LOOPED.replace(step_graph=True)


def test_each_use_has_the_best_that_it_can_follow() -> None:
    rates = known({PLAIN: 100.0, TF32: 120.0, LOOPED: 150.0, GRAPHED: 400.0})
    verdict = choose(CUDA, rates, {})
    found = {use: verdict.winner(use).config for use in RACED}
    assert found == {"flags": TF32, "pilot": LOOPED, "loop": LOOPED, "capture": GRAPHED}
    # Each has its own interval against torch's default at the user's batch.
    assert [round(verdict.winner(use).speedup, 3) for use in RACED] == [1.2, 1.5, 1.5, 4.0]
    assert verdict.baseline.config == PLAIN and verdict.baseline.speedup == 1.0


def test_what_asks_more_and_gains_nothing_is_what_asks_less() -> None:
    for graphed in (150.5, 149.0, 90.0):
        verdict = choose(CUDA, known({PLAIN: 100.0, LOOPED: 150.0, GRAPHED: graphed}), {})
        assert verdict.winner("capture").config == LOOPED
    verdict = choose(CUDA, known({PLAIN: 100.0, TF32: 150.0, LOOPED: 150.9}), {})
    assert verdict.winner("loop").config == TF32


def test_of_fp16_and_bf16_within_noise_bf16_is_advised() -> None:
    fp16 = PLAIN.replace(precision="fp16")
    assert choose(CUDA, known({PLAIN: 100.0, fp16: 151.0, LOOPED: 150.0}), {}).winner(
        "loop"
    ).config == (LOOPED)
    assert choose(CUDA, known({PLAIN: 100.0, fp16: 160.0, LOOPED: 150.0}), {}).winner(
        "loop"
    ).config == (fp16)


def test_the_free_batch_meets_the_same_rule() -> None:
    """A record said 14.74x (0.27-795.91): two turns, which tell nothing."""
    large = GRAPHED.at(256)
    wild = known({PLAIN: 100.0, LOOPED: 150.0}) | {large: [100.0, 20000.0]}
    verdict = choose(CUDA, wild, {})
    assert all(verdict.winner(use, free=True).config == LOOPED for use in ("loop", "capture"))
    assert all(verdict.winner("flags", free=free).config == PLAIN for free in (False, True))
    # As fast as what asks less, at the same batch.
    both = {LOOPED.at(256): 300.0, large: 301.0}
    tied = choose(CUDA, known({PLAIN: 100.0, LOOPED: 150.0, GRAPHED: 200.0} | both), {})
    assert tied.winner("capture", free=True).config == LOOPED.at(256)
    assert tied.winner("capture").config == GRAPHED
    # Faster than the default, but not than what wins at the user's batch.
    same = choose(CUDA, known({PLAIN: 100.0, LOOPED: 150.0, LOOPED.at(256): 150.8}), {})
    assert same.winner("loop", free=True).config == LOOPED
    # Ahead by 13% in turns that swing by 50%.
    swing = [225.0, 127.5] * 3
    unsure = known({PLAIN: 100.0, LOOPED: 150.0}) | {LOOPED.at(256): swing}
    assert choose(CUDA, unsure, {}).winner("loop", free=True).samples_per_s == 150.0
    assert choose(CUDA, unsure, {}).winner("loop", free=True).batch == 64


def test_with_the_batch_free_nothing_worse_is_served_at_the_users() -> None:
    """Neither a tie nor clearly faster, as on a busy host: what is fixed is served free too."""
    noisy = known({PLAIN: 100.0, TF32: 150.0}, 18) | {LOOPED: [260.0, 150.0] * 9}
    verdict = choose(CUDA, noisy, {})
    fixed, free = verdict.winner("loop"), verdict.winner("loop", free=True)
    assert fixed.config == LOOPED and free == fixed


@given(
    st.dictionaries(
        st.sampled_from([c for b in (64, 256) for c in CUDA.configs(b)]),
        st.lists(st.floats(10.0, 1000.0), min_size=1, max_size=5),
        max_size=8,
    )
)
def test_every_winner_is_clearly_faster_or_the_default(rates: dict[Config, list[float]]) -> None:
    verdict = choose(CUDA, {PLAIN: [100.0, 101.0, 99.0]} | rates, {})
    assert {(one.use, one.free) for one in verdict.winners} == {
        (use, free) for use in RACED for free in (False, True)
    }
    for one in verdict.winners:
        choice = one.choice
        assert knobs.follows(one.use, choice.config, PLAIN)
        assert one.free or choice.batch == 64
        assert choice.config == PLAIN or (choice.speedup >= 1.01 and choice.speedup_low > 1.0)


def test_without_the_default_there_is_no_verdict() -> None:
    with pytest.raises(WorkerError):
        choose(SPACE, {FAST: [1.0]}, {})


def test_two_turns_are_advised_where_the_baseline_is_known_to_be_steady() -> None:
    rates = known({DEFAULT: 100.0, FAST: 200.0}, turns=2)
    for noise, chosen in ((Noise(), DEFAULT), (Noise(0.01, 8), FAST), (Noise(0.3, 8), DEFAULT)):
        assert choose(SPACE, rates, {}, noise=noise).winner("loop").config == chosen


def test_what_may_be_anything_is_not_advised() -> None:
    """A record said 42 times (19.8-89.0), of a network that gained nothing on a quiet host."""
    rates = known({DEFAULT: 100.0, FAST: 4200.0}, turns=18, scatter=0.6)
    assert choose(SPACE, rates, {}).winner("loop").config == DEFAULT
    assert (
        choose(SPACE, known({DEFAULT: 100.0, FAST: 4200.0}, 18, 0.05), {}).winner("loop").config
        == FAST
    )
