"""Where the memory of a run goes, and which ways to save memory fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from advisor.cache.config import Config
from advisor.cache.reader import grouped
from advisor.cache.record import Record
from advisor.cache.shown import size, times
from advisor.cache.task import OFFLOADED
from advisor.errors import printable
from advisor.report.data import Bars, Section, Table
from advisor.report.text import WRONG, outcome, rate, ratios
from advisor.tuners.act.pilot.parts import FIXED, PARTS, micro_batches, size_of, unmodified_bytes
from advisor.tuners.decisions import GAIN, LEAST_FREE
from advisor.tuners.knobs import CHECKPOINT, OFFLOAD, SAVING, TORCH, described


def saves(record: Record) -> bool:
    """Whether the unmodified script ran out of memory, so that its baseline saves memory."""
    return OFFLOADED in record.key.task.script


def sections(record: Record) -> Iterator[Section]:
    """Generator: yields the ways to save memory, other batches, and the parts of the memory."""
    if saves(record):
        yield Section("ladder", "Ways to save memory", ladder(record), tuple(lines(record)))
    if measured := batches(record):
        headings = ("batch", "peak", "samples/s", f"steps of accumulation for {record.batch}", "")
        table = Table("The batches that fit, by a repeated step", headings, right=headings[:-1])
        for x in measured:
            cells = size(x["peak_bytes"]), rate(x["samples_per_s"]), str(x["accumulation"] or "-")
            is_ = ", ".join(name for name, holds in x.items() if holds is True)
            table.row(str(x["batch"]), *cells, is_)
        largest = next((f"about {x['batch']}" for x in measured if x["largest"]), "not measured")
        fastest = next(x["batch"] for x in measured if x["fastest"])
        option = printable(str(record.key.task.map.get("batch", "it")))
        said = [
            f"The largest batch that fits: {largest}. The fastest: {fastest}.",
            f"advisor run keeps your batch; to change it, set {option} yourself.",
        ]
        config = next(one.config for one in record.trials if one.stage == "batch")
        if config.knobs != record.winner(record.use).config.knobs:
            how = described(config, record.baseline.config, nothing=record.key.task.baseline)
            said.append(f"Measured with {how}, because torch.compile would compile for each batch.")
        yield Section("batches", "Other batches", table, tuple(said))
    if rows := _parts(record.memory):
        what = f"The memory of a step of {record.key.task.baseline}"
        table = Table(what, ("part", "memory"), right=("memory",))
        for label, count in rows:
            table.row(label, size(count))
        chart = Bars(what, [(label, count, size(count)) for label, count in rows])
        yield Section("memory", "Where the memory goes", table, chart=chart)


def ladder(record: Record) -> Table:
    """For each way to save memory, the least first: the fastest config that fits, and its speed
    over that of the unmodified script with enough memory (estimated)."""
    alone, ratio = _unmodified(record), "over unmodified"
    table = Table(
        "The fastest config that fits, for each way to save memory, by its trial",
        ("saves memory by", "fastest config", "peak", "samples/s", ratio, ""),
        right=("peak", "samples/s", ratio),
    )
    trials = (one for one in record.trials if one.stage == "compute")
    tried = [one for one in trials if one.config.batch == record.batch]
    over, advised = ratios(tried, record.baseline.config), record.winner(record.use).config
    ways = grouped(tried, lambda one: one.config.only(*SAVING))
    wrong = {one.config for one in record.trials if one.measurement.outcome == "wrong"}
    for way in sorted(ways, key=_effort):
        fits = [one for one in ways[way] if one.measurement.ok and one.config not in wrong]
        best = max(fits, key=lambda one: one.measurement.samples_per_s, default=ways[way][0])
        if any(one.config == advised for one in fits):
            best = next(one for one in fits if one.config == advised)
        base, measured = record.baseline.config.without(*SAVING), best.measurement
        says = "advised" if best.config == advised else outcome(measured)
        table.row(
            described(way, TORCH, nothing="nothing"),
            described(best.config.without(*SAVING), base, nothing="-"),
            size(measured.peak_bytes),
            rate(measured.samples_per_s) if measured.ok else "-",
            times(over[best.number] / alone) if over[best.number] and alone else "-",
            WRONG if best.config in wrong else says,
            warns=not measured.ok or best.config in wrong,
        )
    return table


def batches(record: Record) -> list[dict[str, Any]]:
    """The batches that were measured and fit, in samples of a call, as JSON. Of those within 3% of
    the fastest, the user's counts as the fastest, or else the smallest."""
    tried = {one.config.batch: one for one in record.trials if one.stage == "batch"}
    if not tried:
        return []
    rates = {batch: one.measurement.samples_per_s for batch, one in tried.items()}
    near = [batch for batch, rate in rates.items() if GAIN * rate >= max(rates.values())]
    fastest = record.batch if record.batch in near else min(near)
    return [
        {
            "batch": (own := max(1, batch // micro_batches(record.key.task.others))),
            "peak_bytes": one.measurement.peak_bytes,
            "samples_per_s": rates[batch],
            "accumulation": None if record.batch % own else record.batch // own,
            "yours": batch == record.batch,
            "largest": one.origin == "largest",
            "fastest": batch == fastest,
        }
        for batch, one in tried.items()
    ]


def lines(record: Record) -> Iterator[str]:
    """Generator: yields what the unmodified script would need, and how fast it would be."""
    if needs := unmodified_bytes(record.memory):
        limit = record.key.task.max_memory or _room(record)
        yield f"Your unmodified script needs about {size(needs)}, of {size(limit)}."
    ranks, held = record.key.task.processes, size_of(record.memory, *FIXED)
    if ranks > 1 and "unsharded" not in record.memory:
        saved = size(held - held // ranks)
        yield f"Sharded over its {ranks} ranks (fully_shard), each would need about {saved} less."
    if found := slowdown(record):
        faster = f"{1 / found:.2f}x as fast as" if found < 1.005 else f"{found:.2f}x slower than"
        yield f"The advice is {faster} your script would be with enough memory (estimated)."


def sharding(record: Record) -> str:
    """Whether a job's GPUs could hold what they share; '' if they share no weights."""
    whole, memory = size_of(record.memory, "unsharded"), record.memory
    if not whole:
        return ""
    needs = size_of(memory, "peak") - size_of(memory, *FIXED) + whole
    room = _room(record)
    needed = "needed" if needs > (1 - LEAST_FREE) * room else "not needed"
    return (
        f"For the memory, sharding is {needed}: without it a GPU would hold about {size(needs)} of "
        f"{size(room)}."
    )


def _room(record: Record) -> int:
    """Bytes of the device without what other processes hold."""
    total = 2**30 * record.key.environment.device.memory_gib
    return total - size_of(record.memory, "others")


def slowdown(record: Record) -> float:
    """How many times slower the advice is than the unmodified script with enough memory; 0 if that
    is not known."""
    return _unmodified(record) / record.winner(record.use).speedup


def _unmodified(record: Record) -> float:
    """The estimated speed-up of the unmodified script over the baseline; 0 if it is not known."""
    alone = record.memory.get("unmodified")
    return float(alone) if saves(record) and isinstance(alone, float) else 0.0


def _effort(way: Config) -> tuple[bool, float]:
    every = int(way.get(CHECKPOINT) or 0)
    return bool(way.get(OFFLOAD)), 1 / every if every else 0.0


def _parts(memory: Config) -> list[tuple[str, int]]:
    """The parts of a breakdown that are not empty, by their names."""
    block = printable(str(memory.get("block") or "block"))[:60]
    found = ((label.format(block=block), memory.get(name)) for name, label in PARTS.items())
    return [(label, count) for label, count in found if type(count) is int and count > 0]
