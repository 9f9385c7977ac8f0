"""Domains of a record's fields, as annotations that msgspec checks: `speedup: Ratio`.

Every number of a record is finite and every text one line of printable characters, even if no
annotation says so. The upper bounds are beyond any machine's values, and short on a screen.
"""

from __future__ import annotations

import time
from typing import Annotated

from msgspec import Meta

from advisor.errors import printable

LONGEST = 2**12
FIRST = 1577836800.0  # 2020-01-01 in Unix seconds: no record is older
AHEAD_S = 86_400.0  # most seconds that another machine's clock may be ahead

Rate = Annotated[float, Meta(ge=1e-9, le=1e12)]
RateOr0 = Annotated[float, Meta(ge=0, le=1e12)]
PositiveRatio = Annotated[float, Meta(ge=1e-6, le=1e6)]
RatioBound = Annotated[float, Meta(ge=0, le=1e12)]  # wide after few turns
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Bytes = Annotated[int, Meta(ge=0, le=2**50)]
Amount = Annotated[float, Meta(ge=0, le=1e24)]  # of FLOPs, joules or money
Count = Annotated[int, Meta(ge=0, le=10**12)]
Positive = Annotated[int, Meta(ge=1, le=10**12)]
Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{0,128}$")]
Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{12,128}$")]
StudyName = Annotated[str, Meta(pattern=r"^[0-9a-f@-]{0,128}$")]  # a file's name, never a path


def is_moment(seconds: float) -> bool:
    """Whether a record may have been made at this time, by a clock that may be ahead."""
    return FIRST <= seconds <= time.time() + AHEAD_S


def is_line(text: str) -> bool:
    """Whether a terminal shows the text on one line, unchanged."""
    return len(text) <= LONGEST and text.isprintable()


def line(text: str) -> str:
    """The text as one line: blanks for line ends, '?' for characters that cannot be printed."""
    if is_line(text):
        return text
    flat = " ".join(part for part in text.splitlines() if part)
    return printable(flat[:LONGEST])
