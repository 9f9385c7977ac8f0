"""Records in the database: kept, found, removed. What a record may be the cache itself says."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Row, Select, bindparam, func, select, union_all
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, defer

from advisor.cache.codec import to_plain
from advisor.cache.exchange import sound, sound_mark
from advisor.cache.key import as_fields, fields, terms_of
from advisor.cache.match import Kind, Standing, compared, kind_of, relation, standing
from advisor.cache.name import Mark, command_part
from advisor.cache.reader import Reader
from advisor.cache.stores import Shelf, Store
from advisor.errors import RecordDamaged, StoreError
from advisor.service.schema import Item
from advisor.service.tokens import Caller, note
from advisor.tuners.doubt import doubtful

MOST_PLACES = 32
"""Records of one answer, in all their versions."""
MOST_NEAREST = 8
"""The same, where none fits."""
MOST_BYTES = 2**22
"""Of the records in one answer; of what is beyond it only the keys are told."""
MOST_FETCHED = 2**24
"""Bytes of records that were asked for by their keys, in one answer."""
MOST_LISTED = 10_000
"""Keys on one page."""
MOST_MARK = 2**14
"""Bytes of a mark."""
_MOST_NEWEST, _MOST_ALIKE = 4 * MOST_PLACES, 64
"""Versions of the same terms, and terms that stand alike, among which those to be sent are."""
_ALIKE: Standing = (0, 0)
"""How all stand where nothing is wanted of them."""
_MOST_KNOWN = 4000
"""Records whose fields are in memory, at some 5 KB each."""

Put = Literal["added", "known"]


class Turn(NamedTuple):
    """What narrows: `same` columns by name. One with nothing `beside` has an index of its own, in
    which its terms stand in their order.

    `wanted`: fields of a key that what is found is held against; `answers`: what fits them is an
    answer, and not of other code than the one that is meant.
    """

    same: Mapping[str, str]
    beside: Sequence[ColumnElement[bool]]
    wanted: Mapping[str, Any]
    answers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is looked for; see `cache.reader.Sought.question`, whose fields these are.

    `family` is None where no kin is asked for, '' of a model without one.
    """

    model: str = ""
    target: str = ""
    origins: Sequence[str] | None = None
    file: str = ""
    command: str = ""
    id: str = ""
    batch: int | None = None
    code: str = ""
    origin: str = ""
    family: str | None = None
    wanted: Mapping[str, Any] = field(default_factory=dict)
    near: int | None = None

    @property
    def turns(self) -> list[Turn]:
        """What narrows: where one turn finds nothing the next one does, and of kin both do."""
        if self.family is not None:
            own = Turn({"model": str(self.wanted["model"])[:12]}, (), self.wanted)
            others = Turn({"family": self.family}, (), {**self.wanted, "model": ""})
            return [own, others] if self.family else [own]
        same, beside = self._same, self._beside
        first = {"code": self.code, "origin": self.origin} if self.target else {}
        found = [{**same, name: value} for name, value in first.items() if value]
        return [
            Turn(one, beside, self.wanted, answers="code" in one or not self.code)
            for one in (*found, same)
        ]

    @property
    def narrows(self) -> bool:
        return self.family is not None or bool(self._same or self._beside)

    @property
    def _same(self) -> dict[str, str]:
        asked = {"model": self.model[:12], "target": self.target, "file": self.file}
        return {name: value for name, value in (asked | {"command": self.command}).items() if value}

    @property
    def _beside(self) -> list[ColumnElement[bool]]:
        found: list[ColumnElement[bool]] = []
        if self.origins is not None:
            found.append(Item.origin.in_(self.origins))
        if self.id:
            found += [Item.id >= self.id, Item.id < f"{self.id}g"]
        if self.batch is not None:
            found.append(Item.batch == self.batch)
        return found

    def standing(self, wanted: Mapping[str, Any], have: Mapping[str, Any]) -> Standing | None:
        """Of a record with these fields; None of what is not to be told."""
        if self.family is None:
            return standing(wanted, have)
        akin = relation(wanted, have)
        return akin and akin[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The keys of what was found, the nearest record's first, and how many bytes each has.

    `place` is the nearest's, '' for none; `kind` how the best of its versions matches.
    """

    sizes: Mapping[str, int]
    place: str = ""
    kind: Kind = "miss"

    @property
    def etag(self) -> str:
        """A key holds the digest of its bytes: equal keys, equal answer."""
        return f'"{hashlib.sha256(" ".join(self.sizes).encode()).hexdigest()[:32]}"'

    @property
    def sent(self) -> list[str]:
        """The keys whose bytes go along."""
        left, keys = MOST_BYTES, []
        for key, size in self.sizes.items():
            left -= size
            if left < 0:
                break
            keys.append(key)
        return keys


def look(session: Session, question: Question) -> Found:
    """What fits of what is looked for, else the nearest: all versions, and the marks on them."""
    places = _sent(session, question)
    if not places:
        return Found(sizes={})
    rows = session.execute(select(Item.place, Item.key, Item.size).where(Item.place.in_(places)))
    order = {place: number for number, place in enumerate(places)}
    found = sorted((order[place], key, size) for place, key, size in rows)
    sizes = {key: size for _number, key, size in found}
    place, kind = next(iter(places.items()))
    return Found(sizes=sizes, place=place, kind=kind)


def _sent(session: Session, question: Question) -> dict[str, Kind]:
    """The places of what is sent, and how each answers: what fits, else the nearest."""
    found: dict[str, Kind] = {}
    fit = False
    for one, fits, places in _ordered(session, question):
        most = MOST_PLACES if fits else MOST_NEAREST
        if len(found) >= most or (fit and not fits):
            break
        fit = fits
        new = [place for place in places() if place not in found]
        kind: Kind = kind_of(one) if fits else "miss"
        found |= dict.fromkeys(new[: most - len(found)], kind)
    return found


def _ordered(
    session: Session, question: Question
) -> Iterator[tuple[Standing, bool, Callable[[], dict[str, None]]]]:
    """How what is looked for stands, what would be chosen first first; whether that may answer, or
    is akin; and the places of it."""
    for turn in question.turns:
        if not turn.wanted:
            yield _ALIKE, True, functools.partial(_newest, session, turn)
            continue
        standings: list[tuple[Standing, str]] = [
            (one, terms)
            for terms, known in _terms(session, turn)
            if (one := question.standing(turn.wanted, _fields(known))) is not None
        ]
        for one, several in groupby(sorted(standings), key=lambda pair: pair[0]):
            alike = [terms for _one, terms in several]
            may = question.family is not None or kind_of(one) != "miss"
            near = question.near if may else None
            yield one, may and turn.answers, functools.partial(_newest, session, turn, alike, near)
        if standings and question.family is None:
            return


def _terms(session: Session, turn: Turn) -> Sequence[Row[str, str]]:
    """Each terms among some records, with the fields of one of them, as JSON."""
    where = _alike(tuple(turn.same))
    if turn.same and not turn.beside:
        return session.execute(_steps(tuple(turn.same)), turn.same).all()
    some = select(Item.terms, func.min(Item.fields)).where(*where, *turn.beside, Item.terms != "")
    return session.execute(some.group_by(Item.terms), turn.same).all()


def _alike(columns: tuple[str, ...]) -> list[ColumnElement[bool]]:
    return [getattr(Item, name) == bindparam(name) for name in columns]


@functools.cache
def _steps(columns: tuple[str, ...]) -> Select[str, str]:
    """As `_terms`, by one step into an index for each, however many records have them."""
    where = _alike(columns)

    def following(*more: ColumnElement[bool]) -> Select[Any]:
        return select(Item.terms).where(*where, *more).order_by(Item.terms).limit(1)

    first = following(Item.terms != "").subquery()
    steps = select(first.c.terms).cte(recursive=True)
    last = steps.c.terms
    step = select(following(Item.terms > last).correlate(steps).scalar_subquery())
    steps = steps.union_all(step.where(last.is_not(None)))
    of_one = select(Item.fields).where(*where, Item.terms == steps.c.terms).limit(1)
    known = of_one.correlate(steps).scalar_subquery()
    return select(steps.c.terms, known).where(steps.c.terms.is_not(None))


def _newest(
    session: Session, turn: Turn, terms: Sequence[str] = (), near: int | None = None
) -> dict[str, None]:
    """The places of some records, of the batch that is near before others, then the newest.

    Args:
        terms: of which it is one; of none, any.
    """
    where = [*_alike(tuple(turn.same)), *turn.beside]
    kinds = [Item.terms == one for one in terms[:_MOST_ALIKE]] or [Item.terms != ""]
    few = [
        select(Item.place, Item.batch, Item.created)
        .where(*where, one)
        .order_by(Item.created.desc())
        .limit(_MOST_NEWEST)
        .subquery()
        for one in kinds
    ]
    found = union_all(*map(select, few)).subquery().c
    query = select(found.place)
    if near is not None:
        query = query.order_by((found.batch == near).desc())
    rows = session.scalars(query.order_by(found.created.desc(), found.place), turn.same)
    return dict.fromkeys(rows)


@functools.lru_cache(maxsize=_MOST_KNOWN)
def _fields(known: str) -> Mapping[str, Any]:
    """A record's fields, from their JSON, which is read once."""
    return as_fields(json.loads(known))


def data_of(session: Session, keys: Iterable[str]) -> dict[str, bytes]:
    """The bytes under some keys, without what is not there."""
    rows = session.execute(select(Item.key, Item.data).where(Item.key.in_(list(keys))))
    return {key: data for key, data in rows}


def fetched(session: Session, keys: Sequence[str]) -> dict[str, bytes | None]:
    """The bytes under the first of some keys, as many as may go into one answer; None for what is
    not there."""
    sizes = {
        key: size
        for key, size in session.execute(select(Item.key, Item.size).where(Item.key.in_(keys)))
    }
    left, chosen = MOST_FETCHED, []
    for key in keys:
        left -= sizes.get(key, 0)
        if left < 0:
            break
        chosen.append(key)
    there = data_of(session, chosen)
    return {key: there.get(key) for key in chosen}


def listed(session: Session, after: str, most: int = MOST_LISTED) -> tuple[list[str], bool]:
    """The keys behind one, sorted, and whether there are more."""
    query = select(Item.key).where(Item.key > after).order_by(Item.key).limit(most + 1)
    keys = list(session.scalars(query))
    return keys[:most], len(keys) > most


def put(session: Session, reader: Reader, key: str, data: bytes, by: Caller) -> Put:
    """Keep a record or a mark. Nothing is overwritten: what is there already is known.

    Raises:
        RecordDamaged: it is none that may be used, or not what its key says.
    """
    item = item_of(reader, key, data)
    item.token, item.stored = by.token, time.time()
    there = data_of(session, [key])
    if not there:
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
    """The row of a record or a mark; raises RecordDamaged as `put` does."""
    if mark := Mark.parse(key):
        if len(data) > MOST_MARK:
            raise RecordDamaged(f"mark: {len(data)} bytes, expected at most {MOST_MARK}")
        sound_mark(mark, data)
        model, id, batch = mark.place.split("/")
        whole = {"place": mark.place, "model": model, "id": id, "batch": int(batch)}
        return Item(key=key, data=data, size=len(data), **whole)
    record, name, data = sound(reader, key, data)
    known = to_plain(fields(record.key))
    return Item(
        key=key,
        data=data,
        size=len(data),
        place=name.place,
        model=name.model,
        id=name.id,
        batch=name.batch,
        target=name.target,
        origin=name.origin,
        called=record.target.name,
        file=record.target.name.partition(":")[0],
        code=record.target.code,
        family=record.family,
        command=command_part(record.key.task.command),
        device=record.key.environment.device.name,
        fields=json.dumps(known),
        terms=terms_of(known),
        speedup=0.0 if doubtful(record) else record.winner(record.use).speedup,
        created=record.provenance.created,
    )


def delete(session: Session, key: str, by: Caller) -> bool | None:
    """Remove what is under a key; whether it was there, None where it is not theirs to remove."""
    item = session.get(Item, key)
    if item is None:
        return False
    if not by.owns(item.token):
        return None
    session.delete(item)
    note(session, by, "deleted", key)
    return True


def count(session: Session) -> int:
    """Of records, in all versions."""
    return session.scalar(select(func.count()).where(Item.terms != "")) or 0


def known(session: Session, id: str) -> bool:
    """Whether there is a record of this id, as people type it."""
    key, _at, batch = id.partition("@")
    where = (Item.fields != "", Item.id == key, Item.batch == int(batch or 0))
    return session.scalar(select(Item.key).where(*where).limit(1)) is not None


def any_there(session: Session) -> bool:
    return session.scalar(select(Item.key).limit(1)) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A record in a list: its newest version. `id` as people type it."""

    id: str
    target: str
    device: str
    speedup: float
    created: float


def newest(session: Session, most: int, skip: int = 0) -> list[Line]:
    """Each record once, the newest first."""
    last = (
        select(Item.place, func.max(Item.created).label("created"))
        .where(Item.fields != "")
        .group_by(Item.place)
        .subquery()
    )
    query = (
        select(Item.id, Item.batch, Item.called, Item.device, Item.speedup, Item.created)
        .join(last, (Item.place == last.c.place) & (Item.created == last.c.created))
        .order_by(Item.created.desc(), Item.key)
        .offset(skip)
        .limit(most)
    )
    found: dict[str, Line] = {}
    for id, batch, called, device, speedup, created in session.execute(query):
        one = f"{id}@{batch}"
        found.setdefault(
            one, Line(id=one, target=called, device=device, speedup=speedup, created=created)
        )
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is known of a kind of device: how many records, and their least, mean and largest
    speed-up."""

    device: str
    records: int
    least: float
    mean: float
    most: float
    newest: float


def fleet(session: Session) -> list[Fleet]:
    """Each kind of device, the one with the most records first."""
    number = func.count(Item.place.distinct())
    known = func.nullif(Item.speedup, 0.0)  # not where it is doubtful
    query = (
        select(
            Item.device,
            number,
            func.min(known),
            func.avg(known),
            func.max(known),
            func.max(Item.created),
        )
        .where(Item.fields != "")
        .group_by(Item.device)
        .order_by(number.desc(), Item.device)
    )
    return [
        Fleet(
            device=device,
            records=count,
            least=low or 0.0,
            mean=mean or 0.0,
            most=high or 0.0,
            newest=last,
        )
        for device, count, low, mean, high, last in session.execute(query)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A record beside what was asked for: how it matches, and where it differs."""

    line: Line
    kind: Kind
    differs: tuple[str, ...]


def near(session: Session, question: Question, most: int = MOST_PLACES) -> list[Near]:
    """What a lookup would be told, the nearest first."""
    places: dict[str, None] = {}
    for _standing, _fits, alike in _ordered(session, question):
        if len(places) < most:
            places |= alike()
    order = {place: number for number, place in enumerate([*places][:most])}
    query = select(Item).options(defer(Item.data)).where(Item.place.in_(order), Item.fields != "")
    found: dict[str, Near] = {}
    for one in sorted(session.scalars(query), key=lambda one: (order[one.place], -one.created)):
        kind, differs = compared(question.wanted, _fields(one.fields))
        id = f"{one.id}@{one.batch}"
        line = Line(
            id=id, target=one.called, device=one.device, speedup=one.speedup, created=one.created
        )
        found.setdefault(one.place, Near(line=line, kind=kind, differs=tuple(map(str, differs))))
    return list(found.values())


class Kept:
    """What answers a question, as a store to read: so that the cache says which version counts."""

    url = "this server"
    studies: Path | None = None
    shelf: Shelf | None = None

    def __init__(self, session: Session, question: Question) -> None:
        self._session, self._question = session, question

    def keys(self) -> list[str]:
        return sorted(look(self._session, self._question).sizes)

    def get(self, key: str) -> bytes | None:
        return self.get_many([key]).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        return data_of(self._session, keys)

    def put(self, key: str, data: bytes) -> None:
        self.check_writable()

    def delete(self, key: str) -> bool:
        self.check_writable()
        return False

    def check_writable(self) -> None:
        raise StoreError(f"{self.url}: only read here")

    def health(self) -> str:
        return "ok, read-only"

    def set_aside(self) -> Path:
        raise StoreError(f"{self.url}: only read here")


def _proof(store: Kept) -> Store:
    return store
