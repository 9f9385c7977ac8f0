"""Records in the database: stored, looked up, removed. The cache decides what a valid record is."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator
from sqlalchemy import ColumnElement, Row, Subquery, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from advisor.cache.codec import to_plain
from advisor.cache.domain import LONGEST, is_line
from advisor.cache.exchange import sound
from advisor.cache.key import are_whole, as_fields, completed, fields, terms_of
from advisor.cache.match import Kind, Standing, kind_of, relation, standing
from advisor.cache.name import command_digest
from advisor.cache.reader import Reader
from advisor.cache.record import Record
from advisor.cache.stores.store import MAX_BYTES, Store
from advisor.errors import RecordDamaged, StoreError
from advisor.resolve.answer import unverified
from advisor.resolve.doubt import doubtful
from advisor.service import quotas
from advisor.service.schema import Item
from advisor.service.tokens import Caller, note

Trust = Literal["verified", "unverified", "doubtful", "stale"]
"""Compared with fp32, or changes no numbers; not compared; measured on a host too busy to tell;
found to hold no longer."""
MOST_RECORDS, MOST_NEAREST = 32, 8
"""Records in one answer, with all their versions: of those that fit, and of others."""
MOST_BYTES = 2**22
"""Of the records in one answer; of others only the keys are sent."""
MOST_FETCHED = 2**24
"""Bytes of records that were asked for by their keys, in one answer."""
MOST_LISTED = 10_000
"""Keys on one page."""
_MOST_ALIKE, _MOST_FOUND = 1000, 4 * MOST_RECORDS
"""Terms that match alike, and their records, of which some are sent."""
_MOST_KNOWN = 4000
"""Records whose fields are in memory, at some 5 KB each."""

Part = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$|^$")]
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
Batch = Annotated[int | None, Field(ge=0, lt=10**10)]


class Search(NamedTuple):
    """Records to look among, and the fields of a key to compare them with. `answers`: those that
    fit are answers, and not of other code than the one that is meant."""

    where: Sequence[ColumnElement[bool]]
    wanted: Mapping[str, Any]
    answers: bool = True


class Question(BaseModel):
    """What is looked for, as `cache.reader.RecordFilter.questions` says it. `family` is None unless
    similar models are asked for too, '' for a model without one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(default="", pattern=r"^[0-9a-f]{12,128}$|^$")
    target: Part = ""
    origins: list[Hex] | None = Field(default=None, max_length=1000)
    file: str = Field(default="", max_length=LONGEST)
    command: Part = ""
    id: str = Field(default="", pattern=r"^[0-9a-f]{0,12}$")
    batch: Batch = None
    code: str = Field(default="", pattern=r"^[0-9a-f]{0,128}$")
    origin: Part = ""
    family: str | None = Field(default=None, pattern=r"^[0-9a-f]{0,128}$")
    near: Batch = None
    wanted: str = Field(default="{}", max_length=2**15, description="A key's fields, as JSON")

    @model_validator(mode="after")
    def _check(self) -> Question:
        device = self.fields.get("device.name", "")
        if not all(isinstance(text, str) and is_line(text) for text in (self.file, device)):
            raise ValueError("file, device.name: expected a line of printable text")
        if self.family is not None and not are_whole(self.fields):
            raise ValueError("wanted: expected all fields of a key, to find similar models")
        if self.family is None and self.fields and not self._narrowed:
            raise ValueError("expected what narrows: a model, target, file, command or id")
        return self

    @functools.cached_property
    def fields(self) -> Mapping[str, Any]:
        """The wanted fields of a key."""
        try:
            stated = json.loads(self.wanted)
        except RecursionError:
            stated = None
        if not isinstance(stated, dict):
            raise ValueError("wanted: expected a map in JSON")
        found = as_fields(stated)
        return found if self.family is None else completed(found)

    @property
    def searches(self) -> list[Search]:
        """Where to look, one after another: a later one only if those before found nothing, but for
        similar models always."""
        if self.family is not None:
            own = Search([Item.model == str(self.fields["model"])[:12]], self.fields)
            others = Search([Item.family == self.family], {**self.fields, "model": ""})
            return [own, others] if self.family else [own]
        every, answers = self._narrowed, not self.code or not self.fields
        found = [Search(every, self.fields, answers)]
        if self.target and self.origin:
            found.insert(0, Search([Item.origin == self.origin, *every], self.fields, answers))
        if self.target and self.code:
            found.insert(0, Search([Item.code == self.code, *every], self.fields))
        return found

    @property
    def _narrowed(self) -> list[ColumnElement[bool]]:
        found = [Item.model == self.model[:12]] if self.model else []
        for name in ("target", "file", "command"):
            if value := getattr(self, name):
                found.append(getattr(Item, name) == value)
        if self.origins is not None:
            found.append(Item.origin.in_(self.origins))
        if self.id:
            found += [Item.id >= self.id, Item.id < f"{self.id}g"]
        return found if self.batch is None else [*found, Item.batch == self.batch]

    def standing(self, wanted: Mapping[str, Any], have: Mapping[str, Any]) -> Standing | None:
        """How a record with these fields matches; None if it is not to be sent."""
        if self.family is None:
            return standing(wanted, have)
        similar = relation(wanted, have)
        return similar and similar[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The keys of what was found, the nearest record's first, and how many bytes each has.

    `record_key` is the nearest's, '' for none; `kind` how the best of its versions matches.
    """

    sizes: Mapping[str, int]
    record_key: str = ""
    kind: Kind = "miss"


def find(session: Session, question: Question) -> Found:
    """What fits of what is looked for, else the nearest: all versions."""
    nearest = _nearest(session, question)
    if not nearest:
        return Found(sizes={})
    own = Item.record_key.in_(nearest)
    rows = session.execute(select(Item.record_key, Item.key, Item.size).where(own))
    order = {record: number for number, record in enumerate(nearest)}
    found = sorted((order[record], key, size) for record, key, size in rows)
    record, kind = next(iter(nearest.items()))
    return Found(sizes={key: size for _number, key, size in found}, record_key=record, kind=kind)


def _nearest(session: Session, question: Question) -> dict[str, Kind]:
    """The keys of the records to send, and how each matches: what fits, else the nearest."""
    found: dict[str, Kind] = {}
    fitted = False
    for search, one, terms in _groups(session, question):
        may = question.family is not None or kind_of(one) != "miss"
        fits = may and search.answers
        most = MOST_RECORDS if fits else MOST_NEAREST
        if len(found) >= most or (fitted and not fits):
            break
        fitted = fits
        records = _records(session, search, terms, question.near if may else None)
        new = [record for record in records if record not in found][: most - len(found)]
        found |= dict.fromkeys(new, kind_of(one) if fits else "miss")
    return found


def _groups(
    session: Session, question: Question
) -> Iterator[tuple[Search, Standing, list[str] | None]]:
    """Terms of records that match alike, the best first; None for any terms."""
    for search in question.searches:
        if not search.wanted:
            yield search, (0, 0), None
            continue
        groups: dict[Standing, list[str]] = {}
        for terms, known in _terms(session, search):
            if (one := question.standing(search.wanted, _fields(known))) is not None:
                groups.setdefault(one, []).append(terms)
        yield from ((search, one, groups[one]) for one in sorted(groups))
        if groups and question.family is None:
            return


def _terms(session: Session, search: Search) -> Sequence[Row[str, str]]:
    """Each terms among some records, with the fields of one of them, as JSON."""
    where = search.where
    terms = select(Item.terms).where(*where).distinct().subquery()
    one = select(Item.fields).where(*where, Item.terms == terms.c.terms).limit(1)
    return session.execute(select(terms.c.terms, one.correlate(terms).scalar_subquery())).all()


def _records(
    session: Session, search: Search, terms: Sequence[str] | None, near: int | None
) -> Sequence[str]:
    """The keys of records with these terms: those of the batch that is near, then the newest."""
    query = select(Item.record_key).where(*search.where).group_by(Item.record_key, Item.batch)
    if terms is not None:
        query = query.where(Item.terms.in_(terms[:_MOST_ALIKE]))
    if near is not None:
        query = query.order_by((Item.batch == near).desc())
    newest = query.order_by(func.max(Item.created).desc(), Item.record_key)
    return session.scalars(newest.limit(_MOST_FOUND)).all()


@functools.lru_cache(maxsize=_MOST_KNOWN)
def _fields(known: str) -> Mapping[str, Any]:
    """A record's fields, from their JSON."""
    return completed(as_fields(json.loads(known)))


def within(sizes: Mapping[str, int], most: int) -> list[str]:
    """The first keys, of no more bytes together than `most`."""
    keys = []
    for key, size in sizes.items():
        most -= size
        if most < 0:
            break
        keys.append(key)
    return keys


def data_of(session: Session, keys: Iterable[str]) -> dict[str, bytes]:
    """The bytes under some keys, without what is not there."""
    rows = session.execute(select(Item.key, Item.data).where(Item.key.in_(list(keys))))
    return {key: data for key, data in rows}


def fetched(session: Session, keys: Sequence[str]) -> dict[str, bytes | None]:
    """The bytes under the first of some keys, as many as may go into one answer; None for what is
    not there."""
    rows = session.execute(select(Item.key, Item.size).where(Item.key.in_(keys)))
    sizes = {key: size for key, size in rows}
    chosen = within({key: sizes.get(key, 0) for key in keys}, MOST_FETCHED)
    return {**dict.fromkeys(chosen), **data_of(session, chosen)}


def listed(session: Session, after: str, most: int = MOST_LISTED) -> tuple[list[str], bool]:
    """The keys behind one, sorted, and whether there are more."""
    query = select(Item.key).where(Item.key > after).order_by(Item.key).limit(most + 1)
    keys = list(session.scalars(query))
    return keys[:most], len(keys) > most


def put(
    session: Session, reader: Reader, key: str, data: bytes, by: Caller
) -> Literal["added", "known"]:
    """Store a record. Nothing is overwritten: what is there already is known.

    Raises:
        RecordDamaged: it is invalid, or not what its key says.
        UsageError: it is beyond the token's quota.
    """
    item = item_of(reader, key, data)
    item.token, item.stored = by.token, time.time()
    there = data_of(session, [key])
    if not there:
        quotas.check(session, Item, by, item.size)
        try:
            with session.begin_nested():
                session.add(item)
                note(session, by, "put", key)
        except IntegrityError:  # another server was first
            there = data_of(session, [key])
        else:
            return "added"
    if there.get(key) != data:
        raise RecordDamaged(f"{key[:80]}: another is kept under this key; refused")
    return "known"


def item_of(reader: Reader, key: str, data: bytes) -> Item:
    """The row of a record; raises RecordDamaged as `put` does."""
    record, name, data = sound(reader, key, data)
    known = to_plain(fields(record.key))
    return Item(
        key=key,
        data=data,
        size=len(data),
        record_key=name.record_key,
        model=record.key.model[:12],
        id=name.id,
        batch=name.batch,
        target=name.target[0],
        origin=name.target[1],
        called=record.target.name,
        file=record.target.name.partition(":")[0],
        code=record.target.code,
        family=record.family,
        command=command_digest(record.key.task.command),
        device=record.key.environment.device.name,
        fields=json.dumps(known),
        terms=terms_of(known),
        speedup=record.winner(record.use).speedup,
        trust=trust_of(record),
        framework=framework_of(record),
        created=record.provenance.created,
    )


def trust_of(record: Record) -> Trust:
    """Whether a record's speed-up can be trusted."""
    if record.stale:
        return "stale"
    if doubtful(record):
        return "doubtful"
    return "unverified" if unverified(record, record.winner(record.use).config) else "verified"


def framework_of(record: Record) -> str:
    """The libraries that a record's model is built of, without their versions."""
    names = dict.fromkeys(name.partition("==")[0] for name in record.key.libraries)
    return ", ".join(names) or "torch"


def delete(session: Session, key: str, by: Caller) -> bool:
    """Remove what is under a key, if it is the caller's; whether it was there."""
    item = session.get(Item, key)
    if item is None:
        return False
    by.check_owns(item.token)
    session.delete(item)
    note(session, by, "deleted", key)
    return True


def count(session: Session) -> int:
    """Of records, in all versions."""
    return session.scalar(select(func.count()).select_from(Item)) or 0


def known(session: Session, id: str) -> bool:
    """Whether there is a record of this id, as people type it."""
    return session.scalar(select(Item.key).where(*_of_id(id)).limit(1)) is not None


def speedup_of(session: Session, id: str, token: int) -> float | None:
    """The speed-up of a record that a token stored; None if there is none of this id."""
    where = (*_of_id(id), Item.token == token)
    newest = select(Item.speedup).where(*where).order_by(Item.created.desc())
    return session.scalar(newest.limit(1))


def device_of(session: Session, id: str) -> str:
    """The device that a record was measured on; '' if there is none of this id."""
    return session.scalar(select(Item.device).where(*_of_id(id)).limit(1)) or ""


def _of_id(id: str) -> list[ColumnElement[bool]]:
    key, _at, batch = id.partition("@")
    return [Item.id == key, Item.batch == int(batch or 0)]


def any_there(session: Session) -> bool:
    return session.scalar(select(Item.key).limit(1)) is not None


def newest_versions() -> Subquery:
    """The newest version of each record, the one that came last if it was verified again: a column
    `key` of `items`."""
    order = func.row_number().over(
        partition_by=Item.record_key,
        order_by=(Item.created.desc(), Item.stored.desc(), Item.key),
    )
    versions = select(Item.key, order.label("version")).subquery()
    return select(versions.c.key).where(versions.c.version == 1).subquery()


class StoredAnswer(Store):
    """What answers a question, as a store to read: so that the cache says which version counts."""

    url = "this server"
    takes_blobs = False

    def __init__(self, session: Session, question: Question) -> None:
        self._data = data_of(session, find(session, question).sizes)

    def keys(self) -> list[str]:
        return sorted(self._data)

    def get_many(
        self, keys: Iterable[str], most: int = MAX_BYTES
    ) -> dict[str, bytes | RecordDamaged]:
        return {key: self._data[key] for key in keys if key in self._data}

    def put(self, key: str, data: bytes) -> None:
        self.check_writable()

    def delete(self, key: str) -> bool:
        self.check_writable()
        return False

    def check_writable(self) -> None:
        raise StoreError(f"{self.url}: only read here")
