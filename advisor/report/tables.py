"""Records as tables and lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from advisor.cache.config import Config
from advisor.cache.key import Environment
from advisor.cache.match import Difference
from advisor.cache.record import CAPTURE, FLAGS, LOOP, Part, Record, Trial
from advisor.cache.shown import interval, size, tells
from advisor.finding.answer import break_even, unverified
from advisor.finding.horizon import Row
from advisor.printed import script_line
from advisor.report.text import age, duration, outcome, rate, spread
from advisor.tuners.knobs import described

UNSTEADY = 1.2
"""Fastest over slowest turn of the advice from which the host's own noise is worth a word."""
WIDE = 100
"""Columns below which a config would be cut short to make room for its turns."""


class _Cells(Table):
    """A table whose cells are text: nothing that a record says is read as markup."""

    def __init__(
        self, *headings: str, right: Sequence[str] = (), whole: Sequence[str] = ()
    ) -> None:
        super().__init__(box=None, pad_edge=False, header_style="bold")
        for heading in headings:
            self.add_column(
                heading,
                justify="right" if heading in right else "left",
                no_wrap=heading in whole,
                overflow="fold",
            )

    def row(self, *cells: str, style: str = "") -> None:
        self.add_row(*map(Text, cells), style=style)


def verdict(record: Record, width: int) -> Table:
    """What was found for each use; without turns if narrow."""
    headings = ["", "config", "batch", "samples/s", "turns", "x default (95%)", "peak"]
    if width < WIDE:
        headings.remove("turns")
    numeric = ("batch", "samples/s", "peak")
    table = _Cells(*headings, right=numeric, whole=[h for h in headings if h != "config"])
    for name, choice in record.choices.items():
        turns = [f"{rate(choice.low)}-{rate(choice.high)}"] if width >= WIDE else []
        table.row(
            name,
            described(choice.config, record.baseline.config),
            str(choice.batch),
            rate(choice.samples_per_s),
            *turns,
            "1" if choice == record.baseline else spread(choice),
            size(choice.peak_bytes),
        )
    return table


def summary(record: Record, cache: str | None) -> Iterator[str]:
    """The lines below the verdict: the input pipeline, what it cost, and what to write."""
    made, advised = record.provenance, record.winner(LOOP)
    default = record.baseline.config
    if not record.compares:
        yield "Nothing was raced beside torch's default, which is the advice until something is."
    elif advised == record.baseline:
        yield "Nothing measured is clearly faster at your batch: the advice is the default."
    if made.steps:
        yield f"Chosen for a job of {made.steps:,} steps."
    elif made.duration_s:
        yield f"Chosen for a job of {duration(made.duration_s)}."
    if record.stale:
        yield f"Marked stale by advisor verify: {record.stale}."
    if paying := pays(record, break_even(record)):
        yield paying
    unsteady = advised.high / advised.low
    if unsteady >= UNSTEADY:
        yield (
            f"Its turns differ by {unsteady:.2f}x: the host, which is the limit here, was busy or "
            "shared. Measure again with --force when it is quiet."
        )
    for trial in record.trials:
        if trial.stage == "numerics":
            state = "" if trial.measurement.ok else f"{outcome(trial.measurement)}, "
            yield f"{described(trial.config, default)}: {state}{trial.measurement.reason}"
    for name, choice in record.choices.items():
        if why := unverified(record, choice.config):
            yield f"{name}: {described(choice.config, default)}{why}"
    if record.input:
        said = described(record.input)
        yield f"input pipeline: {'DataLoader default' if said == 'torch default' else said}"
    yield (
        f"record {record.id}: {made.trials} trial{'s' if made.trials != 1 else ''} in "
        f"{duration(made.seconds)}"
    )
    yield from ("", "In your script:", f"    {script_line(record, cache)}")
    yield from _other_uses(record)


def _other_uses(record: Record) -> Iterator[str]:
    """What the script can ask for instead, where it gains by that."""
    loop, default = record.winner(LOOP), record.baseline
    captured, flags, free = (
        record.winner(CAPTURE),
        record.winner(FLAGS),
        record.winner(LOOP, free=True),
    )
    if captured.config not in (loop.config, default.config):
        yield f"    or, with its step given to advice.capture: capture=True: {spread(captured)}"
    if flags.config not in (loop.config, default.config):
        yield f"    a script that calls nothing but apply() gets the flags alone: {spread(flags)}"
    if free.batch != record.batch:
        yield (
            f'    or, with the batch free: batch="free" ({free.batch} samples a step; another '
            "batch is another optimisation)"
        )


def part_name(part: Part) -> str:
    """'channels_last', 'bf16', 'compile=default'."""
    return described(part.knob, Config())


def parts(record: Record) -> Table:
    """What each knob of the advice contributes."""
    table = _Cells("knob", "contributes", "95%", "", right=["contributes"])
    held = record.winner(LOOP).config | record.input
    for part in record.parts:
        name, value = next(iter(part.knob.items()))
        note = "through a DataLoader" if part.stage == "input" else ""
        if held.get(name) != value or type(held.get(name)) is not type(value):
            note = "not needed, set back to torch's default"
        elif not tells(part.low, part.high):
            note = "a larger --budget or a quieter machine tells"
        elif part.low <= 1:
            note = "nothing by itself"
        ratio = f"{part.ratio:.2f}x" if tells(part.low, part.high) else "?"
        table.row(part_name(part), ratio, interval(part.low, part.high), note)
    return table


def horizon(record: Record, rows: Sequence[Row]) -> Table:
    """Which config is the best from how many steps on, at the user's batch."""
    headings = ("best from step", "after", "config", "first step", "step", "how")
    table = _Cells(*headings, right=[h for h in headings if h not in ("config", "how")])
    for row in rows:
        one = row.candidate
        table.row(
            f"{row.steps:,}",
            duration(row.seconds) if row.steps > 1 else "",
            described(one.config, record.baseline.config),
            duration(one.pace.first_step_s),
            duration(one.pace.step_s),
            ("raced" if one.raced else "measured once")
            + (", started afresh" if one.fresh else ", slowest first step seen"),
        )
    return table


def pays(record: Record, rows: Sequence[Row]) -> str:
    """'pays from step 1,252 on (38.1 s)': the advice, or '' where it is the default."""
    advised = record.winner(LOOP).config
    if advised == record.baseline.config:
        return ""
    for row in rows:
        if row.candidate.config == advised:
            after = f" ({duration(row.seconds)})" if row.steps > 1 else ""
            return f"The advice pays from step {row.steps:,} on{after}."
    return ""


def listing(records: Sequence[tuple[Record, Sequence[Difference]]]) -> Table:
    """One line a record."""
    headings = ("key", "device", "target", "mode", "sample", "speed-up", "age", "state")
    table = _Cells(*headings, whole=("key", "speed-up", "age"))
    for record, differs in records:
        why = [*([record.stale] if record.stale else []), *map(str, differs)]
        state = "fresh" if record.compares else "nothing raced"
        table.add_row(
            *map(
                Text,
                (
                    record.id,
                    record.key.environment.device.name,
                    record.target.name,
                    record.key.task.mode,
                    record.key.task.inputs,
                    f"{record.winner(LOOP).speedup:.2f}x",
                    age(record.provenance.created),
                ),
            ),
            Text("stale: " + ", ".join(why), "yellow") if why else Text(state),
        )
    return table


def trials(record: Record) -> Table:
    """Each trial of a record, fastest first."""
    headings = ("#", "what", "batch", "samples/s", "x", "step", "first step", "peak", "how")
    table = _Cells(*headings, right=[h for h in headings if h not in ("what", "how")])
    order = sorted(record.trials, key=lambda t: (t.stage, -t.measurement.samples_per_s, t.number))
    for trial in order:
        table.row(*_trial(record, trial))
    return table


def _trial(record: Record, trial: Trial) -> list[str]:
    measured, default = trial.measurement, record.baseline.config
    what = described(trial.config, Config(default | record.input))
    if trial.stage == "numerics":
        said = "ok" if measured.ok else outcome(measured)
        return [str(trial.number), f"numerics: {what}", "", said, "", "", "", "", measured.reason]
    inputs = [t for t in record.trials if t.stage == "input" and t.measurement.ok]
    base = record.baseline.samples_per_s
    if trial.stage == "input":
        what = f"input: {described(trial.config, default)}"
        base = inputs[0].measurement.samples_per_s if inputs else 0.0
    ok = measured.ok
    return [
        str(trial.number),
        what,
        str(trial.config.batch or ""),
        rate(measured.samples_per_s) if ok else outcome(measured),
        f"{measured.samples_per_s / base:.2f}" if ok and base else "",
        duration(measured.step_s) if ok else "",
        duration(measured.first_step_s) if ok and measured.first_step_s else "",
        size(measured.peak_bytes),
        trial.origin if ok else measured.reason,
    ]


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
