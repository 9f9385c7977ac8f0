"""Looking into the stores for what a script asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.cache.asking import Chosen, Said, ask
from advisor.cache.match import MISS, Match, Query
from advisor.cache.reader import CurrentFile, Listing, RecordFilter, StoredRecord
from advisor.cache.records import Records
from advisor.cache.stores import Store
from advisor.errors import NoRecord, TargetError
from advisor.finding.answer import Answer, answer
from advisor.finding.meant import Meant
from advisor.finding.request import Request
from advisor.printed import tune_first
from advisor.tuners.target import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Chosen):
    """What comes of a lookup among some records.

    Attributes:
        match: the record that is meant, or a miss.
        answered: what it answers; None where it does not, or there is none.
        refused: why there is no answer although records fit; '' where none do.
    """

    match: Match
    answered: Answer | None = None
    refused: str = ""


def find(records: Records, request: Request, meant: Meant, query: Query) -> Said[Outcome]:
    """Look into one store after another until a record of the reader's own side answers exactly.

    Of a reader without any key every record is. What others wrote, of whatever task and date, is
    not looked at where that is so. See `ask` for how long it takes and what is copied where.

    Raises:
        UsageError: the target is wrong.
    """
    sought = _sought(request, meant, query)

    def read(store: Store) -> Listing:
        return records.look_into(store, sought)

    def choose(held: Sequence[StoredRecord]) -> Outcome:
        ours = [one for one in held if records.is_ours(one.name)]
        outcome = _among(ours, request, meant, query)
        if outcome.final or len(ours) == len(held):
            return outcome
        return dataclasses.replace(_among(held, request, meant, query), final=False)

    return ask(records, read, choose)


def _among(held: Sequence[StoredRecord], request: Request, meant: Meant, query: Query) -> Outcome:
    try:
        match = meant.the_one([one.record for one in held], query)
    except NoRecord as exc:
        return Outcome(match=MISS, refused=str(exc))
    record = match.record
    if record is None:
        return Outcome(match=match)
    try:
        answered = answer(record, request)
    except NoRecord as exc:  # as of a batch that it did not measure
        return Outcome(match=match, refused=f"{exc}; {tune_first(request, record)}")
    return Outcome(
        held=next(one for one in held if one.record is record),
        final=match.kind == "exact" and not record.stale,
        match=match,
        answered=answered,
    )


def _sought(request: Request, meant: Meant, query: Query) -> RecordFilter:
    """What a store is asked for."""
    named = meant.named
    if request.in_hand:
        return RecordFilter(model=query.model, query=query)
    if named is None:
        return RecordFilter(origins=meant.origins, query=query)
    if named.attribute:  # else the record says of what in it the code is
        return RecordFilter(target=named.name, query=query, now=_now(named))
    return RecordFilter(file=named.name, query=query)


def _now(spec: Spec) -> CurrentFile | None:
    """What a target's file holds; None where it cannot be read."""
    try:
        return CurrentFile(code=spec.code, origin=spec.origin)
    except TargetError:
        return None
