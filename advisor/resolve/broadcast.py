"""One lookup for all processes of a job: rank 0's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import msgpack

from advisor.cache.codec import decode, encode, to_plain, unpack
from advisor.cache.config import Config
from advisor.errors import AdvisorError, NoRecord, RecordDamaged
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.act.ranks import Group

WAIT_S = 60.0
"""For rank 0's lookup: it reads a file, or asks a server for tens of milliseconds."""

_calls = itertools.count()


def broadcast_from_rank0(decide: Callable[[], Served]) -> Served:
    """What rank 0 decides, on every rank; outside a process group each rank decides for itself.

    Raises:
        AdvisorError: what decide() raises on rank 0, on every rank.
    """
    group = Group.current()
    if group is None:
        return decide()
    key = f"advisor/advice/{next(_calls)}"
    if group.rank == 0:
        message: dict[str, Any] = {"error": "rank 0 failed in its lookup; see its own message"}
        try:
            served = decide()
            plain = dataclasses.replace(served, record=None, explanation=None)
            record = encode(served.record) if served.record else b""
            message = {"served": to_plain(plain), "record": record}
            return served
        except AdvisorError as exc:
            message = {"error": str(exc)}
            raise
        finally:
            group.store.set(key, msgpack.packb(message))
    found = group.get(key, WAIT_S)
    # Without a word from rank 0: this rank's own lookup, which prepare() compares.
    return decide() if found is None else _received(found)


def _received(data: bytes) -> Served:
    said = unpack(data, max_bin_len=len(data))
    if not isinstance(said, dict) or "error" in said:
        why = said["error"] if isinstance(said, dict) else said
        raise NoRecord(f"{why}; decided by rank 0")
    try:
        record = decode(said["record"]) if said["record"] else None
    except RecordDamaged as exc:
        raise NoRecord(f"what rank 0 says cannot be read: {exc}") from exc
    known = said["served"]
    configs = {
        name: Config(known[name])
        for name in ("config", "default", "flags")
        if known[name] is not None
    }
    reason = f"{known['reason']}; decided by rank 0"
    return Served(**{**known, **configs, "record": record, "reason": reason})
