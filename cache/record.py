"""What was measured, what was chosen, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.cache.config import Config
from advisor.cache.key import Key

OUTCOMES = ("ok", "out_of_memory", "timed_out", "crashed", "failed", "wrong")
"""'failed': the user's code raised; 'wrong': the numbers differ too much from fp32."""

STAGES = ("compute", "input", "numerics")

EFFORTS = ("quick", "normal", "exhaustive")
"""Names of efforts, the least first; a record of more effort is preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What running a config gave.

    Attributes:
        outcome: one of OUTCOMES; `reason` says why it is not 'ok'.
        samples_per_s: by the wall clock, with its confidence interval from `low` to `high`.
        step_s: seconds per step; `gpu_s` of them on the GPU, 0 on the CPU.
        first_step_s: seconds of the first step, compilation and algorithm search included.
        peak_bytes: device memory at its peak.
        steps: how many were timed.
        blocks: raw seconds per step of each block that was timed.
    """

    outcome: str
    reason: str = ""
    samples_per_s: float = 0.0
    low: float = 0.0
    high: float = 0.0
    step_s: float = 0.0
    gpu_s: float = 0.0
    first_step_s: float = 0.0
    peak_bytes: int = 0
    steps: int = 0
    blocks: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome {self.outcome!r}: expected one of {', '.join(OUTCOMES)}")

    @property
    def ok(self) -> bool:
        """The config ran, whole."""
        return self.outcome == "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One config tried. `origin`: who asked for it; `seconds`: what it cost by the wall clock."""

    number: int
    config: Config
    measurement: Measurement
    stage: str
    origin: str
    seconds: float

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"stage {self.stage!r}: expected one of {', '.join(STAGES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A config that was raced. `speedup` is over the default at the user's batch, with its spread;
    `rounds` are the samples/s of each turn of the race; `first_step_s` are the seconds of its first
    step in a fresh process with empty caches, 0 where that was not measured."""

    config: Config
    batch: int
    samples_per_s: float
    low: float
    high: float
    speedup: float
    speedup_low: float
    speedup_high: float
    peak_bytes: int
    rounds: tuple[float, ...] = ()
    first_step_s: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch {self.batch}: expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one knob contributes: samples/s of the advice over those with this knob alone at torch's
    default, with its 95% interval. `knob`: its name and value; `stage`: where it was measured."""

    knob: Config
    ratio: float
    low: float
    high: float
    stage: str = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What was tuned: `name` as 'model.py:Net', `origin` the digest of its path or ''."""

    name: str
    origin: str
    arguments: Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a record comes from; never compared. `created` is in Unix seconds.

    `steps` or `duration_s`: the length of the job that the advice was chosen for; both 0 for the
    steady state. `vocab`: bound of integer inputs.
    """

    created: float
    seconds: float
    trials: int
    advisor: str
    device_uuid: str
    host_cpu: str
    seed: int
    study: str
    budget_s: float
    modules: int
    parameters: int
    effort: str = "normal"
    steps: int = 0
    duration_s: float = 0.0
    vocab: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything known about one key.

    Attributes:
        batch: the user's.
        baseline: torch's default at that batch, from the race.
        at_batch: the best at that batch; `free` the best with the batch free, if it differs.
        input: the knobs of the input stage that were chosen; may be empty.
        parts: what each knob of `at_batch` contributes, once `advisor explain` has measured it.
        stale: why it no longer holds, as `advisor verify` found; empty while it does.
        raced: all that finished the race and was not struck out, chosen or not.
        family: digest of the kinds of modules that the model is built of; '' where not known.
        revised: when `explain` or `verify` last changed it, in Unix seconds; 0 for never.
    """

    key: Key
    target: Target
    batch: int
    baseline: Choice
    at_batch: Choice
    free: Choice | None
    input: Config
    trials: tuple[Trial, ...]
    provenance: Provenance
    raced: tuple[Choice, ...] = ()
    parts: tuple[Part, ...] = ()
    stale: str = ""
    family: str = ""
    revised: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch {self.batch}: expected at least 1")

    @property
    def id(self) -> str:
        """The key's."""
        return self.key.id
