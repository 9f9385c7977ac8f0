"""The protocol of a Runner, which measures configs in a running script or in a worker process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from advisor.cache.config import Config
from advisor.tuners.act.pilot.protocol import TimedSteps
from advisor.tuners.decisions import GAIN

UNVERIFIED = "unverified"  # outcome of a comparison that could not decide
NO_TIME = "no time was left to compare it with fp32"  # a reason for it
MIN_SHARE = 1e-3  # at least this share of a block's time counts: no rate is infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(TimedSteps):
    """The steps of all processes of a job: all samples and joules, the mean losses, `seconds`,
    `extra_s` and `counted` of the slowest process, and the largest of the other figures."""

    gpu_s: float = 0.0  # of `seconds`, by the device's clock; 0 if that is not known

    @property
    def leftover(self) -> int:
        """Batches to use up until steps take as long as in a long run, if they wait for workers or
        keep most of them at work, which slows them: ResNet-50's took 29 ms, not 22, on H200s."""
        busy = self.waited_share > GAIN - 1 or self.loader_load > 1 / 2
        return self.prefetched if busy else 0

    @property
    def waited_share(self) -> float:
        """The share of its time that steps wait for data, once no batch is ready before."""
        waited = min(1.0, self.waited_s / self.seconds) if self.seconds else 0.0
        return 1 - (1 - waited) / max(1.0, self.loader_load)

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def rate(self) -> float:
        """Sustained samples per second: without batches that only drained the queue."""
        return self.samples / max(1.0, self.loader_load) / self.seconds

    @property
    def fed_rate(self) -> float:
        """Samples per second if no step had waited for its data."""
        return self.samples / max(self.seconds - self.waited_s, MIN_SHARE * self.seconds)


@dataclass(frozen=True, slots=True)
class Compared:
    """How a config's training compares with strict fp32."""

    outcome: str  # 'ok', 'wrong', UNVERIFIED, or as in `Measurement` if comparing failed
    reason: str  # one line with the figures that decided
    blames: str = ""  # 'format' (the number format), 'code' (compiled or captured) or 'optimizer'

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


class ConfigFailed(Exception):
    """A config failed; the runner goes on without it."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome  # as in `Measurement`: 'out_of_memory', 'failed', 'crashed', ...


class Runner(Protocol):
    """Measures configs. The code and memory of a config stay until `forget`."""

    baseline: Config  # the reference for other configs: the unmodified script, or torch's default

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        """Switch to a config, make `warm` untimed steps, then time `steps`. Raises ConfigFailed if
        the config failed or took more than `deadline_s`; the next call works. Raises TargetFailed
        if the user's code fails by itself, WorkerError if nothing can be measured."""

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        """Compare the very code that `block` timed with strict fp32; raises as `block`."""

    def forget(self, config: Config) -> None:
        """Free the code and memory of a config."""

    def save(self, config: Config, file: Path) -> None:
        """Save a config's compiled code; writes no file if there is none."""
