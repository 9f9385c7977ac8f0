"""The records that the public functions read and write."""

from __future__ import annotations

from advisor.cache.record import Record
from advisor.cache.records import Records, be_patient
from advisor.cache.settings import Cache as Cache
from advisor.cache.signing import KeyRing
from advisor.cache.stores import open_stores

COMMAND_TIMEOUT_S = 10.0
"""Timeout of remote stores in commands, in seconds."""


def open_records(cache: Cache, *, patient: bool = True, fallback: bool = False) -> Records:
    """The records in the stores that `cache` names. Records with invalid values are refused.

    Args:
        patient: use the long timeout of commands, not the short one of training scripts.
        fallback: as in `open_stores`.

    Raises:
        UsageError: a URL, the project's settings or the secret is wrong.
    """
    stores = open_stores(cache, fallback=fallback)
    if patient:
        be_patient(stores, COMMAND_TIMEOUT_S)
    return Records(stores, keyring=KeyRing.from_environment(), check=refusal)


def refusal(record: Record) -> str:
    """Why the knobs of a record are invalid, or ''. Raises RecordDamaged if its cost is."""
    from advisor.cost import Cost
    from advisor.tuners import knobs

    Cost.of(record)
    return knobs.refusal(record)
