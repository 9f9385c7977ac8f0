"""A checked request for advice."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from advisor.arguments import Budget, Model, Permit, urls_of
from advisor.cache.config import Config
from advisor.cache.kinds import Duration
from advisor.cache.match import Query
from advisor.cache.record import CAPTURE, LOOP, PILOT, Choice, Record
from advisor.cache.shown import size
from advisor.cache.task import Task, checked, rows
from advisor.errors import UsageError, check_type
from advisor.open_store import Cache
from advisor.tuners import environment, fingerprint, knobs
from advisor.tuners.search.plan import Plan
from advisor.tuners.torch_facts import torch

if TYPE_CHECKING:
    from torch import nn

    from advisor.resolve.answer import Candidate

_SHOWN = ("command", "shapes", "dtype", "mode", "optimizer", "processes", "others", "script")
"""Fields of a Task that the first steps of a run show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One lookup.

    Attributes:
        target: a target's name, the model itself, or None for the run of this script.
        given: checked fields of a Task; a missing field may have any value.
        batch: the batch that the script names; None for any batch, or for the best (`free`).
        use: how the script uses advice; `fits`: whether it can follow a whole config.
        plan: the length of the job.
        model, threads: those of a run; None for those of the target and this process.
        interconnect: that of a run's ranks; None for any.
        quiet: do not report a miss, because a pilot or a search then takes over.
        wrong: the fault of a wrong argument, which the lookup raises.
    """

    target: str | nn.Module | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    use: str = LOOP
    device: str = ""
    free: bool = False
    fits: Callable[[Config], bool] = field(default=lambda _config: True, compare=False)
    plan: Plan = Plan()  # noqa: RUF009 # immutable
    cache: Cache = None
    model: str | None = None
    threads: int | None = None
    interconnect: str | None = None
    quiet: bool = False
    wrong: Exception | None = None

    @classmethod
    def of(cls, target: object, asked: Mapping[str, Any]) -> Request:
        """A request from the arguments of `advisor.apply`, and from fields of a Task by keyword.
        Raises UsageError if one is wrong."""
        model, own = Model.of(target), dict(asked)  # type: ignore[arg-type]
        if not isinstance(model.target, str | None):  # else torch is not imported
            said = "a target's name or an nn.Module"
            check_type("target", model.target, torch.nn.Module, said)
        permit = own.pop("permit", Permit())
        check_type("permit", permit, Permit)
        if (tune := own.pop("tune", None)) is not None and model.target is not None:
            Duration().checked("tune", tune)
            raise UsageError(
                f"tune={tune!r} tunes the running script, and takes no target; leave one of them "
                "out, or measure the target before, with advisor tune"
            )
        batch, capture = own.pop("batch", None), own.pop("capture", False)
        plan = Plan.of(Budget(length=own.pop("length", None)).given)
        cache = urls_of(own.pop("store", None))
        check_type("capture", capture, bool | None, "True or False")
        found = checked(Task, own | model.given | permit.given)
        given = {"mode": "train"} | {n: v for n, v in found.items() if rows(Task)[n].asked}
        named = _known_batch(given, batch)
        if batch not in (None, "free") and named is None:
            raise UsageError(f"batch {batch!r}: expected a number of at least 1, or 'free'")
        if given["mode"] == "infer":
            given.pop("optimizer", None)
        if given.get("deterministic") is None and "torch" in sys.modules:
            asks = torch.are_deterministic_algorithms_enabled()
            if asks or torch.backends.cudnn.deterministic:  # which advice must not undo
                given["deterministic"] = True
        return cls(
            target=model.target,
            device=given.pop("device", None) or environment.default_device(),
            given=given,
            batch=named,
            free=batch == "free",
            use=CAPTURE if capture else LOOP,
            plan=plan,
            cache=cache,
        )

    @classmethod
    def attempt(cls, target: object, asked: Mapping[str, Any], *, quiet: bool = False) -> Request:
        """As `of`, but a wrong argument is raised by the lookup; what is right of the device and
        the shape is kept for the advice that changes nothing."""
        try:
            return dataclasses.replace(cls.of(target, asked), quiet=quiet)
        except Exception as exc:  # `serve` reports it
            device = target.device if isinstance(target, Model) else None
            sound: dict[str, Any] = {}
            for name, value in (("shape", asked.get("shape")), ("device", device)):
                with contextlib.suppress(Exception):
                    sound |= checked(Task, {name: value})
            batch = _known_batch(sound, asked.get("batch"))
            device = sound.get("device") or environment.default_device()
            return cls(device=device, batch=batch, quiet=quiet, wrong=exc)

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
    def called(self) -> str:
        """The target as a person calls it; '' for a run."""
        target = self.target
        return target or "" if isinstance(target, str | None) else type(target).__name__

    def allows(self, record: Record, one: Choice | Candidate) -> bool:
        """Whether this script may be served a config of the record."""
        most = self.given.get("max_memory", 0)
        return (
            not (most and one.peak_bytes > most)
            and knobs.permits(self.given, one.config)
            and knobs.follows(self.use, one.config, record.baseline.config)
            and self.fits(one.config)
        )

    def query(self) -> Query:
        """The query for the stores. Raises AdvisorError if the device does not exist."""
        model, threads = self.model, self.threads
        if model is None and not isinstance(self.target, str | None):
            model = fingerprint.of_model(self.target)
        if self.device != "cpu":
            threads = 0
        return Query(
            environment=environment.detect(self.device),
            given=self.given,
            model=model,
            threads=environment.own_threads() if threads is None else threads,
            interconnect=self.interconnect,
        )


def _known_batch(given: Mapping[str, Any], batch: object) -> int | None:
    """The batch size that the script names; None if it names none or a wrong one."""
    if type(batch) is int and batch >= 1:
        return batch
    shapes = given.get("shapes")
    return int(shapes[0][0]) if batch is None and shapes else None
