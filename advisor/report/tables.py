"""Records as tables and lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from advisor.cache.config import Config
from advisor.cache.key import Environment
from advisor.cache.match import Difference
from advisor.cache.reader import StoredRecord
from advisor.cache.record import CAPTURE, FLAGS, INTERRUPTED, Choice, Part, Record
from advisor.cache.shown import interval, size, tells, times
from advisor.cache.signing import UNSIGNED
from advisor.command_snippets import line_anywhere, script_line
from advisor.report import feeding
from advisor.report.data import Table
from advisor.report.text import age, duration, outcome, rate, ratio, ratios, spread
from advisor.resolve.answer import break_even, unverified
from advisor.resolve.doubt import DOUBTFUL, doubtful
from advisor.tuners.decisions import NOTABLE
from advisor.tuners.doubt import unsteady
from advisor.tuners.knobs import INPUT_PIPELINE, caveats, described

WAITED = 0.1
"""Share of a run's time from which its waiting for data gets a line."""
_MORE_WORKERS = ": more workers in its DataLoader may give more than any config"
AGAIN = "Measure again with --force when it is quiet."
"""The remedy on a busy host, at the end of a line."""
UNSTEADY = 1.2
"""Fastest over slowest turn of the advice from which a line names the busy host."""


def verdict(record: Record) -> Table:
    """What was found for each use."""
    over = "speed-up (95%)"
    table = Table(
        f"The winner for each use, measured in turn with {record.key.task.baseline}",
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


def summary(record: Record, *, short: bool = False) -> Iterator[str]:
    """The lines below the verdict; `short` as in `start`."""
    if record.stale:
        yield stale(record)
    yield from remarks(record, short=short)
    yield from compared(record)
    yield from feeding.remarks(record)
    yield f"record {record.id}: {cost(record)}"


def start(
    record: Record,
    cache: str | None,
    command: Sequence[str] = (),
    *,
    url: str = "",
    short: bool = False,
) -> Iterator[str]:
    """How to apply a record.

    Args:
        cache: its store.
        command: the run's, as typed.
        url: of the store that has the record for a reader on another machine.
        short: a remark names the budget that an untried config needs: that is the one remedy.
    """
    yield ""
    if not gains(record):
        yield nothing_to_gain(record, short=short)
        return
    place, line = where(record), script_line(record, cache, command=command)
    if url:
        place, line = f"{place}, with ADVISOR_CACHE={shlex.quote(url)}", line_anywhere(record)
    yield from (f"{place}:", f"    {line}")
    if record.input and not record.key.task.command:
        yield "    loader = DataLoader(dataset, **advice.loader)"
    yield from (f"    {other}" for other in other_uses(record, None if url else cache))


def gains(record: Record) -> bool:
    """Whether a record advises anything for any use."""
    return bool(record.input) or any(
        one.choice.config != record.baseline.config for one in record.winners
    )


def nothing_to_gain(record: Record, *, short: bool = False) -> str:
    """What to do with a record that advises nothing; `short` as in `start`."""
    how = "run it as usual" if record.key.task.command else "train as usual"
    if record.provenance.effort == INTERRUPTED:
        return f"Nothing was found to gain before it was cut short; {how}."
    if undecided(record):
        again = "" if short else f" {AGAIN}"
        return f"Could not tell what gains on this machine; {how}.{again}"
    if short:
        return f"Nothing that there was time for gains on this machine; {how}."
    return f"Nothing to gain on this machine; {how}."


def undecided(record: Record) -> bool:
    """Whether something may gain NOTABLE, and was not measured well enough to tell."""
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


def called(record: Record, config: Config) -> str:
    """How a config differs from the baseline."""
    nothing = "unmodified" if record.key.task.command else "torch default"
    return described(config, record.baseline.config, nothing=nothing)


def where(record: Record) -> str:
    """The title above the lines that apply a record."""
    return "Start it like this" if record.key.task.command else "In your script"


def stale(record: Record) -> str:
    """Why a record no longer holds; '' while it does."""
    return f"Marked stale by advisor verify: {record.stale}." if record.stale else ""


def remarks(record: Record, *, short: bool = False) -> Iterator[str]:
    """What limits the verdict; `short` as in `start`."""
    made, advised, baseline = record.provenance, record.winner(record.use), record.key.task.baseline
    if not record.compares:
        yield (
            f"The final race was too short to compare anything with {baseline}, which is the "
            "advice until then."
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
    yield from filter(None, (break_even_line(record), first_step_line(record)))
    unsteady = advised.high / advised.low if advised.low > 0 else 0.0
    if unsteady >= UNSTEADY and record.compares:
        what = described(advised.config, record.baseline.config, nothing=baseline)
        repeats = gains(record) and made.effort != INTERRUPTED and not short
        again = f" {AGAIN}" if repeats else ""
        so = "the speed-up may lie anywhere in its interval"
        if advised.config == record.baseline.config:
            so = "a gain may have been missed"
        yield (
            f"The fastest turn of {what} was {unsteady:.2f}x its slowest, because the host was "
            f"busy: {so}.{again}"
        )
    if (waited := waits(record)) >= WAITED:
        tried = set(INPUT_PIPELINE) & set(record.baseline.config)
        mend = "" if tried or not record.compares else _MORE_WORKERS
        yield f"Your unmodified script waits for its data {waited:.0%} of the time{mend}."


def caveats_of(record: Record) -> Iterator[str]:
    """What a comparison with fp32 cannot show of the advice."""
    every = (said for one in record.winners for said in caveats(one.choice.config))
    yield from dict.fromkeys(every)


def waits(record: Record) -> float:
    """Share of the time in which an unmodified run waits for its data."""
    default = record.baseline.config
    return max((t.measurement.waited for t in record.trials if t.config == default), default=0.0)


def compared(record: Record) -> Iterator[str]:
    """The comparisons with strict fp32, and what was not compared."""
    default = record.baseline.config
    for trial in record.trials:
        if trial.stage == "numerics":
            ok = trial.measurement.ok
            state = "trains like fp32" if ok else outcome(trial.measurement)
            yield f"{described(trial.config, default)}: {state}, {trial.measurement.reason}"
    yield from uncompared(record)


def uncompared(record: Record) -> Iterator[str]:
    """Advice that changes numerics and was not compared with fp32."""
    for name, choice in record.choices.items():
        if why := unverified(record, choice.config):
            yield f"{name}: {described(choice.config, record.baseline.config)}{why}"


def cost(record: Record) -> str:
    """'18 trials in 24.7 s'."""
    made = record.provenance
    return f"{made.trials} trial{'s' if made.trials != 1 else ''} in {duration(made.seconds)}"


def other_uses(record: Record, cache: str | None = None) -> Iterator[str]:
    """What else the record offers, if it gains more."""
    use, default = record.use, record.baseline.config
    advised, free = record.winner(use), record.winner(use, free=True)
    if record.key.task.command:
        if free.batch != record.batch:
            yield (
                f"or, with the batch free ({free.batch} samples a step; a larger batch trains "
                f"differently): {script_line(record, cache, free=True)}"
            )
        return
    captured, flags = record.winner(CAPTURE), record.winner(FLAGS)
    if captured.config not in (advised.config, default):
        yield f"or, with its step given to advice.capture: capture=True: {spread(captured)}"
    if flags.config not in (advised.config, default):
        yield f"a script that calls apply(TARGET) alone gets the flags alone: {spread(flags)}"
    if free.batch != record.batch:
        yield (
            f'or, with the batch free: batch="free" ({free.batch} samples a step; a larger batch '
            "trains differently)"
        )


def part_name(part: Part) -> str:
    """'channels_last', 'bf16', 'compile=default'."""
    return described(part.knob, Config())


def parts(record: Record) -> Table:
    """What each knob of the advice contributes."""
    baseline = record.key.task.baseline
    table = Table(
        f"Speed-up of the advice over the advice with this knob as in {baseline}",
        ("knob", "speed-up", "95%", "note"),
        right=("speed-up",),
        whole=("95%",),
    )
    held = record.winner(record.use).config | record.input
    for part in record.parts:
        name, value = next(iter(part.knob.items()))
        note = "through a DataLoader" if part.stage == "input" else ""
        if held.get(name) != value or type(held.get(name)) is not type(value):
            note = "not needed, removed from the advice"
        elif not tells(part.low, part.high):
            note = "use a larger --budget or a quieter machine"
        elif part.low <= 1:
            note = "nothing by itself"
        given = times(part.ratio) if tells(part.low, part.high) else "?"
        table.row(part_name(part), given, interval(part.low, part.high), note)
    return table


def break_even_table(record: Record) -> Table:
    """The best config for each length of a job, at the user's batch."""
    table = Table(
        "The best config for each length of a job, at your batch",
        ("best from step", "after", "config", "first step", "step", "how"),
        right=("best from step", "after", "first step", "step"),
    )
    for row in break_even(record):
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


def break_even_line(record: Record) -> str:
    """From which step on the advice pays; '' if it is the baseline or that is not known."""
    advised = record.winner(record.use).config
    if advised == record.baseline.config:
        return ""
    row = next((one for one in break_even(record) if one.candidate.config == advised), None)
    if row is None:
        return ""
    after = f" ({duration(row.seconds)})" if row.steps > 1 else ""
    return f"The advice pays from step {row.steps:,} on{after}."


def first_step_line(record: Record) -> str:
    """Seconds of the first step with artifacts and without; '' if they were not measured."""
    advised = record.winner(record.use)
    if not advised.loaded_step_s or not advised.first_step_s:
        return ""
    fresh, loaded = duration(advised.first_step_s), duration(advised.loaded_step_s)
    return f"Its first step takes {fresh}, or {loaded} with the compiled code that was kept."


def listing(
    found: Sequence[tuple[StoredRecord, Sequence[Difference]]], with_store: bool = False
) -> Table:
    """One line a record; `with_store`: it says which store has it."""
    table = Table(
        "What is tuned",
        ("key", "device", "target", "mode", "sample", "speed-up", "age", "state")
        + ("store",) * with_store,
        whole=("key", "speed-up", "age"),
        spare=("mode", "sample"),
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
    headings = (
        "#",
        "config",
        "batch",
        "samples/s",
        "speed-up",
        "step",
        "first step",
        "peak",
        "from",
    )
    table = Table(
        f"Every trial, the fastest first; speed-up is over {record.key.task.baseline}",
        headings,
        right=[heading for heading in headings if heading not in ("config", "from")],
        whole=("samples/s", "speed-up", "step", "first step", "peak"),
        spare=("first step", "peak"),
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


def raced(record: Record) -> list[Choice]:
    """The baseline, the winners and what else finished the race, each config once."""
    found: dict[Config, Choice] = {}
    for choice in (record.baseline, *record.choices.values(), *record.raced):
        found.setdefault(choice.config, choice)
    return list(found.values())


def numerics(record: Record) -> Table:
    """What was compared with strict fp32, and the result."""
    headings = ("config", "batch", "outcome", "distance")
    table = Table("Compared with strict fp32 on this model", headings, right=("batch",))
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
