"""Ratios of two configs measured in turn, with an interval that holds under peeking, and doubts."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.cache.record import Choice, inner
from advisor.tuners.decisions import CLEARLY, GAIN, LOOKS, NOTABLE, RESOLVABLE
from advisor.tuners.knobs import THREADS

WIDEST = 1e12
"""An interval that ends above this ratio says nothing, and no record can hold it."""

# Student's t, two-sided 99%, by degrees of freedom (any statistics table).
_T99 = (
    *(63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17),
    *(3.11, 3.05, 3.01, 2.98, 2.95, 2.92, 2.90, 2.88, 2.86, 2.85),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A paired ratio of two configs measured in turn, with its interval."""

    mean: float
    low: float
    high: float

    def within(self, fraction: float) -> bool:
        """Whether the interval keeps within this fraction of the mean, to both sides."""
        return max(self.high / self.mean - 1, 1 - self.low / self.mean) <= fraction

    @property
    def faster(self) -> bool:
        """Whether it is clearly above 1, and not too noisy to tell."""
        return self.mean >= CLEARLY and self.low > 1.0 and self.high <= RESOLVABLE * self.mean

    @property
    def level(self) -> bool:
        """Whether it is about 1, as far as its interval tells."""
        return self.mean >= 1 / CLEARLY or (self.mean >= 1 / GAIN and self.high >= 1.0)


UNKNOWN_RATIO = Ratio(mean=1.0, low=0.0, high=math.inf)
LEVEL = Ratio(mean=1.0, low=1.0, high=1.0)  # of a config to itself


@dataclass(frozen=True, slots=True)
class Noise:
    """The standard deviation of a log-ratio, from `turns` of the baseline to itself."""

    deviation: float = 0.0
    turns: int = 0

    @classmethod
    def of(cls, rates: Sequence[float]) -> Noise:
        """From the baseline's blocks, each against the mean of its neighbours, as in a turn."""
        logs = [math.log(rate) for rate in rates]
        apart = [b - (a + c) / 2 for a, b, c in zip(logs, logs[1:], logs[2:], strict=False)]
        # Every second one: neighbours share blocks.
        apart = apart[::2]
        if len(apart) < 2:
            return cls()
        return cls(math.sqrt(statistics.fmean(one * one for one in apart)), len(apart))


UNMEASURED = Noise()


def ratio_of(logs: Sequence[float], noise: Noise = UNMEASURED) -> Ratio:
    """Trimmed mean of turn-by-turn log-ratios, with Yuen's interval (Biometrika 61, 1974).

    The fastest and slowest turns are left out, so that a load that begins or ends within a turn
    does not count. The level is 99%, a fifth of 5% of error for each of five looks (Bonferroni).
    From the second of LOOKS on correlated turns count as n (1 - r) / (1 + r), r being the
    correlation of neighbours (Wilks, Statistical Methods in the Atmospheric Sciences, 5.2.4).
    Before the second look, the interval is at least as wide as the baseline's noise: a few turns
    can be alike by luck. The interval of two turns holds both; one turn has no interval.
    """
    mean = statistics.fmean(logs) if logs else 0.0
    if len(logs) < 2 or (len(logs) == 2 and noise.turns < 2):
        return Ratio(mean=math.exp(mean), low=0.0, high=math.inf)
    if len(logs) == 2:
        half = abs(logs[0] - logs[1])
    else:
        mean, half = _trimmed(logs)
    if len(logs) < LOOKS[1] and noise.turns > 1:
        half = max(half, _t99(noise.turns) * noise.deviation / math.sqrt(len(logs)))
    if mean + half > math.log(WIDEST):
        return Ratio(mean=math.exp(mean), low=0.0, high=math.inf)
    return Ratio(mean=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half))


def _trimmed(logs: Sequence[float]) -> tuple[float, float]:
    """The trimmed mean, and half the width of its interval."""
    count, kept = len(logs), inner(logs)
    mean = statistics.fmean(kept)
    held = [min(max(one, kept[0]), kept[-1]) for one in logs]
    correlation = _neighbours(held) if count >= LOOKS[1] else 0.0
    worth = len(kept) * (1 - correlation) / (1 + correlation)
    spread = statistics.stdev(held) * math.sqrt((count - 1) / (len(kept) - 1))
    return mean, _t99(len(kept) - 1) * spread / math.sqrt(worth)


def paired(ours: Sequence[float], theirs: Sequence[float], noise: Noise = UNMEASURED) -> Ratio:
    return ratio_of([math.log(a / b) for a, b in zip(ours, theirs, strict=False)], noise)


def _t99(freedom: int) -> float:
    return _T99[min(freedom, len(_T99)) - 1]


def _neighbours(values: Sequence[float]) -> float:
    """Correlation of neighbours, from 0 to 0.9, without the bias of few values: -1/n (Marriott and
    Pope, Biometrika 41, 1954)."""
    mean = statistics.fmean(values)
    total = sum((value - mean) ** 2 for value in values)
    if total <= 1e-12:
        return 0.0
    pairs = sum((a - mean) * (b - mean) for a, b in itertools.pairwise(values))
    return min(0.9, max(0.0, pairs / total + 1 / len(values)))


def unsteady(turns: Sequence[float], interval: float = math.inf) -> bool:
    """Whether a baseline's turns (samples/s), without the fastest and slowest, vary by more than
    `interval` (upper over lower end). At least NOTABLE is allowed, at most RESOLVABLE."""
    kept = inner([math.log(rate) for rate in turns])
    moved = math.exp(kept[-1] - kept[0]) if kept else 1.0
    return moved > min(RESOLVABLE, max(NOTABLE, interval))


def is_doubtful(choice: Choice, baseline: Choice) -> bool:
    """Whether a config may have gained only because the host was busy. Other jobs slow all configs
    on a GPU alike. On a CPU, where configs differ in threads, they do not: one network gained 22.9
    times next to another tuning, and nothing alone."""
    on_cpu = baseline.config.get(THREADS) is not None
    if not on_cpu or choice.config == baseline.config or choice.speedup_low <= 1:
        return False
    return unsteady(baseline.rounds, choice.speedup_high / choice.speedup_low)
