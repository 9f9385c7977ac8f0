"""Numbers with units to text, tables and plain data; nothing here prints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from advisor.cache.codec import plain
from advisor.cache.config import Config
from advisor.cache.key import Environment
from advisor.cache.match import Difference
from advisor.cache.record import Choice, Measurement, Part, Record
from advisor.finding.answer import break_even
from advisor.finding.horizon import Row
from advisor.printed import choices, script_line

if TYPE_CHECKING:
    from advisor.tuners.act.advice import Advice

OUTCOMES = {
    "out_of_memory": "out of memory",
    "timed_out": "timed out",
    "crashed": "crashed",
    "failed": "failed",
    "wrong": "wrong result",
}


UNSTEADY = 1.2
"""Fastest over slowest turn of the advice from which the host's own noise is worth a word."""
WIDE = 100
"""Columns below which a config would be cut short to make room for its turns."""


def rate(samples_per_s: float) -> str:
    """'12,764' or '3.27': samples per second, three digits at least."""
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"


def size(count: int) -> str:
    """Bytes as '1.4 GiB'; '-' where not known."""
    if count <= 0:
        return "-"
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def duration(seconds: float) -> str:
    """'4.2 ms', '12 s', '3m 20s'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{int(seconds // 60)}m {int(seconds % 60):02d}s"


def age(created: float, now: float | None = None) -> str:
    """'3 min', '5 h', '12 d'."""
    seconds = max(0.0, (time.time() if now is None else now) - created)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"


def changes(config: Config, default: Config) -> str:
    """What a config does differently from the default: 'bf16, channels_last'."""
    parts = []
    for name, value in config.items():
        if name == "batch_size" or default.get(name, False) == value:
            continue
        if name == "precision":
            parts.append(str(value))
        elif isinstance(value, bool):
            parts.append(name if value else f"no {name}")
        else:
            parts.append(f"{name}={value}")
    return ", ".join(parts) or "torch default"


def outcome(measured: Measurement) -> str:
    return OUTCOMES.get(measured.outcome, measured.outcome)


def spread(choice: Choice) -> str:
    """'1.38x (1.36-1.41)'."""
    return f"{choice.speedup:.2f}x ({choice.speedup_low:.2f}-{choice.speedup_high:.2f})"


def verdict(record: Record, width: int) -> Table:
    """What was found: at the user's batch and with the batch free; without turns if narrow."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    wide = width >= WIDE
    headings = ["", "config", "batch", "samples/s", "turns", "x default (95%)", "peak"]
    for heading in headings if wide else (h for h in headings if h != "turns"):
        numeric = heading in ("batch", "samples/s", "peak")
        table.add_column(
            heading, justify="right" if numeric else "left", no_wrap=heading != "config"
        )
    for name, choice in choices(record):
        table.add_row(
            name,
            changes(choice.config, record.baseline.config),
            str(choice.batch),
            rate(choice.samples_per_s),
            *([f"{rate(choice.low)}-{rate(choice.high)}"] if wide else []),
            "1" if choice == record.baseline else spread(choice),
            size(choice.peak_bytes),
        )
    return table


def summary(record: Record, cache: str | None) -> list[str]:
    """The lines below the verdict: the input pipeline, what it cost, and what to write."""
    lines = []
    count = record.provenance.trials
    if record.at_batch == record.baseline:
        lines.append("Nothing measured is clearly faster at your batch: the advice is the default.")
    made = record.provenance
    if made.steps:
        lines.append(f"Chosen for a job of {made.steps:,} steps.")
    elif made.duration_s:
        lines.append(f"Chosen for a job of {duration(made.duration_s)}.")
    if record.stale:
        lines.append(f"Marked stale by advisor verify: {record.stale}.")
    if paying := pays(record, break_even(record)):
        lines.append(paying)
    unsteady = record.at_batch.high / record.at_batch.low
    if unsteady >= UNSTEADY:
        lines.append(
            f"Its turns differ by {unsteady:.2f}x: the host, which is the limit here, was busy or "
            "shared. Measure again with --force when it is quiet."
        )
    for trial in record.trials:
        if trial.stage == "numerics":
            what = changes(trial.config, record.baseline.config)
            state = {"ok": "", "wrong": "struck out, "}.get(
                trial.measurement.outcome, "not compared, "
            )
            lines.append(f"{what}: {state}{trial.measurement.reason}")
    if record.input:
        default = Config(dict.fromkeys(record.input, False))
        said = changes(record.input, default)
        lines.append(f"input pipeline: {'DataLoader default' if said == 'torch default' else said}")
    lines.append(
        f"record {record.id}: {count} trial{'s' if count > 1 else ''} in "
        f"{duration(record.provenance.seconds)}"
    )
    lines += ["", "In your script:", f"    {script_line(record, cache)}"]
    if record.free is not None and record.free != record.at_batch:
        lines.append(
            f'    or, with the batch free: batch="free" ({record.free.batch} samples a step; '
            "another batch is another optimisation)"
        )
    return lines


def part_name(part: Part) -> str:
    """'channels_last', 'bf16', 'compile=default'."""
    return changes(part.knob, Config(dict.fromkeys(part.knob, False)))


def parts(record: Record) -> Table:
    """What each knob of the advice contributes."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("knob", "contributes", "95%", ""):
        table.add_column(heading, justify="right" if heading == "contributes" else "left")
    held = record.at_batch.config | record.input
    for part in record.parts:
        name, value = next(iter(part.knob.items()))
        note = "through a DataLoader" if part.stage == "input" else ""
        if held.get(name) != value:
            note = "not needed, set back to torch's default"
        elif part.low <= 1:
            note = "not needed"
        table.add_row(
            part_name(part), f"{part.ratio:.2f}x", f"{part.low:.2f}-{part.high:.2f}", note
        )
    return table


def horizon(record: Record, rows: Sequence[Row]) -> Table:
    """Which config is the best from how many steps on, at the user's batch."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("best from step", "after", "config", "first step", "step", "how"):
        numeric = heading not in ("config", "how")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        one = row.candidate
        table.add_row(
            f"{row.steps:,}",
            duration(row.seconds) if row.steps > 1 else "",
            changes(one.config, record.baseline.config),
            duration(one.pace.first_step_s),
            duration(one.pace.step_s),
            ("raced" if one.raced else "measured once")
            + (", started afresh" if one.fresh else ", slowest first step seen"),
        )
    return table


def pays(record: Record, rows: Sequence[Row]) -> str:
    """'pays from step 1,252 on (38.1 s)': the advice, or '' where it is the default."""
    advised = record.at_batch.config
    if advised == record.baseline.config:
        return ""
    for row in rows:
        if row.candidate.config == advised:
            after = f" ({duration(row.seconds)})" if row.steps > 1 else ""
            return f"The advice pays from step {row.steps:,} on{after}."
    return ""


def listing(records: Sequence[tuple[Record, Sequence[Difference]]]) -> Table:
    """One line a record."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (
        "key",
        "device",
        "target",
        "mode",
        "sample",
        "batch",
        "speed-up",
        "age",
        "state",
    ):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("key", "speed-up", "age"))
    for record, differs in records:
        why = [*([record.stale] if record.stale else []), *map(str, differs)]
        table.add_row(
            record.id,
            record.key.environment.device.name,
            record.target.name,
            record.key.mode,
            record.key.inputs,
            str(record.batch),
            f"{record.at_batch.speedup:.2f}x",
            age(record.provenance.created),
            Text("stale: " + ", ".join(why), "yellow") if why else "fresh",
        )
    return table


def trials(record: Record) -> Table:
    """Each trial of a record, fastest first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("#", "what", "batch", "samples/s", "x", "step", "first step", "peak", "how"):
        numeric = heading not in ("what", "how")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    order = sorted(record.trials, key=lambda t: (t.stage, -t.measurement.samples_per_s, t.number))
    inputs = [t for t in record.trials if t.stage == "input"]
    for trial in order:
        measured = trial.measurement
        if trial.stage == "numerics":
            what = f"numerics: {changes(trial.config, record.baseline.config)}"
            table.add_row(
                str(trial.number),
                what,
                "",
                "ok" if measured.ok else outcome(measured),
                "",
                "",
                "",
                "",
                measured.reason,
            )
            continue
        base = inputs[0].measurement if trial.stage == "input" else record.baseline
        default = record.baseline.config
        good = measured.ok
        table.add_row(
            str(trial.number),
            ("input: " if trial.stage == "input" else "") + changes(trial.config, default),
            str(trial.config.get("batch_size", "")),
            rate(measured.samples_per_s) if good else outcome(measured),
            f"{measured.samples_per_s / base.samples_per_s:.2f}" if good else "",
            duration(measured.step_s) if good else "",
            duration(measured.first_step_s) if good and measured.first_step_s else "",
            size(measured.peak_bytes),
            trial.origin if good else measured.reason,
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


def as_data(record: Record, cache: str | None) -> dict[str, Any]:
    """A record as JSON has it, with its id and the line for a script."""
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
    return {"id": record.id, "script": script, "break_even": rows, **plain(record)}


def explained(advice: Advice) -> dict[str, Any]:
    """Why a lookup found what it found, as JSON has it."""
    found = advice.explanation
    data: dict[str, Any] = {
        "status": advice.status,
        "reason": advice.reason,
        "config": dict(advice.config),
        "batch_size": advice.batch_size,
        "record": advice.record.id if advice.record else None,
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
                "differs": [
                    {"field": d.field, "wanted": d.wanted, "found": d.found} for d in near.differs
                ],
            }
            for near in found.near_misses
        ],
    }
