"""A record's output: tables and charts for a terminal and a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

FULL_WIDTH = 100  # a terminal with fewer columns leaves out the `spare` columns of a table


class Row(NamedTuple):
    """Cells of text; `warns`: the last cell describes a problem."""

    cells: tuple[str, ...]
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text below headings; no cell is read as markup.

    Attributes:
        right: headings of columns of numbers, which are never folded.
        whole: headings of the other columns that are never folded.
        spare: headings of columns that a narrow terminal leaves out.
    """

    caption: str
    headings: tuple[str, ...]
    right: Sequence[str] = ()
    whole: Sequence[str] = ()
    spare: Sequence[str] = ()
    rows: list[Row] = field(default_factory=list)

    def row(self, *cells: str, warns: bool = False) -> None:
        self.rows.append(Row(cells, warns))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left_out = self.spare if options.max_width < FULL_WIDTH else ()
        shown = [i for i, heading in enumerate(self.headings) if heading not in left_out]
        drawn = RichTable(box=None, pad_edge=False, header_style="bold")
        for heading in (self.headings[i] for i in shown):
            number = heading in self.right
            drawn.add_column(
                heading,
                justify="right" if number else "left",
                no_wrap=number or heading in self.whole,
                overflow="fold",
            )
        for row in self.rows:
            cells = [Text(cell) for cell in row.cells]
            cells[-1].stylize("yellow" if row.warns else "")
            drawn.add_row(*(cells[i] for i in shown))
        yield drawn


class Estimate(NamedTuple):
    """A ratio with its 95% interval."""

    label: str
    value: float
    low: float
    high: float


class Comparison(NamedTuple):
    """A chart: speed-ups as dots on one axis."""

    title: str
    axis: str
    rows: Sequence[Estimate]


class Tried(NamedTuple):
    """A trial that ended `at_s` seconds into the search; `samples_per_s` is 0 if it failed, and
    `at_batch` says whether it has the user's batch."""

    label: str
    at_s: float
    samples_per_s: float
    at_batch: bool


class Timeline(NamedTuple):
    """A chart: samples/s of each trial over the seconds of the search."""

    title: str
    points: Sequence[Tried]

    @property
    def leaders(self) -> list[Tried]:
        """Each trial that was the best so far at the user's batch."""
        found: list[Tried] = []
        for one in self.points:
            if one.at_batch and one.samples_per_s > (found[-1].samples_per_s if found else 0.0):
                found.append(one)
        return found


class Bars(NamedTuple):
    """A chart: for each part its label, its size, and the size as text."""

    title: str
    bars: Sequence[tuple[str, int, str]]


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report.

    Attributes:
        name: one word, for links.
        lines: text below the table.
        code: lines to copy, into a script or a shell; they come last.
        chart: drawn on a page only; the table has the same numbers.
    """

    name: str
    title: str
    table: Table | None = None
    lines: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    chart: Comparison | Timeline | Bars | None = None

    def text(self) -> Iterator[str | RenderableType]:
        """The section for a terminal."""
        yield from ("", Text(self.title, "bold"))
        yield from filter(None, [self.table])
        yield from (*self.lines, *(f"    {line}" for line in self.code))


class Report(NamedTuple):
    """The report on one record. `facts`: names and values, such as the device and driver."""

    title: str
    headline: str
    stale: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
