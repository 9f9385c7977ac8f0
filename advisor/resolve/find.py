"""One lookup: find the records for a request in the stores, and choose what to serve."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from advisor.cache import settings
from advisor.cache.asking import Chosen, LookupResult, ask
from advisor.cache.explanation import Explanation, NearMiss
from advisor.cache.match import MISS, Match, compare
from advisor.cache.reader import StoredRecord
from advisor.cache.signing import UNSIGNED
from advisor.command_snippets import tune_again, tune_first
from advisor.errors import NoRecord, StoreError
from advisor.open_store import open_records
from advisor.resolve.answer import answer, carry_over
from advisor.resolve.job import request_tuning
from advisor.resolve.request import Request
from advisor.resolve.target_resolver import CODE, TargetResolver, script
from advisor.tuners import knobs
from advisor.tuners.act.advice_usage import STALE, Served
from advisor.tuners.target import EDITED

DISABLED = Served(status="disabled", reason="ADVISOR_DISABLE is set")
GOES_ON = "Training goes on unmodified"
_log = logging.getLogger("advisor")


def look_up(request: Request, notices: list[str]) -> Served:
    """The Served for a request; status 'miss' if no record fits. Appends messages for the user to
    `notices`. Raises UsageError, and StoreError if no store can be read."""
    resolver = TargetResolver(request, request.query())
    records = open_records(request.cache, patient=False, fallback=True)

    def choose(held: Sequence[StoredRecord]) -> Chosen:
        """Prefer records that the user or their team signed. Without a key, all are equal."""
        ours = [one for one in held if records.is_ours(one.name)]
        chosen = _choose(ours, request, resolver)
        if chosen.final or len(ours) == len(held):
            return chosen
        return dataclasses.replace(_choose(held, request, resolver), final=False)

    result = ask(records, resolver.sought(), choose)
    chosen = result.chosen
    if chosen is None:
        raise StoreError("; ".join(map(str, result.failed)))
    if chosen.held is not None:
        served = _with_warnings(chosen.answer, request, chosen.match, notices)
    elif (
        not chosen.refused
        and request.miss_action == "nearest"
        and resolver.is_similar(chosen.match)
    ):
        served = _nearest(request, resolver, chosen.match, notices)
    else:
        served = _missed(request, resolver, result, chosen, notices)
    if (record := served.record) is not None:
        notices += [f"{fault}; the lookup went on without this store" for fault in result.failed]
        signed = next(one.trusted for one in result.held if one.record is record)
        reason = served.reason if signed else f"{served.reason}; {UNSIGNED}"
        served = dataclasses.replace(served, signed=signed, reason=reason)
        _log.info("record %s (%s): %s", record.id, served.status, reason)
    return dataclasses.replace(served, explanation=_explained(request, resolver, result, served))


def preview(request: Request) -> Served:
    """As `look_up`, without messages; a miss if advice is disabled."""
    return DISABLED if settings.disabled() else look_up(request, [])


def _choose(held: Sequence[StoredRecord], request: Request, resolver: TargetResolver) -> Chosen:
    match = MISS
    try:
        match = resolver.match([one.record for one in held])
        record = match.record
        if record is None or not match.fits:
            return Chosen(match=match)
        served = answer(record, request)
    except NoRecord as exc:  # several records fit, or the record lacks this batch
        remedy = f"; {tune_first(request, match.record)}" if match.record else ""
        return Chosen(match=match, refused=f"{exc}{remedy}")
    there = next(one for one in held if one.record is record)
    final = match.kind == "exact" and not record.stale
    return Chosen(match=match, held=there, final=final, answer=served)


def _with_warnings(served: Served, request: Request, match: Match, notices: list[str]) -> Served:
    """The Served, STALE if the record is stale or differs from the request; a notice says so."""
    record, doubts = match.record, []
    assert record is not None
    if match.differs:
        doubts.append(f"measured elsewhere: {', '.join(map(str, match.differs))}")
    if record.stale:
        doubts.append(f"marked stale by advisor verify: {record.stale}")
    if not doubts:
        return served
    why = "; ".join(doubts)
    if served.config.changed(served.default):
        notices.append(
            f"the advice for {record.target.name} is used and may be out of date ({why}). To "
            f"measure again: {tune_again(record, request.cache)}"
        )
    return dataclasses.replace(served, reason=f"{served.reason}; {why}", status=STALE)


def _nearest(
    request: Request, resolver: TargetResolver, match: Match, notices: list[str]
) -> Served:
    near, differs = match.record, ", ".join(map(str, match.differs))
    assert near is not None
    served = carry_over(near, request, resolver.query)
    reason = f"the nearest record, {near.id}, differs in {differs}; {served.reason}"
    notices.append(
        f"{request.called or near.target.name} was not tuned for this request; {reason}. To tune, "
        f"{tune_first(request, near)}"
    )
    return dataclasses.replace(served, reason=reason)


def _missed(
    request: Request,
    resolver: TargetResolver,
    result: LookupResult,
    chosen: Chosen,
    notices: list[str],
) -> Served:
    """The Served of a miss, with the reason. Requests a tuning if `on_miss` says so."""
    why = chosen.refused or _why_missed(request, resolver, chosen.match)
    if request.miss_action == "request" and not request.quiet:
        why += f"; {request_tuning(request, resolver.query, chosen.match.record)}"
    faults = [str(one) for one in (*result.failed, *result.refused)]
    why = "; ".join([why, *(fault for fault in faults if fault not in why)])
    if not request.quiet:
        notices.append(f"{why}. {GOES_ON}")
    return Served(status="miss", reason=why, config=knobs.TORCH, default=knobs.TORCH)


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
        elif request.target is None:
            what = f"nothing was tuned for {script().name} or a module that it imports"
        what += f" on {resolver.query.environment.device.name}"
    if differs:
        what += f" (the nearest record differs in {', '.join(map(str, differs))})"
    return f"{what}; {tune_first(request, near)}"


def _explained(
    request: Request, resolver: TargetResolver, result: LookupResult, served: Served
) -> Explanation:
    others = [
        NearMiss(
            id=one.record.id,
            target=one.record.target.name,
            store=one.store.url,
            signed=one.trusted,
            differs=(
                *resolver.differences(one.record),
                *compare(resolver.query, one.record.key)[1],
            ),
        )
        for one in result.held
        if served.record is None or one.record.id != served.record.id
    ]
    return Explanation(
        target=request.called,
        query=resolver.query,
        stores=tuple(result.stores),
        served=served.record.id if served.record else "",
        status=served.status,
        reason=served.reason,
        refused=tuple(result.refused),
        near_misses=tuple(sorted(others, key=lambda one: len(one.differs))),
    )
