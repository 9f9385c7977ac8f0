"""The list of records: each record once, by its newest version."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement, RowMapping, Select, String, cast, func, or_, select
from sqlalchemy.orm import Session

from advisor.cache.domain import LONGEST
from advisor.service import lookups
from advisor.service.records import Trust
from advisor.service.schema import Item

ON_A_PAGE = 50  # records, or jobs, on one page of a list
COLUMNS = ("model", "device", "framework", "speedup", "trust", "used", "created")
Short = Annotated[str, Field(max_length=LONGEST)]


class View(BaseModel):
    """A filter and an order for the list of records. `sort`: a column, with '-' before it if the
    largest value comes first."""

    model_config = ConfigDict(frozen=True)

    model: Short = ""
    device: Short = ""
    framework: Short = ""
    trust: Trust | Literal[""] = ""
    sort: str = Field(default="-created", pattern=f"^-?({'|'.join(COLUMNS)})$")
    page: int = Field(default=0, ge=0, le=10**5)

    def url(self, **changes: str | int) -> str:
        """The address of this view with some fields changed."""
        return f"/?{urlencode(self.model_copy(update=changes).model_dump(exclude_defaults=True))}"


def listed(session: Session, view: View) -> tuple[Sequence[RowMapping], int]:
    """Returns (a page of the records of a view, the number of records on all pages).

    A row has COLUMNS, the record's `id` as people type it, and `stale`: how many of its lookups,
    counted in `used`, had other software.
    """
    uses = lookups.uses()
    own = ("device", "framework", "speedup", "trust", "created")
    columns: dict[str, Any] = {name: getattr(Item, name) for name in own} | {
        "model": Item.called,
        "used": func.coalesce(uses.c.used, 0),
        "stale": func.coalesce(uses.c.stale, 0),
        "id": Item.id + "@" + cast(Item.batch, String),
    }
    by = columns[view.sort.removeprefix("-")]
    query = (
        _newest(*(column.label(name) for name, column in columns.items()))
        .join(uses, Item.record_key == uses.c.record_key, isouter=True)
        .where(*_where(view))
        .order_by(by.desc() if view.sort.startswith("-") else by, Item.record_key)
        .offset(view.page * ON_A_PAGE)
    )
    number = session.scalar(_newest(func.count()).where(*_where(view))) or 0
    return session.execute(query.limit(ON_A_PAGE)).mappings().all(), number


def _newest(*columns: Any) -> Select[Any]:
    """Columns of the newest version of each record. Of versions with the same time of measuring,
    the last stored one counts."""
    newest = (Item.created.desc(), Item.stored.desc(), Item.key)
    order = func.row_number().over(partition_by=Item.record_key, order_by=newest)
    versions = select(Item.key, order.label("version")).subquery()
    found = select(*columns).select_from(Item).join(versions, Item.key == versions.c.key)
    return found.where(versions.c.version == 1)


def _where(view: View) -> list[ColumnElement[bool]]:
    equal = view.model_dump(include={"device", "framework", "trust"})
    found = [getattr(Item, name) == value for name, value in equal.items() if value]
    if view.model:
        called = Item.called.icontains(view.model, autoescape=True)
        found.append(or_(called, Item.id.startswith(view.model[:12], autoescape=True)))
    return found


def choices(session: Session) -> dict[str, Sequence[str]]:
    """The values that each filter offers."""
    return {
        name: session.scalars(select(column).distinct().order_by(column)).all()
        for name, column in (("device", Item.device), ("framework", Item.framework))
    }


def median(session: Session) -> tuple[int, float]:
    """Returns (the number of records whose newest version is verified, their median speed-up)."""
    found = session.scalars(_newest(Item.speedup).where(Item.trust == "verified")).all()
    return len(found), statistics.median(found or [0.0])
