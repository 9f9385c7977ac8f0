"""Whether a host was too busy to tell what gains."""

from __future__ import annotations

import math
from collections.abc import Sequence

from advisor.cache.record import Choice
from advisor.cache.turns import inner
from advisor.tuners.decisions import NOTABLE, RESOLVABLE
from advisor.tuners.knobs import THREADS


def unsteady(turns: Sequence[float], interval: float = math.inf) -> bool:
    """Whether a race's baseline moved by more than the interval of what was found.

    The fastest and slowest turns are left out, as in the speed-up: noise of single turns moves the
    rest by less than that interval, a load that stays for several turns by more.

    Args:
        turns: samples/s of the baseline.
        interval: upper over lower end of the speed-up; whatever it is, NOTABLE is allowed and more
            than RESOLVABLE is not.
    """
    kept = inner([math.log(rate) for rate in turns])
    moved = math.exp(kept[-1] - kept[0]) if kept else 1.0
    return moved > min(RESOLVABLE, max(NOTABLE, interval))


def is_doubtful(choice: Choice, baseline: Choice) -> bool:
    """Whether a config may have gained only as long as the host was busy.

    That is so on a CPU alone, whose configs are known by their threads: there other jobs slow one
    config more than another (one network gained 22.9 times beside another tuning, and nothing
    without). A load on a GPU slows all configs alike.
    """
    on_cpu = baseline.config.get(THREADS) is not None
    if not on_cpu or choice.config == baseline.config or choice.speedup_low <= 1:
        return False
    return unsteady(baseline.rounds, choice.speedup_high / choice.speedup_low)
