"""Configs with which a run failed. This machine leaves them out when that run starts again.

Each config is a small file in the folder of studies, valid until the record is measured again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from advisor.cache.config import Config
from advisor.cache.key import fingerprint
from advisor.cache.record import Record
from advisor.cache.stores.filesystem import make_folder, read_regular, study_file
from advisor.cache.stores.timeout import run_with_timeout
from advisor.cache.task import Task
from advisor.errors import StoreError, UsageError, printable
from advisor.open_store import Cache, open_records

MAX_FILE_BYTES = 4096
READ_S, WRITE_S = 0.2, 1.0  # timeouts in seconds: the file system may not respond
_FAULTS = (OSError, StoreError, UsageError)


@dataclass(frozen=True, slots=True)
class Failures:
    """The failed configs of one run, which is given by its model's fingerprint and its task."""

    cache: Cache
    model: str
    task: Task

    def _file(self, config: Config) -> Path:
        run = fingerprint([self.model, self.task.decisive, self.task.batch])[:12]
        records = open_records(self.cache, timeout_s=0, fallback=True)
        return study_file(records.studies, f"{run}-{config.knobs.digest}.failed")

    def keep(self, config: Config, why: str) -> bool:
        """Store that a config failed, and why. Returns whether that was possible."""

        def write() -> bool:
            file = self._file(config)
            make_folder(file.parent)
            return file.write_text(why) >= 0

        with contextlib.suppress(*_FAULTS):
            return run_with_timeout(WRITE_S, write, "failures")
        return False

    def of(self, config: Config, record: Record) -> str:
        """Why a config failed since its record was measured; '' if it did not."""

        def read() -> str:
            file = self._file(config)
            text = read_regular(file, MAX_FILE_BYTES).decode(errors="replace")
            return text if file.stat().st_mtime > record.provenance.created else ""

        with contextlib.suppress(*_FAULTS):
            return printable(run_with_timeout(READ_S, read, "failures"))
        return ""
