"""What is shown of a record, as data: a terminal, a page and a plot draw the same, and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Drawn
from rich.text import Text

from advisor.cache.codec import to_plain
from advisor.cache.record import Record
from advisor.finding.answer import break_even
from advisor.printed import script_line

if TYPE_CHECKING:
    from advisor.tuners.act.advice_usage import Served

WIDE = 100
"""Columns of a terminal below which a table leaves out what it can spare."""


@dataclass(frozen=True, slots=True)
class Row:
    """Cells of text; `warns`: the last one is something to be looked at."""

    cells: tuple[str, ...]
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text below headings: nothing in them is markup, whatever it looks like.

    Attributes:
        right: headings of columns of numbers.
        whole: headings of columns that are never folded.
        spare: headings of columns that a narrow terminal leaves out.
    """

    caption: str
    headings: tuple[str, ...]
    right: Sequence[str] = ()
    whole: Sequence[str] = ()
    spare: Sequence[str] = ()
    rows: list[Row] = dataclasses.field(default_factory=list)

    def row(self, *cells: str, warns: bool = False) -> None:
        self.rows.append(Row(cells, warns))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = options.max_width < WIDE
        shown = [not (narrow and heading in self.spare) for heading in self.headings]
        drawn = Drawn(box=None, pad_edge=False, header_style="bold")
        for heading, here in zip(self.headings, shown, strict=True):
            if here:
                justify = "right" if heading in self.right else "left"
                drawn.add_column(
                    heading,
                    justify=justify,  # type: ignore[arg-type]
                    no_wrap=heading in self.whole,
                    overflow="fold",
                )
        for row in self.rows:
            *cells, last = map(Text, row.cells)
            last.stylize("yellow" if row.warns else "")
            both = zip([*cells, last], shown, strict=True)
            drawn.add_row(*(cell for cell, here in both if here))
        yield drawn


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval, equal ends where it has none."""

    label: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A chart: one estimate a row on one axis, as dots about `reference`, or as bars from 0 where
    that is None. `text` is a number as the axis has it."""

    title: str
    axis: str
    rows: tuple[Estimate, ...]
    text: Callable[[float], str]
    reference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A trial when it ended, `at_s` seconds into the search; `samples_per_s` is 0 where it failed.
    `at_batch`: at the user's; `leads`: it was the best so far there."""

    label: str
    at_s: float
    samples_per_s: float
    at_batch: bool
    leads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A chart: samples/s of each trial over the seconds of the search."""

    title: str
    points: tuple[Tried, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Samples/s over loader workers, few first."""

    label: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """A chart: what loaders give by their workers; `level`: samples/s of the step alone."""

    title: str
    curves: tuple[Curve, ...]
    level: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of a report.

    Attributes:
        name: one word, which a link can name.
        chart, curves: only a page draws them; the table has the same numbers.
        lines: what else is to be said.
        code: lines to copy, into a script or a shell; they come last.
    """

    name: str
    title: str
    chart: Comparison | Timeline | None = None
    curves: Curves | None = None
    table: Table | None = None
    lines: tuple[str, ...] = ()
    code: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is shown of one record. `facts`: name and value of where it was measured."""

    title: str
    headline: str
    stale: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]


def as_data(record: Record, cache: str | None) -> dict[str, Any]:
    """A record with its id and the line for a script."""
    rows = [
        {
            "from_step": row.steps,
            "seconds": row.seconds,
            "config": dict(row.candidate.config),
            "first_step_s": row.candidate.pace.first_step_s,
            "step_s": row.candidate.pace.step_s,
            "raced": row.candidate.raced,
            "fresh": row.candidate.fresh,
        }
        for row in break_even(record)
    ]
    script = script_line(record, cache)
    return {"id": record.id, "script": script, "break_even": rows, **to_plain(record)}


def explained(served: Served, batch_size: int | None) -> dict[str, Any]:
    """Why a lookup found what it found."""
    found = served.explanation
    data: dict[str, Any] = {
        "status": served.status,
        "reason": served.reason,
        "config": dict(served.config),
        "batch_size": batch_size,
        "record": served.record.id if served.record else None,
    }
    if found is None:
        return data
    return data | {
        "stores": [{"url": url, "said": said} for url, said in found.stores],
        "refused": list(found.refused),
        "near_misses": [
            {
                "id": near.id,
                "target": near.target,
                "store": near.store,
                "signed": near.signed,
                "differs": [
                    {"field": d.field, "wanted": d.wanted, "found": d.found} for d in near.differs
                ],
            }
            for near in found.near_misses
        ],
    }
