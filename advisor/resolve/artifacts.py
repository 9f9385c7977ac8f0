"""The compiled code that is kept for the config that a script is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.cache.artifacts import Found, Purpose
from advisor.cache.records import be_patient
from advisor.open_store import Cache, open_records
from advisor.tuners.act.advice_usage import EXACT, STALE, Served
from advisor.tuners.knobs import compiles

if TYPE_CHECKING:
    from advisor.tuners.act.artifacts import Fetch

PATIENCE_S = 2.0
"""For a remote store to say anything."""


def artifacts_of(served: Served, device: str, cache: Cache) -> Fetch | None:
    """A fetch of the compiled code; None if there can be none."""
    record = served.record
    if record is None or served.status not in (EXACT, STALE) or not compiles(served.config):
        return None
    from advisor.tuners.act.artifacts import Fetch
    from advisor.tuners.environment import detect, tools

    purpose = Purpose.of(record, served.config, detect(device), tools())

    def find() -> Found | None:
        # Opened anew: a lookup is over within milliseconds, and this may take longer.
        records = open_records(cache, patient=False, fallback=True)
        be_patient(records.stores, PATIENCE_S)
        return records.artifacts.find(purpose)

    return Fetch(find)
