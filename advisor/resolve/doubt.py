"""Find records that were measured on a host too busy to tell which config gains."""

from __future__ import annotations

import dataclasses

from advisor.cache.record import Record
from advisor.tuners.doubt import is_doubtful

DOUBTFUL = (
    "Doubtful: the baseline's speed changed during the race by more than the result's interval, as "
    "on a busy host; configs that seemed to gain are not advised"
)


def doubtful(record: Record) -> bool:
    """Whether the host was too busy during a record's race. Such a record counts in no mean."""
    best, own = record.winner(record.use), record.baseline
    deciding = record.raced if best.config == own.config else (best,)
    return any(is_doubtful(one, own) for one in deciding)


def without_doubtful(record: Record) -> Record:
    """The record without doubtful configs. Its baseline replaces doubtful winners."""
    own, winners = record.baseline, [one.choice for one in record.winners]
    dropped = {one.config for one in (*winners, *record.raced) if is_doubtful(one, own)}
    if not dropped:
        return record
    return dataclasses.replace(
        record,
        winners=tuple(
            dataclasses.replace(one, choice=own) if one.choice.config in dropped else one
            for one in record.winners
        ),
        raced=tuple(one for one in record.raced if one.config not in dropped),
        trials=tuple(one for one in record.trials if one.config not in dropped),
    )
