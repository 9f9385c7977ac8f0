"""The winner for each use, from the rates that the race measured."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.cache.config import Config
from advisor.cache.record import USES, Choice
from advisor.errors import WorkerError
from advisor.tuners import knobs
from advisor.tuners.search.race import SearchResult, choose
from advisor.tuners.search.ratio import Noise
from advisor.tuners.search.space import Space

SPACE = Space(
    {
        "precision": ("default", "tf32", "bf16", "fp16"),
        "channels_last": (False, True),
        "step_graph": (False, True),
        "num_workers": (0, 4, 8, 16),
        "batch_size": (64, 128, 256),
    }
)
PLAIN = SPACE.default
TF32, BF16, FP16 = (PLAIN.replace(precision=name) for name in ("tf32", "bf16", "fp16"))
FAST, CAPTURED = BF16.replace(channels_last=True), BF16.replace(step_graph=True)
FOUR, EIGHT, SIXTEEN = (PLAIN.replace(num_workers=number) for number in (4, 8, 16))
LOOP, CAPTURE, FREE, FREE_CAPTURE = (
    (use, free) for free in (False, True) for use in ("loop", "capture")
)
Rates = dict[Config, float | list[float]]


def turns(rates: Rates) -> dict[Config, list[float]]:
    """Repeat single rates for six turns. PLAIN has a rate of 100 by default."""
    known = {PLAIN: 100.0, **rates}
    return {c: rate if isinstance(rate, list) else [rate] * 6 for c, rate in known.items()}


def winner(result: SearchResult, use: str = "loop", free: bool = False) -> Choice:
    return next(one.choice for one in result.winners if (one.use, one.free) == (use, free))


def noisy(std: float) -> Rates:
    """Return 18 noisy turns each of FAST and PLAIN, whose rates are 42 to 1."""
    draw = random.Random(1)
    rates = {PLAIN: 100.0, FAST: 4200.0}
    return {c: [r * math.exp(draw.gauss(0, std)) for _ in range(18)] for c, r in rates.items()}


NOISE = [1.0, 0.9, 1.1, 1.0, 0.9, 1.1]
NOISY_BF16: Rates = {BF16: [200.0 * s for s in NOISE]}
BOTH_LARGE: Rates = {BF16.at(256): 300.0, CAPTURED.at(256): 301.0}
TWO_TURNS: Rates = {BF16: 150.0, CAPTURED.at(256): [100.0, 20000.0]}
UNCERTAIN: Rates = {BF16: 150.0, BF16.at(256): [225.0, 127.5] * 3}
BUSY: Rates = {PLAIN: [100.0] * 18, TF32: [150.0] * 18, BF16: [260.0, 150.0] * 9}


@pytest.mark.parametrize(
    ("rates", "use", "best"),
    [
        ({BF16: 130.0, FAST: 200.0}, LOOP, FAST),
        ({BF16: 100.5, FAST: 60.0}, LOOP, PLAIN),
        # Among ties, the one with the fewest changes, requirements or workers wins.
        ({BF16: 199.5, FAST: 200.0}, LOOP, BF16),
        ({FOUR: 150.0, EIGHT: 200.0, SIXTEEN: 200.5}, LOOP, EIGHT),
        ({BF16: 150.0, CAPTURED: 150.5}, CAPTURE, BF16),
        ({BF16: 150.0, CAPTURED: 90.0}, CAPTURE, BF16),
        ({TF32: 150.0, BF16: 150.9}, LOOP, TF32),
        ({FP16: 151.0, BF16: 150.0}, LOOP, BF16),
        ({FP16: 160.0, BF16: 150.0}, LOOP, FP16),
        # FAST leads by 2% with 10% noise, by 8% with 10% noise, and by 2% without noise.
        (NOISY_BF16 | {FAST: [204.0 * s for s in reversed(NOISE)]}, LOOP, BF16),
        (NOISY_BF16 | {FAST: [216.0 * s for s in reversed(NOISE)]}, LOOP, FAST),
        ({BF16: 200.0, FAST: 204.0}, LOOP, FAST),
        # A speed-up of 42x with an interval of 20 to 89 was noise in a real case.
        (noisy(0.6), LOOP, PLAIN),
        (noisy(0.05), LOOP, FAST),
        # If the batch size is free, the smallest batch near the best rate wins.
        ({FAST: 200.0, FAST.at(128): 392.0, FAST.at(256): 400.0}, FREE, FAST.at(128)),
        ({FAST: 200.0, FAST.at(128): 392.0, FAST.at(256): 400.0}, LOOP, FAST),
        # Two turns are too few.
        (TWO_TURNS, FREE, BF16),
        (TWO_TURNS, FREE_CAPTURE, BF16),
        # Ties at the same batch size: the one with fewer requirements wins.
        (BOTH_LARGE | {BF16: 150.0, CAPTURED: 200.0}, FREE_CAPTURE, BF16.at(256)),
        (BOTH_LARGE | {BF16: 150.0, CAPTURED: 200.0}, CAPTURE, CAPTURED),
        # Faster than the default, but level with the winner at the user's batch size.
        ({BF16: 150.0, BF16.at(256): 150.8}, FREE, BF16),
        # It leads by 13% with 50% noise.
        (UNCERTAIN, FREE, BF16),
        # On a busy host the result is unclear. The winner at the fixed batch size stays.
        (BUSY, LOOP, BF16),
        (BUSY, FREE, BF16),
    ],
)
def test_simplest_of_the_fastest_wins(rates: Rates, use: tuple[str, bool], best: Config) -> None:
    assert winner(choose(SPACE, turns(rates), {}), *use).config == best


def test_winner_has_an_interval_and_its_peak_memory() -> None:
    result = choose(SPACE, turns(noisy(0.01)), {FAST: 7})
    best = winner(result)
    assert best.speedup_low < 42.0 < best.speedup_high and best.peak_bytes == 7
    assert result.baseline.config == PLAIN and result.baseline.speedup == 1.0


def test_winner_of_each_use_is_the_best_that_the_use_can_apply() -> None:
    result = choose(SPACE, turns({TF32: 120.0, BF16: 150.0, CAPTURED: 400.0}), {})
    winners = [winner(result, use) for use in USES]
    assert [one.config for one in winners] == [TF32, BF16, BF16, CAPTURED]
    # Each speed-up is relative to torch's default at the user's batch size.
    assert [round(one.speedup, 3) for one in winners] == [1.2, 1.5, 1.5, 4.0]


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.sampled_from([c for b in (64, 256) for c in SPACE.configs(b)]),
        st.lists(st.floats(10.0, 1000.0), min_size=1, max_size=5),
        max_size=8,
    )
)
def test_every_winner_is_clearly_faster_or_the_default(rates: dict[Config, list[float]]) -> None:
    result = choose(SPACE, {PLAIN: [100.0, 101.0, 99.0]} | rates, {})
    assert {(one.use, one.free) for one in result.winners} == {
        (use, free) for use in USES for free in (False, True)
    }
    for one in result.winners:
        choice = one.choice
        assert knobs.follows(one.use, choice.config, PLAIN)
        assert one.free or choice.batch == 64
        assert choice.config == PLAIN or (choice.speedup >= 1.01 and choice.speedup_low > 1.0)


def test_no_winner_without_rates_of_the_default() -> None:
    with pytest.raises(WorkerError):
        choose(SPACE, {FAST: [1.0]}, {})


STEADY, UNSTEADY = Noise(0.01, 8), Noise(0.3, 8)


@pytest.mark.parametrize(("noise", "best"), [(Noise(), PLAIN), (STEADY, FAST), (UNSTEADY, PLAIN)])
def test_two_turns_suffice_if_the_baseline_is_steady(noise: Noise, best: Config) -> None:
    rates = {PLAIN: [100.0] * 2, FAST: [200.0] * 2}
    assert winner(choose(SPACE, rates, {}, noise=noise)).config == best
