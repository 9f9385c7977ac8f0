"""A record as tables, lines and sections: what `tune`, `show` and a page say of it."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from advisor.cache.config import Config
from advisor.cache.key import Environment
from advisor.cache.limit import Limit
from advisor.cache.match import Difference
from advisor.cache.reader import StoredRecord
from advisor.cache.record import CAPTURE, CUT_SHORT, FLAGS, Part, Record
from advisor.cache.shown import interval, size, tells, times
from advisor.cache.signing import UNSIGNED
from advisor.command_snippets import line_anywhere, script_line
from advisor.errors import printable
from advisor.report import cost as cost_of
from advisor.report import feeding, memory
from advisor.report.data import Comparison, Estimate, Report, Section, Table, Timeline, Tried
from advisor.report.text import age, duration, outcome, rate, ratios, spread
from advisor.resolve.answer import DOUBTFUL, advises, break_even, doubtful, is_clear, unverified
from advisor.tuners.knobs import INPUT_PIPELINE, caveats, described

WAITED = 0.1  # a run that waits for data for a smaller share of its time gets no line about it


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
        stale=stale(record),
        facts=(
            *environment(record.key.environment),
            ("record", record.id),
            ("measured", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(made.created))),
            ("cost", f"{cost(record)}, {made.how}"),
            ("advisor", made.advisor),
        ),
        sections=(*_sections(record), use(record, cache, line)),
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
    lines, race = tuple(remarks(record)), _race(record)
    yield Section("chosen", "What was chosen", verdict(record), lines, chart=race)
    if tried := list(_tried(record)):
        timeline = Timeline("Samples/s of each trial over time", tried)
        yield Section("tried", "What was tried", trials(record), chart=timeline)
    yield from memory.sections(record)
    yield from cost_of.sections(record)
    if record.parts:
        rows = [Estimate(part_name(one), one.ratio, one.low, one.high) for one in record.parts]
        axis = "speed-up over the advice without this knob, with its 95% interval"
        chart = Comparison("Gain from each knob", axis, rows)
        yield Section("knobs", "What each knob contributes", parts(record), chart=chart)
    if record.limits:
        yield Section("limits", "What no setting can fix", limits(record.limits))
    if loaders := feeding.table(record):
        yield Section("loader", "The loader", loaders, tuple(feeding.remarks(record)))
    none = "Not needed: the advice changes no number format and compiles nothing."
    yield Section("numerics", "Comparison with fp32", lines=tuple(compared(record)) or (none,))


def _race(record: Record) -> Comparison | None:
    """The winners and the other configs of the final race, each once; None if only the baseline
    raced."""
    names = {choice.config: name for name, choice in record.choices.items()}
    others = [one for one in record.raced if one.config not in names]
    rows = []
    for one in (*record.choices.values(), *others):
        if one.config != record.baseline.config:
            what = f"{called(record, one.config)}, batch {one.batch}"
            label = f"{names.get(one.config, 'not chosen')}: {what}"
            rows.append(Estimate(label, one.speedup, one.speedup_low, one.speedup_high))
    axis = f"speed-up over {record.key.task.baseline}, with its 95% interval"
    return Comparison("The final race", axis, rows) if rows else None


def _tried(record: Record) -> Iterator[Tried]:
    """Generator: yields each trial of the search, with the time when it ended."""
    ended = 0.0
    for trial in sorted(record.trials, key=lambda trial: trial.number):
        ended = min(ended + trial.seconds, sys.float_info.max)
        if trial.stage == "compute":
            measured, batch = trial.measurement, trial.config.batch
            label = f"{trial.number}: {called(record, trial.config)}, batch {batch}"
            speed = measured.samples_per_s if measured.ok else 0.0
            yield Tried(label, ended, speed, batch == record.batch)


def verdict(record: Record) -> Table:
    """A table of the winner for each use."""
    over = "speed-up (95%)"
    table = Table(
        f"The winner for each use, measured in turn with {record.key.task.baseline}",
        ("", "config", "batch", "samples/s", "turns", over, "peak"),
        right=("batch", "samples/s", "peak"),
        whole=("", "turns", over),
        spare=("turns",),
    )
    for name, choice in record.choices.items():
        table.row(
            name,
            described(choice.config, record.baseline.config, nothing="-"),
            str(choice.batch),
            rate(choice.samples_per_s),
            f"{rate(choice.low)}-{rate(choice.high)}",
            "1" if choice == record.baseline else spread(choice),
            size(choice.peak_bytes),
        )
    return table


def summary(record: Record) -> Iterator[str]:
    """The lines below the verdict."""
    yield from filter(None, [stale(record)])
    yield from (*remarks(record), *compared(record), *feeding.remarks(record))
    yield f"record {record.id}: {cost(record)}"


def use(
    record: Record, cache: str | None, line: str = "", *, command: Sequence[str] = (), url: str = ""
) -> Section:
    """How to apply a record.

    Args:
        cache: the record's store.
        line: the line that applies the record; default: the line for this folder.
        command: the command of a run, as typed.
        url: the store's URL for a reader on another machine.
    """
    run, others = record.key.task.command, tuple(_other_uses(record, None if url else cache))
    gains = record.input or advises(record) or memory.saves(record)
    if not gains and (run or not others):
        return Section("script", "What to do", lines=(nothing_to_gain(record),), code=others)
    title = "Start it like this" if run else "In your script"
    if url:
        title, line = f"{title}, with ADVISOR_CACHE={shlex.quote(url)}", line_anywhere(record)
    code = [line or script_line(record, cache, command=command)]
    if record.input and not run:
        code.append("loader = DataLoader(dataset, **advice.loader)")
    return Section("script", title, code=(*code, *others))


def nothing_to_gain(record: Record) -> str:
    """What to do with a record that advises nothing."""
    how = "run it as usual" if record.key.task.command else "train as usual"
    if is_undecided(record):
        untold = f"Could not tell what gains on this machine; {how}."
        if record.provenance.effort == CUT_SHORT:  # a line has said what to do
            return untold
        return f"{untold} Give a larger --budget, or --force when the machine is quiet."
    return f"Nothing measured clearly gains on this machine; {how}."


def is_undecided(record: Record) -> bool:
    """Whether a tuning that advises nothing was too short or too noisy to tell what gains."""
    return not advises(record) and record.compares and not is_clear(record)


def _other_uses(record: Record, cache: str | None) -> Iterator[str]:
    """Lines on winners for other uses or batches, if they differ from the advice."""
    advised, free = record.winner(record.use), record.winner(record.use, free=True)
    batch = f"({free.batch} samples a step; a larger batch trains differently)"
    if record.key.task.command:
        if free.batch != record.batch:
            line = script_line(record, cache, free=True)
            yield f"# or, with the batch free {batch}: {line}"
        return
    for name, how in (
        (CAPTURE, "# or, for a step that is given to advice.capture, capture=True"),
        (FLAGS, "# a script that calls apply(TARGET) alone gets the flags alone"),
    ):
        winner = record.winner(name)
        if winner.config not in (advised.config, record.baseline.config):
            yield f"{how}: {spread(winner)}"
    if free.batch != record.batch:
        yield f'# or, with the batch free: batch="free" {batch}'


def called(record: Record, config: Config) -> str:
    """How a config differs from the baseline."""
    return described(config, record.baseline.config, nothing=next(iter(record.choices)))


def stale(record: Record) -> str:
    """Why a record no longer holds; '' while it does."""
    return f"Marked stale by advisor verify: {record.stale}." if record.stale else ""


def changes(record: Record, differs: Sequence[Difference]) -> list[str]:
    """Why a record is stale. `differs`: what has changed on this machine since."""
    return [*filter(None, [record.stale]), *map(str, differs)]


def remarks(record: Record) -> Iterator[str]:
    """Generator: yields lines on what limits the result."""
    made, advised, baseline = record.provenance, record.winner(record.use), record.baseline
    name = record.key.task.baseline
    if not record.compares:
        others = any(one.config != baseline.config for one in record.trials)
        why = "measured for long enough" if others else "tried"
        yield f"No other config was {why}: the advice is {name}."
    elif advised == baseline:
        noisy = is_undecided(record)
        none = "Too noisy to tell what is" if noisy else "Nothing measured is clearly"
        yield f"{none} faster at your batch: the advice is {name}."
    if doubtful(record):
        yield f"{DOUBTFUL}."
    yield from caveats_of(record)
    if line := memory.sharding(record):
        yield line
    if made.steps:
        yield f"Chosen for a job of {made.steps:,} steps."
    elif made.duration_s:
        yield f"Chosen for a job of {duration(made.duration_s)}."
    for steps, config, pace in break_even(record):
        if config == advised.config != baseline.config:
            after = f" ({duration(pace.time_s(steps))})" if steps > 1 else ""
            yield f"The advice pays from step {steps:,} on{after}."
    if advised.loaded_step_s and advised.first_step_s:
        fresh, loaded = duration(advised.first_step_s), duration(advised.loaded_step_s)
        yield f"Its first step takes {fresh}, or {loaded} with the compiled code that was kept."
    unmodified = (one.measurement for one in record.trials if one.config == baseline.config)
    if (waited := max((one.waited for one in unmodified), default=0.0)) >= WAITED:
        tried = set(INPUT_PIPELINE) & set(baseline.config) or not record.compares
        mend = "" if tried else ": if cores are free, more workers in its DataLoader may give more"
        yield f"Your unmodified script waits for its data {waited:.0%} of the time{mend}."


def caveats_of(record: Record) -> Iterator[str]:
    """Effects of the advice that a comparison with fp32 cannot see."""
    every = (said for one in record.winners for said in caveats(one.choice.config))
    yield from dict.fromkeys(every)


def compared(record: Record) -> Iterator[str]:
    """The comparisons with strict fp32, and the advice that was not compared."""
    default, lines = record.baseline.config, dict[str, None]()
    for trial in record.trials:
        if trial.stage == "numerics":
            state = outcome(trial.measurement) or "trains like fp32"
            if trial.measurement.outcome == "failed":
                state = "not verified"
            lines[f"{described(trial.config, default)}: {state}, {trial.measurement.reason}"] = None
    yield from lines  # a config that was compared at two batches may give the same line
    for name, choice in record.choices.items():
        if why := unverified(record, choice.config):
            yield f"{name}: {described(choice.config, default)}{why}"


def cost(record: Record) -> str:
    """'18 trials in 24.7 s'."""
    made = record.provenance
    return f"{made.trials} trial{'s' if made.trials != 1 else ''} in {duration(made.seconds)}"


def limits(found: Sequence[Limit]) -> Table:
    """What slows the unmodified script down, and no setting can fix."""
    right = ("it takes", "without it at most")
    table = Table("What slows the script down", ("what", "where", *right), right=right)
    for one in found:
        table.row(printable(one.what), place(one), took(one), times(one.gain))
    return table


def place(limit: Limit) -> str:
    """'train.py:12', in the present folder; '' if it is not known."""
    file = printable(limit.file).removeprefix(f"{Path.cwd()}/")
    return f"{file}:{limit.line}" if file else ""


def took(limit: Limit) -> str:
    each = {"loading": "a sample", "evaluation": "a time", "checkpoint": "a time"}
    return f"{duration(limit.seconds)} {each.get(limit.what, 'a step')}"


def part_name(part: Part) -> str:
    """'channels_last', 'bf16', 'compile=default'."""
    return described(part.knob, Config())


def parts(record: Record) -> Table:
    """What each knob of the advice contributes."""
    table = Table(
        "What each knob adds: the speed-up over the advice without it",
        ("knob", "speed-up", "95%", "note"),
        right=("speed-up",),
        whole=("95%",),
    )
    held = record.winner(record.use).config | record.input
    for part in record.parts:
        told = tells(part.low, part.high)
        name, value = next(iter(part.knob.items()))
        note = "through a DataLoader" if part.stage == "input" else ""
        if held.get(name) != value or type(held.get(name)) is not type(value):
            note = "not needed, removed from the advice"
        elif not told:
            note = "use a larger --budget or a quieter machine"
        elif part.low <= 1:
            note = "nothing by itself"
        given = times(part.ratio) if told else "?"
        table.row(part_name(part), given, interval(part.low, part.high), note)
    return table


def listing(
    found: Sequence[tuple[StoredRecord, Sequence[Difference]]], stores: Sequence[str] = ()
) -> Table:
    """A table with a row for each record; with several `stores` (URLs), also its store's number."""
    table = Table(
        "What is tuned",
        ("key", "device", "target", "mode", "sample", "speed-up", "age", "state")
        + ("store",) * bool(stores),
        whole=("key", "speed-up", "age"),
        spare=("mode", "sample"),
    )
    for held, differs in found:
        record = held.record
        why, task, advised = changes(record, differs), record.key.task, record.winner(record.use)
        told = tells(advised.speedup_low, advised.speedup_high) and not doubtful(record)
        state = "fresh" if record.compares else "nothing else raced"
        if why:
            state = f"stale: {', '.join(why)}"
        elif doubtful(record):
            state = "doubtful: the host was busy"
        elif is_undecided(record):
            told, state = False, "could not tell what gains"
        table.row(
            record.id,
            record.key.environment.device.name,
            record.target.name,
            task.mode,
            task.inputs,
            times(advised.speedup) if told else "?",
            age(record.provenance.created),
            state if held.trusted else f"{state}; {UNSIGNED}",
            *(str(number) for number, url in enumerate(stores, 1) if url == held.store.url),
            warns=bool(why) or not held.trusted,
        )
    return table


def trials(record: Record) -> Table:
    """Each trial of the search, the fastest first, those that failed last."""
    numbers = ("samples/s", "speed-up", "step", "first step", "peak")
    table = Table(
        f"Every trial, the fastest first; speed-up is over {record.key.task.baseline}",
        ("#", "config", "batch", *numbers, "from"),
        right=("#", "batch", *numbers),
        spare=("first step", "peak"),
    )
    tried = [trial for trial in record.trials if trial.stage == "compute"]
    over = ratios(tried, record.baseline.config)
    for trial in sorted(tried, key=lambda t: (-t.measurement.samples_per_s, t.number)):
        measured, ok = trial.measurement, trial.measurement.ok
        table.row(
            str(trial.number),
            called(record, trial.config),
            str(trial.config.batch or ""),
            rate(measured.samples_per_s) if ok else outcome(measured),
            times(over[trial.number]) if over[trial.number] else "",
            duration(measured.step_s) if ok else "",
            duration(measured.first_step_s) if ok and measured.first_step_s else "",
            size(measured.peak_bytes),
            trial.origin if ok else measured.reason,
            warns=not ok,
        )
    return table


def environment(found: Environment) -> list[tuple[str, str]]:
    device, software = found.device, found.software
    rows = [
        ("device", device.name),
        ("kind", device.kind),
        ("capability", device.capability),
        ("multiprocessors" if device.kind == "cuda" else "cores", str(device.multiprocessors)),
        ("memory", f"{device.memory_gib} GiB"),
        ("MIG profile", device.mig),
        ("driver", software.driver),
        ("CUDA", software.cuda),
        ("cuDNN", software.cudnn),
        ("torch", software.torch),
        ("power limit", f"{software.power_limit_w} W" if software.power_limit_w else ""),
        ("clock cap", f"{software.clock_cap_mhz} MHz" if software.clock_cap_mhz else ""),
    ]
    return [(name, value) for name, value in rows if value]
