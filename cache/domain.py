"""What a field of a record may hold beyond its type: written beside the field, held at decoding.

    created: Moment
    speedup: Times

Every number of a record is finite and every text one line of printable characters, also where no
domain says more. The upper bounds are far beyond what any machine does, and short on a screen.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from advisor.errors import printable

LONGEST = 2**12
"""Characters of one text."""
FIRST = 1577836800.0
"""2020-01-01 in Unix seconds: no record is older."""
AHEAD_S = 86_400.0
"""What the clock of another machine may be ahead."""


@dataclass(frozen=True, slots=True)
class Domain:
    """`says` what is expected; `holds` tells whether a value of the right type is it."""

    says: str
    holds: Callable[[Any], bool]


def is_moment(seconds: float) -> bool:
    """A time at which a record may have been made, whatever its writer's clock said."""
    return FIRST <= seconds <= time.time() + AHEAD_S


def is_line(text: str) -> bool:
    """One line that a terminal shows as it is."""
    return len(text) <= LONGEST and text.isprintable()


def line(text: str) -> str:
    """The nearest text that is one: blanks for line ends, '?' for what cannot be printed."""
    if is_line(text):
        return text
    flat = " ".join(part for part in text.splitlines() if part)
    return printable(flat[:LONGEST])


def _from_to(what: str, least: float, most: float) -> Domain:
    return Domain(f"{what} from {least:g} to {most:g}", lambda value: least <= value <= most)


def _matches(pattern: str) -> Callable[[str], bool]:
    found = re.compile(pattern)
    return lambda text: found.fullmatch(text) is not None


Moment = Annotated[float, Domain("a time from 2020 until now", is_moment)]
MomentOr0 = Annotated[
    float, Domain("0 or a time from 2020 until now", lambda value: value == 0 or is_moment(value))
]
Rate = Annotated[float, _from_to("samples/s", 1e-9, 1e12)]
RateOr0 = Annotated[float, _from_to("samples/s", 0, 1e12)]
Times = Annotated[float, _from_to("a ratio", 1e-6, 1e6)]
TimesBound = Annotated[float, _from_to("a ratio", 0, 1e12)]
"""The end of a ratio's interval, which few and unsteady turns leave wide."""
Span = Annotated[float, _from_to("seconds", 0, 1e9)]
Share = Annotated[float, _from_to("a share", 0, 1)]
Bytes = Annotated[int, _from_to("bytes", 0, 2**50)]
Count = Annotated[int, _from_to("a number", 0, 10**12)]
Positive = Annotated[int, _from_to("a number", 1, 10**12)]
Hex = Annotated[str, Domain("hexadecimal digits", _matches(r"[0-9a-f]{0,128}"))]
Fingerprint = Annotated[str, Domain("12 to 128 hexadecimal digits", _matches(r"[0-9a-f]{12,128}"))]
StudyName = Annotated[
    str, Domain("hexadecimal digits, '@' and '-'", _matches(r"[0-9a-f@-]{0,128}"))
]
"""Names a file beside the records: never a path."""
