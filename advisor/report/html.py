"""A record as one HTML page without scripts or other files; all texts of records are escaped.

Templates draw its charts as SVG: their text folds on a phone and follows the reader's colours and
font, and a page needs no optional library.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jinja2

from advisor.cache.record import Record
from advisor.cache.shown import times
from advisor.report.data import Comparison, Timeline
from advisor.report.sections import report
from advisor.report.text import duration, rate

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # possible distances between two ticks, up to a power of ten
BEYOND = 1.6
"""Intervals are cut at this multiple of the largest value, or they would flatten the others."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps numbers from `low` to `high` to positions in percent, from `start` to `end`."""

    low: float
    high: float
    start: float = 1.0
    end: float = 99.0

    def at(self, value: float) -> float:
        """The position of a number; for a number outside, the nearer end."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def cuts(self, value: float) -> bool:
        """Whether a number lies outside."""
        return not self.low <= value <= self.high

    def ticks(self, most: int = 4) -> list[float]:
        """Round numbers on the scale, at most `most` + 1."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next((one * power for one in STEPS if one * power >= rough), rough)
        first = math.ceil(self.low / step)
        return [step * i for i in range(first, first + most + 1) if step * i <= self.high]


def _scale(low: float, high: float, **ends: float) -> Scale:
    """A Scale from any numbers of a record: its ends are finite and differ."""
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
    """A renderer for the templates of some packages and of `advisor.report`."""
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
