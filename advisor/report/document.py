"""A record and a lookup as JSON, for programs; `templates/schema.json` describes all JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from advisor.cache.codec import to_plain
from advisor.cache.record import Record
from advisor.command_snippets import script_line
from advisor.report import memory, sections
from advisor.resolve.answer import DOUBTFUL, advises, doubtful, gain, unverified
from advisor.resolve.commands import state_of
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.knobs import needs_comparison


def as_data(record: Record, cache: str | None, *, finished: bool = False) -> dict[str, Any]:
    """A record as JSON, with its id, the line for a script, and what to do with the record.

    Args:
        cache: the record's store, for the line.
        finished: whether a tuning has just found that nothing is left to compare.
    """
    line, advice = script_line(record, cache), advice_of(record, finished=finished)
    return {"id": record.id, "script": line, "advice": advice, **to_plain(record)}


def advice_of(record: Record, *, finished: bool = False) -> dict[str, Any]:
    """What a record advises on this machine, and what to do `next`: 'run' with the advice, 'tune'
    again, or 'stop', because nothing gains."""
    own, advised, state = record.baseline.config, record.winner(record.use), state_of(record)
    verified = "verified" if needs_comparison(advised.config, own) else "same numbers"
    loader = "the advice is its loader, or the way to save memory"
    do, why = "run", gain(record, record.use) if advises(record) else loader
    if state == "nothing else raced":
        do, why = ("stop" if finished else "tune"), "nothing else was measured for long enough"
    elif state != "exact":
        do, why = "tune", state
    elif doubtful(record):
        do, why = "tune", DOUBTFUL
    elif not (record.input or advises(record) or memory.saves(record)):
        do = "tune" if sections.is_undecided(record) else "stop"
        why = sections.nothing_to_gain(record)
    return {
        "next": do,
        "why": why,
        "config": dict(advised.config.changed(own) | record.input),
        "speedup": advised.speedup,
        "low": advised.speedup_low,
        "high": advised.speedup_high,
        "numbers": "not verified" if unverified(record, advised.config) else verified,
    }


def explained(served: Served, batch_size: int | None) -> dict[str, Any]:
    """The result of a lookup and the reason for it, as JSON."""
    data: dict[str, Any] = {
        "status": served.status,
        "reason": served.reason,
        "config": dict(served.config),
        "batch_size": batch_size,
        "record": served.record.id if served.record else None,
    }
    if found := served.explanation:
        data["stores"] = [{"url": url, "said": said} for url, said in found.stores]
        data["refused"] = list(found.refused)
        data["near_misses"] = msgspec.to_builtins(found.near_misses)
    return data
