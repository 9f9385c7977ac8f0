"""What was measured, what was chosen, and where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from advisor.cache.config import Config
from advisor.cache.domain import (
    Bytes,
    Count,
    Hex,
    Positive,
    Rate,
    RateOr0,
    Ratio,
    RatioBound,
    Seconds,
    Share,
    StudyName,
)
from advisor.cache.key import Key

OUTCOMES = ("ok", "out_of_memory", "timed_out", "crashed", "failed", "wrong")
"""'failed': the user's code raised; 'wrong': the numbers differ too much from fp32."""
STAGES = ("compute", "input", "loader", "numerics")
EFFORTS = ("quick", "normal", "exhaustive")
"""The least first; a record of more effort is preferred."""
WITHIN, INTERRUPTED = "within", "interrupted"
"""Efforts below EFFORTS: tuned inside a run that went on, and ended by Ctrl-C."""
USES = ("flags", "pilot", "loop", "capture")
"""What a script lets advice do, the least first; each includes those before it."""
FLAGS, PILOT, LOOP, CAPTURE = RACED = USES


def _one_of(names: Sequence[str]) -> Meta:
    return Meta(pattern=f"^({'|'.join(names)})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What running a config gave.

    Attributes:
        outcome: one of OUTCOMES; `reason` says why it is not 'ok'.
        samples_per_s: by the wall clock, with its confidence interval from `low` to `high`.
        step_s: seconds per step; `gpu_s` the same by the GPU's clock, 0 on the CPU.
        busy: share of a step's time in which the device works; 0 on the CPU and if unknown.
        first_step_s: seconds of the first step, with compilation and algorithm search.
        peak_bytes: device memory at its peak.
        steps: how many were timed.
        blocks: seconds per step of each block that was timed.
        waited: share of the time in which a run waited for its data.
        warm_s: seconds until the steps of a run settled, without the first step.
    """

    outcome: Annotated[str, _one_of(OUTCOMES)]
    reason: str = ""
    samples_per_s: RateOr0 = 0.0
    low: RateOr0 = 0.0
    high: RateOr0 = 0.0
    step_s: Seconds = 0.0
    gpu_s: Seconds = 0.0
    busy: Share = 0.0
    first_step_s: Seconds = 0.0
    peak_bytes: Bytes = 0
    steps: Count = 0
    blocks: tuple[Seconds, ...] = ()
    waited: Share = 0.0
    warm_s: Seconds = 0.0

    @property
    def ok(self) -> bool:
        """Whether the config ran to the end."""
        return self.outcome == "ok"


def best_known(seen: Sequence[Measurement]) -> Measurement:
    """Of several measurements of one config the one with the most blocks."""
    return max(seen, key=lambda one: len(one.blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One config tried. `origin`: who asked for it; `seconds`: what it cost by the wall clock."""

    number: Count
    config: Config
    measurement: Measurement
    stage: Annotated[str, _one_of(STAGES)]
    origin: str
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A config that was raced.

    Attributes:
        speedup: over the default at the user's batch, with its 95% interval.
        rounds: samples/s of each turn of the race.
        first_step_s: seconds of the first step with nothing compiled before; `loaded_step_s` with
            its artifacts loaded. 0 where not measured.
    """

    config: Config
    batch: Positive
    samples_per_s: Rate
    low: Rate
    high: Rate
    speedup: Ratio
    speedup_low: RatioBound
    speedup_high: RatioBound
    peak_bytes: Bytes
    rounds: tuple[Rate, ...] = ()
    first_step_s: Seconds = 0.0
    loaded_step_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one knob contributes: samples/s of the advice over those with this knob alone at torch's
    default, with its 95% interval. `knob`: its name and value; `stage`: where it was measured."""

    knob: Config
    ratio: Ratio
    low: RatioBound
    high: RatioBound
    stage: str = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The choice for a use, at the user's batch or with the batch `free`."""

    use: Annotated[str, _one_of(USES)]
    free: bool
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What was tuned: `name` as 'model.py:Net', `origin` the digest of its file's path or '', and
    `code` that of what decides the model in it, '' where that is not known."""

    name: str
    origin: Hex
    code: Hex = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a record comes from; never compared. `created` is in Unix seconds.

    `steps` or `duration_s`: the length of the job that the advice was chosen for; both 0 for the
    steady state.
    """

    created: float
    seconds: Seconds
    trials: Count
    advisor: str
    device_uuid: str
    host_cpu: str
    seed: int
    study: StudyName
    budget_s: Seconds
    modules: Count
    parameters: Count
    effort: str = "normal"
    steps: Count = 0
    duration_s: Seconds = 0.0

    @property
    def how(self) -> str:
        """The effort, for people."""
        lesser = {WITHIN: "within its own run", INTERRUPTED: "until it was cut short"}
        return lesser.get(self.effort, f"with --effort {self.effort}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything known about one key at one batch.

    Attributes:
        baseline: torch's default at the user's batch, from the race.
        winners: the best for each of USES, at the user's batch and, if other batches were tried,
            with the batch free.
        input: the knobs of the input stage that were chosen; may be empty.
        trials: of every stage. Those of 'numerics' are the comparisons with strict fp32; a config
            without one was not verified.
        raced: every config that finished the race, chosen or not.
        parts: what each knob of the loop's winner contributes, once `advisor explain` measured it.
        stale: why it no longer holds, as `advisor verify` found; '' while it does.
        family: digest of the kinds of modules in the model; '' if unknown.
        revised: when `explain`, `verify` or another name last changed it, in Unix seconds, or 0.
    """

    key: Key
    target: Target
    baseline: Choice
    winners: tuple[Winner, ...]
    input: Config
    trials: tuple[Trial, ...]
    provenance: Provenance
    raced: tuple[Choice, ...] = ()
    parts: tuple[Part, ...] = ()
    stale: str = ""
    family: Hex = ""
    revised: float = 0.0

    def __post_init__(self) -> None:
        there = [(one.use, one.free) for one in self.winners]
        if len({*there}) < len(there) or not {*there} >= {(use, False) for use in USES}:
            raise ValueError(f"winners: expected one for each of {', '.join(USES)}")

    @property
    def batch(self) -> int:
        """The user's."""
        return self.key.task.batch

    @property
    def use(self) -> str:
        """The use that is served by default: the pilot for a run, else the loop."""
        return PILOT if self.key.task.command else LOOP

    @property
    def id(self) -> str:
        """The key's with the batch, 'ae1bff61eea5@128': what people see and type."""
        return f"{self.key.id}@{self.batch}"

    def winner(self, use: str, *, free: bool = False) -> Choice:
        """The best for a use; with the batch free, if no other batch won, at the user's."""
        choices = {(one.use, one.free): one.choice for one in self.winners}
        return choices.get((use, free), choices[use, False])

    @property
    def compares(self) -> bool:
        """Whether the race or the search compared anything with torch's default."""
        default = self.baseline.config
        raced = (*self.raced, *(one.choice for one in self.winners))
        others = [
            trial.measurement.ok
            for trial in self.trials
            if trial.config != default and trial.stage == "compute" and trial.origin != "reference"
        ]
        # Without time for a race the default has the one turn of its trial.
        enough = len(self.baseline.rounds) > 1 or not any(others)
        return any(one.config != default for one in raced) or (bool(others) and enough)

    @property
    def choices(self) -> dict[str, Choice]:
        """Every config that was chosen, by its name in a report; equal ones once, by the loop's
        name, as most scripts have a loop."""
        default = "unmodified" if self.key.task.command else "torch default"
        found = {self.baseline.config: (default, self.baseline)}
        for one in sorted(self.winners, key=lambda one: (one.free, one.use != LOOP)):
            name = _NAMES[one.use]
            if one.free:
                name = "batch free" if one.use == LOOP else f"{name}, batch free"
            found.setdefault(one.choice.config, (name, one.choice))
        return dict(found.values())


_NAMES = {
    LOOP: "at your batch",
    FLAGS: "flags alone",
    PILOT: "advisor run",
    CAPTURE: "step captured",
}
