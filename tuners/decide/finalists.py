"""Who races: for each use what leads the trials, at the user's batch and at any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from advisor.cache.config import Config
from advisor.cache.record import LOOP, Measurement, Trial
from advisor.tuners import knobs
from advisor.tuners.decide.race import MIN_ROUNDS, TURN_S
from advisor.tuners.decide.winners import FREE_WITHIN
from advisor.tuners.length import WARM
from advisor.tuners.search.plan import Part
from advisor.tuners.search.space import Space

MOST, MOST_LESS = 4, 2
"""Finalists at the user's batch: of the widest use, and of each lesser one."""
WITHIN = 0.7
"""Slower than this fraction of the leader in the search: no finalist. Wide, because a busy host
can make a single measurement 30% too fast or slow; the race drops losers after a few turns."""
FREE_NEAR = 0.9
"""The same for other batches, that the smallest of those within FREE_WITHIN is found."""


def finalists(space: Space, trials: Sequence[Trial]) -> list[Config]:
    """The default, then the best of each use, at the user's batch and at any; then the others.

    The first are those that must race if there is little time.
    """
    rate = {t.config: t.measurement.samples_per_s for t in trials if t.measurement.ok}
    # A loop is what most scripts have; what only a captured step can follow is next.
    uses = sorted(space.uses, key=lambda use: use != LOOP)
    leaders = {use: _leaders(space, rate, use) for use in uses}
    free = {use: _free(space, rate, use) for use in uses if len(space.batches) > 1}
    found = [space.default]
    for of_use in (leaders, free):
        found += [config for use in uses for config in of_use.get(use, [])[:1]]
    found += [config for use in uses for config in free.get(use, [])[1:]]
    # What pays nothing before its first step is the best of a short job, and where none compiles.
    for use in uses:
        paid = (set(knobs.PAYING) & set(c.changed(space.default)) for c in leaders[use])
        found += [c for c, names in zip(leaders[use], paid, strict=True) if not names][:1]
    # What needs no comparison with fp32 is left if all that does is struck out.
    for use in uses:
        found += [c for c in leaders[use] if not knobs.doubtful(c) and c != space.default][:1]
    for use in uses:
        most = MOST if use == space.uses[0] else MOST_LESS
        near = [c for c in leaders[use] if rate[c] >= WITHIN * rate[leaders[use][0]]]
        found += near[1:most]
    return list(dict.fromkeys(found))


def _leaders(space: Space, rate: dict[Config, float], use: str) -> list[Config]:
    """What a use can follow at the user's batch, the fastest first."""
    mine = [c for c in rate if c.batch == space.batch and knobs.follows(use, c, space.default)]
    return sorted(mine, key=lambda config: -rate[config])


def _free(space: Space, rate: dict[Config, float], use: str) -> list[Config]:
    """The fastest at any batch; then the best of smaller batches that come near, of those as near
    as is asked the smallest first."""
    best: dict[int, Config] = {}
    for config in sorted(rate, key=lambda config: -rate[config]):
        if knobs.follows(use, config, space.default):
            best.setdefault(config.batch, config)
    if not best:
        return []
    top = next(iter(best.values()))
    near = [c for c in best.values() if c.batch < top.batch and rate[c] >= FREE_NEAR * rate[top]]
    near.sort(key=lambda config: (rate[config] < FREE_WITHIN * rate[top], config.batch))
    return [top, *near[:2]]


def affordable(
    found: Sequence[Config], trials: Sequence[Trial], part: Part, again: Mapping[Config, float]
) -> list[Config]:
    """The default, and the others, in order, for which the least race leaves time.

    `again`: seconds of building a config again, where they are known.
    """
    measured = {trial.config: trial.measurement for trial in trials}
    left = part.left_s + part.reserve_s
    taken: list[Config] = []
    for config in found:
        # Built and warmed up; then turns.
        one = measured[config]
        build_s = again.get(config, one.first_step_s / WARM) + 4 * one.step_s
        cost_s = build_s + MIN_ROUNDS * _turn_s(one)
        # What was searched or compiled in this process before is quicker to build: one is tried.
        first = len(taken) == 1 and cost_s <= part.clock.left_s
        if not taken or first or cost_s <= left:
            taken.append(config)
            left -= cost_s
    return taken


def _turn_s(measured: Measurement) -> float:
    """Seconds of a turn at least: one warm and one timed step, or in a run as many steps as settle
    it and two blocks of them, which are long where it waits for its data."""
    block_s = measured.step_s * measured.steps / max(1, len(measured.blocks))
    return measured.warm_s + max(TURN_S + measured.step_s, 2 * block_s)
