"""Configs that a run failed with: this machine starts that run without them from then on.

One small file for each, beside the studies. It counts until the record is measured again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

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
"""The file system may be away."""
T = TypeVar("T")


class Failures:
    """Of one run: a model's fingerprint and a task."""

    def __init__(self, cache: Cache, model: str, task: Task) -> None:
        self._cache = cache
        self._run = fingerprint([model, task.decisive, task.batch])[:12]

    def keep(self, config: Config, why: str) -> bool:
        """Remember that a config failed; returns whether that was possible."""

        def write(file: Path) -> bool:
            make_folder(file.parent)
            file.write_text(why)
            return True

        return self._try(config, WRITE_S, write) or False

    def of(self, config: Config, record: Record) -> str:
        """Why a config failed since its record was measured; '' if it did not."""

        def read(file: Path) -> str:
            text = read_regular(file, MAX_BYTES).decode(errors="replace")
            return text if file.stat().st_mtime > record.provenance.created else ""

        return printable(self._try(config, READ_S, read) or "")

    def _try(self, config: Config, seconds: float, act: Callable[[Path], T]) -> T | None:
        def with_file() -> T:
            records = open_records(self._cache, patient=False, fallback=True)
            return act(records.study(f"{self._run}-{config.knobs.digest}.failed"))

        with contextlib.suppress(OSError, StoreError, UsageError):
            return run_with_timeout(seconds, with_file, "failures")
        return None
