"""A record as sections, which `advisor show KEY` prints and `advisor report KEY` draws."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from advisor.cache.record import Record
from advisor.report import feeding, tables
from advisor.report.data import Comparison, Estimate, Report, Section, Timeline, Tried
from advisor.report.text import spread
from advisor.resolve.answer import doubtful
from advisor.tuners.knobs import described


def report(record: Record, cache: str | None = None, line: str = "") -> Report:
    """The report on a record.

    Args:
        cache: the record's store, for the lines to copy.
        line: the line that applies the record; default: the line for this folder.
    """
    task, device, made = record.key.task, record.key.environment.device, record.provenance
    what = f"{task.inputs}, batch {task.batch}, {task.mode}, on {device.name}"
    return Report(
        title=f"{record.target.name}: {what}",
        headline=_headline(record),
        stale=tables.stale(record),
        facts=(
            *tables.environment(record.key.environment),
            ("record", record.id),
            ("measured", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(made.created))),
            ("cost", f"{tables.cost(record)}, {made.how}"),
            ("advisor", made.advisor),
        ),
        sections=(*_sections(record), tables.use(record, cache, line)),
    )


def _headline(record: Record) -> str:
    advised, baseline = record.winner(record.use), record.key.task.baseline
    if advised.config == record.baseline.config:
        return f"The advice is {baseline}"
    what = described(advised.config, record.baseline.config)
    if doubtful(record):
        return f"Doubtful, and not advised, because the host was busy: {what}"
    return f"{spread(advised)} as fast as {baseline}: {what}"


def _sections(record: Record) -> Iterator[Section]:
    """Generator: yields the sections that have content."""
    chosen, remarks = tables.verdict(record), tuple(tables.remarks(record))
    yield Section("chosen", "What was chosen", chosen, remarks, chart=_race(record))
    if tried := list(_tried(record)):
        chart = Timeline("Samples/s of each trial over time", tried)
        yield Section("tried", "What was tried", tables.trials(record), chart=chart)
    if record.parts:
        title = "What each knob contributes"
        yield Section("knobs", title, tables.parts(record), chart=parts_chart(record))
    if loaders := feeding.table(record):
        yield Section("loader", "The loader", loaders, tuple(feeding.remarks(record)))
    none = "Not needed: the advice changes no number format and compiles nothing."
    compared = tuple(tables.compared(record)) or (none,)
    yield Section("numerics", "Comparison with fp32", lines=compared)


def _race(record: Record) -> Comparison | None:
    """The winners and the other configs of the final race, each once; None if only the baseline
    raced."""
    names = {choice.config: name for name, choice in record.choices.items()}
    others = [one for one in record.raced if one.config not in names]
    rows = []
    for one in (*record.choices.values(), *others):
        if one.config != record.baseline.config:
            what = f"{tables.called(record, one.config)}, batch {one.batch}"
            label = f"{names.get(one.config, 'not chosen')}: {what}"
            rows.append(Estimate(label, one.speedup, one.speedup_low, one.speedup_high))
    axis = f"speed-up over {record.key.task.baseline}, with its 95% interval"
    return Comparison("The final race", axis, rows) if rows else None


def parts_chart(record: Record) -> Comparison:
    """What each knob contributes, as `advisor explain` has measured."""
    rows = [Estimate(tables.part_name(one), one.ratio, one.low, one.high) for one in record.parts]
    axis = "speed-up over the advice without this knob, with its 95% interval"
    return Comparison("Gain from each knob", axis, rows)


def _tried(record: Record) -> Iterator[Tried]:
    """Generator: yields each trial of the search, with the time when it ended."""
    ended = 0.0
    for trial in sorted(record.trials, key=lambda trial: trial.number):
        ended = min(ended + trial.seconds, sys.float_info.max)
        if trial.stage == "compute":
            measured, batch = trial.measurement, trial.config.batch
            label = f"{trial.number}: {tables.called(record, trial.config)}, batch {batch}"
            rate = measured.samples_per_s if measured.ok else 0.0
            yield Tried(label, ended, rate, batch == record.batch)
