"""Records as tables and lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from advisor.cache.config import Config
from advisor.cache.key import Environment
from advisor.cache.match import Difference
from advisor.cache.reader import StoredRecord
from advisor.cache.record import CAPTURE, FLAGS, INTERRUPTED, PILOT, Choice, Part, Record
from advisor.cache.seal import UNSIGNED
from advisor.cache.shown import interval, size, tells, times
from advisor.finding.answer import break_even, unverified
from advisor.finding.doubt import DOUBTFUL, doubtful
from advisor.finding.horizon import BreakEven
from advisor.printed import line_anywhere, script_line
from advisor.report import feeding
from advisor.report.data import Table
from advisor.report.text import age, duration, outcome, rate, ratio, ratios, spread
from advisor.tuners.decisions import NOTABLE
from advisor.tuners.doubt import unsteady
from advisor.tuners.knobs import INPUT_PIPELINE, caveats, described

WAITED = 0.1
"""Share of the time that a run waits for its data from which that is worth a word."""
_MORE_WORKERS = ": more workers in its DataLoader may give more than any config"
AGAIN = "Measure again with --force when it is quiet."
"""The remedy at the end of a line where the host was too busy to tell."""
UNSTEADY = 1.2
"""Fastest over slowest turn of the advice from which the host's own noise is worth a word."""


def verdict(record: Record) -> Table:
    """What was found for each use."""
    over = "x as it is (95%)" if record.key.task.command else "x default (95%)"
    table = Table(
        f"What was found for each use, raced in turn with {record.key.task.baseline}",
        ("", "config", "batch", "samples/s", "turns", over, "peak"),
        right=("batch", "samples/s", "peak"),
        whole=("", "batch", "samples/s", "turns", over, "peak"),
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


def summary(record: Record, cache: str | None) -> Iterator[str]:
    """The lines below the verdict: the loader, and what it cost."""
    if record.stale:
        yield stale(record)
    yield from said(record)
    yield from compared(record)
    yield from feeding.said(record)
    yield f"record {record.id}: {cost(record)}"


def start(
    record: Record, cache: str | None, command: Sequence[str] = (), *, short: bool = False
) -> Iterator[str]:
    """What to write for a record to be followed, and where; `command`: as typed, of a run. `short`:
    there was no time for some configs."""
    if not gains(record):
        yield from ("", nothing_to_gain(record, short=short))
        return
    line = script_line(record, cache, command=command)
    yield from _started(where(record), line, [*_loader(record), *other_uses(record, cache)])


def gains(record: Record) -> bool:
    """Whether a record advises anything beside its baseline, be it for another use."""
    return bool(record.input) or any(
        one.choice.config != record.baseline.config for one in record.winners
    )


def nothing_to_gain(record: Record, *, short: bool = False) -> str:
    """What to do with a record that advises nothing; `short` as in `start`."""
    how = "run it as usual" if record.key.task.command else "train as usual"
    if record.provenance.effort == INTERRUPTED:
        return f"Nothing was found to gain before it was cut short; {how}."
    if undecided(record):
        return f"Could not tell what gains on this machine; {how}. {AGAIN}"
    if short:
        return f"Nothing that there was time for gains on this machine; {how}."
    return f"Nothing to gain on this machine; {how}."


def undecided(record: Record) -> bool:
    """Whether something may gain as much as `advisor tune` mentions, and was not measured well
    enough to tell, or not at all."""
    default, seen = record.baseline.config, ratios(record.trials, record.baseline.config)
    last = {one.config: one for one in record.trials if one.stage != "numerics"}
    timed_out = any(one.measurement.outcome == "timed_out" for one in last.values())
    wrong = {one.config for one in record.trials if one.measurement.outcome == "wrong"}
    raced = {one.config: one.speedup_high for one in record.raced}
    most = {
        config: raced.get(config, seen.get(one.number) or 0.0)
        for config, one in last.items()
        if one.measurement.ok and config != default and config not in wrong
    }
    restless = unsteady(record.baseline.rounds) or doubtful(record)
    return timed_out or restless or any(one >= NOTABLE for one in most.values())


def start_anywhere(record: Record, url: str) -> Iterator[str]:
    """The same for a reader elsewhere, to whom the record is in the store of this URL."""
    if not gains(record):
        yield from ("", nothing_to_gain(record))
        return
    place = f"{where(record)}, with ADVISOR_CACHE={shlex.quote(url)}"
    yield from _started(place, line_anywhere(record), [*_loader(record), *other_uses(record)])


def _started(place: str, line: str, others: Iterable[str]) -> Iterator[str]:
    yield from ("", f"{place}:", f"    {line}", *(f"    {other}" for other in others))


def _loader(record: Record) -> Iterator[str]:
    """The line that follows what was found of the loader."""
    if record.input and not record.key.task.command:
        yield "loader = DataLoader(dataset, **advice.loader)"


def called(record: Record, config: Config) -> str:
    """What a config of a record does otherwise than its baseline."""
    nothing = "as it is" if record.key.task.command else "torch default"
    return described(config, record.baseline.config, nothing=nothing)


def where(record: Record) -> str:
    """What the lines that apply a record stand under."""
    return "Start it like this" if record.key.task.command else "In your script"


def stale(record: Record) -> str:
    """Why a record no longer holds; '' while it does."""
    return f"Marked stale by advisor verify: {record.stale}." if record.stale else ""


def said(record: Record) -> Iterator[str]:
    """What must be known of the verdict."""
    made, advised, baseline = record.provenance, record.winner(record.use), record.key.task.baseline
    if not record.compares:
        yield (
            f"Nothing was raced beside {baseline} for long enough to tell: that is the advice "
            "until something is."
        )
    elif advised == record.baseline:
        yield f"Nothing measured is clearly faster at your batch: the advice is {baseline}."
    if doubtful(record):
        yield f"{DOUBTFUL}."
    yield from caveats_of(record)
    if made.steps:
        yield f"Chosen for a job of {made.steps:,} steps."
    elif made.duration_s:
        yield f"Chosen for a job of {duration(made.duration_s)}."
    if paying := pays(record, break_even(record)):
        yield paying
    if loading := first_step(record):
        yield loading
    unsteady = advised.high / advised.low if advised.low > 0 else 0.0
    if unsteady >= UNSTEADY and record.compares:
        what = described(advised.config, record.baseline.config, nothing=baseline)
        again = f" {AGAIN}" if gains(record) and made.effort != INTERRUPTED else ""
        yield (
            f"The fastest turn of {what} was {unsteady:.2f}x its slowest: the host, "
            "which is the limit here, was busy or shared, and the speed-up is known no better than "
            f"its interval says.{again}"
        )
    if (waited := waits(record)) >= WAITED:
        tried = set(INPUT_PIPELINE) & set(record.baseline.config)
        mend = "" if tried or not record.compares else _MORE_WORKERS
        yield f"As it is, it waits for its data {waited:.0%} of the time{mend}."


def caveats_of(record: Record) -> Iterator[str]:
    """What no comparison shows of what was chosen."""
    every = (said for one in record.winners for said in caveats(one.choice.config))
    yield from dict.fromkeys(every)


def waits(record: Record) -> float:
    """Share of the time in which a run as it is waits for its data."""
    default = record.baseline.config
    return max((t.measurement.waited for t in record.trials if t.config == default), default=0.0)


def compared(record: Record) -> Iterator[str]:
    """What was held against fp32, and what was served without."""
    default = record.baseline.config
    for trial in record.trials:
        if trial.stage == "numerics":
            ok = trial.measurement.ok
            state = "trains like fp32" if ok else outcome(trial.measurement)
            yield f"{described(trial.config, default)}: {state}, {trial.measurement.reason}"
    yield from unheld(record)


def unheld(record: Record) -> Iterator[str]:
    """What changes numerics and was not held against fp32."""
    for name, choice in record.choices.items():
        if why := unverified(record, choice.config):
            yield f"{name}: {described(choice.config, record.baseline.config)}{why}"


def cost(record: Record) -> str:
    """'18 trials in 24.7 s'."""
    made = record.provenance
    return f"{made.trials} trial{'s' if made.trials != 1 else ''} in {duration(made.seconds)}"


def other_uses(record: Record, cache: str | None = None) -> Iterator[str]:
    """What the script can ask for instead, where it gains by that."""
    if record.key.task.command:
        yield from _free_run(record, cache)
        return
    loop, default = record.winner(record.use), record.baseline
    captured, flags, free = (
        record.winner(CAPTURE),
        record.winner(FLAGS),
        record.winner(record.use, free=True),
    )
    if captured.config not in (loop.config, default.config):
        yield f"or, with its step given to advice.capture: capture=True: {spread(captured)}"
    if flags.config not in (loop.config, default.config):
        yield f"a script that calls apply(TARGET) alone gets the flags alone: {spread(flags)}"
    if free.batch != record.batch:
        yield (
            f'or, with the batch free: batch="free" ({free.batch} samples a step; another '
            "batch is another optimisation)"
        )


def _free_run(record: Record, cache: str | None) -> Iterator[str]:
    free = record.winner(PILOT, free=True)
    if free.batch != record.batch:
        yield (
            f"or, with the batch free ({free.batch} samples a step; another batch is another "
            f"optimisation): {script_line(record, cache, free=True)}"
        )


def part_name(part: Part) -> str:
    """'channels_last', 'bf16', 'compile=default'."""
    return described(part.knob, Config())


def parts(record: Record) -> Table:
    """What each knob of the advice contributes."""
    baseline = record.key.task.baseline
    table = Table(
        f"Samples/s of the advice over those with one knob alone set back to {baseline}",
        ("knob", "contributes", "95%", "note"),
        right=("contributes",),
        whole=("95%",),
    )
    held = record.winner(record.use).config | record.input
    for part in record.parts:
        name, value = next(iter(part.knob.items()))
        note = "through a DataLoader" if part.stage == "input" else ""
        if held.get(name) != value or type(held.get(name)) is not type(value):
            note = f"not needed, set back to {baseline}"
        elif not tells(part.low, part.high):
            note = "a larger --budget or a quieter machine tells"
        elif part.low <= 1:
            note = "nothing by itself"
        given = times(part.ratio) if tells(part.low, part.high) else "?"
        table.row(part_name(part), given, interval(part.low, part.high), note)
    return table


def horizon(record: Record, rows: Sequence[BreakEven]) -> Table:
    """Which config is the best from how many steps on, at the user's batch."""
    table = Table(
        "The best config at your batch, by the length of a job",
        ("best from step", "after", "config", "first step", "step", "how"),
        right=("best from step", "after", "first step", "step"),
    )
    for row in rows:
        one = row.candidate
        table.row(
            f"{row.steps:,}",
            duration(row.seconds) if row.steps > 1 else "",
            called(record, one.config),
            duration(one.pace.first_step_s),
            duration(one.pace.step_s),
            ("raced" if one.raced else "measured once")
            + (", first step measured" if one.fresh else ", slowest first step seen"),
        )
    return table


def pays(record: Record, rows: Sequence[BreakEven]) -> str:
    """'pays from step 1,252 on (38.1 s)': the advice, or '' where it is the default."""
    advised = record.winner(record.use).config
    if advised == record.baseline.config:
        return ""
    for row in rows:
        if row.candidate.config == advised:
            after = f" ({duration(row.seconds)})" if row.steps > 1 else ""
            return f"The advice pays from step {row.steps:,} on{after}."
    return ""


def first_step(record: Record) -> str:
    """What the advice takes before its first step, with its artifacts and without; '' where that
    was not measured."""
    advised = record.winner(record.use)
    if not advised.loaded_step_s or not advised.first_step_s:
        return ""
    fresh, loaded = duration(advised.first_step_s), duration(advised.loaded_step_s)
    return f"Its first step takes {fresh}, {loaded} with what is kept of its compilation."


def listing(
    found: Sequence[tuple[StoredRecord, Sequence[Difference]]], with_store: bool = False
) -> Table:
    """One line a record; `with_store`: it says which store has it."""
    table = Table(
        "What is tuned",
        ("key", "device", "target", "mode", "sample", "speed-up", "age", "state")
        + ("store",) * with_store,
        whole=("key", "speed-up", "age"),
    )
    for held, differs in found:
        record = held.record
        why = [*([record.stale] if record.stale else []), *map(str, differs)]
        fresh = "fresh" if record.compares else "nothing else raced"
        fresh = "doubtful: the host was busy" if doubtful(record) else fresh
        state = "stale: " + ", ".join(why) if why else fresh
        table.row(
            record.id,
            record.key.environment.device.name,
            record.target.name,
            record.key.task.mode,
            record.key.task.inputs,
            "?" if doubtful(record) else ratio(record.winner(record.use)),
            age(record.provenance.created),
            state if held.trusted else f"{state}; {UNSIGNED}",
            *[held.store.url.partition("?")[0]] * with_store,
            warns=bool(why) or not held.trusted,
        )
    return table


def trials(record: Record) -> Table:
    """Each trial of the search, the fastest first, those that failed last."""
    headings = ("#", "what", "batch", "samples/s", "x", "step", "first step", "peak", "how")
    table = Table(
        f"Every trial, the fastest first; x is over the trial of {record.key.task.baseline}",
        headings,
        right=[heading for heading in headings if heading not in ("what", "how")],
    )
    tried = [trial for trial in record.trials if trial.stage == "compute"]
    over = ratios(tried, record.baseline.config)
    for trial in sorted(tried, key=lambda t: (-t.measurement.samples_per_s, t.number)):
        measured, what = trial.measurement, called(record, trial.config)
        ok = measured.ok
        table.row(
            str(trial.number),
            what,
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


def memory(record: Record) -> Table:
    """The peak of each config that was raced."""
    device = record.key.environment.device
    table = Table(
        f"Peak memory of what was raced; the {where_memory_is(record)} has {device.memory_gib} GiB",
        ("config", "batch", "peak", "of it"),
        right=("batch", "peak", "of it"),
    )
    for choice in raced(record):
        if choice.peak_bytes:
            share = choice.peak_bytes / (device.memory_gib * 2**30) if device.memory_gib else 0.0
            table.row(
                called(record, choice.config),
                str(choice.batch),
                size(choice.peak_bytes),
                f"{share:.1%}" if share else "-",
            )
    return table


def where_memory_is(record: Record) -> str:
    """'device' or 'host'."""
    return "host" if record.key.environment.device.kind == "cpu" else "device"


def raced(record: Record) -> list[Choice]:
    """Torch's default, what was chosen and what else finished the race, each config once."""
    found: dict[Config, Choice] = {}
    for choice in (record.baseline, *record.choices.values(), *record.raced):
        found.setdefault(choice.config, choice)
    return list(found.values())


def numerics(record: Record) -> Table:
    """What was held against strict fp32, and how that ended."""
    headings = ("config", "batch", "outcome", "distance")
    table = Table("Held against strict fp32 on this model", headings, right=("batch",))
    for trial in record.trials:
        if trial.stage == "numerics":
            measured = trial.measurement
            table.row(
                called(record, trial.config),
                str(trial.config.batch or ""),
                "ok" if measured.ok else outcome(measured),
                measured.reason,
                warns=not measured.ok,
            )
    return table


def environment(found: Environment) -> list[tuple[str, str]]:
    """The environment as the key sees it."""
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
