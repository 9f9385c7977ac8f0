"""Ratios of two configs measured in turn, and how often their interval holds the truth."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from advisor.tuners.decisions import CLEARLY, LOOKS
from advisor.tuners.search.ratio import UNKNOWN_RATIO, Noise, Ratio, ratio_of

Draw = Callable[[random.Random, int], list[float]]
"""Logarithms of the rates of so many blocks in a row."""


def normal(rng: random.Random, blocks: int) -> list[float]:
    """Noise of a quiet GPU."""
    return [rng.gauss(0, 0.005) for _ in range(blocks)]


def busy(correlation: float) -> Draw:
    """Noise of a host that is busy for several blocks in a row: an AR(1) series."""

    def draw(rng: random.Random, blocks: int) -> list[float]:
        fresh = math.sqrt(1 - correlation**2)
        found = [rng.gauss(0, 0.03)]
        for _ in range(blocks - 1):
            found.append(correlation * found[-1] + fresh * rng.gauss(0, 0.03))
        return found

    return draw


def loaded(mean_blocks: float) -> Draw:
    """Noise of a host on which something else runs for stretches of so many blocks."""

    def draw(rng: random.Random, blocks: int) -> list[float]:
        found: list[float] = []
        while len(found) < blocks:
            level = 0.0 if rng.random() < 0.5 else rng.uniform(-math.log(5), math.log(5))
            found += [level] * (1 + int(rng.expovariate(1 / mean_blocks)))
        return [level + rng.gauss(0, 0.005) for level in found[:blocks]]

    return draw


def race(draw: Draw, rng: random.Random, configs: int) -> list[float]:
    """Log-ratios of two configs that are equally fast, raced there and back."""
    logs = draw(rng, configs * LOOKS[-1])
    rounds = [logs[at : at + configs] for at in range(0, len(logs), configs)]
    return [(one[-1] - one[0]) * (1 if turn % 2 == 0 else -1) for turn, one in enumerate(rounds)]


@pytest.mark.parametrize("configs", [2, 4])
@pytest.mark.parametrize(
    "draw",
    [normal, busy(0.5), busy(0.95), loaded(3), loaded(30)],
    ids=["quiet", "busy 0.5", "busy 0.95", "load of 3 blocks", "load of 30 blocks"],
)
def test_an_interval_holds_the_truth_at_every_look(draw: Draw, configs: int) -> None:
    rng, races = random.Random(0), 200
    everywhere = stopped = 0
    for _ in range(races):
        logs = race(draw, rng, configs)
        looks = [ratio_of(logs[:count]) for count in LOOKS]
        everywhere += all(one.low <= 1 <= one.high for one in looks)
        end = next((one for one in looks if one.within(CLEARLY - 1)), looks[-1])
        stopped += end.low <= 1 <= end.high
    assert stopped >= 0.95 * races and everywhere >= 0.92 * races, (stopped, everywhere)


def test_the_interval_is_students_and_yuens() -> None:
    found = ratio_of([0.0, 0.1, 0.2])
    half = 9.92 * 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(math.exp(0.1))
    assert found.high == pytest.approx(math.exp(0.1 + half))
    assert found.low == pytest.approx(math.exp(0.1 - half))
    # Of twelve two are left out at each end; they count as much as their neighbours in the spread.
    logs = [0.0, 9.0, 0.1, -9.0, 0.0, 0.1, 0.0, 0.1, 9.0, 0.1, -9.0, 0.0]
    found = ratio_of(logs)
    assert found.mean == pytest.approx(math.exp(0.05))
    half = 3.5 * 0.05 * math.sqrt(12 / 11) * math.sqrt(11 / 7) / math.sqrt(8)
    assert found.high == pytest.approx(math.exp(0.05 + half), rel=1e-3)


@pytest.mark.parametrize(
    ("logs", "noise", "expected"),
    [
        ([], Noise(), UNKNOWN_RATIO),
        ([math.log(1.5)], Noise(0.01, 9), Ratio(mean=1.5, low=0.0, high=math.inf)),
        ([0.0, 0.0], Noise(), Ratio(mean=1.0, low=0.0, high=math.inf)),
        ([0.0, 0.0], Noise(0.01, 1), Ratio(mean=1.0, low=0.0, high=math.inf)),
        ([0.0, 60.0, -60.0], Noise(), Ratio(mean=1.0, low=0.0, high=math.inf)),
    ],
)
def test_too_little_has_no_interval(logs: list[float], noise: Noise, expected: Ratio) -> None:
    found = ratio_of(logs, noise)
    assert (found.low, found.high) == (expected.low, expected.high)
    assert found.mean == pytest.approx(expected.mean) and not found.faster


@pytest.mark.parametrize(
    ("ratio", "faster", "level"),
    [
        ((1.005, 1.004, 1.006), False, True),
        ((1.05, 1.04, 1.06), True, True),
        ((1.05, 0.99, 1.11), False, True),
        ((20.0, 9.0, 44.0), False, True),  # it may be anything
        ((2.0, 1.6, 2.5), True, True),
        ((0.98, 0.97, 0.99), False, False),
        ((0.98, 0.95, 1.01), False, True),
        ((0.9, 0.7, 1.2), False, False),
    ],
)
def test_faster_and_level(ratio: tuple[float, float, float], faster: bool, level: bool) -> None:
    one = Ratio(mean=ratio[0], low=ratio[1], high=ratio[2])
    assert (one.faster, one.level) == (faster, level)


def test_noise_is_that_of_a_turn_against_its_neighbours() -> None:
    rng = random.Random(0)
    found = Noise.of([math.exp(rng.gauss(0, 0.02)) for _ in range(2001)])
    assert found.turns == 1000
    assert found.deviation == pytest.approx(0.02 * math.sqrt(1.5), rel=0.05)
    assert Noise.of([1.0, 2.0, 1.0, 2.0]) == Noise()
