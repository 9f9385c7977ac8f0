"""Formats numbers for people."""

from __future__ import annotations

UNTOLD = 1.5  # an interval that holds 1 tells nothing if its ends have this ratio


def size(count: int) -> str:
    """Bytes as '1.4 GiB' or '512 KiB'; '-' where not known."""
    if count <= 0:
        return "-"
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def tells(low: float, high: float) -> bool:
    """Whether an interval shows that its ratio is not 1, or is about 1."""
    return not low <= 1 <= high or high < UNTOLD * low


def times(ratio: float) -> str:
    """'1.38x'."""
    return f"{ratio:.2f}x"


def speedup(ratio: float, low: float, high: float) -> str:
    """'1.38x (1.36-1.41)'; 'could not tell' if the interval tells nothing."""
    told = interval(low, high)
    return f"{times(ratio)} ({told})" if tells(low, high) else told


def interval(low: float, high: float) -> str:
    """'1.36-1.41'; 'could not tell' if the interval tells nothing."""
    return f"{low:.2f}-{high:.2f}" if tells(low, high) else "could not tell"
