"""The records that the public functions read and write."""

from __future__ import annotations

from advisor.cache.record import Record
from advisor.cache.records import Records, be_patient
from advisor.cache.settings import Cache as Cache
from advisor.cache.signing import KeyRing
from advisor.cache.stores import open_stores

PATIENCE_S = 10.0
"""What a remote store may take for a command."""


def open_records(cache: Cache, *, patient: bool = True, fallback: bool = False) -> Records:
    """The records in the stores that `cache` names. One whose values are invalid is refused.

    Args:
        patient: wait for remote stores as a person does, not as a training script does.
        fallback: as `open_stores` takes it.

    Raises:
        UsageError: a URL, the project's settings or the secret is wrong.
    """
    stores = open_stores(cache, fallback=fallback)
    if patient:
        be_patient(stores, PATIENCE_S)
    return Records(stores, keyring=KeyRing.from_environment(), check=refusal)


def refusal(record: Record) -> str:
    """What is wrong with a record that the cache cannot know, as a knob's domain; or ''."""
    from advisor.tuners import knobs

    return knobs.refusal(record)
