"""A place where configs are visited: a running script, or a worker with made-up data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from advisor.cache.config import Config

UNVERIFIED = "unverified"
"""A comparison could not tell."""
LEAST = 1e-3
"""Share of a block's samples, or of its time, that counts at least: a rate has a logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some steps in a row with one config, over all processes of a job.

    Attributes:
        steps, samples: that were timed; samples of all processes.
        seconds: wall clock of the slowest process, the device synchronized at both ends.
        first_s: seconds of the untimed steps before them, if this block switched to the config:
            building, compiling and graph capture.
        waited_s: of `seconds`, what the steps waited for their data.
        gpu_s: of `seconds`, by the device's clock; 0 if that is not known.
        peak_bytes: of device memory since the config was switched to.
        compiled: graphs that torch.compile made within the timed steps.
        borrowed: share, 0 to 1, of the batches that came from a loader's queue and that its busy
            workers did not replace meanwhile.
    """

    steps: int
    samples: int
    seconds: float
    first_s: float = 0.0
    waited_s: float = 0.0
    gpu_s: float = 0.0
    peak_bytes: int = 0
    compiled: int = 0
    borrowed: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.seconds / self.steps

    @property
    def rate(self) -> float:
        """Sustained samples per second: without borrowed batches."""
        return self.samples * max(1 - self.borrowed, LEAST) / self.seconds

    @property
    def fed_rate(self) -> float:
        """Samples per second if no step had waited for its data."""
        return self.samples / max(self.seconds - self.waited_s, LEAST * self.seconds)


@dataclass(frozen=True, slots=True)
class Compared:
    """How a config's training compares with strict fp32.

    Attributes:
        outcome: 'ok', 'wrong', UNVERIFIED, or an outcome of `Measurement` if comparing failed.
        reason: one line with the figures that decided.
        blames: what is wrong: 'format' (the number format), 'code' (what is compiled or captured)
            or 'optimizer' (its kernels).
    """

    outcome: str
    reason: str
    blames: str = ""

    @property
    def ok(self) -> bool:
        """It trains like fp32."""
        return self.outcome == "ok"


class ConfigFailed(Exception):
    """A config failed; the place goes on without it.

    Attributes:
        outcome: as in `Measurement`: 'out_of_memory', 'failed', 'crashed' or 'timed_out'.
    """

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class Place(Protocol):
    """Where configs are visited. What was built for a config stays alive until `forget`."""

    @property
    def baseline(self) -> Config:
        """What all others are compared with: the unmodified script, or torch's default."""

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        """Switch to a config, make `warm` untimed steps, then time `steps`.

        Raises:
            ConfigFailed: the config failed or took longer than `deadline_s`; the next call works.
            TargetFailed: the user's code fails by itself. WorkerError: nothing can be measured.
        """

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        """Compare the very code that `block` timed with strict fp32; raises as `block`."""

    def forget(self, config: Config) -> None:
        """Free what was built for a config."""

    def save(self, config: Config, file: Path) -> None:
        """Save what torch.compile made for a config; no file if that is nothing."""
