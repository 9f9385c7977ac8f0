"""Looking into the stores for what a script asks for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from advisor.cache.asking import Said, ask
from advisor.cache.match import Query
from advisor.cache.record import Record
from advisor.cache.records import Held, Listing, Marks, Records, Sought
from advisor.cache.stores import Store
from advisor.finding.meant import Meant, matched, spec_of
from advisor.finding.request import Request


def find(records: Records, request: Request, meant: Meant, query: Query) -> Said:
    """Look into one store after another until a record fits exactly.

    See `ask` for how long that takes and what is copied where.

    Raises:
        UsageError: the target is wrong.
    """
    look, fits = _how(records, request, meant, query)

    def read(store: Store, marks: Marks) -> Listing:
        listing = look(store, marks=marks)
        return dataclasses.replace(
            listing, held=tuple(one for one in listing.held if fits(one.record))
        )

    def choose(held: Sequence[Held]) -> tuple[Held | None, bool]:
        match = matched(meant.wanted_of(one.record for one in held), query)
        chosen = next((one for one in held if one.record is match.record), None)
        return chosen, match.kind == "exact" and chosen is not None and not chosen.record.stale

    return ask(records, read, choose)


def _how(
    records: Records, request: Request, meant: Meant, query: Query
) -> tuple[Callable[..., Listing], Callable[[Record], bool]]:
    """How a store is read for a target, and which of what comes back is of it."""
    target = request.target
    if target is None:
        sought = Sought(origins=meant.origins)
        return functools.partial(records.look_into, sought=sought), sought.fits
    if not isinstance(target, str):
        sought = Sought(model=query.model)
        return functools.partial(records.look_into, sought=sought), sought.fits
    spec = spec_of(target)
    if spec.attribute:
        sought = Sought(target=spec.name)
        return functools.partial(records.look_into, sought=sought), sought.fits
    return records.look_into, lambda record: record.target.name.split(":")[0] == spec.name
