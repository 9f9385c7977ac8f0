"""A measured table as a place: visits are played back in no time, by a clock of their own."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from advisor.cache.config import Config
from advisor.errors import UsageError
from advisor.tuners.measure.place import Block, Compared, ConfigFailed, Place

COMPARED_STEPS = 12
"""Steps that a comparison takes: four points under fp32, the number format and the config."""


class ReplayPlace:
    """Plays back a table, JSON lines as in `advisor show KEY --json`'s trials.

    Each row has `config` and `samples_per_s`, or `ok: false`; the first one of a config counts.

    Args:
        table: the file.
        baseline: the first row's config where it is None.
        noise: standard deviation of the logarithm of a block's samples/s.

    Attributes:
        visited: the config of each block, in order.

    Raises:
        UsageError: the table cannot be read.
    """

    def __init__(
        self, table: Path, *, baseline: Config | None = None, noise: float = 0.005, seed: int = 0
    ) -> None:
        self._rows: dict[Config, Mapping[str, Any]] = {}
        try:
            for line in table.read_text().splitlines():
                row = json.loads(line)
                self._rows.setdefault(Config(row["config"]), row)
            self._baseline = baseline or next(iter(self._rows))
        except (OSError, ValueError, KeyError, TypeError, StopIteration) as exc:
            raise UsageError(f"table {str(table)!r} cannot be replayed: {exc}") from exc
        self._noise = noise
        self._random = random.Random(seed)
        self._now_s = 0.0
        self._built: set[Config] = set()
        self._at_work: Config | None = None
        self.visited: list[Config] = []

    @property
    def baseline(self) -> Config:
        """See Place."""
        return self._baseline

    def now(self) -> float:
        """Seconds that all visits so far would have taken."""
        return self._now_s

    def configs(self) -> list[Config]:
        """All of the table."""
        return list(self._rows)

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        """See Place."""
        self.visited.append(config)
        first_s, step_s = self._first_s(config), self._step_s(config)
        switched = config != self._at_work
        before_s = first_s + warm * step_s
        seconds = steps * step_s * math.exp(self._random.gauss(0.0, self._noise))
        if before_s + seconds > deadline_s:
            self._now_s += deadline_s
            raise ConfigFailed("timed_out", f"no answer within {deadline_s:.0f} s")
        self._now_s += before_s + seconds
        self._built.add(config)
        self._at_work = config
        row = self._rows[config]
        return Block(
            steps=steps,
            samples=steps * config.batch,
            seconds=seconds,
            first_s=before_s if switched else 0.0,
            gpu_s=steps * row.get("gpu_ms", 0.0) / 1000,
            peak_bytes=int(row.get("peak_bytes", 0)),
        )

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        """See Place: all that a table has was measured right."""
        self._now_s += min(deadline_s, COMPARED_STEPS * self._step_s(self._baseline))
        self._at_work = None
        return Compared(outcome="ok", reason="as measured")

    def forget(self, config: Config) -> None:
        """See Place."""
        self._built.discard(config)

    def save(self, config: Config, file: Path) -> None:
        """See Place: nothing was compiled."""

    def _first_s(self, config: Config) -> float:
        if config in self._built:
            return 0.0
        return float(self._rows.get(config, {}).get("first_step_s", 0.0))

    def _step_s(self, config: Config) -> float:
        """Seconds of a step.

        Raises:
            ConfigFailed: the table has none.
        """
        row = self._rows.get(config)
        if row is None:
            raise ConfigFailed("failed", "not in the table")
        if not row.get("ok", True):
            raise ConfigFailed("out_of_memory", "it failed when the table was measured")
        return config.batch / float(row["samples_per_s"])


_: type[Place] = ReplayPlace
