"""Configs measured in turn, there and back, so that a drifting machine is the same for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from advisor.cache.config import Config
from advisor.tuners.decisions import CLEARLY, LOOKS, TURN_S
from advisor.tuners.measure.place import ConfigFailed
from advisor.tuners.search.ratio import paired
from advisor.tuners.search.visit import Visitor
from advisor.tuners.search.winners import Rates


def race(
    visitor: Visitor,
    configs: Sequence[Config],
    left_s: Callable[[], float],
    lost: Callable[[Config, ConfigFailed], None],
    turn_s: float = TURN_S,
) -> Rates:
    """Samples/s of each round; the first config is what the others are held against.

    Ends when all ratios are known closely, after the last of LOOKS, or where no time is left for
    another round like the last. Only whole rounds count. A config that fails is left out.

    Args:
        turn_s: seconds of a block.

    Raises:
        ConfigFailed: the first one failed before a round was over.
    """
    reference = configs[0]
    rates: Rates = {config: [] for config in dict.fromkeys(configs)}
    for turn in range(LOOKS[-1]):
        began = visitor.now()
        for config in list(rates) if turn % 2 == 0 else list(rates)[::-1]:
            try:
                rates[config].append(visitor.block(config, turn_s).rate)
            except ConfigFailed as exc:
                if config == reference and turn == 0:
                    raise
                if config == reference or exc.outcome == "timed_out":
                    return {one: seen[:turn] for one, seen in rates.items()} if turn else {}
                del rates[config]
                lost(config, exc)
        ratios = [paired(rates[config], rates[reference]) for config in rates]
        if turn + 1 in LOOKS and all(one.within(CLEARLY - 1) for one in ratios[1:]):
            break
        if left_s() < visitor.now() - began:
            break
    return rates
