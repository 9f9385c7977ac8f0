"""The finalists measured in turn, and the verdict."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from advisor.cache.config import Config
from advisor.cache.record import Choice, Trial
from advisor.errors import WorkerError
from advisor.tuners.knobs import INPUT, PAYING
from advisor.tuners.measure.runner import Runner
from advisor.tuners.search.space import Space

FINALISTS = 4
WITHIN = 0.7
"""Slower than this fraction of the leader in the search: no finalist. Wide, because a busy host
can make a single measurement 30% too fast or slow; the race drops losers after a few turns."""
FREE_WITHIN = 0.97
"""The smallest batch whose throughput is at least this fraction of the best one's."""
CLEARLY = 1.01
"""Faster than the default by at least this, and by more than the noise, or not at all."""
TIE = 0.99
"""Configs this close to the fastest: the one that changes least is chosen."""
NOISY_TIE = 0.97
"""The same for configs that the race could not tell from the fastest: its 95% interval holds 1."""
ROUNDS = 24
MIN_ROUNDS = 3
SETTLED = 0.005
"""A ratio is known when its 95% interval is within this fraction of it, to both sides."""

# Student's t, two-sided 95%, by degrees of freedom (any statistics table).
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A paired ratio of two configs measured in turn, with its 95% interval."""

    mean: float
    low: float
    high: float


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Geometric mean of the turn-by-turn ratios; the interval is Student's on their logs.

    A busy host stays slow for several turns, so that turns are worth less than independent ones:
    they count as n (1 - r) / (1 + r), r being the correlation of neighbours (effective sample
    size of an AR(1) series, e.g. Wilks, Statistical Methods in the Atmospheric Sciences, 5.2.4).
    Fewer than two turns have no interval: it is then from zero to infinity.
    """
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(mean=math.exp(mean), low=0.0, high=math.inf)
    correlation = _neighbours(logs, mean)
    worth = max(2.0, len(logs) * (1 - correlation) / (1 + correlation))
    t = _T95[min(int(worth) - 1, len(_T95)) - 1]
    half = t * statistics.stdev(logs) / math.sqrt(worth)
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
    *,
    share_s: float,
    budget_s: float,
    stage: str = "compute",
    drop: bool = True,
    now: Callable[[], float] = time.monotonic,
) -> dict[Config, list[float]]:
    """Measure configs in turn, there and back (A B B A ...); samples/s of each turn.

    The first config is what the others are held against. Ends when all are known to SETTLED,
    after ROUNDS rounds, or after MIN_ROUNDS once `budget_s` is spent. A config that fails any
    turn is left out; with `drop`, one that is clearly slower than another of its batch size
    runs no further, so that its time goes to those that are still close.
    """
    reference = configs[0]
    rates: dict[Config, list[float]] = {config: [] for config in dict.fromkeys(configs)}
    running = list(rates)
    began = now()
    for turn in range(ROUNDS):
        for config in list(running if turn % 2 == 0 else reversed(running)):
            measured = runner.measure(config, seconds=share_s, stage=stage, keep=True)
            if measured.ok:
                rates[config].append(measured.samples_per_s)
            else:
                del rates[config]
                running.remove(config)
        if turn + 1 < MIN_ROUNDS or reference not in rates:
            continue
        if now() - began >= budget_s or _settled([rates[c] for c in running]):
            break
        if drop:
            running = [c for c in running if c == reference or not _beaten(c, running, rates)]
    runner.release()
    return rates


def _settled(seen: list[list[float]]) -> bool:
    ratios = [paired_ratio(rates, seen[0]) for rates in seen[1:]]
    return all(ratio.high - ratio.low <= 2 * SETTLED * ratio.mean for ratio in ratios)


def _beaten(config: Config, running: list[Config], rates: dict[Config, list[float]]) -> bool:
    return any(
        paired_ratio(rates[config], rates[other]).high < TIE
        for other in running
        if other != config and other["batch_size"] == config["batch_size"]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    baseline: Choice
    at_batch: Choice
    free: Choice | None


def finalists(space: Space, trials: Sequence[Trial]) -> list[Config]:
    """The default, then the leaders: at the user's batch and with the batch free, by turns."""
    user = space.batches[0]
    ok = [trial for trial in trials if trial.measurement.ok]
    rate = {t.config: t.measurement.samples_per_s for t in ok}
    sorted_all = _leaders([c for c in rate if c["batch_size"] == user], rate, 0.0)
    at_batch = [config for config in sorted_all if rate[config] >= WITHIN * rate[sorted_all[0]]]
    free = _free_leaders(rate) if len(space.batches) > 1 else []
    # What pays nothing before its first step is the best of a short job.
    first = [name for name in PAYING if name in space.default]
    cheap = [c for c in sorted_all if all(c[n] == space.default[n] for n in first)][:1]
    found = [space.default, *at_batch[:1], *cheap, *free[:1], *at_batch[1:FINALISTS], *free[1:]]
    return list(dict.fromkeys(found))


def _leaders(configs: Sequence[Config], rate: dict[Config, float], within: float) -> list[Config]:
    ordered = sorted(configs, key=lambda config: -rate[config])
    return [config for config in ordered if rate[config] >= within * rate[ordered[0]]]


def _free_leaders(rate: dict[Config, float]) -> list[Config]:
    """The best config of each batch size that comes near the best: smallest batches first."""
    best: dict[object, Config] = {}
    for config in rate:
        held = best.get(config["batch_size"])
        if held is None or rate[config] > rate[held]:
            best[config["batch_size"]] = config
    near = _leaders(list(best.values()), rate, FREE_WITHIN - 0.02)
    top = near[:1]
    smallest = sorted(near, key=lambda config: int(config["batch_size"] or 0))[:2]
    return list(dict.fromkeys([*top, *smallest]))


def decide(
    space: Space,
    rates: dict[Config, list[float]],
    peaks: dict[Config, int],
    weigh: Callable[[Config, float], float] | None = None,
) -> Verdict:
    """Choose on what the race measured, and on nothing else.

    `weigh` gives the samples/s over a whole job from a config and its steady samples/s; the choice
    is then made on these, and what is returned still tells the steady state.

    Raises:
        WorkerError: the default did not finish the race, so that nothing can be compared.
    """
    default = space.default
    if not rates.get(default):
        raise WorkerError("torch's default did not finish the final race; tune again")
    if weigh is not None:
        over_job = {c: [max(1e-9, weigh(c, rate)) for rate in seen] for c, seen in rates.items()}
        chosen = decide(space, over_job, peaks)
        steady = raced(space, rates, peaks)
        return Verdict(
            baseline=steady[chosen.baseline.config],
            at_batch=steady[chosen.at_batch.config],
            free=None if chosen.free is None else steady[chosen.free.config],
        )
    user = space.batches[0]
    choices = raced(space, rates, peaks)
    baseline = choices[default]
    at_batch = _clearly_best(space, [c for c in choices.values() if c.batch == user])
    free: Choice | None = None
    if len(space.batches) > 1:
        fastest = max(choice.samples_per_s for choice in choices.values())
        near = [c for c in choices.values() if c.samples_per_s >= FREE_WITHIN * fastest]
        smallest = min(choice.batch for choice in near)
        free = max((c for c in near if c.batch == smallest), key=lambda c: c.samples_per_s)
        if free.batch == user or free.samples_per_s < at_batch.samples_per_s * CLEARLY:
            free = at_batch
    return Verdict(baseline=baseline, at_batch=at_batch, free=free)


def raced(
    space: Space, rates: dict[Config, list[float]], peaks: dict[Config, int]
) -> dict[Config, Choice]:
    """What the race says of each config, held against the default."""
    reference = rates[space.default]
    return {config: choice_of(config, seen, reference, peaks) for config, seen in rates.items()}


def _clearly_best(space: Space, choices: Sequence[Choice]) -> Choice:
    """The fastest that is clearly faster than the default, or the least change tied with it."""
    better = [c for c in choices if c.speedup >= CLEARLY and c.speedup_low > 1.0]
    if not better:
        return next(c for c in choices if c.config == space.default)
    fastest = max(better, key=lambda c: c.samples_per_s)
    tied = [choice for choice in better if _ties(choice, fastest)]
    return min(tied, key=lambda c: (len(space.changed(c.config)), -c.samples_per_s))


def _ties(ours: Choice, fastest: Choice) -> bool:
    turns = min(len(ours.rounds), len(fastest.rounds))
    ratio = paired_ratio(ours.rounds[:turns], fastest.rounds[:turns])
    return ratio.mean >= TIE or (ratio.mean >= NOISY_TIE and ratio.high >= 1.0)


def choice_of(
    config: Config, seen: list[float], reference: list[float], peaks: dict[Config, int]
) -> Choice:
    """What a race says of a config, held against the turns of the default."""
    turns = min(len(seen), len(reference))
    ratio = paired_ratio(seen[:turns], reference[:turns])
    batch = config["batch_size"]
    assert isinstance(batch, int)
    return Choice(
        config=config,
        batch=batch,
        samples_per_s=statistics.median(seen),
        low=min(seen),
        high=max(seen),
        speedup=ratio.mean,
        speedup_low=ratio.low,
        speedup_high=ratio.high,
        peak_bytes=peaks.get(config, 0),
        rounds=tuple(seen),
    )


def choose_input(
    runner: Runner, space: Space, config: Config, *, share_s: float, budget_s: float
) -> tuple[Config, dict[Config, list[float]]]:
    """Choose the input pipeline's knobs one by one, measured through a real DataLoader.

    Returns the chosen values and each race turn's samples/s by config.
    """
    chosen = space.default_input
    seen: dict[Config, list[float]] = {}
    for name, values in space.inputs.items():
        configs = [Config(config | chosen.replace(**{name: value})) for value in values]
        if len(configs) < 2:
            continue
        rates = race(runner, configs, share_s=share_s, budget_s=budget_s, stage=INPUT, drop=False)
        seen |= rates
        held = rates.get(configs[0])
        if not held:
            continue
        ratios = {c: paired_ratio(rates[c], held) for c in rates}
        better = [c for c in ratios if ratios[c].mean >= CLEARLY and ratios[c].low > 1.0]
        if better:
            best = max(better, key=lambda c: ratios[c].mean)
            chosen = chosen.replace(**{name: best[name]})
    return chosen, seen
