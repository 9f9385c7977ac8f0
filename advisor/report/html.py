"""A record as one page: no script, nothing from elsewhere, everything from the record escaped.

Its charts are SVG by hand, not matplotlib's: their text folds on a telephone and follows the
reader's colours and font, and a page needs no optional library.
"""

from __future__ import annotations

import functools
import math
import secrets
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2

from advisor.cache.record import Record
from advisor.errors import UsageError
from advisor.report.data import Comparison, Curves, Timeline
from advisor.report.sections import report
from advisor.report.text import duration, rate

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Of ticks, times a power of ten."""
BEYOND = 1.6
"""An interval that ends beyond this times the largest value is cut there: it would flatten all."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers from `low` to `high` as positions in percent from `start` to `end`."""

    low: float
    high: float
    start: float = 1.0
    end: float = 99.0

    def at(self, value: float) -> float:
        """Of a number; of one outside, the end that is nearer."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def cuts(self, value: float) -> bool:
        """Whether a number lies outside."""
        return not self.low <= value <= self.high

    def ticks(self, most: int = 4) -> list[float]:
        """Round numbers within, `most` of them or one more."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next((one * power for one in STEPS if one * power >= rough), rough)
        first = math.ceil(self.low / step)
        return [step * i for i in range(first, first + most + 1) if step * i <= self.high]


def _scale(low: float, high: float, **ends: float) -> Scale:
    """Of ends that a record gave: finite, and never the same."""
    low = min(max(low, 0.0), 1e300)
    return Scale(low, max(min(high, 1e301), low * 1.01, 1e-300), **ends)


def across(chart: Comparison) -> Scale:
    """The axis of a comparison."""
    largest = max(max(row.value for row in chart.rows), chart.reference or 0.0)
    most = min(max(row.high for row in chart.rows), BEYOND * largest)
    least = 0.0
    if chart.reference is not None:
        least = min(chart.reference, *(row.low for row in chart.rows))
        least -= 0.05 * (largest - least)
    return _scale(least, max(most, largest))


def over_time(chart: Timeline) -> tuple[Scale, Scale]:
    """The axes of a timeline: seconds to the right, samples/s up."""
    seconds = max(point.at_s for point in chart.points)
    fastest = max(point.samples_per_s for point in chart.points)
    return _scale(0.0, seconds), _scale(0.0, fastest, start=96.0, end=8.0)


def over_workers(chart: Curves) -> tuple[Scale, Scale]:
    """The axes of curves: workers to the right, samples/s up."""
    points = [point for curve in chart.curves for point in curve.points]
    fastest = max(chart.level, *(rate for _, rate in points))
    most = max(workers for workers, _ in points)
    return _scale(0.0, most, start=3.0, end=97.0), _scale(0.0, fastest, start=96.0, end=8.0)


def template(name: str, *packages: str) -> str | None:
    """The text of a template, from the first package that has it, else from this one's."""
    for package in (*packages, "advisor.report"):
        file = resources.files(package) / "templates" / name
        if file.is_file():
            return file.read_text("utf-8")
    return None


@functools.cache
def pages(*packages: str) -> jinja2.Environment:
    """What renders pages from the templates of some packages, and this one's charts."""
    pages = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: template(name, *packages)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"rate": rate, "duration": duration}
    pages.globals |= {"across": across, "over_time": over_time, "over_workers": over_workers}
    return pages


def page(record: Record, cache: str | None = None) -> str:
    """A record as HTML, whole; `cache`: where it is, for the lines that are copied."""
    return pages().get_template("report.html").render(report=report(record, cache))


def save(text: str, path: Path) -> None:
    """Write a page, whole or not at all; what was there is replaced.

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
