"""What a script asks for: collapsed into one object at the door, and checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from advisor.cache import settings
from advisor.cache.config import Config
from advisor.cache.match import Query
from advisor.cache.record import CAPTURE, LOOP, PILOT, Record
from advisor.cache.task import Task, checked
from advisor.errors import UsageError
from advisor.opening import Cache
from advisor.tuners.length import Length
from advisor.tuners.search.plan import Plan
from advisor.tuners.torch_facts import torch

if TYPE_CHECKING:
    from torch import nn

Fits = Callable[[Record, Config], bool]
"""Whether a config of a record can be followed whole, by one who does more or less than a use."""


def anything(_record: Record, _config: Config) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One lookup.

    Attributes:
        target: a target's name, the model itself, or None for the running script's.
        given: fields of a Task, checked; what is left out is open.
        batch: that the script itself names; None where it leaves it open.
        free: whether it wants the best batch.
        use: what it can follow.
        fits: which configs of that it can, a framework those that it has words for.
        steps, seconds: the length of the job; both 0 for the steady state.
        device: 'cuda:0' or 'cpu'.
        on_miss: one of settings.ON_MISS; None for what is set where it runs.
        cache: as `open_records` takes it.
    """

    target: str | nn.Module | None
    given: Mapping[str, Any]
    batch: int | None
    free: bool
    use: str
    device: str
    steps: int = 0
    seconds: float = 0.0
    on_miss: str | None = None
    cache: Cache = None
    fits: Fits = anything

    @classmethod
    def of(cls, target: object, asked: Mapping[str, Any]) -> Request:
        """A request from fields of a Task by keyword, and `batch`, `capture`, `steps`, `duration`,
        `cache`, `on_miss` and `fits`; all may be left out.

        Raises:
            UsageError: one is wrong.
        """
        from advisor.tuners.environment import default_device

        own = dict(asked)
        batch, capture, cache = (own.pop(name, None) for name in ("batch", "capture", "cache"))
        length = {name: own.pop(name, None) for name in ("steps", "duration")}
        fits, on_miss = own.pop("fits", anything), own.pop("on_miss", None)
        if not isinstance(target, str | None) and not isinstance(target, torch.nn.Module):
            raise UsageError(f"target {target!r}: expected a target's name or an nn.Module")
        if on_miss is not None:
            _is_on_miss(on_miss)
        given = checked(Task, own)
        named = known_batch(given, batch)
        if batch not in (None, "free") and named is None:
            raise UsageError(f"batch {batch!r}: expected a number of at least 1, or 'free'")
        plan = Plan.of(length)
        if given.get("mode") == "infer":
            given.pop("optimizer", None)
        if given.get("deterministic") is None and _is_deterministic():
            given["deterministic"] = True
        given.setdefault("mode", "train")
        return cls(
            target=target,
            given={name: value for name, value in given.items() if name != "device"},
            batch=named,
            free=batch == "free",
            use=CAPTURE if capture else LOOP,
            device=given.get("device") or default_device(),
            steps=plan.steps or 0,
            seconds=plan.duration_s or 0.0,
            on_miss=on_miss,
            cache=cache,
            fits=fits,
        )

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
    def nearest(self) -> bool:
        """Whether a miss is to take what is safe from the nearest record.

        Raises:
            UsageError: what is set is none of settings.ON_MISS.
        """
        return self._misses == "nearest"

    @property
    def asks(self) -> bool:
        """Whether a miss is to be asked of the team's server as a job. Raises as `nearest`."""
        return self._misses == "request"

    @property
    def _misses(self) -> str:
        on_miss = self.on_miss or settings.on_miss() or "default"
        _is_on_miss(on_miss)
        return on_miss

    def length(self, batch: int) -> Length | None:
        """How long the job is, at the batch that it names, else at this one."""
        if not self.steps and not self.seconds:
            return None
        return Length(batch=self.batch or batch, steps=self.steps, seconds=self.seconds)

    def query(self) -> Query:
        """What is looked for.

        Raises:
            AdvisorError: the device is not there, or does not tell what it is.
        """
        from advisor.tuners import fingerprint
        from advisor.tuners.environment import detect, own_threads

        model = None if isinstance(self.target, str | None) else self.target
        return Query(
            environment=detect(self.device),
            given=self.given,
            model=None if model is None else fingerprint.of_model(model),
            threads=own_threads() if self.device == "cpu" else 0,
        )


def _is_on_miss(value: object) -> None:
    if value not in settings.ON_MISS:
        raise UsageError(f"on_miss {value!r}: expected one of {', '.join(settings.ON_MISS)}")


def processes() -> int:
    """Of this job, as its launcher says."""
    from advisor.tuners.environment import env_int

    return max(1, env_int("WORLD_SIZE", 1))


def known_batch(given: Mapping[str, Any], batch: object) -> int | None:
    """The batch size that the script itself names, None where it leaves it open or is wrong."""
    if type(batch) is int and batch >= 1:
        return batch
    shapes = given.get("shapes")
    return int(shapes[0][0]) if batch is None and shapes else None


def _is_deterministic() -> bool:
    """The user has already asked PyTorch for determinism: that is not for advice to undo."""
    if "torch" not in sys.modules:
        return False
    return bool(torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic)
