"""Whether a host was too busy to tell what gains."""

from __future__ import annotations

import math
from collections.abc import Sequence

from advisor.cache.record import Choice, inner
from advisor.tuners.decisions import NOTABLE, RESOLVABLE
from advisor.tuners.knobs import THREADS


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
