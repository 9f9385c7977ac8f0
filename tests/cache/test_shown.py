from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from advisor.cache.shown import interval, size, speedup

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "-"),
        (512, "512 B"),
        (1000 * 1024, "1000 KiB"),
        (2**20, "1 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_a_size_has_the_unit_that_fits(count: int, text: str) -> None:
    assert size(count) == text


def test_nothing_else_turns_bytes_into_text() -> None:
    """Whatever divides by a GiB inside a text would say 0.000977 GiB of a MiB."""
    sources = [path for f in ("advisor", "cache", "tuners") for path in (ROOT / f).rglob("*.py")]
    assert sources
    by_hand = [path.name for path in sources if re.search(r"\{[^}]*/ 2\*\*30", path.read_text())]
    assert by_hand == []


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.36, 1.41, "1.36-1.41"),
        (0.97, 1.02, "0.97-1.02"),
        (1.78, 15.27, "1.78-15.27"),
        (0.2, 0.9, "0.20-0.90"),
        (0.0, 29348.73, "could not tell"),
        (0.0, math.inf, "could not tell"),
        (0.6, 1.8, "could not tell"),
    ],
)
def test_figures_that_say_nothing_are_not_shown(low: float, high: float, text: str) -> None:
    assert interval(low, high) == text
    assert speedup(1.9, low, high) == (text if text == "could not tell" else f"1.90x ({text})")
