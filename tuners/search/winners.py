"""The winner for each use, by the turns of the race, or of the visits where none was run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from advisor.cache.config import Config
from advisor.cache.record import RACED, Choice, Winner
from advisor.errors import WorkerError
from advisor.tuners import knobs
from advisor.tuners.decisions import GAIN, TELLS
from advisor.tuners.search.race import Rates
from advisor.tuners.search.ratio import LEVEL, UNMEASURED, Noise, Ratio, paired
from advisor.tuners.search.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`baseline`: torch's default at the user's batch; `winners` for each of RACED, at the user's
    batch and, where others were tried, with the batch free; `raced`: what was measured more than
    once, each with an interval."""

    baseline: Choice
    winners: tuple[Winner, ...]
    raced: tuple[Choice, ...]

    def winner(self, use: str, *, free: bool = False) -> Choice:
        """The best for one of RACED."""
        return {(one.use, one.free): one.choice for one in self.winners}[use, free]


def choose(
    space: Space,
    rates: Rates,
    peaks: dict[Config, int],
    weigh: Callable[[Config, float], float] = lambda _config, rate: rate,
    noise: Noise = UNMEASURED,
) -> Verdict:
    """The winners; what is not clearly faster than torch's default is not advised.

    `weigh` gives the samples/s over a whole job from a config and its steady samples/s; the choice
    is made on these, and what is returned tells the steady state. `noise` is that of the default,
    where there are but two turns.

    Raises:
        WorkerError: the default did not finish the race, so that nothing can be compared.
    """
    if not rates.get(space.default):
        raise WorkerError("the baseline did not finish the race; tune again")
    over_job = {c: [max(1e-9, weigh(c, rate)) for rate in seen] for c, seen in rates.items()}
    steady, choices = (
        {c: choice_of(c, seen, turns[space.default], peaks, noise) for c, seen in turns.items()}
        for turns in (rates, over_job)
    )
    found = _at_batch(space, choices)
    if len(space.batches) > 1:
        found |= _free(space, choices, found)
    return Verdict(
        baseline=steady[space.default],
        winners=tuple(
            Winner(use=use, free=free, choice=steady[choice.config])
            for (use, free), choice in found.items()
        ),
        raced=tuple(
            choice
            for choice in steady.values()
            if len(choice.rounds) > 1 and math.isfinite(choice.speedup_high)
        ),
    )


_Found = dict[tuple[str, bool], Choice]


def _at_batch(space: Space, choices: dict[Config, Choice]) -> _Found:
    """For each use the fastest at the user's batch; the lesser use's where that is as fast."""
    found: _Found = {}
    held = choices[space.default]
    for use in RACED:
        better = [c for c in _better(space, choices, use) if c.batch == space.batch]
        if better:
            best = _lightest(space, better)
            held = held if _ties(held, best) else best
        found[use, False] = held
    return found


def _free(space: Space, choices: dict[Config, Choice], fixed: _Found) -> _Found:
    """The same at the smallest batch near the fastest; the user's where that is as fast."""
    found: _Found = {}
    held = fixed[RACED[0], False]
    for use in RACED:
        at_user = fixed[use, False]
        # At the user's batch nobody is served less than with the batch fixed.
        if held.batch == space.batch or paired(at_user.rounds, held.rounds).faster:
            held = at_user
        better = _better(space, choices, use)
        if better:
            fastest = max(choice.samples_per_s for choice in better)
            near = [c for c in better if GAIN * c.samples_per_s >= fastest]
            smallest = min(choice.batch for choice in near)
            best = _lightest(space, [c for c in near if c.batch == smallest])
            if paired(best.rounds, at_user.rounds).faster and not _ties(held, best):
                held = best
        found[use, True] = held
    return found


def _better(space: Space, choices: dict[Config, Choice], use: str) -> list[Choice]:
    """What a use can follow, and is clearly faster than torch's default. What more workers give
    comes in bursts: it may be anything above TELLS."""
    found = []
    for choice in choices.values():
        ratio = Ratio(mean=choice.speedup, low=choice.speedup_low, high=choice.speedup_high)
        fed = knobs.workers(choice.config) > knobs.workers(space.default)
        faster = ratio.faster or (fed and ratio.low >= TELLS)
        if faster and knobs.follows(use, choice.config, space.default):
            found.append(choice)
    return found


def _lightest(space: Space, choices: Sequence[Choice]) -> Choice:
    """Of those tied with the fastest the one that asks least of a script, and of its host."""
    fastest = max(choices, key=lambda choice: choice.samples_per_s)

    def asks(choice: Choice) -> tuple[int, int, float]:
        burden = knobs.burden(choice.config, space.default)
        return burden, knobs.workers(choice.config), -choice.samples_per_s

    return min((one for one in choices if one is fastest or _ties(one, fastest)), key=asks)


def _ties(ours: Choice, fastest: Choice) -> bool:
    """Whether one is as fast as another, as far as their turns tell."""
    return paired(ours.rounds, fastest.rounds).level


def choice_of(
    config: Config,
    seen: list[float],
    reference: list[float],
    peaks: dict[Config, int],
    noise: Noise = UNMEASURED,
) -> Choice:
    """What a race says of a config, held against the turns of the default."""
    ratio = LEVEL if seen is reference else paired(seen, reference, noise)
    return Choice(
        config=config,
        batch=config.batch,
        samples_per_s=statistics.median(seen),
        low=min(seen),
        high=max(seen),
        speedup=ratio.mean,
        speedup_low=ratio.low,
        speedup_high=ratio.high,
        peak_bytes=peaks.get(config, 0),
        rounds=tuple(seen),
    )
