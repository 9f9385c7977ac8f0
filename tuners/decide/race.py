"""Configs measured in turn, so that a drifting machine is the same for all of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.tuners import knobs
from advisor.tuners.measure.runner import Runner
from advisor.tuners.search.plan import Part

TURN_S = 0.3
"""Timed seconds of one turn: the more turns, the better a drifting machine cancels out."""
TIE = 0.99
"""Configs this close to the fastest: the one that asks least is chosen."""
ROUNDS, MOST_ROUNDS = 24, 96
"""After as many a race ends that can tell; after the second number any."""
MIN_ROUNDS = 3
TELLS = 6
"""Turns whose interval is narrow enough to tell much; by three it is twice as wide, by two ten
times. Where time is short it goes to those who lead."""
SETTLED = 0.005
"""A ratio is known when its 95% interval is within this fraction of it, to both sides."""
CLEAR = 0.05
"""The same for a ratio that can be told at all: a race goes on for one that is wider."""
BUILDING = 0.6
"""Share of a race after which no further config is built for it: turns tell, not entrants."""
BUILD, BUILD_LEAST_S = 3.0, 15.0
"""Building a config again may take so many times what it took before, and this."""
MARGIN, HANGS = 2.0, 4.0
"""A turn is begun where there is time for one that takes so many times as long as its last: what is
cut off costs a command its start; and the config the race if it is cut off after so many times as
long, as what hangs."""
WIDEST = 1e12
"""The end of an interval beyond which a race has told nothing, and no record keeps it."""

# Student's t, two-sided 95%, by degrees of freedom (any statistics table).
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A paired ratio of two configs measured in turn, with its 95% interval."""

    mean: float
    low: float
    high: float

    def within(self, fraction: float) -> bool:
        """Whether the interval keeps within this fraction of the mean, to both sides."""
        return max(self.high / self.mean - 1, 1 - self.low / self.mean) <= fraction


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Geometric mean of the turn-by-turn ratios; the interval is Student's on their logs.

    A busy host stays slow for several turns, so that turns are worth less than independent ones:
    they count as n (1 - r) / (1 + r), r being the correlation of neighbours (effective sample
    size of an AR(1) series, e.g. Wilks, Statistical Methods in the Atmospheric Sciences, 5.2.4).
    Fewer than two turns have no interval, nor have some that are apart beyond all reason: it is
    then from zero to infinity.
    """
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(logs)
    untold = Ratio(mean=math.exp(mean), low=0.0, high=math.inf)
    if len(logs) < 2:
        return untold
    correlation = _neighbours(logs, mean)
    worth = max(2.0, len(logs) * (1 - correlation) / (1 + correlation))
    t = _T95[min(int(worth) - 1, len(_T95)) - 1]
    half = t * statistics.stdev(logs) / math.sqrt(worth)
    if mean + half > math.log(WIDEST):
        return untold
    return Ratio(mean=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half))


def _neighbours(values: Sequence[float], mean: float) -> float:
    """Correlation of neighbours, from 0 to 0.9; 0 where there are too few values to tell."""
    total = sum((value - mean) ** 2 for value in values)
    if len(values) < 6 or total <= 1e-12:
        return 0.0
    pairs = sum((a - mean) * (b - mean) for a, b in itertools.pairwise(values))
    return min(0.9, max(0.0, pairs / total))


def race(
    runner: Runner,
    configs: Sequence[Config],
    part: Part,
    *,
    stage: str = knobs.COMPUTE,
    drop: bool = True,
    build_s: Callable[[Config], float] = lambda _config: math.inf,
    start_s: float = 0.0,
    lost: Callable[[Config, Measurement], None] = lambda _config, _why: None,
) -> dict[Config, list[float]]:
    """Measure configs in turn, there and back (A B B A ...); samples/s of each turn.

    The first config is what the others are held against. Ends when all are known to SETTLED, after
    ROUNDS rounds, or with its part of the time, whatever is known by then; where a ratio is wider
    than CLEAR it goes on into the part's reserve. A config that fails any turn is left out, as is
    one that was not reached; where the first or another is cut off by the end, the turns count that
    it had. With `drop`, one that is clearly slower than another of its batch size, which whoever
    follows it can follow too, runs no further, so that its time goes to those that are still close;
    where that does not leave TELLS turns to all, so does one that is slower as far as can be seen.
    `build_s`: what a config's first step took before; `start_s`: what starting a worker takes of
    the first turn. `lost` is told of what failed.
    """
    reference = configs[0]
    rates: dict[Config, list[float]] = {config: [] for config in dict.fromkeys(configs)}
    running = list(rates)
    took: dict[Config, float] = {}

    def left_s(needs_s: float = 0.0) -> float:
        left = part.left_s
        return left if left > needs_s or _known(running, rates, CLEAR) else left + part.reserve_s

    whole_s = part.left_s
    over = False
    for turn in range(MOST_ROUNDS):
        for config in list(running if turn % 2 == 0 else reversed(running)):
            needs_s = MARGIN * took.get(config, 0.0)
            deadline_s = left_s(needs_s) + part.clock.slack_s / 4
            built = sum(map(bool, rates.values()))
            if turn == 0 and built >= 2 and part.left_s < (1 - BUILDING) * whole_s:
                running.remove(config)
                continue
            if left_s() <= 0 or not running or running[0] != reference:
                break
            if over := needs_s > deadline_s:
                break
            most = BUILD * build_s(config) + BUILD_LEAST_S if turn == 0 else math.inf
            if not built:  # nothing is told without the first one: it may have all that is left
                most, deadline_s = math.inf, max(deadline_s, part.clock.left_s)
            began = part.clock.now()
            ending = turn > 0 and (config == reference or deadline_s < HANGS * took[config])
            measured = runner.measure(
                config, seconds=TURN_S, stage=stage, keep=True, deadline_s=min(most, deadline_s)
            )
            took[config] = part.clock.now() - began - measured.first_step_s
            if turn == 0 and config == reference:
                took[config] = max(0.0, took[config] - start_s)
            if measured.ok:
                rates[config].append(measured.samples_per_s)
            elif over := ending and measured.outcome == "timed_out":
                break
            else:
                lost(config, measured)
                del rates[config]
                running.remove(config)
        if over or left_s() <= 0 or reference not in rates:
            break
        if drop and turn:
            running = _tellable(running, rates, took, left_s())
        if turn + 1 < MIN_ROUNDS:
            continue
        if _known(running, rates, SETTLED if turn + 1 < ROUNDS else CLEAR):
            break
        if drop:
            running = [
                c for c in running if c == reference or not _beaten(c, running, rates, _surely)
            ]
    runner.release()
    return {config: seen for config, seen in rates.items() if seen}


def _known(running: list[Config], rates: dict[Config, list[float]], fraction: float) -> bool:
    """Whether every ratio to the first config is known to within this fraction."""
    return all(paired(rates[config], rates[running[0]]).within(fraction) for config in running[1:])


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """`paired_ratio` of the turns that both have; without one from zero to infinity."""
    turns = min(len(ours), len(theirs))
    if not turns:
        return Ratio(mean=1.0, low=0.0, high=math.inf)
    return paired_ratio(ours[:turns], theirs[:turns])


def beside(seen: Sequence[float], now: Sequence[float], then: Sequence[float]) -> list[float]:
    """Turns of a config as they would have been in an earlier race: `now` and `then` are those of
    torch's default, in the same race as these and in the earlier one."""
    return [ours / new * old for ours, new, old in zip(seen, now, then, strict=False)]


def _tellable(
    running: list[Config],
    rates: dict[Config, list[float]],
    took: dict[Config, float],
    left_s: float,
) -> list[Config]:
    """Those for whom the time holds TELLS turns; the slowest of those who are behind go first."""
    behind = [c for c in running[1:] if _beaten(c, running, rates, _so_far)]
    staying = list(running)
    for config in sorted(behind, key=lambda c: paired(rates[c], rates[running[0]]).mean):
        if sum(took[c] * max(0, TELLS - len(rates[c])) for c in staying) <= left_s:
            break
        staying.remove(config)
    return staying


def _beaten(
    config: Config,
    running: list[Config],
    rates: dict[Config, list[float]],
    slower: Callable[[Ratio], bool],
) -> bool:
    """Whether another one of its batch, which whoever follows it can follow too, is faster."""
    default = running[0]
    use = knobs.use_of(config, default)
    return any(
        slower(paired(rates[config], rates[other]))
        for other in running
        if other != config and other.batch == config.batch and knobs.follows(use, other, default)
    )


def _surely(ratio: Ratio) -> bool:
    return ratio.high < TIE


def _so_far(ratio: Ratio) -> bool:
    return ratio.mean < 1
