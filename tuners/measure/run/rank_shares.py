"""What limits a job of several ranks: compute, the exchange, the loader, or one slow rank."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from advisor.cache.limit import Limit
from advisor.cache.shown import times
from advisor.tuners.act.pilot.protocol import RankStep

_EXCHANGE, _LOADING, _COMPUTE = "exchange between ranks", "loading", "compute"
PROFILED_STEPS, MOST_STEPS, PROFILED_S = 6, 50, 0.5
"""At least and at most so many steps are profiled; between them, so many seconds."""
SLOW = 1.5
"""A rank is called slow if the step would be so many times as fast without it. Ranks that do the
same differed by up to 1.18 on two busy cores, and by 1.28 with eleven processes on them."""


def steps_to_profile(step_s: float) -> int:
    return max(PROFILED_STEPS, min(MOST_STEPS, math.ceil(PROFILED_S / max(step_s, 1e-6))))


def shares(ranks: Sequence[RankStep]) -> dict[str, float]:
    """The shares of a job's step by what they go to, the largest first; from a step of each rank.

    All ranks make their steps together, so a rank's own time is what it does not wait. The rank
    that comes last to an exchange waits only for the transfer. If its own time is longer than that
    of the others, they wait for it, and the difference counts as `rank N`.
    """
    step_s = statistics.fmean(one.step_s for one in ranks)
    own = [step_s - one.waits_s for one in ranks]
    slow = max(range(len(ranks)), key=own.__getitem__)
    usual_s = statistics.median(one for rank, one in enumerate(own) if rank != slow)
    late_s = own[slow] - usual_s
    loads_s = statistics.median(one.loads_s for rank, one in enumerate(ranks) if rank != slow)
    found = {_EXCHANGE: min(one.waits_s for one in ranks), _LOADING: loads_s}
    if step_s >= SLOW * (step_s - late_s):
        found[f"rank {slow}"] = late_s
    found[_COMPUTE] = step_s - sum(found.values())
    ordered = sorted(found.items(), key=lambda one: -one[1])
    return {what: max(0.0, seconds) / step_s for what, seconds in ordered}


def line(ranks: Sequence[RankStep]) -> str:
    """'what limits the 2 ranks: rank 1, which is slow, 58% of a step (at most 2.38x without), ...';
    of a slow rank, if it were as fast as the others. '' of no ranks."""
    if not ranks:
        return ""
    parts = [
        f"{what}{', which is slow,' * what.startswith('rank ')} {share:.0%}"
        + f" (at most {times(1 / max(1e-3, 1 - share))} without)" * (what != _COMPUTE)
        for what, share in shares(ranks).items()
    ]
    parts[0] = parts[0].replace("%", "% of a step", 1)
    return f"what limits the {len(ranks)} ranks: {', '.join(parts)}"


def limits(ranks: Sequence[RankStep]) -> tuple[Limit, ...]:
    """A slow rank and the exchange as limits of a step; none of no ranks."""
    if not ranks:
        return ()
    step_s = statistics.fmean(one.step_s for one in ranks)
    return tuple(
        Limit(what=what, file="", line=0, seconds=share * step_s, gain=1 / max(1e-3, 1 - share))
        for what, share in shares(ranks).items()
        if what not in (_COMPUTE, _LOADING)
    )
