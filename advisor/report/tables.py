"""Records as tables and lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from advisor.cache.config import Config
from advisor.cache.key import Environment
from advisor.cache.match import Difference
from advisor.cache.reader import StoredRecord
from advisor.cache.record import CAPTURE, FLAGS, Part, Record
from advisor.cache.shown import interval, size, tells, times
from advisor.cache.signing import UNSIGNED
from advisor.command_snippets import line_anywhere, script_line
from advisor.report import feeding
from advisor.report.data import Table
from advisor.report.text import age, duration, outcome, rate, ratio, ratios, spread
from advisor.resolve.answer import DOUBTFUL, break_even, doubtful, is_clear, unverified
from advisor.tuners.knobs import INPUT_PIPELINE, caveats, described

WAITED = 0.1
"""A run that waits for data for a smaller share of its time gets no line about it."""
_MORE_WORKERS = ": more workers in its DataLoader may give more than any config"


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
    if record.stale:
        yield stale(record)
    yield from remarks(record)
    yield from compared(record)
    yield from feeding.remarks(record)
    yield f"record {record.id}: {cost(record)}"


def start(
    record: Record,
    cache: str | None,
    command: Sequence[str] = (),
    *,
    url: str = "",
) -> Iterator[str]:
    """How to apply a record.

    Args:
        cache: the record's store.
        command: the command of a run, as typed.
        url: the store's URL for a reader on another machine.
    """
    yield ""
    if not gains(record):
        yield nothing_to_gain(record)
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


def nothing_to_gain(record: Record) -> str:
    """What to do with a record that advises nothing."""
    how = "run it as usual" if record.key.task.command else "train as usual"
    if record.compares and not is_clear(record):
        again = "Give a larger --budget, or --force when the machine is quiet."
        return f"Could not tell what gains on this machine; {how}. {again}"
    return f"Nothing measured clearly gains on this machine; {how}."


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


def remarks(record: Record) -> Iterator[str]:
    """Generator: yields lines on what limits the result."""
    made, advised, baseline = record.provenance, record.winner(record.use), record.key.task.baseline
    if not record.compares:
        yield f"Nothing was compared with {baseline}, which is the advice."
    elif advised == record.baseline:
        yield f"Nothing measured is clearly faster at your batch: the advice is {baseline}."
    if doubtful(record):
        yield f"{DOUBTFUL}."
    yield from caveats_of(record)
    if made.steps:
        yield f"Chosen for a job of {made.steps:,} steps."
    elif made.duration_s:
        yield f"Chosen for a job of {duration(made.duration_s)}."
    yield from _pays(record)
    if (waited := waits(record)) >= WAITED:
        tried = set(INPUT_PIPELINE) & set(record.baseline.config)
        mend = "" if tried or not record.compares else _MORE_WORKERS
        yield f"Your unmodified script waits for its data {waited:.0%} of the time{mend}."


def caveats_of(record: Record) -> Iterator[str]:
    """Effects of the advice that a comparison with fp32 cannot see."""
    every = (said for one in record.winners for said in caveats(one.choice.config))
    yield from dict.fromkeys(every)


def waits(record: Record) -> float:
    """Share of the time in which an unmodified run waits for its data."""
    default = record.baseline.config
    return max((t.measurement.waited for t in record.trials if t.config == default), default=0.0)


def compared(record: Record) -> Iterator[str]:
    """The comparisons with strict fp32, and the advice that was not compared."""
    default = record.baseline.config
    for trial in record.trials:
        if trial.stage == "numerics":
            state = outcome(trial.measurement) or "trains like fp32"
            yield f"{described(trial.config, default)}: {state}, {trial.measurement.reason}"
    for name, choice in record.choices.items():
        if why := unverified(record, choice.config):
            yield f"{name}: {described(choice.config, default)}{why}"


def cost(record: Record) -> str:
    """'18 trials in 24.7 s'."""
    made = record.provenance
    return f"{made.trials} trial{'s' if made.trials != 1 else ''} in {duration(made.seconds)}"


def other_uses(record: Record, cache: str | None = None) -> Iterator[str]:
    """Lines on winners for other uses or batches, if they differ from the advice."""
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
        yield f"or, for a step that is given to advice.capture, capture=True: {spread(captured)}"
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


def _pays(record: Record) -> Iterator[str]:
    """From which step on the advice pays, and the seconds of its first step, if they are known."""
    advised = record.winner(record.use)
    for steps, config, pace in break_even(record):
        if config == advised.config != record.baseline.config:
            after = f" ({duration(pace.time_s(steps))})" if steps > 1 else ""
            yield f"The advice pays from step {steps:,} on{after}."
    if advised.loaded_step_s and advised.first_step_s:
        fresh, loaded = duration(advised.first_step_s), duration(advised.loaded_step_s)
        yield f"Its first step takes {fresh}, or {loaded} with the compiled code that was kept."


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
        why = [*filter(None, [record.stale]), *map(str, differs)]
        state = "fresh" if record.compares else "nothing else raced"
        if why:
            state = "stale: " + ", ".join(why)
        elif doubtful(record):
            state = "doubtful: the host was busy"
        table.row(
            record.id,
            record.key.environment.device.name,
            record.target.name,
            record.key.task.mode,
            record.key.task.inputs,
            "?" if doubtful(record) else ratio(record.winner(record.use)),
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
