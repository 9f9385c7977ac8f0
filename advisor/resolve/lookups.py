"""apply() and lookup(): the advice for a training script.

One lookup: the arguments become a Request, the stores are asked for its records, one record is
chosen, and the part of it that fits is the Served that an Advice acts on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from advisor.arguments import Model, Permit
from advisor.cache import settings
from advisor.cache.artifacts import Purpose, StoredArtifacts
from advisor.cache.asking import Explanation, NearMiss, ask
from advisor.cache.codec import from_plain, to_plain, unpack
from advisor.cache.config import Config
from advisor.cache.kinds import Shape
from advisor.cache.match import MISS, Match, compare
from advisor.cache.reader import StoredRecord
from advisor.cache.record import Record
from advisor.cache.signing import UNSIGNED
from advisor.command_snippets import tune_again, tune_first
from advisor.errors import (
    AdvisorError,
    AdvisorWarning,
    NoRecord,
    RecordDamaged,
    StoreError,
    UsageError,
    printable,
)
from advisor.open_store import Cache, open_records
from advisor.resolve.answer import answer
from advisor.resolve.request import Request
from advisor.resolve.target_resolver import CODE, TargetResolver
from advisor.store import Store
from advisor.tuners import knobs
from advisor.tuners.act.advice_usage import EXACT, STALE, Served
from advisor.tuners.act.ranks import APART, Group, named
from advisor.tuners.environment import detect, tools
from advisor.tuners.faults import Stopped
from advisor.tuners.target import EDITED

if TYPE_CHECKING:
    from torch import nn

    from advisor.tuners.act.advice import Advice

_LIBRARIES = ("advisor", "torch")
"""A warning skips the lines of these packages, and names the user's own line."""
PATIENCE_S = 2.0  # timeout of remote stores for compiled code, in seconds
WAIT_S = 60.0  # seconds that ranks wait for rank 0's lookup, which usually takes milliseconds
DISABLED = Served(status="disabled", reason="ADVISOR_DISABLE is set")
AT_FIRST_STEPS = "the run's record is looked up at its first training steps"
GOES_ON = "Training goes on unmodified"
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
    tune: float | str | None = None,
    strict: bool = False,
) -> Advice:
    """Set the process-wide flags that were found best, and return the advice for the rest.

    Never breaks a run: without a fitting record the advice changes nothing, and one
    AdvisorWarning says why. Creates no CUDA context and starts no process.

    Args:
        target: a name as for `advisor tune`, the model itself, or an `advisor.Model`. None: the run
            of this script.
        shape: shape of one batch, (64, 3, 256, 256) or '64x3x256x256', or a list of shapes.
        batch: another batch size than shape's, or 'free' for the best one that was found.
        capture: the script gives its step to `advice.capture`.
        permit: limits on the configs that may be used.
        length: of this job: its steps, as 500, or its time, as '2h', first step included.
        store: an `advisor.Store`, or one or several URLs; default: $ADVISOR_CACHE, else
            [tool.advisor] cache in pyproject.toml, else the user's cache folder.
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
    model, strict = Model.of(given.pop("target")), given.pop("strict")
    if model.target is None:
        from advisor.resolve.online import apply_to_script

        return apply_to_script(model, given, strict=strict)
    advice = advise(Request.attempt(model, given), strict=strict)
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
    strict: bool = False,
) -> Advice:
    """As `apply` of a target, but without setting flags of the process: `advice.set_flags()` does.

    `lookup(...).explanation` says what was looked for, what was found, and in which fields every
    other record of the target differs.
    """
    given = dict(locals())
    del given["strict"]
    return advise(Request.attempt(given.pop("target"), given), strict=strict)


def advise(request: Request, *, strict: bool) -> Advice:
    """The advice of `serve`. All of its messages become one warning."""
    advice = serve(request, strict=strict)
    warn(advice.served.notice)
    return advice


def serve(request: Request, *, strict: bool) -> Advice:
    """The advice for a request, the same on every rank; `served.notice` is for the user. The advice
    changes nothing if advisor is disabled, no record fits or an error occurs; strict=True raises
    instead."""
    set_up_logging()
    if settings.disabled():
        return _advice(DISABLED, request)
    try:
        # In a process group one rank decides for all: ranks that train differently hang.
        served = broadcast_from_rank0(lambda: look_up(request))
        if strict and served.status == "miss" and not request.quiet:
            raise NoRecord(served.reason)
        return _advice(served, request)
    except Exception as exc:  # the one catch-all: whatever goes wrong, training goes on
        if strict:
            raise
        why = str(exc)
        if not isinstance(exc, AdvisorError):
            _log.error("the lookup failed; please report this", exc_info=exc)
            why = f"the lookup failed ({type(exc).__name__}: {exc})"
    return _advice(missed(why), request)


def _advice(served: Served, request: Request) -> Advice:
    from advisor.tuners.act.advice import Advice

    batch, config = None if request.free else request.batch, served.config
    if batch is not None and config.batch:
        config = config.at(batch)  # the batch of this rank
    batch, record = config.batch or batch, served.record
    advice = Advice(knobs.Advised(config), device=request.device, batch_size=batch, served=served)
    if record is None or served.status not in (EXACT, STALE) or not knobs.compiles(config):
        return advice
    from advisor.tuners.act.artifacts import Fetch

    purpose = Purpose.of(record, served.config, detect(request.device), tools())

    def find() -> StoredArtifacts | None:
        records = open_records(request.cache, timeout_s=PATIENCE_S, fallback=True)
        return records.artifacts.find(purpose)

    advice.artifacts = Fetch(find)
    return advice


def look_up(request: Request) -> Served:
    """The Served for a request; status 'miss' if no record fits. Raises UsageError, and StoreError
    if no store can be read."""
    if settings.disabled():
        return DISABLED
    if request.wrong is not None:
        raise request.wrong
    if request.target is None and request.model is None:
        if request.quiet:
            return missed(AT_FIRST_STEPS, quiet=True)
        raise UsageError("target None: give its name, such as model.py:Net, or the model itself")
    resolver = TargetResolver(request, request.query())
    records = open_records(request.cache, timeout_s=0, fallback=True)
    found = Explanation(target=request.called, query=resolver.query)

    def choose(held: Sequence[StoredRecord]) -> Match:
        """Prefer records that the user or their team signed. Without a key, all are equal."""
        ours = [one for one in held if records.is_ours(one.name)]
        match = _choose(ours, request, resolver)
        if match.final or len(ours) == len(held):
            return match
        return dataclasses.replace(_choose(held, request, resolver), final=False)

    match, held = ask(records, resolver.sought(), choose, found)
    if match is None:
        raise StoreError("; ".join(found.failed))
    served = _served(request, resolver, match, found)
    if (record := served.record) is not None:
        away = [f"{fault}; the lookup went on without this store" for fault in found.failed]
        signed = next(one.trusted for one in held if one.record is record)
        reason = served.reason if signed else f"{served.reason}; {UNSIGNED}"
        notice = ". ".join(filter(None, [served.notice, *away]))
        served = dataclasses.replace(served, signed=signed, reason=reason, notice=notice)
        _log.info("record %s (%s): %s", record.id, served.status, reason)
    found.served, found.status = record.id if record else "", served.status
    found.reason, found.near_misses = served.reason, _near_misses(resolver, held, found.served)
    return dataclasses.replace(served, explanation=found)


def _choose(held: Sequence[StoredRecord], request: Request, resolver: TargetResolver) -> Match:
    match = MISS
    try:
        match = resolver.match([one.record for one in held])
        record = match.record
        if record is None or not match.fits:
            return match
        served = answer(record, request)
    except NoRecord as exc:  # several records fit, or the record lacks this batch
        remedy = f"; {tune_first(request, match.record)}" if match.record else ""
        return dataclasses.replace(match, refused=f"{exc}{remedy}")
    there = next(one for one in held if one.record is record)
    final = match.kind == "exact" and not record.stale
    return dataclasses.replace(match, held=there, answer=served, final=final)


def _served(request: Request, resolver: TargetResolver, match: Match, found: Explanation) -> Served:
    """The answer of a match, STALE if its record is stale or differs from the request."""
    near, answered = match.record, match.answer
    differs = ", ".join(map(str, match.differs))
    if answered is not None:
        served: Served = answered
        assert near is not None
        doubts = [f"measured elsewhere: {differs}"] if differs else []
        doubts += [f"marked stale by advisor verify: {near.stale}"] if near.stale else []
        if not doubts:
            return served
        why, notice = "; ".join(doubts), ""
        if served.config.changed(served.default):
            notice = (
                f"the advice for {near.target.name} is used and may be out of date ({why}). To "
                f"measure again: {tune_again(near, request.cache)}"
            )
        reason = f"{served.reason}; {why}"
        return dataclasses.replace(served, reason=reason, notice=notice, status=STALE)
    why = match.refused
    if not why and found.failed and near is None:
        why = "no record was found"  # it may be in a store that failed
    why = why or _why_missed(request, resolver, match)
    faults = [fault for fault in (*found.failed, *found.refused) if fault not in why]
    return missed("; ".join([why, *faults]), quiet=request.quiet)


def missed(why: str, *, quiet: bool = False) -> Served:
    """The Served of a miss. `quiet`: without a notice."""
    notice = "" if quiet else f"{why}. {GOES_ON}"
    torch = knobs.TORCH
    return Served(status="miss", reason=why, config=torch, default=torch, notice=notice)


def _why_missed(request: Request, resolver: TargetResolver, match: Match) -> str:
    """Why no record fits, and the command to run."""
    near, differs = match.record, match.differs
    if near is not None and differs and differs[0].field == CODE:
        first, differs = differs[0], differs[1:]
        if first.wanted != EDITED:  # its code cannot be compared
            in_hand = "give the model itself: advisor.apply(model)"
            return f"the code of {near.target.name} is {first.wanted}; {in_hand}"
        what = f"the code of {near.target.name} has changed since it was tuned"
    else:
        this = "" if isinstance(request.target, str) else "this "
        what = f"{this}{request.called} was not tuned for this request"
        if request.given.get("command"):
            what = "this run was not tuned"
        what += f" on {resolver.query.environment.device.name}"
    if differs:
        what += f" (the nearest record differs in {', '.join(map(str, differs))})"
    return f"{what}; {tune_first(request, near)}"


def _near_misses(
    resolver: TargetResolver, held: Sequence[StoredRecord], served: str
) -> tuple[NearMiss, ...]:
    """The records that were not served, the nearest first."""
    others = [
        NearMiss(
            id=one.record.id,
            target=one.record.target.name,
            store=one.store.url,
            signed=one.trusted,
            differs=resolver.differences(one.record) + compare(resolver.query, one.record.key)[1],
        )
        for one in held
        if one.record.id != served
    ]
    return tuple(sorted(others, key=lambda one: len(one.differs)))


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
    a process group decide alike. Raises Stopped if one does not come to this point."""
    group = Group.current()
    if group is None:
        return fault
    key = f"advisor/faults/{next(_calls)}"
    with contextlib.suppress(RuntimeError):  # DistNetworkError: the store is gone
        group.store.add(f"{key}/known", int(bool(fault)))
        if not group.meet(key):
            raise Stopped("unclear", APART)
        return fault or "on another rank" * bool(group.store.add(f"{key}/known", 0))
    return fault


def warn(message: str, *, speaks: bool | None = None) -> None:
    """Show a message as a warning, on rank 0 only (or where `speaks`). The warning names the user's
    own line, if any."""
    message = printable(message)  # parts may come from a store
    if not message:
        return
    if not (_speaks() if speaks is None else speaks):
        _log.debug("%s", message)
        return
    level, frame = 2, sys._getframe().f_back
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"advisor: {message}", AdvisorWarning, stacklevel=level)


def warn_in_hook(message: str, *, speaks: bool | None = None) -> None:
    """As `warn`, but print the message if warnings are errors, as with `python -W error`: a hook
    that raises would end the run."""
    try:
        warn(message, speaks=speaks)
    except AdvisorWarning:
        sys.stderr.write(f"advisor: {printable(message)}\n")


def warn_of_failure(message: str) -> None:
    """As `warn_in_hook`, on the rank that fails first, which it names."""
    group, first = Group.current(), True
    if group is not None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            first = group.store.add("advisor/failed", 1) == 1
    warn_in_hook(f"{named()}{message}", speaks=first)


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
        _log.propagate = False  # else a script with handlers of its own prints each line twice
        named = logging.getLevelNamesMapping().get(level.upper())
        _log.setLevel(logging.INFO if named is None else named)
        if named is None and _speaks():
            known = "expected debug, info, warning or error; it counts as info"
            _log.warning("ADVISOR_LOG=%s: %s", printable(level), known)
