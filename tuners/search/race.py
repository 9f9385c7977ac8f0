"""The final race, and the turns that the choice is made from."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.cache.config import Config
from advisor.tuners.decisions import CLEARLY, LOOKS, TURN_S
from advisor.tuners.measure.place import ConfigFailed
from advisor.tuners.search.ratio import paired
from advisor.tuners.search.visit import Visit, Visitor

Rates = dict[Config, list[float]]
"""Samples/s of each turn, by config."""


def race(
    visitor: Visitor, configs: Sequence[Config], turn_s: float = TURN_S
) -> tuple[Rates, dict[Config, ConfigFailed]]:
    """Configs measured in turn, there and back, so that a drifting machine is the same for all; and
    why some of them failed, which are left out. The others are held against the first one.

    Ends when all ratios are known closely, after the last of LOOKS, or where no time is left for
    another round like the last. Only whole rounds count.

    Args:
        turn_s: seconds of a block.
    """
    reference, clock = configs[0], visitor.clock
    rates: Rates = {config: [] for config in dict.fromkeys(configs)}
    lost: dict[Config, ConfigFailed] = {}
    for turn in range(LOOKS[-1]):
        began = clock.now()
        for config in list(rates) if turn % 2 == 0 else list(rates)[::-1]:
            try:
                rates[config].append(visitor.block(config, turn_s).rate)
            except ConfigFailed as exc:
                if exc.outcome != "timed_out":
                    lost[config] = exc
                if config == reference or exc.outcome == "timed_out":
                    whole = {one: seen[:turn] for one, seen in rates.items()}
                    return (whole if turn else {}), lost
                del rates[config]
        ratios = [paired(rates[config], rates[reference]) for config in rates]
        if turn + 1 in LOOKS and all(one.within(CLEARLY - 1) for one in ratios[1:]):
            break
        if clock.left_s < clock.now() - began:
            break
    return rates, lost


def decisive(raced: Rates, leaders: Sequence[Visit], visitor: Visitor) -> Rates:
    """The turns that the choice is made from: those of the race; where it was too noisy to
    contradict what the visits of the leaders have told, or there was none, those of the visits."""
    if len(raced) > 1:
        pooled = _pooled(raced, leaders, visitor.own)
        own, noise = pooled[visitor.own], visitor.noise
        ratios = {c: paired(pooled[c], own, noise) for c in pooled if c != visitor.own}
        told = [one for one in leaders if one.ratio.faster and one.config in ratios]
        clear = any(one.faster for one in ratios.values())
        if clear or not any(ratios[one.config].high >= one.ratio.mean for one in told):
            return pooled
    most = max((one.turns for one in leaders), key=len, default=())
    # Where nothing came near the baseline, its own blocks are all there is to say.
    blocks = [turn.beside for turn in most] or visitor.baseline
    return _beside(visitor.own, [block.rate for block in blocks], leaders)


def _pooled(raced: Rates, leaders: Sequence[Visit], own: Config) -> Rates:
    """The rounds of a race; where it had few, after as many turns of each visit."""
    visits = [one for one in leaders if one.config in raced]
    count = min((len(one.turns) for one in visits), default=0)
    if not count or len(raced[own]) >= LOOKS[1]:
        return raced
    rates = [turn.beside.rate for turn in visits[0].turns[-count:]]
    turns = _beside(own, rates, visits, -count)
    return {config: turns[config] + seen for config, seen in raced.items()}


def _beside(own: Config, rates: list[float], visits: Sequence[Visit], since: int = 0) -> Rates:
    """The turns of visits from one on, as if all were beside the same blocks of the baseline."""
    return {own: rates} | {
        one.config: [t.ratio * rate for t, rate in zip(one.turns[since:], rates, strict=False)]
        for one in visits
        if one.turns
    }
