"""apply() and lookup(): the advice for a training script."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from advisor.arguments import Model, Permit, length_given, urls_of
from advisor.cache import settings
from advisor.cache.artifacts import Purpose, StoredArtifacts
from advisor.cache.codec import from_plain, to_plain, unpack
from advisor.cache.config import Config
from advisor.cache.kinds import Duration, Shape, Shapes
from advisor.cache.record import Record
from advisor.cache.records import be_patient
from advisor.cache.task import Task, rows
from advisor.errors import (
    AdvisorError,
    AdvisorWarning,
    NoRecord,
    RecordDamaged,
    UsageError,
    printable,
)
from advisor.open_store import Cache, open_records
from advisor.resolve.find import DISABLED, GOES_ON, look_up
from advisor.resolve.request import Fits, Request, known_batch
from advisor.tuners.act.advice_usage import EXACT, STALE, Served
from advisor.tuners.act.ranks import Group

if TYPE_CHECKING:
    from torch import nn

    from advisor.store import Store
    from advisor.tuners.act.advice import Advice
    from advisor.tuners.act.artifacts import Fetch

_LIBRARIES = ("advisor", "torch")
"""A warning skips the lines of these packages, and names the user's own line."""
PATIENCE_S = 2.0
"""Timeout of remote stores for compiled code, in seconds."""
WAIT_S = 60.0
"""Seconds that ranks wait for rank 0's lookup, which usually takes milliseconds."""
_calls = itertools.count()
_log = logging.getLogger("advisor")


def apply(
    target: str | nn.Module | Model | None = None,
    *,
    shape: Shape | Sequence[Shape] | None = None,
    batch: int | str | None = None,
    capture: bool = False,
    permit: Permit = Permit(),
    length: int | str | None = None,
    store: Store | Cache = None,
    on_miss: str | None = None,
    tune: float | str | None = None,
    strict: bool = False,
) -> Advice:
    """Set the process-wide flags that were found best, and return the advice for the rest.

    Never breaks a run: without a fitting record the advice changes nothing, and one
    AdvisorWarning says why. Creates no CUDA context and starts no process.

    Args:
        target: a name as for `advisor tune`, the model itself, or an `advisor.Model`. None: the run
            of this script, or a model that the script defines or imports.
        shape: shape of one batch, (64, 3, 256, 256) or '64x3x256x256', or a list of shapes.
        batch: another batch size than shape's, or 'free' for the best one that was found.
        capture: the script gives its step to `advice.capture`.
        permit: limits on the configs that may be used.
        length: of this job: its steps, as 500, or its time, as '2h', first step included.
        store: an `advisor.Store`, or one or several URLs; default: $ADVISOR_CACHE, else
            [tool.advisor] cache in pyproject.toml, else the user's cache folder.
        on_miss: 'default', 'nearest' (the safe part of the nearest record) or 'request' (ask a
            server for a tuning).
        tune: without a target: seconds, or '10m', in which a run that is not tuned yet tries
            configs between its steps. The run continues with the best and stores it.
        strict: raise instead of warning.

    Without a target, `apply` also attaches a pilot, unless `advisor run` or `advisor tune` did. At
    the first training steps, the pilot looks up the record of this very model and applies it.
    `advisor.release()` removes the pilot.

    In an initialised torch.distributed process group, rank 0 looks up for all ranks, so every
    rank must call `apply`.

    Raises:
        AdvisorError: with strict=True, if there is no advice.
    """
    given = dict(locals())
    tune, strict = given.pop("tune"), given.pop("strict")
    target, asked = _asked(**given)
    if target is None:
        from advisor.resolve.online import apply_to_script

        return apply_to_script(asked, tune=tune, strict=strict)

    def request() -> Request:
        if tune is not None:
            Duration().checked("tune", tune)
            raise UsageError(
                f"tune={tune!r} tunes the running script, and takes no target; leave one of them "
                "out, or measure the target before, with advisor tune"
            )
        return Request.of(target, asked)

    advice = advise(request, asked, strict=strict)
    advice.set_flags()
    return advice


def lookup(
    target: str | nn.Module | Model | None = None,
    *,
    shape: Shape | Sequence[Shape] | None = None,
    batch: int | str | None = None,
    capture: bool = False,
    permit: Permit = Permit(),
    length: int | str | None = None,
    store: Store | Cache = None,
    on_miss: str | None = None,
    strict: bool = False,
) -> Advice:
    """As `apply`, but without setting flags of the process: call `advice.set_flags()` for that.

    `lookup(...).explanation` says what was looked for, what was found, and in which fields every
    other record of the target differs.
    """
    given = dict(locals())
    return lookup_for(given.pop("target"), given)


def lookup_for(target: Any, given: Mapping[str, Any], fits: Fits | None = None) -> Advice:
    """As `lookup(target, **given)`, but only with configs for which `fits` is true."""
    inspect.signature(lookup).bind(target, **given)
    own = dict(given) if fits is None else {**given, "fits": fits}
    strict = bool(own.pop("strict", False))
    target, asked = _asked(target, **own)
    return advise(lambda: Request.of(target, asked), asked, strict=strict)


def _asked(
    target: str | nn.Module | Model | None,
    permit: Any = Permit(),
    length: int | str | None = None,
    store: Store | Cache = None,
    **own: Any,
) -> tuple[str | nn.Module | None, dict[str, Any]]:
    """The target, and the other arguments of `lookup` as `Request.of` takes them."""
    model = Model.of(target)
    asked = {row.keyword for row in rows(Task).values() if row.asked}
    if not isinstance(permit, Permit):
        own, permit = own | {"permit": permit}, Permit()  # the request refuses this value
    given = (model.given | permit.given).items()
    described = {name: value for name, value in given if name in asked}
    return model.target, own | described | length_given(length) | {"cache": urls_of(store)}


def advise(make: Callable[[], Request], asked: Mapping[str, Any], *, strict: bool) -> Advice:
    """The advice of `serve`. All of its messages become one warning."""
    advice, notices = serve(make, asked, strict=strict)
    warn(*notices)
    return advice


def serve(
    make: Callable[[], Request], asked: Mapping[str, Any], *, strict: bool
) -> tuple[Advice, list[str]]:
    """(The advice for a request, the same on every rank; messages for the user). The advice changes
    nothing if advisor is disabled, no record fits or an error occurs; strict=True raises instead.

    `asked`: the arguments of the request; `device`, `cache`, `quiet` and the batch are read.
    """
    from advisor.tuners.knobs import TORCH

    set_up_logging()
    notices: list[str] = []
    if settings.disabled():
        return _advice(DISABLED, asked), notices
    try:
        # In a process group one rank decides for all: ranks that train differently hang.
        served = broadcast_from_rank0(lambda: look_up(make(), notices))
        if strict and served.status == "miss" and not asked.get("quiet"):
            raise NoRecord(served.reason)
        return _advice(served, asked), notices
    except Exception as exc:  # the one catch-all: whatever goes wrong, training goes on
        if strict:
            raise
        why = str(exc)
        if not isinstance(exc, AdvisorError):
            _log.error("the lookup failed; please report this", exc_info=exc)
            why = f"the lookup failed ({type(exc).__name__}: {exc})"
    served = Served(status="miss", reason=why, config=TORCH, default=TORCH)
    return _advice(served, asked), [f"{why}. {GOES_ON}"]


def broadcast_from_rank0(decide: Callable[[], Served]) -> Served:
    """Call `decide` on rank 0; return its result, or raise its AdvisorError, on every rank. Outside
    a process group, each rank decides for itself."""
    group = Group.current()
    if group is None:
        return decide()
    key = f"advisor/advice/{next(_calls)}"
    if group.rank == 0:
        message: dict[str, Any] = {"error": "rank 0 failed in its lookup; see its own message"}
        try:
            served = decide()
            message = {"served": to_plain(dataclasses.replace(served, explanation=None))}
            return served
        except AdvisorError as exc:
            message = {"error": str(exc)}
            raise
        finally:
            group.store.set(key, msgpack.packb(message))
    found = group.get(key, WAIT_S)
    if found is None:  # rank 0 did not answer: prepare() compares the ranks' advice
        return decide()
    try:
        said = unpack(found)
        if "error" in said:
            raise NoRecord(f"{said['error']}; decided by rank 0")
        known = said["served"]
        kinds = {"record": Record, "config": Config, "default": Config, "flags": Config}
        for name, cls in kinds.items():
            known[name] = None if known[name] is None else from_plain(cls, known[name])
    except RecordDamaged as exc:
        raise NoRecord(f"rank 0's message cannot be read: {exc}") from exc
    return Served(**{**known, "reason": f"{known['reason']}; decided by rank 0"})


def known_to_any_rank(fault: str) -> str:
    """This rank's `fault`, else 'on another rank' if another rank has one, else ''. So all ranks of
    a process group decide alike."""
    group = Group.current()
    if group is None:
        return fault
    key = f"advisor/faults/{next(_calls)}"
    with contextlib.suppress(RuntimeError):  # DistNetworkError: the store is gone
        group.store.add(f"{key}/known", int(bool(fault)))
        group.meet(key)
        return fault or "on another rank" * bool(group.store.add(f"{key}/known", 0))
    return fault


def _advice(served: Served, asked: Mapping[str, Any]) -> Advice:
    from advisor.tuners.act.advice import Advice
    from advisor.tuners.knobs import Advised, compiles

    device, batch, config = _device(asked.get("device")), named_batch(asked), served.config
    if batch is not None and config.batch:
        config = config.at(batch)  # the batch of this rank
    batch = config.batch or batch
    advice = Advice(Advised(config), device=device, batch_size=batch, served=served)
    if served.record is not None and served.status in (EXACT, STALE) and compiles(served.config):
        advice.artifacts = _artifacts(served.record, served.config, device, asked.get("cache"))
    return advice


def _artifacts(record: Record, config: Config, device: str, cache: Cache) -> Fetch:
    from advisor.tuners.act.artifacts import Fetch
    from advisor.tuners.environment import detect, tools

    purpose = Purpose.of(record, config, detect(device), tools())

    def find() -> StoredArtifacts | None:
        records = open_records(cache, patient=False, fallback=True)
        be_patient(records.stores, PATIENCE_S)
        return records.artifacts.find(purpose)

    return Fetch(find)


def named_batch(asked: Mapping[str, object]) -> int | None:
    """The batch that the arguments name; None if they name none or a wrong one."""
    given = {}
    with contextlib.suppress(AdvisorError):
        if asked.get("shape") is not None:
            given["shapes"] = Shapes().checked("shape", asked["shape"])
    return known_batch(given, asked.get("batch"))


def _device(asked: object) -> str:
    """The requested device if PyTorch knows it, else the default device."""
    from advisor.tuners.environment import default_device
    from advisor.tuners.torch_facts import torch

    if asked is not None and isinstance(asked, str | torch.device):
        with contextlib.suppress(RuntimeError):
            return str(torch.device(asked))
    return default_device()


def warn(*messages: str) -> None:
    """Show all messages as one warning, on rank 0 only. The warning names the user's own line, if
    any."""
    message = printable(". ".join(messages))  # parts may come from a store
    if not message:
        return
    if not _speaks():
        _log.debug("%s", message)
        return
    level, frame = 2, sys._getframe().f_back
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"advisor: {message}", AdvisorWarning, stacklevel=level)


def tell(message: str) -> None:
    """Print a line on stderr, on rank 0 only; or log the line, if the log shows it."""
    if _log.isEnabledFor(logging.INFO) or not _speaks():
        _log.info("%s", message)
    else:
        sys.stderr.write(f"advisor: {printable(message)}\n")


def _speaks() -> bool:
    """Whether this is rank 0, or there are no ranks."""
    group = Group.current()
    return (str(group.rank) if group else os.environ.get("RANK", "0")) == "0"


def set_up_logging() -> None:
    """Log to stderr if $ADVISOR_LOG is set."""
    level = os.environ.get("ADVISOR_LOG", "")
    if level and not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("advisor %(levelname)s %(message)s"))
        _log.addHandler(handler)
        named = logging.getLevelNamesMapping().get(level.upper())
        _log.setLevel(named if named is not None else logging.INFO)
