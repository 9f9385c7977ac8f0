"""Looking into the stores for what a script asks for."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.cache.asking import Said, ask
from advisor.cache.match import Query
from advisor.cache.reader import Held, Listing, Marks, Sought
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.stores import Store
from advisor.errors import NoRecord
from advisor.finding.answer import answer
from advisor.finding.meant import Meant, matched, spec_of
from advisor.finding.request import Request


def find(records: Records, request: Request, meant: Meant, query: Query) -> Said:
    """Look into one store after another until a record of the reader's own side fits exactly.

    Of a reader without any key every record is. See `ask` for how long that takes and what is
    copied where.

    Raises:
        UsageError: the target is wrong.
    """
    sought = _sought(request, meant, query)

    def read(store: Store, marks: Marks) -> Listing:
        return records.look_into(store, sought, marks)

    def choose(held: Sequence[Held]) -> tuple[Held | None, bool]:
        match = matched(meant.wanted_of(counting(held, request, meant, query)), query)
        chosen = next((one for one in held if one.record is match.record), None)
        if chosen is None or chosen.record.stale or match.kind != "exact":
            return chosen, False
        return chosen, records.is_ours(chosen.name)

    return ask(records, read, choose)


def counting(held: Sequence[Held], request: Request, meant: Meant, query: Query) -> list[Record]:
    """The records among which the answer is: where one that the reader or their team signed
    answers exactly, whatever others wrote, of whatever task and date, is not looked at."""
    ours = [one.record for one in held if one.trusted]
    match = matched(meant.wanted_of(ours), query)
    if match.record is None or match.record.stale or match.kind != "exact":
        return [one.record for one in held]
    try:
        answer(match.record, request)
    except NoRecord:  # as of a batch that it did not measure
        return [one.record for one in held]
    return ours


def _sought(request: Request, meant: Meant, query: Query) -> Sought:
    """What a store is asked for."""
    target = request.target
    if request.in_hand:
        return Sought(model=query.model, query=query)
    if not isinstance(target, str):
        return Sought(origins=meant.origins, query=query)
    spec = spec_of(target)
    if spec.attribute:
        return Sought(target=spec.name, query=query)
    return Sought(file=spec.name, query=query)
