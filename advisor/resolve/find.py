"""One lookup: what the stores have for a request, and what is served of it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from advisor.cache import settings
from advisor.cache.asking import Chosen, LookupResult, ask
from advisor.cache.explanation import Explanation, NearMiss
from advisor.cache.match import Match, Query, compare
from advisor.cache.reader import StoredRecord
from advisor.cache.signing import UNSIGNED
from advisor.command_snippets import tune_again, tune_first
from advisor.errors import NoRecord, StoreError
from advisor.open_store import open_records
from advisor.resolve.answer import answer, carried
from advisor.resolve.job import request_tuning
from advisor.resolve.request import Request
from advisor.resolve.target_resolver import CODE, TargetResolver, script
from advisor.tuners import knobs
from advisor.tuners.act.advice_usage import EXACT, STALE, Served
from advisor.tuners.environment import env_int
from advisor.tuners.target import EDITED

IN_HAND = "give the model itself: advisor.apply(model)"
"""What to do if a file's code cannot be compared."""
DISABLED = Served(status="disabled", reason="ADVISOR_DISABLE is set")
_log = logging.getLogger("advisor")


def look_up(request: Request, notices: list[str]) -> Served:
    """What a request is served; status 'miss' if nothing fits. Adds what the user should know.

    Raises:
        UsageError: the target, the settings or the device is wrong.
        StoreError: no store can be read.
    """
    query = request.query()
    records = open_records(request.cache, patient=False, fallback=True)
    resolver = TargetResolver(request)

    def choose(held: Sequence[StoredRecord]) -> Chosen:
        """Records of the reader's own side come first; without any key that is every record."""
        ours = [one for one in held if records.is_ours(one.name)]
        chosen = _choose(ours, request, resolver, query)
        if chosen.final or len(ours) == len(held):
            return chosen
        return dataclasses.replace(_choose(held, request, resolver, query), final=False)

    result = ask(records, resolver.sought(query), choose)
    chosen = result.chosen
    if chosen is None:
        raise StoreError("; ".join(map(str, result.failed)))
    match, near = chosen.match, chosen.match.record
    if chosen.held is not None:
        served = _with_warnings(chosen.answer, request, match, notices)
    elif not chosen.refused and request.miss_action == "nearest" and _is_akin(query, match):
        served = _nearest(request, query, match, notices)
    else:
        why = chosen.refused or _miss(request, query, match)
        if request.miss_action == "request" and not request.quiet:
            why += f"; {request_tuning(request, query, near)}"
        faults = [str(one) for one in (*result.failed, *result.refused)]
        why = "; ".join([why, *(fault for fault in faults if fault not in why)])
        if not request.quiet:
            notices.append(f"{why}. Training goes on {request.goes_on}")
        served = Served(status="miss", reason=why, config=knobs.TORCH, default=knobs.TORCH)
    if (record := served.record) is not None:
        notices += [f"{fault}; looked on without it" for fault in result.failed]
        signed = next(one.trusted for one in result.held if one.record is record)
        reason = served.reason if signed else f"{served.reason}; {UNSIGNED}"
        served = dataclasses.replace(served, signed=signed, reason=reason)
        _log.info("record %s (%s): %s", record.id, served.status, reason)
    explanation = _explained(request, query, resolver, result, served)
    return dataclasses.replace(served, explanation=explanation)


def preview(request: Request) -> Served:
    """What a request would be served, without a warning. Raises as `look_up`."""
    return DISABLED if settings.disabled() else look_up(request, [])


def _choose(
    held: Sequence[StoredRecord], request: Request, resolver: TargetResolver, query: Query
) -> Chosen:
    try:
        match = resolver.match([one.record for one in held], query)
    except NoRecord as exc:
        return Chosen(refused=str(exc))
    record = match.record
    if record is None or not match.fits:
        return Chosen(match=match)
    try:
        served = answer(record, request)
    except NoRecord as exc:  # e.g. it did not measure this batch
        return Chosen(match=match, refused=f"{exc}; {tune_first(request, record)}")
    return Chosen(
        match=match,
        held=next(one for one in held if one.record is record),
        final=match.kind == "exact" and not record.stale,
        answer=served,
    )


def _with_warnings(served: Served, request: Request, match: Match, notices: list[str]) -> Served:
    """The same, stale if the record is, with what else differs from what was measured."""
    record, reason = match.record, served.reason
    assert record is not None
    there, here = record.key.task.processes, processes()
    if here != there:
        reason += f"; measured in {there} process{'es' * (there > 1)}, this job has {here}"
    name, differs = record.target.name, ", ".join(map(str, match.differs))
    again = tune_again(record, request.cache) if differs or record.stale else ""
    if differs:
        reason += f"; measured elsewhere: {differs}"
        notices.append(
            f"{name} was tuned under other conditions ({differs}); its advice is used and may be "
            f"out of date. To measure again: {again}"
        )
    if record.stale:
        reason += f"; marked stale by advisor verify: {record.stale}"
        notices.append(
            f"the advice for {name} no longer holds ({record.stale}); it is used all the same. To "
            f"measure again: {again}"
        )
    return dataclasses.replace(served, reason=reason, status=STALE if again else EXACT)


def _is_akin(query: Query, match: Match) -> bool:
    """Whether anything may be carried over: what a CPU likes says nothing of a GPU."""
    near = match.record
    return near is not None and near.key.environment.device.kind == query.environment.device.kind


def _nearest(request: Request, query: Query, match: Match, notices: list[str]) -> Served:
    near, differs = match.record, ", ".join(map(str, match.differs))
    assert near is not None
    served = carried(near, request, query)
    reason = f"the nearest record, {near.id}, differs in {differs}; {served.reason}"
    notices.append(
        f"{request.called or near.target.name} was not tuned for this; {reason}. To measure it, "
        f"{tune_first(request, near)}"
    )
    return dataclasses.replace(served, reason=reason)


def _miss(request: Request, query: Query, match: Match) -> str:
    """Why nothing fits, and what to run."""
    near, differs = match.record, match.differs
    if near is not None and differs and differs[0].field == CODE:
        first, differs = differs[0], differs[1:]
        if first.wanted != EDITED:
            return f"the code of {near.target.name} is {first.wanted}; {IN_HAND}"
        what = f"the code of {near.target.name} has changed since it was tuned"
    else:
        this = "" if isinstance(request.target, str) else "this "
        what = f"{this}{request.called} was not tuned for this"
        if request.given.get("command"):
            what = "this run was not tuned"
        elif request.target is None:
            what = f"nothing was tuned for {script().name} or a module that it imports"
        what += f" on {query.environment.device.name}"
    if differs:
        what += f" (the nearest record differs in {', '.join(map(str, differs))})"
    return f"{what}; {tune_first(request, near)}"


def _explained(
    request: Request, query: Query, resolver: TargetResolver, result: LookupResult, served: Served
) -> Explanation:
    others = [
        NearMiss(
            id=one.record.id,
            target=one.record.target.name,
            store=one.store.url,
            signed=one.trusted,
            differs=(*resolver.differences(one.record), *compare(query, one.record.key)[1]),
        )
        for one in result.held
        if served.record is None or one.record.id != served.record.id
    ]
    return Explanation(
        target=request.called,
        query=query,
        stores=tuple(result.stores),
        served=served.record.id if served.record else "",
        status=served.status,
        reason=served.reason,
        refused=tuple(result.refused),
        near_misses=tuple(sorted(others, key=lambda one: len(one.differs))),
    )


def processes() -> int:
    """Of this job, as its launcher says."""
    return max(1, env_int("WORLD_SIZE", 1))
