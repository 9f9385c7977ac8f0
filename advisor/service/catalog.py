"""What the page of records lists: each record once, by its newest version."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from advisor.cache.domain import LONGEST
from advisor.service import coverage
from advisor.service.records import TRUSTS, newest_versions
from advisor.service.schema import Item

ON_A_PAGE = 50

Column = Literal["model", "device", "framework", "speedup", "trust", "used", "created"]
Short = Annotated[str, Field(max_length=LONGEST)]


class View(BaseModel):
    """Which records a reader wants to see, and in which order.

    `sort` is a column, after '-' if the largest value comes first.
    """

    model_config = ConfigDict(frozen=True)

    model: Short = ""
    device: Short = ""
    framework: Short = ""
    trust: str = Field("", pattern=f"^({'|'.join(TRUSTS)}|)$")
    sort: str = Field("-created", pattern=f"^-?({'|'.join(get_args(Column))})$")
    page: int = Field(0, ge=0, le=10**5)

    @property
    def is_narrowed(self) -> bool:
        return bool(self.model or self.device or self.framework or self.trust)

    def url(self, **changes: str | int) -> str:
        """The address of this view with some fields changed."""
        view = self.model_copy(update=changes)
        return "/?" + urlencode(view.model_dump(exclude_defaults=True))

    def sorted_by(self, column: str) -> str:
        """How a column is sorted, in ARIA's words; '' if the view is sorted by another one."""
        return {column: "ascending", f"-{column}": "descending"}.get(self.sort, "")

    def sort_url(self, column: str) -> str:
        """The address that sorts by a column, or turns its order around."""
        turned = self.sort == f"-{column}"
        return self.url(sort=column if turned else f"-{column}", page=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A record in the list.

    Attributes:
        id: as people type it.
        trust: one of `records.TRUSTS`.
        used: how often lookups of the last days found it; `stale` of them had other software.
    """

    id: str
    model: str
    device: str
    framework: str
    speedup: float
    trust: str
    created: float
    used: int
    stale: int


def listed(session: Session, view: View) -> tuple[list[Line], int]:
    """A page of the records of a view, and how many there are on all pages."""
    newest, uses = newest_versions(), coverage.uses()
    columns: dict[str, ColumnElement[Any]] = {
        **{name: getattr(Item, name).label(name) for name in _SHOWN},
        "model": Item.called.label("model"),
        "used": func.coalesce(uses.c.used, 0).label("used"),
        "stale": func.coalesce(uses.c.stale, 0).label("stale"),
    }
    by = columns[view.sort.removeprefix("-")]
    where = _where(view)
    query = (
        select(Item.id, Item.batch, *columns.values())
        .join(newest, Item.key == newest.c.key)
        .join(uses, Item.place == uses.c.place, isouter=True)
        .where(*where)
        .order_by(by.desc() if view.sort.startswith("-") else by, Item.place)
        .offset(view.page * ON_A_PAGE)
        .limit(ON_A_PAGE)
    )
    lines = [
        Line(id=f"{row['id']}@{row['batch']}", **{name: row[name] for name in columns})
        for row in session.execute(query).mappings()
    ]
    of_all = select(func.count()).select_from(Item).join(newest, Item.key == newest.c.key)
    return lines, session.scalar(of_all.where(*where)) or 0


_SHOWN = ("device", "framework", "speedup", "trust", "created")


def _where(view: View) -> list[ColumnElement[bool]]:
    equal = {name: getattr(view, name) for name in ("device", "framework", "trust")}
    found: list[ColumnElement[bool]] = [
        getattr(Item, name) == value for name, value in equal.items() if value
    ]
    if view.model:
        called = Item.called.icontains(view.model, autoescape=True)
        found.append(or_(called, Item.id.startswith(view.model[:12], autoescape=True)))
    return found


def choices(session: Session) -> dict[str, Sequence[str]]:
    """The values that each filter offers."""
    return {
        name: session.scalars(
            select(column).where(Item.fields != "", column != "").distinct().order_by(column)
        ).all()
        for name, column in (("device", Item.device), ("framework", Item.framework))
    }


@dataclass(frozen=True, slots=True)
class Median:
    """The median speed-up of the newest versions of `records` records that are verified."""

    records: int
    speedup: float


def median(session: Session) -> Median:
    newest = newest_versions()
    query = select(Item.speedup).join(newest, Item.key == newest.c.key)
    found = session.scalars(query.where(Item.trust == "verified")).all()
    return Median(len(found), statistics.median(found) if found else 0.0)
