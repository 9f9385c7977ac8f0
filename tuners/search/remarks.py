"""What a search says of its configs, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

from advisor.cache.config import Config
from advisor.tuners.decisions import CLEARLY, NOTABLE
from advisor.tuners.search.race import Rates
from advisor.tuners.search.ratio import Noise, Ratio, paired
from advisor.tuners.search.visit import Visit
from advisor.tuners.search.visits import Visits, score


def shown(ratio: Ratio) -> str:
    """'1.52x (1.49-1.55)', or that it was seen once."""
    if ratio.high == math.inf:
        return f"{ratio.mean:.2f}x in one turn"
    return f"{ratio.mean:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def remedy(seconds: float) -> str:
    """The budget that has so many seconds, rounded up to tens, as it can be typed."""
    return f"--budget {10 * math.ceil(seconds / 10)}s has the time for it"


def gains(
    visits: Visits,
    rates: Rates,
    noise: Noise,
    chosen: Collection[Config],
    named: Callable[[Config], str],
) -> Iterator[str]:
    """A line for each config that seemed to gain and is not advised; whether the loader is the
    limit of the rest.

    Args:
        rates: the turns that the choice was made from.
    """
    own = visits.baseline.config
    seemed = [v for v in visits.values() if v.ok and v.ratio.mean >= NOTABLE]
    for visit in sorted(seemed, key=lambda one: -one.ratio.mean):
        if (config := visit.config) not in chosen and config != own:
            raced = len(rates.get(config, ())) > 1
            ratio = paired(rates[config], rates[own], noise) if raced else visit.ratio
            why = _why_not(visits, visit, ratio)
            yield f"{named(config)}: {shown(ratio)}, not advised: {why}"
    best = visits.best()
    if best.waits and score(best) >= CLEARLY * best.ratio.mean:
        yield (
            f"the loader is the limit: {named(best.config)} waits {best.waited:.0%} of its time "
            f"for data, and would be {score(best):.2f}x if it were fed"
        )


def _why_not(visits: Visits, visit: Visit, ratio: Ratio) -> str:
    """Why a config that seemed to gain is not advised."""
    compared = visits.compared(visit.config)
    if compared is not None and not compared.ok:
        return compared.reason
    if compared is None and visits.is_doubtful(visit.config) and visits.leads(visit):
        return "it was not compared with fp32"
    if ratio.high < math.inf and not ratio.faster:
        return "too noisy to tell"
    return "another one is as fast or faster"
