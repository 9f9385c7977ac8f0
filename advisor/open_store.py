"""The records that the public functions read and write."""

from __future__ import annotations

from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.settings import Cache as Cache
from advisor.cache.signing import KeyRing
from advisor.cache.stores import Remote, open_stores

COMMAND_TIMEOUT_S = 10.0  # timeout of remote stores in commands, in seconds


def open_records(
    cache: Cache, *, timeout_s: float = COMMAND_TIMEOUT_S, fallback: bool = False
) -> Records:
    """The records in the stores that `cache` names. Records with invalid values are refused.

    Args:
        timeout_s: of remote stores, at least; 0 for their own, short enough for training scripts.
        fallback: as in `open_stores`.

    Raises:
        UsageError: a URL, the project's settings or the secret is wrong.
    """
    stores = open_stores(cache, fallback=fallback)
    for store in stores:
        if isinstance(store, Remote):
            store.timeout_s = max(store.timeout_s, timeout_s)
    return Records(stores, keyring=KeyRing.from_environment(), check=refusal)


def refusal(record: Record) -> str:
    """Why the knobs of a record are invalid, or ''. Raises RecordDamaged if its cost is."""
    from advisor.cost import Cost
    from advisor.tuners import knobs

    Cost.of(record)
    return knobs.refusal(record)
