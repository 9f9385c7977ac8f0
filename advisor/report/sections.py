"""A record whole, part by part: what `advisor show KEY` prints and `advisor report KEY` draws."""

from __future__ import annotations

import time
from collections.abc import Iterator

from advisor.cache.record import Record
from advisor.cache.shown import size
from advisor.finding.answer import break_even
from advisor.finding.doubt import doubtful
from advisor.printed import about, script_line
from advisor.report import charts, feeding, tables
from advisor.report.data import Report, Section
from advisor.report.text import spread
from advisor.tuners.knobs import described


def report(record: Record, cache: str | None = None, line: str | None = None) -> Report:
    """All that is shown of a record; `cache`: where it is, for the lines that are copied; `line`:
    the one that follows it, where that is not for this folder."""
    task, device = record.key.task, record.key.environment.device
    what = f"{task.inputs}, batch {task.batch}, {task.mode}, on {device.name}"
    return Report(
        title=f"{record.target.name}: {what}",
        headline=_headline(record),
        stale=tables.stale(record),
        facts=(*tables.environment(record.key.environment), *_provenance(record)),
        sections=tuple(_sections(record, cache, line)),
    )


def _headline(record: Record) -> str:
    advised = record.winner(record.use)
    if advised.config == record.baseline.config:
        return f"The advice is {record.key.task.baseline}"
    what = described(advised.config, record.baseline.config)
    if doubtful(record):
        return f"Doubtful, and not advised: {what}, as the host was busy"
    return f"{spread(advised)} {record.key.task.baseline} with {what}"


def _provenance(record: Record) -> Iterator[tuple[str, str]]:
    made = record.provenance
    yield "record", record.id
    yield "measured", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(made.created))
    yield "cost", f"{tables.cost(record)}, {made.how}"
    yield "advisor", made.advisor


def _sections(record: Record, cache: str | None, line: str | None) -> Iterator[Section]:
    yield Section(
        name="chosen",
        title="What was chosen",
        chart=charts.race(record),
        table=tables.verdict(record),
        lines=tuple(tables.said(record)),
    )
    yield _tried(record)
    yield _knobs(record, cache)
    yield _lengths(record)
    yield _inputs(record)
    yield _memory(record)
    yield _numerics(record)
    line = script_line(record, cache) if line is None else line
    gains = tables.gains(record) or not record.compares
    others = (f"# {one}" for one in tables.other_uses(record, cache))
    yield Section(
        name="script",
        title=tables.where(record) if gains else "What to do",
        lines=() if gains else (tables.nothing_to_gain(record),),
        code=(line, *others) if gains else (),
    )


def _tried(record: Record) -> Section:
    chart = charts.timeline(record)
    missing = "The record has no trials: it was made by hand, or its search is not in it."
    return Section(
        name="tried",
        title="What was tried",
        chart=chart,
        table=tables.trials(record) if chart else None,
        lines=() if chart else (missing,),
    )


def _knobs(record: Record, cache: str | None) -> Section:
    nothing = record.winner(record.use).config == record.baseline.config and not record.input
    line = "Not measured yet; run:"
    if nothing:
        line = f"No knob is set: {record.key.task.baseline} is advised."
    return Section(
        name="knobs",
        title="What each knob gives",
        chart=charts.parts(record) if record.parts else None,
        table=tables.parts(record) if record.parts else None,
        lines=() if record.parts else (line,),
        code=() if record.parts or nothing else (about("explain", record, cache),),
    )


def _lengths(record: Record) -> Section:
    rows = break_even(record)
    missing = "Not known: no first step was measured. advisor tune with --force measures them."
    return Section(
        name="length",
        title="From which step on it pays",
        table=tables.horizon(record, rows) if rows else None,
        lines=() if rows else (missing,),
    )


def _inputs(record: Record) -> Section:
    chart = charts.inputs(record)
    missing = feeding.UNTUNED
    if record.key.task.command:
        missing = f"Your unmodified script waits for its data {tables.waits(record):.0%} of the time."
    return Section(
        name="loader",
        title="Loader against step",
        chart=chart,
        curves=charts.loaders(record),
        table=feeding.table(record),
        lines=() if chart else (missing,),
    )


def _memory(record: Record) -> Section:
    chart, most = charts.memory(record), record.key.task.max_memory
    within = f"All within the {size(most)} that were permitted." if most else ""
    missing = "Not known: this device does not say what is in use."
    return Section(
        name="memory",
        title="Memory",
        chart=chart,
        table=tables.memory(record) if chart else None,
        lines=tuple(filter(None, [within if chart else missing])),
    )


def _numerics(record: Record) -> Section:
    table, lines = tables.numerics(record), tuple(tables.unheld(record))
    none = "What was chosen changes no number format and compiles nothing; rounding may differ."
    return Section(
        name="numerics",
        title="Numerics",
        table=table if table.rows else None,
        lines=lines if table.rows or lines else (none,),
    )
