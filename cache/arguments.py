"""Arguments as people write them, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from advisor.errors import UsageError

MODES = ("train", "infer")
MOST_SHAPES = 8
MOST = 2**31 - 1
"""The largest number taken anywhere: far above any that is meant, and safe to compute with."""


def parse_shape(shape: Sequence[int] | str) -> tuple[int, ...]:
    """(64, 3, 256, 256) of itself or of '64x3x256x256': a batch and a sample.

    Raises:
        UsageError: it is no such shape.
    """
    parts = shape.lower().split("x") if isinstance(shape, str) else shape
    try:
        numbers = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) < 2 or not all(1 <= number <= MOST for number in numbers):
        raise UsageError(
            f"shape {shape!r}: expected a batch and a sample, each number from 1 to {MOST}, "
            "e.g. 64x3x256x256"
        )
    return numbers


Shapes = Sequence[int] | str | Sequence[Sequence[int] | str]
"""One shape, or two to eight that a job's inputs alternate between."""


def parse_shapes(shape: Shapes) -> tuple[tuple[int, ...], ...]:
    """Each shape with its batch, the largest first: their order does not matter to a job.

    Raises:
        UsageError: one is no shape, or they do not go together.
    """
    several = isinstance(shape, Sequence) and not isinstance(shape, str)
    if not several or not any(isinstance(part, Sequence) for part in shape):
        return (parse_shape(shape),)  # type: ignore[arg-type]
    if all(isinstance(part, str) and part.isdigit() for part in shape):
        return (parse_shape(shape),)  # type: ignore[arg-type]
    found = [parse_shape(one) for one in shape]  # type: ignore[arg-type]
    listed = ", ".join("x".join(map(str, one)) for one in found)
    if not 1 <= len(found) <= MOST_SHAPES:
        raise UsageError(f"shapes {listed}: expected one to {MOST_SHAPES}, got {len(found)}")
    if len(set(found)) < len(found):
        raise UsageError(f"shapes {listed}: one is given twice; give each once")
    if len({len(one) for one in found}) > 1:
        raise UsageError(f"shapes {listed}: expected the same number of dimensions in all")
    return tuple(sorted(found, key=lambda one: (-math.prod(one), one)))


def mix_of(shapes: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """A key's mix: nothing for a job of one shape."""
    return tuple("x".join(map(str, shape)) for shape in shapes) if len(shapes) > 1 else ()


def parse_bytes(text: int | str | None) -> int:
    """'20GiB', '512MB' or a number of bytes; 0 for None.

    Raises:
        UsageError: it is no size.
    """
    if text is None:
        return 0
    units = {"": 1, "b": 1}
    for power, prefix in enumerate("kmgt", start=1):
        units |= {f"{prefix}ib": 1024**power, f"{prefix}b": 1000**power, prefix: 1024**power}
    value = str(text).strip().lower()
    number = value.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = value[len(number) :].strip()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError(f"memory size {text!r}: expected a positive size such as 40GiB or 512MiB")
    return size


def parse_duration(text: float | str) -> float:
    """Seconds of '90s', '5m' or '1h30m', or of a number.

    Raises:
        UsageError: it is no time above zero.
    """
    parts = re.fullmatch(
        r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", str(text).strip()
    )
    if not str(text).strip() or parts is None or not any(parts.groups()):
        raise UsageError(f"{text!r}: expected a time such as 90s, 5m or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in parts.groups())
    total = 3600 * hours + 60 * minutes + seconds
    if not 0 < total < math.inf:
        raise UsageError(f"{text!r}: expected a time above zero, such as 90s, 5m or 1h30m")
    return total


def check_length(steps: int | None, duration_s: float | None) -> None:
    """Raise UsageError where a job's length is given twice or is no length."""
    if steps is not None and duration_s is not None:
        raise UsageError("steps and duration exclude each other; give one of them")
    if steps is not None:
        if type(steps) is not int:
            raise UsageError(f"steps {steps!r}: expected a number from 1 to {MOST}")
        check_number("steps", steps)
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise UsageError(f"duration {duration_s:g}s: expected a time above zero")


def check_number(what: str, value: int, least: int = 1) -> None:
    """Raise UsageError where a number is not from `least` to MOST."""
    if not least <= value <= MOST:
        raise UsageError(f"{what} {value}: expected a number from {least} to {MOST}")


def check(what: str, value: str, allowed: Sequence[str]) -> None:
    """Raise UsageError where a value is not one of those allowed."""
    if value not in allowed:
        raise UsageError(f"{what} {value!r}: expected one of {', '.join(allowed)}")
