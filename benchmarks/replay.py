"""A Runner that replays a measured table: visits take no time, but advance a simulated clock."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from advisor.cache.config import Config
from advisor.tuners.measure.runner import Block, Compared, ConfigFailed, Runner

COMPARED_STEPS = 12
"""Steps of a comparison: four points with fp32, with the number format and with the config."""


class ReplayRunner:
    """Replays a table of JSON lines, like the trials of `advisor show KEY --json`.

    Each row has `config` and `samples_per_s`, or `ok: false`. Only the first row of a config
    counts; the first row of the table is the baseline.

    Args:
        table: path of the table.
        noise: standard deviation of the logarithm of a block's samples/s.
    """

    def __init__(self, table: Path, *, noise: float, seed: int) -> None:
        self._rows: dict[Config, Mapping[str, Any]] = {}
        for line in table.read_text().splitlines():
            row = json.loads(line)
            self._rows.setdefault(Config(row["config"]), row)
        self._noise = noise
        self._random = random.Random(seed)
        self._now_s = 0.0
        self._built: set[Config] = set()
        self._active: Config | None = None

    @property
    def baseline(self) -> Config:
        """See Runner."""
        return next(iter(self._rows))

    def now(self) -> float:
        """Returns the seconds that all visits so far would have taken."""
        return self._now_s

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        """See Runner."""
        step_s, row = self._step_s(config), self._rows[config]
        first_s = 0.0 if config in self._built else float(row.get("first_step_s", 0.0))
        before_s = first_s + warm * step_s
        seconds = steps * step_s * math.exp(self._random.gauss(0.0, self._noise))
        if before_s + seconds > deadline_s:
            self._now_s += deadline_s
            raise ConfigFailed("timed_out", f"no answer within {deadline_s:.0f} s")
        self._now_s += before_s + seconds
        switched, self._active = config != self._active, config
        self._built.add(config)
        return Block(
            steps=steps,
            samples=steps * config.batch,
            seconds=seconds,
            first_s=before_s if switched else 0.0,
            gpu_s=steps * row.get("gpu_ms", 0.0) / 1000,
            peak_bytes=int(row.get("peak_bytes", 0)),
        )

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        """See Runner. All rows pass, as only correct configs were measured."""
        self._now_s += min(deadline_s, COMPARED_STEPS * self._step_s(self.baseline))
        self._active = None
        return Compared(outcome="ok", reason="as measured")

    def forget(self, config: Config) -> None:
        """See Runner."""
        self._built.discard(config)

    def save(self, config: Config, file: Path) -> None:
        """See Runner. There is no compiled code to save."""

    def _step_s(self, config: Config) -> float:
        row = self._rows.get(config)
        if row is None:
            raise ConfigFailed("failed", "not in the table")
        if not row.get("ok", True):
            raise ConfigFailed("out_of_memory", "it failed when the table was measured")
        return config.batch / float(row["samples_per_s"])


_: type[Runner] = ReplayRunner
