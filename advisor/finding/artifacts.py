"""What was compiled for the advice that a script is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.cache.artifacts import Found, Purpose
from advisor.cache.records import be_patient
from advisor.opening import Cache, open_records
from advisor.tuners.act.advice_usage import EXACT, STALE
from advisor.tuners.knobs import compiles

PATIENCE_S = 2.0
"""What a remote store may take to say anything: one that is down is not waited for longer."""

if TYPE_CHECKING:
    from advisor.tuners.act.advice import Advice
    from advisor.tuners.act.artifacts import Fetch


def artifacts_of(advice: Advice, cache: Cache) -> Fetch | None:
    """What was compiled for an advice, to be fetched; None where nothing can have been.

    Args:
        cache: as `open_records` takes it.
    """
    record = advice.record
    if record is None or advice.status not in (EXACT, STALE) or not compiles(advice.config):
        return None
    from advisor.tuners.act.artifacts import Fetch
    from advisor.tuners.environment import detect, tools

    purpose = Purpose.of(record, advice.config, detect(str(advice.device)), tools())

    def find() -> Found | None:
        # Opened anew: a lookup is over within milliseconds, and this may take longer.
        records = open_records(cache, patient=False, fallback=True)
        be_patient(records.stores, PATIENCE_S)
        return records.artifacts.find(purpose)

    return Fetch(find)
