"""Records in the database: kept, found, removed. What a record may be the cache itself says."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Row, Subquery, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from advisor.cache.codec import to_plain
from advisor.cache.exchange import sound
from advisor.cache.key import as_fields, completed, fields, terms_of
from advisor.cache.match import Kind, Standing, kind_of, relation, standing
from advisor.cache.name import command_digest
from advisor.cache.reader import Reader
from advisor.cache.record import Record
from advisor.cache.stores.store import MAX_BYTES, Store
from advisor.errors import RecordDamaged, StoreError
from advisor.finding.answer import unverified
from advisor.finding.doubt import doubtful
from advisor.service import quotas
from advisor.service.schema import Item
from advisor.service.tokens import Caller, note

TRUSTS = ("verified", "unverified", "doubtful", "stale")
"""Compared with fp32, or nothing in it changes numbers; not compared; measured on a host too busy
to tell; found to hold no longer."""
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
_MOST_ALIKE, _MOST_FOUND = 1000, 4 * MOST_PLACES
"""Terms that match alike, and places of them, among which those to be sent are."""
_ALIKE: Standing = (0, 0)
"""How all stand where nothing is wanted of them."""
_MOST_KNOWN = 4000
"""Records whose fields are in memory, at some 5 KB each."""

Put = Literal["added", "known"]


class Turn(NamedTuple):
    """Records to look among: those of which the columns `same` have these values, and `beside`
    holds.

    `wanted`: fields of a key that what is found is compared with; `answers`: what fits them is an
    answer, and not of other code than the one that is meant.
    """

    same: Mapping[str, str]
    beside: Sequence[ColumnElement[bool]]
    wanted: Mapping[str, Any]
    answers: bool = True

    @property
    def where(self) -> list[ColumnElement[bool]]:
        same = [getattr(Item, name) == value for name, value in self.same.items()]
        return [*same, *self.beside, Item.terms != ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is looked for; see `cache.reader.RecordFilter.questions`, whose fields these are.

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
) -> Iterator[tuple[Standing, bool, Callable[[], list[str]]]]:
    """Groups of records that match alike, the best first: how they match, whether they may answer
    or are akin, and a function that finds their places."""
    for turn in question.turns:
        if not turn.wanted:
            yield _ALIKE, True, functools.partial(_places, session, turn)
            continue
        groups: dict[Standing, list[str]] = {}
        for terms, known in _terms(session, turn):
            if (one := question.standing(turn.wanted, _fields(known))) is not None:
                groups.setdefault(one, []).append(terms)
        for one in sorted(groups):
            may = question.family is not None or kind_of(one) != "miss"
            near = question.near if may else None
            find = functools.partial(_places, session, turn, groups[one], near)
            yield one, may and turn.answers, find
        if groups and question.family is None:
            return


def _terms(session: Session, turn: Turn) -> Sequence[Row[str, str]]:
    """Each terms among some records, with the fields of one of them, as JSON."""
    terms = select(Item.terms).where(*turn.where).distinct().subquery()
    one = select(Item.fields).where(*turn.where, Item.terms == terms.c.terms).limit(1)
    return session.execute(select(terms.c.terms, one.correlate(terms).scalar_subquery())).all()


def _places(
    session: Session, turn: Turn, terms: Sequence[str] | None = None, near: int | None = None
) -> list[str]:
    """The places of some records, of the batch that is near before others, then the newest.

    Args:
        terms: of which it is one; None for any.
    """
    of_terms = [] if terms is None else [Item.terms.in_(terms[:_MOST_ALIKE])]
    query = select(Item.place).where(*turn.where, *of_terms).group_by(Item.place, Item.batch)
    if near is not None:
        query = query.order_by((Item.batch == near).desc())
    newest = query.order_by(func.max(Item.created).desc(), Item.place)
    return list(session.scalars(newest.limit(_MOST_FOUND)))


@functools.lru_cache(maxsize=_MOST_KNOWN)
def _fields(known: str) -> Mapping[str, Any]:
    """A record's fields, from their JSON, which is read once."""
    return completed(as_fields(json.loads(known)))


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
    """Keep a record. Nothing is overwritten: what is there already is known.

    Raises:
        RecordDamaged: it is none that may be used, or not what its key says.
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
        place=name.record_key,
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


def trust_of(record: Record) -> str:
    """Whether a record's speed-up can be trusted: one of TRUSTS."""
    if record.stale:
        return "stale"
    if doubtful(record):
        return "doubtful"
    return "unverified" if unverified(record, record.winner(record.use).config) else "verified"


def framework_of(record: Record) -> str:
    """The libraries that a record's model is built of, without their versions."""
    names = dict.fromkeys(name.partition("==")[0] for name in record.key.libraries)
    return ", ".join(names) or "torch"


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


def known(session: Session, id: str, token: int | None = None) -> bool:
    """Whether there is a record of this id, as people type it; of this token, if one is given."""
    where = _of_id(id) if token is None else [*_of_id(id), Item.token == token]
    return session.scalar(select(Item.key).where(*where).limit(1)) is not None


def device_of(session: Session, id: str) -> str:
    """The device that a record was measured on; '' where there is none of this id."""
    return session.scalar(select(Item.device).where(*_of_id(id)).limit(1)) or ""


def _of_id(id: str) -> list[ColumnElement[bool]]:
    key, _at, batch = id.partition("@")
    return [Item.fields != "", Item.id == key, Item.batch == int(batch or 0)]


def any_there(session: Session) -> bool:
    return session.scalar(select(Item.key).limit(1)) is not None


def newest_versions() -> Subquery:
    """The newest version of each record, one row a record: keys of `items`."""
    order = func.row_number().over(
        partition_by=Item.place, order_by=(Item.created.desc(), Item.key)
    )
    versions = select(Item.key, order.label("version")).where(Item.fields != "").subquery()
    return select(versions.c.key).where(versions.c.version == 1).subquery()


class Kept(Store):
    """What answers a question, as a store to read: so that the cache says which version counts."""

    url = "this server"
    takes_blobs = False

    def __init__(self, session: Session, question: Question) -> None:
        self._session, self._question = session, question

    def keys(self) -> list[str]:
        return sorted(look(self._session, self._question).sizes)

    def get_many(
        self, keys: Iterable[str], most: int = MAX_BYTES
    ) -> dict[str, bytes | RecordDamaged]:
        return {**data_of(self._session, keys)}

    def put(self, key: str, data: bytes) -> None:
        self.check_writable()

    def delete(self, key: str) -> bool:
        self.check_writable()
        return False

    def check_writable(self) -> None:
        raise StoreError(f"{self.url}: only read here")
