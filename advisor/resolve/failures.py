"""Configs with which a run failed. This machine leaves them out when that run starts again.

Each config is a small file in the folder of studies, valid until the record is measured again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from advisor.cache.config import Config
from advisor.cache.key import fingerprint
from advisor.cache.record import Record
from advisor.cache.stores.filesystem import make_folder, read_regular
from advisor.cache.stores.timeout import run_with_timeout
from advisor.cache.task import Task
from advisor.errors import StoreError, UsageError, printable
from advisor.open_store import Cache, open_records

MAX_BYTES = 4096
READ_S, WRITE_S = 0.2, 1.0
"""Timeouts in seconds: the file system may not respond."""


@dataclass(frozen=True, slots=True)
class Failures:
    """The failed configs of one run, which is given by its model's fingerprint and its task."""

    cache: Cache
    model: str
    task: Task

    def keep(self, config: Config, why: str) -> bool:
        """Store that a config failed, and why. Returns whether that was possible."""

        def write(file: Path) -> str:
            make_folder(file.parent)
            file.write_text(why)
            return str(file)

        return bool(self._try(config, WRITE_S, write))

    def of(self, config: Config, record: Record) -> str:
        """Why a config failed since its record was measured; '' if it did not."""

        def read(file: Path) -> str:
            text = read_regular(file, MAX_BYTES).decode(errors="replace")
            return text if file.stat().st_mtime > record.provenance.created else ""

        return printable(self._try(config, READ_S, read))

    def _try(self, config: Config, seconds: float, act: Callable[[Path], str]) -> str:
        run = fingerprint([self.model, self.task.decisive, self.task.batch])[:12]

        def with_file() -> str:
            records = open_records(self.cache, patient=False, fallback=True)
            return act(records.study(f"{run}-{config.knobs.digest}.failed"))

        with contextlib.suppress(OSError, StoreError, UsageError):
            return run_with_timeout(seconds, with_file, "failures")
        return ""
