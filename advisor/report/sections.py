"""A record part by part: `advisor show KEY` prints it, `advisor report KEY` draws it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from advisor.cache.record import Record
from advisor.command_snippets import about, script_line
from advisor.report import charts, feeding, tables
from advisor.report.data import Comparison, Report, Section, Table, Timeline
from advisor.report.text import spread
from advisor.resolve.doubt import doubtful
from advisor.tuners.knobs import described


def report(record: Record, cache: str | None = None, line: str | None = None) -> Report:
    """All that is shown of a record.

    Args:
        cache: its store, for the lines to copy.
        line: the line that applies it, if that is not for this folder.
    """
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
        return f"Doubtful, and not advised, because the host was busy: {what}"
    return f"{spread(advised)} as fast as {record.key.task.baseline}: {what}"


def _provenance(record: Record) -> Iterator[tuple[str, str]]:
    made = record.provenance
    yield "record", record.id
    yield "measured", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(made.created))
    yield "cost", f"{tables.cost(record)}, {made.how}"
    yield "advisor", made.advisor


def _sections(record: Record, cache: str | None, line: str | None) -> Iterator[Section]:
    race, verdict = charts.race(record), tables.verdict(record)
    yield Section("chosen", "What was chosen", verdict, tuple(tables.remarks(record)), chart=race)
    yield _section(
        "tried",
        "What was tried",
        tables.trials(record),
        "The record has no trials.",
        chart=charts.timeline(record),
    )
    yield _knobs(record, cache)
    yield _section(
        "length",
        "When it pays off",
        tables.break_even_table(record),
        "Not known: no first step was measured. advisor tune with --force measures them.",
    )
    untuned = feeding.UNTUNED
    if record.key.task.command:
        untuned = (
            f"Your unmodified script waits for its data {tables.waits(record):.0%} of the time."
        )
    yield _section("loader", "The loader", feeding.table(record), untuned)
    yield _section(
        "numerics",
        "Comparison with fp32",
        tables.numerics(record),
        "Not needed: the advice changes no number format and compiles nothing.",
        tuple(tables.uncompared(record)),
    )
    yield _start(record, cache, line)


def _section(
    name: str,
    title: str,
    table: Table | None,
    missing: str,
    lines: Sequence[str] = (),
    chart: Comparison | Timeline | None = None,
) -> Section:
    """A section with a table and lines, or with `missing` if it has neither."""
    shown = table if table and table.rows else None
    said = tuple(lines) if shown or lines else (missing,)
    return Section(name, title, shown, said, chart=chart)


def _knobs(record: Record, cache: str | None) -> Section:
    title = "What each knob contributes"
    if record.parts:
        return Section("knobs", title, tables.parts(record), chart=charts.parts(record))
    if record.winner(record.use).config == record.baseline.config and not record.input:
        return Section(
            "knobs", title, lines=(f"No knob is set: {record.key.task.baseline} is advised.",)
        )
    code = about("explain", record, cache)
    return Section("knobs", title, lines=("Not measured yet; run:",), code=(code,))


def _start(record: Record, cache: str | None, line: str | None) -> Section:
    if record.compares and not tables.gains(record):
        return Section("script", "What to do", lines=(tables.nothing_to_gain(record),))
    line = script_line(record, cache) if line is None else line
    others = (f"# {one}" for one in tables.other_uses(record, cache))
    return Section("script", tables.where(record), code=(line, *others))
