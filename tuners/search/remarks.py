"""What a search says of its configs, in words."""

from __future__ import annotations

import math

from advisor.cache.config import Config
from advisor.tuners import knobs
from advisor.tuners.measure.place import Compared
from advisor.tuners.search.ratio import Ratio
from advisor.tuners.search.space import Space


def named(space: Space, config: Config, baseline: str) -> str:
    """What a config changes, and its batch where that is not the user's."""
    at = f" at batch {config.batch}" if config.batch != space.batch else ""
    return knobs.described(config, space.default, nothing=baseline) + at


def shown(ratio: Ratio) -> str:
    """'1.52x (1.49-1.55)', or that it was seen once."""
    if ratio.high == math.inf:
        return f"{ratio.mean:.2f}x in one turn"
    return f"{ratio.mean:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def budget(seconds: float) -> str:
    """Seconds as a budget that can be typed, rounded up to tens: '120s'."""
    return f"{10 * math.ceil(seconds / 10)}s"


def why_not(ratio: Ratio, compared: Compared | None, *, needed: bool) -> str:
    """Why a config that seemed to gain is not advised; `needed`: only if it was compared."""
    if compared is not None and not compared.ok:
        return compared.reason
    if compared is None and needed:
        return "it was not compared with fp32"
    if ratio.high < math.inf and not ratio.faster:
        return "too noisy to tell"
    return "another one is as fast or faster"
