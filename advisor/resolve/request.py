"""What a script asks for, checked once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.cache import settings
from advisor.cache.config import Config
from advisor.cache.match import Query
from advisor.cache.record import CAPTURE, LOOP, PILOT, Record
from advisor.cache.shown import size
from advisor.cache.task import Task, checked
from advisor.errors import UsageError
from advisor.open_store import Cache
from advisor.tuners import knobs
from advisor.tuners.length import Length
from advisor.tuners.search.plan import Plan
from advisor.tuners.torch_facts import torch

if TYPE_CHECKING:
    from torch import nn

Fits = Callable[[Record, Config], bool]
"""Whether a config of a record can be followed whole, e.g. by a framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One lookup.

    Attributes:
        target: a target's name, the model itself, or None for the running script's.
        given: checked fields of a Task; what is missing is open.
        batch: that the script names; None if it leaves the batch open.
        free: whether it wants the best batch.
        use: what it can follow; `fits`: which of those configs.
        steps, seconds: the length of the job; both 0 for the steady state.
        on_miss: one of settings.ON_MISS; None for the configured one.
        cache: as `open_records` takes it.
        model: fingerprint of a run's model; `threads` that torch uses in it.
        folder: where a run was started, if that is known.
        quiet: a miss is no news, because a pilot or a search then takes over.
    """

    target: str | nn.Module | None
    given: Mapping[str, Any]
    batch: int | None
    use: str
    device: str
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
        `cache`, `on_miss`, `fits` and `quiet`; all are optional.

        Raises:
            UsageError: one is wrong.
        """
        from advisor.tuners.environment import default_device

        own = dict(asked)
        batch, capture = own.pop("batch", None), own.pop("capture", False)
        plan = Plan.of({name: own.pop(name, None) for name in ("steps", "duration")})
        as_they_are = ("cache", "on_miss", "fits", "quiet")
        more = {name: own.pop(name) for name in as_they_are if name in own}
        if not isinstance(target, str | None) and not isinstance(target, torch.nn.Module):
            raise UsageError(f"target {target!r}: expected a target's name or an nn.Module")
        if more.get("on_miss") is not None:
            _check_on_miss(more["on_miss"])
        given = checked(Task, own)
        named = known_batch(given, batch)
        if batch not in (None, "free") and named is None:
            raise UsageError(f"batch {batch!r}: expected a number of at least 1, or 'free'")
        if given.get("mode") == "infer":
            given.pop("optimizer", None)
        if given.get("deterministic") is None and _is_deterministic():
            given["deterministic"] = True
        given.setdefault("mode", "train")
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
            **more,
        )

    @classmethod
    def of_run(
        cls,
        task: Task,
        permitted: Mapping[str, Any],
        *,
        model: str,
        device: str,
        own_batch: int | None = None,
        **more: Any,
    ) -> Request:
        """What a run asks for, whose first steps show its task.

        Args:
            permitted: fields of a Task by the run's user.
            own_batch: the user's, if the run's batch is what the record of that one advises.
            more: fields of the request.
        """
        shown = ("command", "shapes", "dtype", "mode", "optimizer", "processes", "others", "script")
        given = {name: getattr(task, name) for name in shown} | dict(permitted)
        if own_batch is not None:
            given["shapes"] = ((own_batch, *task.sample),)
        return cls(
            target=None,
            given=given,
            batch=own_batch or task.batch,
            free=own_batch is not None,
            use=PILOT,
            model=model,
            device=device,
            **more,
        )

    def __str__(self) -> str:
        most = self.given.get("max_memory", 0)
        return f"batch {self.batch}{f' within {size(most)}' if most else ''}"

    @property
    def in_hand(self) -> bool:
        """Whether the model itself is there, so that no name has to be trusted."""
        return self.use == PILOT or not isinstance(self.target, str | None)

    @property
    def called(self) -> str:
        """The target as a person calls it; '' for the running script's."""
        if self.target is None or isinstance(self.target, str):
            return self.target or ""
        return type(self.target).__name__

    @property
    def goes_on(self) -> str:
        """How training goes on without advice."""
        return "as the script is" if self.use == PILOT else "with torch's defaults"

    @property
    def miss_action(self) -> str:
        """One of settings.ON_MISS.

        Raises:
            UsageError: the configured one is none of them.
        """
        on_miss = self.on_miss or settings.on_miss() or "default"
        _check_on_miss(on_miss)
        return on_miss

    def length(self, batch: int) -> Length | None:
        """How long the job is, at its own batch, else at this one."""
        if not self.steps and not self.seconds:
            return None
        return Length(batch=self.batch or batch, steps=self.steps, seconds=self.seconds)

    def allows(self, record: Record, config: Config, peak_bytes: int) -> bool:
        """Whether this script may be served a config of the record."""
        most = self.given.get("max_memory", 0)
        return (
            not (most and peak_bytes > most)
            and knobs.permits(self.given, config)
            and knobs.follows(self.use, config, record.baseline.config)
            and self.fits(record, config)
        )

    def query(self) -> Query:
        """What the stores are asked.

        Raises:
            AdvisorError: the device is not there, or does not tell what it is.
        """
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
    """The batch size that the script names; None if it leaves it open or names a wrong one."""
    if type(batch) is int and batch >= 1:
        return batch
    shapes = given.get("shapes")
    return int(shapes[0][0]) if batch is None and shapes else None


def folder() -> Path | None:
    """The current folder; None if it is gone."""
    try:
        return Path.cwd()
    except OSError:
        return None


def _is_deterministic() -> bool:
    """The user has already asked PyTorch for determinism, which advice must not undo."""
    if "torch" not in sys.modules:
        return False
    return bool(torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic)
