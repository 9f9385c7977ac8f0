"""Runner: whatever turns a config into a measurement."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.errors import UsageError

TOO_SOON = "the command ends before it is measured"
"""The reason of a config that a command leaves no steps for: nothing is told of the config."""


Tell = Callable[[Sequence[Config], float], None]
"""Called now and then with the configs that are not built yet and the seconds so far."""


class Runner(Protocol):
    """Measures configs, one at a time. A failing config is a Measurement too, never an error."""

    def measure(
        self,
        config: Config,
        *,
        seconds: float,
        stage: str = "compute",
        keep: bool = False,
        floor: float = 0.0,
        deadline_s: float | None = None,
    ) -> Measurement:
        """Measure for about `seconds`, warm-up not counted.

        Args:
            config: a value for every knob of the space, batch_size among them.
            seconds: time to spend on timed steps.
            stage: 'compute' (a batch on the device) or 'input' (through a DataLoader).
            keep: hold the built workload for the next turn of a race.
            floor: samples/s below which the exact number is of no interest.
            deadline_s: seconds after which it is given up, as 'timed_out'; None: the runner's own.
        """

    def release(self) -> None:
        """Drop what `keep` held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What building a config gave. `measurement`: of its first steps, or why it failed; `seconds`:
    until it was done, by the wall clock."""

    measurement: Measurement
    seconds: float


class Builder(Protocol):
    """Builds configs before a Runner measures them, several at once: what compilers make is kept
    in caches on disk. Nothing can be timed meanwhile."""

    def room(self, peak_bytes: int) -> int:
        """How many may be built at once that take so many bytes of the device each, 1 at least."""

    def build(
        self, configs: Sequence[Config], *, room: int, deadline_s: float
    ) -> dict[Config, Built]:
        """Run the first steps of all at once, each in a process of its own.

        Args:
            room: how many may be; what the configs leave of it is the builder's.
            deadline_s: seconds after which each that is not done is given up, as 'timed_out'.

        Returns:
            What became of them; without those of which this says nothing.
        """


class ReplayRunner:
    """Plays back a measured table (JSON lines as in `advisor show KEY --json` trials).

    Every row has `config` and `samples_per_s`, or `ok: false`; noise is a log-normal factor.

    Raises:
        UsageError: the table cannot be read.
    """

    def __init__(self, table: Path, *, noise: float = 0.005, seed: int = 0) -> None:
        self._rows: dict[Config, Mapping[str, object]] = {}
        try:
            for line in table.read_text().splitlines():
                row = json.loads(line)
                self._rows.setdefault(Config(row["config"]), row)
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise UsageError(f"table {str(table)!r} cannot be replayed: {exc}") from exc
        self._noise = noise
        self._random = random.Random(seed)
        self.measured: list[Config] = []

    def configs(self) -> list[Config]:
        return list(self._rows)

    def measure(
        self,
        config: Config,
        *,
        seconds: float,
        stage: str = "compute",
        keep: bool = False,
        floor: float = 0.0,
        deadline_s: float | None = None,
    ) -> Measurement:
        del seconds, stage, keep, floor, deadline_s
        self.measured.append(config)
        row = self._rows.get(config)
        if row is None or not row.get("ok", True):
            return Measurement(outcome="out_of_memory", reason="not in the table")
        rate = _number(row["samples_per_s"]) * math.exp(self._random.gauss(0.0, self._noise))
        batch = config["batch_size"]
        assert isinstance(batch, int)
        return Measurement(
            outcome="ok",
            samples_per_s=rate,
            low=rate * (1 - self._noise),
            high=rate * (1 + self._noise),
            step_s=batch / rate,
            gpu_s=_number(row.get("gpu_ms", 0.0)) / 1000,
            first_step_s=_number(row.get("first_step_s", 0.0)),
            peak_bytes=int(_number(row.get("peak_bytes", 0))),
            steps=int(_number(row.get("steps", 1))),
        )

    def release(self) -> None:
        pass


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


_: type[Runner] = ReplayRunner
