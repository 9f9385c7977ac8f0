"""What a lookup serves a script beside the config itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from advisor.cache.config import Config
from advisor.cache.explanation import Explanation
from advisor.cache.record import LOOP, Record

EXACT, STALE = "exact", "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Where a config comes from, and what is known of it; by default it is yet to be measured.

    Attributes:
        status: 'exact', 'stale' (measured under another driver or version), 'nearest' (taken from
            a similar record), 'miss' or 'disabled'.
        reason: one line: what was served, or why nothing was.
        doubt: '; not verified ...', part of the reason, if it was not compared with strict fp32.
        signed: whether the reader, or their team, signed the record behind it.
        record: the record behind it, or None.
        explanation: what was looked for and found, for people with str(); None if this process has
            not looked it up.
        use: what the script lets advice do, for which the config was measured.
        default: torch's own values: those of the config that are the same are not acted on.
        flags: what a script that does not `prepare` can follow; None: the config's own.
        gains: speed-up over torch's default by use, as far as they are known.
    """

    status: str = EXACT
    reason: str = ""
    doubt: str = ""
    signed: bool = True
    record: Record | None = None
    explanation: Explanation | None = None
    use: str = LOOP
    default: Config = field(default_factory=Config)
    flags: Config | None = None
    gains: Mapping[str, float] = field(default_factory=dict)
