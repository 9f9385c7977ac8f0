"""What a field of a record may hold."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from advisor.cache import domain


def holds(annotated: Any, value: object) -> bool:
    try:
        msgspec.convert(value, annotated)
    except msgspec.ValidationError:
        return False
    return True


def test_moments() -> None:
    assert not domain.is_moment(domain.FIRST - 1)
    assert domain.is_moment(domain.FIRST)
    assert domain.is_moment(time.time() + domain.AHEAD_S - 60)
    assert not domain.is_moment(time.time() + domain.AHEAD_S + 60)


def test_lines() -> None:
    longest = "x" * domain.LONGEST
    assert domain.is_line("") and domain.is_line(longest)
    assert not domain.is_line(longest + "x")
    assert not domain.is_line("a\nb") and not domain.is_line("\x1b[2J")
    assert domain.line(longest) == longest
    assert domain.line(longest + "x") == longest
    assert domain.line("a\n\nb\r\nc\x07d") == "a b c?d"


@pytest.mark.parametrize(
    ("annotated", "held", "refused"),
    [
        (domain.Rate, [0.001, 1e12], [0.0, -1.0, 1.1e12, 1e300]),
        (domain.RateOr0, [0.0, 1e12], [-0.001, 1e300]),
        (domain.Ratio, [1e-6, 1e6], [0.0, 1.1e6]),
        (domain.RatioBound, [0.0, 1e12], [-0.001, 1e300]),
        (domain.Seconds, [0.0, 1e9], [-0.001, 1e300]),
        (domain.Bytes, [0, 2**50], [-1, 2**50 + 1, 2**63]),
        (domain.Count, [0, 1, 10**12], [-1, 2**63]),
        (domain.Positive, [1, 10**12], [0, -1, 2**63]),
        (domain.Hex, ["", "0af", "a" * 128], ["g", "A", "a" * 129]),
        (domain.Fingerprint, ["a" * 12, "0" * 128], ["a" * 11, "a" * 129, "", "x" * 12]),
        (domain.StudyName, ["", "0a@-9"], ["../x", "x", "a" * 129]),
    ],
)
def test_domains(annotated: Any, held: list[object], refused: list[object]) -> None:
    assert all(holds(annotated, value) for value in held)
    assert not any(holds(annotated, value) for value in refused)
