"""Ratios of two alternately measured configs, and the coverage of their intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from advisor.tuners.decisions import CLEARLY, LOOKS
from advisor.tuners.search.ratio import UNKNOWN_RATIO, Noise, Ratio, ratio_of

Draw = Callable[[random.Random, int], list[float]]
"""Returns the log-rates of consecutive blocks."""


def idle(rng: random.Random, blocks: int) -> list[float]:
    """The noise of an idle GPU."""
    return [rng.gauss(0, 0.005) for _ in range(blocks)]


def busy(correlation: float) -> Draw:
    """The noise of a busy host, correlated between blocks: an AR(1) series."""

    def draw(rng: random.Random, blocks: int) -> list[float]:
        fresh = math.sqrt(1 - correlation**2)
        logs = [rng.gauss(0, 0.03)]
        for _ in range(blocks - 1):
            logs.append(correlation * logs[-1] + fresh * rng.gauss(0, 0.03))
        return logs

    return draw


def extra_load(mean_blocks: float) -> Draw:
    """The noise of a host with another load that lasts for `mean_blocks` on average."""

    def draw(rng: random.Random, blocks: int) -> list[float]:
        levels: list[float] = []
        while len(levels) < blocks:
            level = 0.0 if rng.random() < 0.5 else rng.uniform(-math.log(5), math.log(5))
            levels += [level] * (1 + int(rng.expovariate(1 / mean_blocks)))
        return [level + rng.gauss(0, 0.005) for level in levels[:blocks]]

    return draw


def race(draw: Draw, rng: random.Random, configs: int) -> list[float]:
    """Return the log-ratios of two equally fast configs, raced in alternating order."""
    logs = draw(rng, configs * LOOKS[-1])
    rounds = [logs[at : at + configs] for at in range(0, len(logs), configs)]
    return [(one[-1] - one[0]) * (1 if turn % 2 == 0 else -1) for turn, one in enumerate(rounds)]


@pytest.mark.parametrize("configs", [2, 4])
@pytest.mark.parametrize(
    "draw",
    [idle, busy(0.5), busy(0.95), extra_load(3), extra_load(30)],
    ids=["quiet", "busy 0.5", "busy 0.95", "load of 3 blocks", "load of 30 blocks"],
)
def test_intervals_contain_the_true_ratio_at_every_look(draw: Draw, configs: int) -> None:
    rng, races = random.Random(0), 200
    at_all_looks = at_the_end = 0
    for _ in range(races):
        logs = race(draw, rng, configs)
        looks = [ratio_of(logs[:count]) for count in LOOKS]
        at_all_looks += all(one.low <= 1 <= one.high for one in looks)
        end = next((one for one in looks if one.within(CLEARLY - 1)), looks[-1])
        at_the_end += end.low <= 1 <= end.high
    assert at_the_end >= 0.95 * races and at_all_looks >= 0.92 * races, (at_the_end, at_all_looks)


def test_interval_is_students_t_and_yuens_if_trimmed() -> None:
    ratio = ratio_of([0.0, 0.1, 0.2])
    half = 9.92 * 0.1 / math.sqrt(3)
    assert ratio.mean == pytest.approx(math.exp(0.1))
    assert ratio.high == pytest.approx(math.exp(0.1 + half))
    assert ratio.low == pytest.approx(math.exp(0.1 - half))
    # Two of twelve are trimmed at each end. Their winsorized values count in the variance.
    logs = [0.0, 9.0, 0.1, -9.0, 0.0, 0.1, 0.0, 0.1, 9.0, 0.1, -9.0, 0.0]
    ratio = ratio_of(logs)
    assert ratio.mean == pytest.approx(math.exp(0.05))
    half = 3.5 * 0.05 * math.sqrt(12 / 11) * math.sqrt(11 / 7) / math.sqrt(8)
    assert ratio.high == pytest.approx(math.exp(0.05 + half), rel=1e-3)


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
def test_too_few_turns_give_no_interval(logs: list[float], noise: Noise, expected: Ratio) -> None:
    ratio = ratio_of(logs, noise)
    assert (ratio.low, ratio.high) == (expected.low, expected.high)
    assert ratio.mean == pytest.approx(expected.mean) and not ratio.faster


@pytest.mark.parametrize(
    ("ratio", "faster", "level"),
    [
        ((1.005, 1.004, 1.006), False, True),
        ((1.05, 1.04, 1.06), True, True),
        ((1.05, 0.99, 1.11), False, True),
        ((20.0, 9.0, 44.0), False, True),  # too uncertain
        ((2.0, 1.6, 2.5), True, True),
        ((0.98, 0.97, 0.99), False, False),
        ((0.98, 0.95, 1.01), False, True),
        ((0.9, 0.7, 1.2), False, False),
    ],
)
def test_the_interval_decides(ratio: tuple[float, float, float], faster: bool, level: bool) -> None:
    one = Ratio(mean=ratio[0], low=ratio[1], high=ratio[2])
    assert (one.faster, one.level) == (faster, level)


def test_noise_is_the_deviation_of_a_turn_from_its_neighbours() -> None:
    rng = random.Random(0)
    noise = Noise.of([math.exp(rng.gauss(0, 0.02)) for _ in range(2001)])
    assert noise.turns == 1000
    assert noise.deviation == pytest.approx(0.02 * math.sqrt(1.5), rel=0.05)
    assert Noise.of([1.0, 2.0, 1.0, 2.0]) == Noise()
