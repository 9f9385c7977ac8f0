"""A record as one page: no script, nothing from elsewhere, everything from the record escaped.

Templates draw its charts as SVG: their text folds on a phone and follows the reader's colours and
font, and a page needs no optional library.
"""

from __future__ import annotations

import functools
import math
import secrets
from dataclasses import dataclass
from pathlib import Path

import jinja2

from advisor.cache.record import Record
from advisor.cache.shown import times
from advisor.errors import UsageError
from advisor.report.data import Comparison, Timeline
from advisor.report.sections import report
from advisor.report.text import duration, rate

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Between two ticks, times a power of ten."""
BEYOND = 1.6
"""An interval is cut at this times the largest value: a wider axis would flatten all others."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Positions in percent, from `start` to `end`, of numbers from `low` to `high`."""

    low: float
    high: float
    start: float = 1.0
    end: float = 99.0

    def at(self, value: float) -> float:
        """The position of a number; one outside is put at the nearer end."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def cuts(self, value: float) -> bool:
        """Whether a number lies outside."""
        return not self.low <= value <= self.high

    def ticks(self, most: int = 4) -> list[float]:
        """Round numbers on the scale, `most` or one more."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next((one * power for one in STEPS if one * power >= rough), rough)
        first = math.ceil(self.low / step)
        return [step * i for i in range(first, first + most + 1) if step * i <= self.high]


def _scale(low: float, high: float, **ends: float) -> Scale:
    """A scale of numbers from a record: finite, and wider than nothing."""
    low = min(max(low, 0.0), 1e300)
    return Scale(low, max(min(high, 1e301), low * 1.01, 1e-300), **ends)


def across(chart: Comparison) -> Scale:
    """The axis of a comparison, with 1 on it."""
    largest = max(1.0, *(row.value for row in chart.rows))
    most = min(max(row.high for row in chart.rows), BEYOND * largest)
    least = min(1.0, *(row.low for row in chart.rows))
    return _scale(least - 0.05 * (largest - least), max(most, largest))


def over_time(chart: Timeline) -> tuple[Scale, Scale]:
    """The axes of a timeline: seconds to the right, samples/s up."""
    seconds = max(point.at_s for point in chart.points)
    fastest = max(point.samples_per_s for point in chart.points)
    return _scale(0.0, seconds), _scale(0.0, fastest, start=96.0, end=8.0)


@functools.cache
def pages(*packages: str) -> jinja2.Environment:
    """A renderer of the templates of some packages, and of those here."""
    loaders = [jinja2.PackageLoader(one) for one in (*packages, "advisor.report")]
    pages = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"rate": rate, "duration": duration, "times": times}
    pages.globals |= {"across": across, "over_time": over_time}
    return pages


def page(record: Record, cache: str | None = None) -> str:
    """The HTML of a record; `cache`: its store, for the lines to copy."""
    return pages().get_template("report.html").render(report=report(record, cache))


def save(text: str, path: Path) -> None:
    """Write a page in place of an older one, completely or not at all.

    Raises:
        UsageError: it cannot be written there.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            temporary.write_text(text, "utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as exc:
        raise UsageError(f"page {str(path)!r}: {exc.strerror or exc}") from exc
