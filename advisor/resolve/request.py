"""A checked request for advice."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.arguments import Permit
from advisor.cache import settings
from advisor.cache.config import Config
from advisor.cache.match import Query
from advisor.cache.record import CAPTURE, LOOP, PILOT, Choice, Record
from advisor.cache.shown import size
from advisor.cache.task import Task, checked
from advisor.errors import UsageError, check_type
from advisor.open_store import Cache
from advisor.tuners import knobs
from advisor.tuners.length import Length, Pace
from advisor.tuners.search.plan import Plan
from advisor.tuners.torch_facts import torch

if TYPE_CHECKING:
    from torch import nn

Fits = Callable[[Record, Config], bool]
"""Whether a config of a record can be followed whole, e.g. by a framework."""
_SHOWN = ("command", "shapes", "dtype", "mode", "optimizer", "processes", "others", "script")
"""Fields of a Task that the first steps of a run show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A config that ran at a batch.

    Attributes:
        samples_per_s: in the steady state, with its interval from `low` to `high`.
        raced: measured in turn with the default, not once.
        faster: the race was sure that the config beats the default, or had another batch.
        pace: its first step and steady step, if these were computed for a job.
    """

    config: Config
    samples_per_s: float
    low: float
    high: float
    peak_bytes: int
    raced: bool = False
    faster: bool = False
    pace: Pace = Pace(batch=0, first_step_s=0.0, step_s=0.0)  # noqa: RUF009 # immutable


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One lookup.

    Attributes:
        target: a target's name, the model itself, or None for the running script's.
        given: checked fields of a Task; a missing field may have any value.
        batch: the batch that the script names; None for any batch, or for the best (`free`).
        use: how the script uses advice; `fits`: whether it can follow a config.
        steps, seconds: the length of the job; both 0 for the steady state.
        on_miss: None for the configured value.
        model, threads: those of a run; None for those of the target and this process.
        folder: the folder in which a run was started, if known.
        quiet: do not report a miss, because a pilot or a search then takes over.
    """

    target: str | nn.Module | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    use: str = LOOP
    device: str = ""
    free: bool = False
    fits: Fits = field(default=lambda _record, _config: True, compare=False)
    steps: int = 0
    seconds: float = 0.0
    on_miss: str | None = None
    cache: Cache = None
    model: str | None = None
    threads: int | None = None
    folder: Path | None = None
    quiet: bool = False

    @classmethod
    def of(cls, target: object, asked: Mapping[str, Any]) -> Request:
        """A request from fields of a Task by keyword, and `batch`, `capture`, `steps`, `duration`,
        `cache`, `on_miss`, `fits` and `quiet`. Raises UsageError if one is wrong."""
        from advisor.tuners.environment import default_device

        if not isinstance(target, str | None) and not isinstance(target, torch.nn.Module):
            raise UsageError(f"target {target!r}: expected a target's name or an nn.Module")
        own = dict(asked)
        check_type("permit", own.pop("permit", Permit()), Permit)
        batch, capture = own.pop("batch", None), own.pop("capture", False)
        plan = Plan.of({name: own.pop(name, None) for name in ("steps", "duration")})
        names = ("cache", "on_miss", "fits", "quiet")
        unchanged = {name: own.pop(name) for name in names if name in own}
        _check_on_miss(unchanged.get("on_miss") or "default")
        given = {"mode": "train"} | checked(Task, own)
        named = known_batch(given, batch)
        if batch not in (None, "free") and named is None:
            raise UsageError(f"batch {batch!r}: expected a number of at least 1, or 'free'")
        if given["mode"] == "infer":
            given.pop("optimizer", None)
        if given.get("deterministic") is None and _is_deterministic():
            given["deterministic"] = True
        return cls(
            target=target,
            device=given.pop("device", None) or default_device(),
            given=given,
            batch=named,
            free=batch == "free",
            use=CAPTURE if capture else LOOP,
            steps=plan.steps or 0,
            seconds=plan.duration_s or 0.0,
            folder=folder(),
            **unchanged,
        )

    def of_run(self, task: Task, own_batch: int | None = None, **seen: Any) -> Request:
        """This request for a run whose first steps have shown its task. `own_batch`: the user's
        batch, if the run has the batch that a record advises in its place.
        """
        given = {name: getattr(task, name) for name in _SHOWN} | dict(self.given)
        if own_batch is not None:
            given["shapes"] = ((own_batch, *task.sample),)
        batch, free = own_batch or task.batch, own_batch is not None
        return dataclasses.replace(self, given=given, batch=batch, free=free, use=PILOT, **seen)

    def __str__(self) -> str:
        most = self.given.get("max_memory", 0)
        return f"batch {self.batch}{f' within {size(most)}' if most else ''}"

    @property
    def has_model(self) -> bool:
        """Whether the model itself is known, so that its name does not matter."""
        return self.use == PILOT or not isinstance(self.target, str | None)

    @property
    def called(self) -> str:
        """The target as a person calls it; '' for the running script's."""
        return (
            self.target or "" if isinstance(self.target, str | None) else type(self.target).__name__
        )

    @property
    def miss_action(self) -> str:
        """One of settings.ON_MISS. Raises UsageError if the configured value is not."""
        on_miss = self.on_miss or settings.on_miss() or "default"
        _check_on_miss(on_miss)
        return on_miss

    def length(self, batch: int) -> Length | None:
        """The job's length at its own batch, else at `batch`; None if no length is given."""
        if not self.steps and not self.seconds:
            return None
        return Length(batch=self.batch or batch, steps=self.steps, seconds=self.seconds)

    def allows(self, record: Record, one: Choice | Candidate) -> bool:
        """Whether this script may be served a config of the record."""
        most = self.given.get("max_memory", 0)
        return (
            not (most and one.peak_bytes > most)
            and knobs.permits(self.given, one.config)
            and knobs.follows(self.use, one.config, record.baseline.config)
            and self.fits(record, one.config)
        )

    def query(self) -> Query:
        """The query for the stores. Raises AdvisorError if the device does not exist."""
        from advisor.tuners import fingerprint
        from advisor.tuners.environment import detect, own_threads

        model, threads = self.model, self.threads
        if model is None and not isinstance(self.target, str | None):
            model = fingerprint.of_model(self.target)
        if self.device != "cpu":
            threads = 0
        return Query(
            environment=detect(self.device),
            given=self.given,
            model=model,
            threads=own_threads() if threads is None else threads,
        )


def _check_on_miss(value: object) -> None:
    if value not in settings.ON_MISS:
        raise UsageError(f"on_miss {value!r}: expected one of {', '.join(settings.ON_MISS)}")


def known_batch(given: Mapping[str, Any], batch: object) -> int | None:
    """The batch size that the script names; None if it names none or a wrong one."""
    if type(batch) is int and batch >= 1:
        return batch
    shapes = given.get("shapes")
    return int(shapes[0][0]) if batch is None and shapes else None


def folder() -> Path | None:
    """The current folder; None if it was removed."""
    try:
        return Path.cwd()
    except OSError:
        return None


def _is_deterministic() -> bool:
    """Whether the user has asked PyTorch for determinism, which advice must not undo."""
    if "torch" not in sys.modules:
        return False
    return bool(torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic)
