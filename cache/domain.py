"""What a field of a record may hold, as annotations that msgspec checks: `speedup: Ratio`.

Every number of a record is finite and every text one line of printable characters, also where no
annotation says more. The upper bounds are far beyond what any machine does, and short on a screen.
"""

from __future__ import annotations

import time
from typing import Annotated

from msgspec import Meta

from advisor.errors import printable

LONGEST = 2**12
"""Characters of one text."""
FIRST = 1577836800.0
"""2020-01-01 in Unix seconds: no record is older."""
AHEAD_S = 86_400.0
"""What the clock of another machine may be ahead."""

Rate = Annotated[float, Meta(ge=1e-9, le=1e12)]
"""Samples per second."""
RateOr0 = Annotated[float, Meta(ge=0, le=1e12)]
Ratio = Annotated[float, Meta(ge=1e-6, le=1e6)]
RatioBound = Annotated[float, Meta(ge=0, le=1e12)]
"""The end of a ratio's interval, which few and unsteady turns leave wide."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Bytes = Annotated[int, Meta(ge=0, le=2**50)]
Count = Annotated[int, Meta(ge=0, le=10**12)]
Positive = Annotated[int, Meta(ge=1, le=10**12)]
Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{0,128}$")]
Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{12,128}$")]
StudyName = Annotated[str, Meta(pattern=r"^[0-9a-f@-]{0,128}$")]
"""Names a file beside the records: never a path."""


def is_moment(seconds: float) -> bool:
    """Whether a record may have been made then, whatever its writer's clock said."""
    return FIRST <= seconds <= time.time() + AHEAD_S


def is_line(text: str) -> bool:
    """Whether a terminal shows the text on one line, unchanged."""
    return len(text) <= LONGEST and text.isprintable()


def line(text: str) -> str:
    """The nearest text that is one line: blanks for line ends, '?' for what cannot be printed."""
    if is_line(text):
        return text
    flat = " ".join(part for part in text.splitlines() if part)
    return printable(flat[:LONGEST])
