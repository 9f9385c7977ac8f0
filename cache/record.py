"""A record: measurements, the choices made from them, and where they come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from advisor.cache import domain, task
from advisor.cache.config import Config
from advisor.cache.key import Key
from advisor.cache.limit import Limit

OUTCOMES = ("ok", "out_of_memory", "timed_out", "crashed", "failed", "wrong")
"""'failed': the user's code raised; 'wrong': the numbers differ too much from fp32."""
STAGES = ("compute", "input", "loader", "numerics", "batch")
EFFORTS = ("quick", "normal", "exhaustive")  # the least first; more effort is preferred
WITHIN, CUT_SHORT = "within", "interrupted"
"""Efforts below EFFORTS: WITHIN a real run while it went on, CUT_SHORT by Ctrl-C."""
USES = ("flags", "pilot", "loop", "capture")
"""How much of its advice a script can follow, the least first; each includes those before it."""
FLAGS, PILOT, LOOP, CAPTURE = USES

ROUNDING = 1e-6  # relative difference that is allowed between a claim and its measurements
TRIMMED = 1 / 6
"""Fraction of the turns that a mean leaves out at each end (Yuen, Biometrika 61, 1974). A load that
starts or stops during a turn makes its ratio up to 5 times too large or too small."""


def _one_of(names: Sequence[str]) -> Meta:
    return Meta(pattern=f"^({'|'.join(names)})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The result of running a config.

    Attributes:
        samples_per_s: by the wall clock, with its confidence interval from `low` to `high`.
        step_s: seconds per step; `gpu_s` the same by the GPU's clock, 0 on the CPU.
        first_step_s: with compilation and algorithm search.
        steps: how many steps were timed; `blocks`: seconds per step of each timed block.
        waited: fraction of the time that a run waited for its data.
    """

    outcome: Annotated[str, _one_of(OUTCOMES)]
    reason: str = ""
    samples_per_s: domain.RateOr0 = 0.0
    low: domain.RateOr0 = 0.0
    high: domain.RateOr0 = 0.0
    step_s: domain.Seconds = 0.0
    gpu_s: domain.Seconds = 0.0
    first_step_s: domain.Seconds = 0.0
    peak_bytes: domain.Bytes = 0
    steps: domain.Count = 0
    blocks: tuple[domain.Seconds, ...] = ()
    waited: domain.Share = 0.0

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A config that was tried. `origin`: what proposed it; `seconds`: the wall time it took."""

    number: domain.Count
    config: Config
    measurement: Measurement
    stage: Annotated[str, _one_of(STAGES)]
    origin: str
    seconds: domain.Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A config that was raced. `speedup`: over the default at the user's batch, with its 95%
    interval; `rounds`: samples/s of each turn of the race; `first_step_s`: with nothing compiled
    before, `loaded_step_s` with artifacts loaded; `joules`: of a sample; 0 if not measured."""

    config: Config
    batch: domain.Positive
    samples_per_s: domain.Rate
    low: domain.Rate
    high: domain.Rate
    speedup: domain.PositiveRatio
    speedup_low: domain.RatioBound
    speedup_high: domain.RatioBound
    peak_bytes: domain.Bytes
    rounds: tuple[domain.Rate, ...] = ()
    first_step_s: domain.Seconds = 0.0
    loaded_step_s: domain.Seconds = 0.0
    joules: domain.Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One knob's contribution: the rate of the advice over the rate with only this knob at torch's
    default, with its 95% interval."""

    knob: Config
    ratio: domain.PositiveRatio
    low: domain.RatioBound
    high: domain.RatioBound
    stage: str = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The choice for a use, at the user's batch or with the batch `free`."""

    use: Annotated[str, _one_of(USES)]
    free: bool
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What was tuned. `name`: as 'model.py:Net'; `origin`: digest of its file's path, or '';
    `code`: digest of the code that decides the model, '' if unknown."""

    name: str
    origin: domain.Hex
    code: domain.Hex = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a record comes from; a lookup ignores it. `created` is in Unix seconds. `steps` or
    `duration_s`: the length of the job that the advice is for; both 0 for the steady state."""

    created: float
    seconds: domain.Seconds
    trials: domain.Count
    advisor: str
    device_uuid: str
    host_cpu: str
    seed: int
    study: domain.StudyName
    budget_s: domain.Seconds
    modules: domain.Count
    parameters: domain.Count
    effort: str = "normal"
    steps: domain.Count = 0
    duration_s: domain.Seconds = 0.0

    @property
    def how(self) -> str:
        lesser = {WITHIN: "within its own run", CUT_SHORT: "until it was cut short"}
        return lesser.get(self.effort, f"with --effort {self.effort}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything known about one key at one batch.

    Attributes:
        baseline: torch's default at the user's batch, from the race.
        winners: the best for each of USES, at the user's batch and, if other batches were tried,
            with the batch free. `raced` has every config that finished the race.
        input: the knobs of the input stage that were chosen; `memory`: of a run, bytes by part.
        cost: of a run, the fields of `advisor.cost.Cost`; `limits`: once `explain` observed it.
        trials: of every stage. A config without one of 'numerics' was not compared with fp32.
        parts: what each knob of the loop's winner contributes, once `advisor explain` measured it.
        stale: why the record no longer holds, as `advisor verify` found; '' while it holds.
        family: digest of the kinds of modules in the model; '' if unknown.
        revised: when `explain`, `verify` or a new name last changed it, in Unix seconds; or 0.
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
    family: domain.Hex = ""
    revised: float = 0.0
    memory: Config = Config()  # noqa: RUF009 # immutable
    cost: Config = Config()  # noqa: RUF009 # immutable
    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        there = {(one.use, one.free) for one in self.winners}
        if len(there) < len(self.winners) or not there >= {(use, False) for use in USES}:
            raise ValueError(f"winners: expected one for each of {', '.join(USES)}")

    @property
    def batch(self) -> int:
        return self.key.task.batch

    @property
    def use(self) -> str:
        """The use that the record serves by default: the pilot for a run, else the loop."""
        return PILOT if self.key.task.command else LOOP

    @property
    def id(self) -> str:
        """The key's id and the batch, 'ae1bff61eea5@128', as people see and type it."""
        return f"{self.key.id}@{self.batch}"

    def winner(self, use: str, *, free: bool = False) -> Choice:
        """The best choice for a use; `free`: at any batch, or at the user's if no other won."""
        choices = {(one.use, one.free): one.choice for one in self.winners}
        return choices.get((use, free), choices[use, False])

    @property
    def compares(self) -> bool:
        """Whether the race or the search compared anything with torch's default."""
        default = self.baseline.config
        raced = (*self.raced, *(one.choice for one in self.winners))
        others = [
            one.measurement.ok
            for one in self.trials
            if one.config != default and one.stage == "compute" and one.origin != "reference"
            if one.measurement.outcome != "timed_out"
        ]
        # If there was no time for a race, the default has only the one turn of its trial.
        enough = len(self.baseline.rounds) > 1 or not any(others)
        return any(one.config != default for one in raced) or (bool(others) and enough)

    @property
    def choices(self) -> dict[str, Choice]:
        """Every chosen config, by its name in a report, the baseline first. Equal configs appear
        once, under the loop's name, because most scripts have a loop."""
        default = "unmodified" if self.key.task.command else "torch default"
        default = "least memory" if task.OFFLOADED in self.key.task.script else default
        found = {self.baseline.config: (default, self.baseline)}
        for one in sorted(self.winners, key=lambda one: (one.free, one.use != LOOP)):
            name = _NAMES[one.use]
            if one.free:
                name = "batch free" if one.use == LOOP else f"{name}, batch free"
            found.setdefault(one.choice.config, (name, one.choice))
        return dict(found.values())


Wanted = Callable[[Record], bool]


def every(_record: Record) -> bool:
    return True


_NAMED = ("flags alone", "advisor run", "at your batch", "step captured")
_NAMES = dict(zip(USES, _NAMED, strict=True))


def inner(logs: Sequence[float]) -> list[float]:
    ordered = sorted(logs)
    out = int(TRIMMED * len(ordered))
    return ordered[out : len(ordered) - out]


def contradictions(record: Record) -> Iterator[str]:
    """Yields the claims of a record that differ from its own measurements."""
    made, revised = record.provenance.created, record.revised or domain.FIRST
    for name, seconds in (("provenance.created", made), ("revised", revised)):
        if not domain.is_moment(seconds):
            yield f"{name} {seconds:g}: expected a time from 2020 until now"
    for trial in record.trials:
        measured = trial.measurement
        if measured.ok and trial.stage != "numerics" and not measured.samples_per_s:
            yield f"trial {trial.number} counts as measured, but has no speed"
    winners = [one.choice for one in record.winners]
    for choice in dict.fromkeys([record.baseline, *winners, *record.raced]):
        turns, default = choice.rounds, record.baseline.rounds
        if not turns or not default:
            yield "a choice has no turn of its race"
        if not choice.speedup_low <= choice.speedup <= choice.speedup_high:
            yield f"the speed-up {choice.speedup:g} is not in its own interval"
        ordered, half = sorted(turns), len(turns) // 2  # `statistics` takes 3 ms to import
        kept = inner([math.log(a / b) for a, b in zip(turns, default, strict=False)])
        claims = {
            "samples/s": (choice.samples_per_s, (ordered[half] + ordered[~half]) / 2),
            "slowest turn": (choice.low, min(turns)),
            "fastest turn": (choice.high, max(turns)),
            "speed-up": (choice.speedup, math.exp(math.fsum(kept) / len(kept))),
        }
        for what, (claimed, found) in claims.items():
            if not math.isclose(claimed, found, rel_tol=ROUNDING):
                yield f"{what} is {claimed:g}, but its turns give {found:g}"
