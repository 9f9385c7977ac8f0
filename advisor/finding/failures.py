"""Advice that a run failed with: this machine starts that run without it from then on.

One small file a failure, beside the studies; it counts until the record is measured anew.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from advisor.cache.config import Config
from advisor.cache.key import fingerprint
from advisor.cache.record import Record
from advisor.cache.stores.filesystem import make_folder, read_regular
from advisor.cache.stores.timeout import run_with_timeout
from advisor.cache.task import Task
from advisor.errors import StoreError, UsageError, printable
from advisor.opening import Cache, open_records

MOST = 4096
LOOK_S, KEEP_S = 0.2, 1.0
"""The folder may be on a file system that is away."""


class Failures:
    """Of one run, by the fingerprint of its model and its task; `cache`: as `apply` takes it."""

    def __init__(self, cache: Cache, model: str, task: Task) -> None:
        self._cache = cache
        self._run = fingerprint([model, task.decisive, task.batch])[:12]

    def keep(self, config: Config, why: str) -> bool:
        """Remember that a config failed; whether that could be."""

        def write() -> None:
            file = self._file(config)
            make_folder(file.parent)
            file.write_text(why)

        with contextlib.suppress(OSError, StoreError, UsageError):
            run_with_timeout(KEEP_S, write, "failures")
            return True
        return False

    def of(self, config: Config, record: Record) -> str:
        """Why a config failed since its record was measured; '' where it did not."""

        def read() -> str:
            file = self._file(config)
            said = read_regular(file, MOST).decode(errors="replace")
            return said if file.stat().st_mtime > record.provenance.created else ""

        with contextlib.suppress(OSError, StoreError, UsageError):
            return printable(run_with_timeout(LOOK_S, read, "failures"))
        return ""

    def _file(self, config: Config) -> Path:
        records = open_records(self._cache, patient=False, fallback=True)
        return records.study(f"{self._run}-{config.knobs.digest}.failed")
