"""One lookup for all processes of a job: rank 0's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgpack

from advisor.cache.codec import decode, encode, unpack
from advisor.cache.config import Config
from advisor.errors import AdvisorError, NoRecord, RecordDamaged
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.act.ranks import Group

if TYPE_CHECKING:
    from advisor.tuners.act.advice import Advice

WAIT_S = 60.0
"""For rank 0's lookup: it reads a file, or asks a server for tens of milliseconds."""

_calls = itertools.count()


def decided_by_first(
    decide: Callable[[], Advice], *, device: str, batch: int | None = None
) -> Advice:
    """What rank 0 decides, on every rank; each rank decides for itself outside a process group.

    Args:
        device: of this rank, where what rank 0 says is put to work.
        batch: that this rank's script names; None for rank 0's.

    Raises:
        AdvisorError: what decide() raises on rank 0, on every rank.
    """
    group = Group.current()
    if group is None:
        return decide()
    key = f"advisor/advice/{next(_calls)}"
    if group.rank == 0:
        return _tell(group, key, decide)
    told = group.get(key, WAIT_S)
    # Rank 0 never asked: this rank's own answer, which prepare() compares.
    return decide() if told is None else _heard(told, device, batch)


def _tell(group: Group, key: str, decide: Callable[[], Advice]) -> Advice:
    message: dict[str, Any] = {"error": "rank 0 failed in its lookup; see its own message"}
    try:
        advice = decide()
        message = {
            "config": dict(advice.config),
            "default": dict(advice.served.default),
            "flags": dict(advice.served.flags or {}),
            "gains": dict(advice.gains),
            "use": advice.use,
            "batch_size": advice.batch_size,
            "status": advice.status,
            "reason": advice.served.reason,
            "doubt": advice.served.doubt,
            "signed": advice.served.signed,
            "record": encode(advice.record) if advice.record else b"",
        }
        return advice
    except AdvisorError as exc:
        message = {"error": str(exc)}
        raise
    finally:
        group.store.set(key, msgpack.packb(message))


def _heard(told: bytes, device: str, batch: int | None) -> Advice:
    from advisor.tuners.act.advice import Advice
    from advisor.tuners.knobs import Advised

    said = unpack(told, max_bin_len=len(told))
    if not isinstance(said, dict) or "error" in said:
        why = said["error"] if isinstance(said, dict) else said
        raise NoRecord(f"{why}; decided by rank 0")
    try:
        record = decode(said["record"]) if said["record"] else None
    except RecordDamaged as exc:
        raise NoRecord(f"what rank 0 says cannot be read: {exc}") from exc
    config = Config(said["config"])
    if batch is not None and config.batch:
        config = config.at(batch)
    return Advice(
        Advised(config),
        device=device,
        batch_size=batch or said["batch_size"],
        served=Served(
            status=said["status"],
            reason=f"{said['reason']}; decided by rank 0",
            doubt=said["doubt"],
            signed=said["signed"],
            record=record,
            use=said["use"],
            default=Config(said["default"]),
            flags=Config(said["flags"]) or None,
            gains=said["gains"],
        ),
    )
