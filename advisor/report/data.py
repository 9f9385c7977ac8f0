"""Records and lookups as JSON has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from advisor.cache.codec import plain
from advisor.cache.record import Record
from advisor.finding.answer import break_even
from advisor.printed import script_line

if TYPE_CHECKING:
    from advisor.tuners.act.advice import Advice


def as_data(record: Record, cache: str | None) -> dict[str, Any]:
    """A record with its id and the line for a script."""
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
    """Why a lookup found what it found."""
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
                "signed": near.signed,
                "differs": [
                    {"field": d.field, "wanted": d.wanted, "found": d.found} for d in near.differs
                ],
            }
            for near in found.near_misses
        ],
    }
