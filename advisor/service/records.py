"""Store and look up records in the database. `advisor.cache` decides which records are valid."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, Json, model_validator
from sqlalchemy import ColumnElement, Row, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from advisor.cache.codec import decode, to_plain
from advisor.cache.domain import LONGEST, is_line
from advisor.cache.exchange import sound
from advisor.cache.key import are_whole, as_fields, completed, fields, terms_of
from advisor.cache.match import MatchKind, Standing, kind_of, relation, standing
from advisor.cache.name import Name, command_digest, ranked
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.errors import RecordDamaged, UsageError
from advisor.resolve.answer import doubtful, is_clear, unverified
from advisor.service import blobs
from advisor.service.database import now
from advisor.service.schema import Item
from advisor.service.tokens import Caller, note

Trust = Literal["verified", "unverified", "doubtful", "stale"]
"""In this order: compared with fp32, or changes no numbers; not compared; measured on a busy host;
refuted by `advisor verify`."""
MAX_RECORDS, MAX_NEAREST = 32, 8
"""Most matching records, and most near records, in one answer, each with all its versions."""
MAX_ANSWER_BYTES = 2**22
"""Most bytes of records in a lookup's answer. Of further records, only the keys are sent."""
MAX_FETCHED = 2**24  # bytes in the answer to a request for records by their keys, at most
_MAX_TERMS, _MAX_FOUND = 1000, 4 * MAX_RECORDS
"""Terms that match equally well, and records with these terms, that a lookup reads at most."""
_MAX_KNOWN = 4000  # records whose parsed fields stay in memory, about 5 KB each

Digest12 = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$|^$")]
Batch = Annotated[int | None, Field(ge=0, lt=10**10)]
Clauses = list[ColumnElement[bool]]


class Question(BaseModel):
    """A lookup, as `cache.reader.RecordFilter.question` writes it. `family`: None to find no
    similar models, '' for a model without a family."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(default="", pattern=r"^[0-9a-f]{12,128}$|^$")
    target: Digest12 = ""
    file: str = Field(default="", max_length=LONGEST)
    command: Digest12 = ""
    id: str = Field(default="", pattern=r"^[0-9a-f]{0,12}$")
    batch: Batch = None
    code: str = Field(default="", pattern=r"^[0-9a-f]{0,128}$")
    origin: Digest12 = ""
    family: str | None = Field(default=None, pattern=r"^[0-9a-f]{0,128}$")
    near: Batch = None
    wanted: Json[dict[str, Any]] = Field(default_factory=dict, description="A key's fields")

    @model_validator(mode="after")
    def _check(self) -> Question:
        device = self.fields.get("device.name", "")
        if not all(isinstance(text, str) and is_line(text) for text in (self.file, device)):
            raise ValueError("file, device.name: expected a line of printable text")
        if self.family is not None and not are_whole(self.fields):
            raise ValueError("wanted: to find similar models, give all fields of a key")
        if self.family is None and self.fields and not self._narrowed:
            raise ValueError("wanted: also give a model, target, file, command or id")
        return self

    @functools.cached_property
    def fields(self) -> Mapping[str, Any]:
        """The wanted fields of a key."""
        found = as_fields(self.wanted)
        return found if self.family is None else completed(found)

    @property
    def searches(self) -> Iterator[tuple[Clauses, bool]]:
        """Yields (conditions, whether a record that matches under them is an answer), the best
        first. If a code is wanted, records of other code are no answers."""
        if self.family is not None:
            model = str(self.fields["model"])[:12]
            yield [Item.model == model], True
            if self.family:
                yield [Item.family == self.family, Item.model != model], True
            return
        every, any_code = self._narrowed, not self.code or not self.fields
        if self.target and self.code:
            yield [Item.code == self.code, *every], True
        if self.target and self.origin:
            yield [Item.origin == self.origin, *every], any_code
        yield every, any_code

    @property
    def _narrowed(self) -> Clauses:
        found = [Item.model == self.model[:12]] if self.model else []
        for name in ("target", "file", "command"):
            if value := getattr(self, name):
                found.append(getattr(Item, name) == value)
        if self.id:
            found += [Item.id >= self.id, Item.id < f"{self.id}g"]
        return found if self.batch is None else [*found, Item.batch == self.batch]

    def standing(self, have: Mapping[str, Any]) -> Standing | None:
        """How well a record with these fields matches; None if the answer leaves the record out."""
        if self.family is None:
            return standing(self.fields, have)[0]
        similar = relation(self.fields, have)
        return similar and similar[0]


class Found(NamedTuple):
    """A lookup's result. `sizes`: bytes by key, the nearest record first; `record_key`: the nearest
    record's, or ''; `kind`: how its best version matches."""

    sizes: Mapping[str, int]
    record_key: str = ""
    kind: MatchKind = "miss"


def find(session: Session, question: Question) -> Found:
    """Find the records that match, or else the nearest ones, with all their versions."""
    nearest = _nearest(session, question)
    if not nearest:
        return Found({})
    rows = session.execute(
        select(Item.record_key, Item.key, Item.size).where(Item.record_key.in_(nearest))
    )
    order = {record: number for number, record in enumerate(nearest)}
    found = sorted((order[record], key, size) for record, key, size in rows)
    return Found({key: size for _number, key, size in found}, *next(iter(nearest.items())))


def _nearest(session: Session, question: Question) -> dict[str, MatchKind]:
    """The keys of the records that match, or else of the nearest, and how well each matches."""
    found: dict[str, MatchKind] = {}
    fitted = False
    for where, answers in question.searches:
        groups = _groups(session, question, where)
        for one in sorted(groups):
            matches = question.family is not None or kind_of(one) != "miss"
            fits = matches and answers
            most = MAX_RECORDS if fits else MAX_NEAREST
            if len(found) >= most or (fitted and not fits):
                return found
            fitted = fits
            records = _records(session, where, groups[one], question.near if matches else None)
            found |= dict.fromkeys(records[: most - len(found)], kind_of(one) if fits else "miss")
        if groups and question.family is None:
            break
    return found


def _groups(session: Session, question: Question, where: Clauses) -> dict[Standing, list[str]]:
    """Terms of records, grouped by how well they match; an empty list stands for any terms."""
    if not question.fields:
        return {(0, 0): []}
    terms = select(Item.terms).where(*where).distinct().subquery()
    one = select(Item.fields).where(*where, Item.terms == terms.c.terms).limit(1)
    rows = select(terms.c.terms, one.correlate(terms).scalar_subquery())
    groups: dict[Standing, list[str]] = {}
    for text, known in session.execute(rows):
        if (found := question.standing(_fields(known))) is not None:
            groups.setdefault(found, []).append(text)
    return groups


def _records(
    session: Session, where: Clauses, terms: Sequence[str], near: int | None
) -> Sequence[str]:
    """The keys of records with these terms: first those with batch `near`, then the newest."""
    query = select(Item.record_key).where(*where).group_by(Item.record_key, Item.batch)
    if terms:
        query = query.where(Item.terms.in_(terms[:_MAX_TERMS]))
    if near is not None:
        query = query.order_by((Item.batch == near).desc())
    newest = query.order_by(func.max(Item.created).desc(), Item.record_key)
    return session.scalars(newest.limit(_MAX_FOUND)).all()


@functools.lru_cache(maxsize=_MAX_KNOWN)
def _fields(known: str) -> Mapping[str, Any]:
    """A record's fields, from their JSON."""
    return completed(as_fields(json.loads(known)))


def within(sizes: Mapping[str, int], most: int) -> list[str]:
    """The first keys, whose records have at most `most` bytes together."""
    totals = itertools.accumulate(sizes.values())
    return [key for key, total in zip(sizes, totals, strict=True) if total <= most]


def data_of(session: Session, keys: Iterable[str]) -> dict[str, bytes]:
    """The records by key. Keys that the database does not have are left out."""
    rows = session.execute(select(Item.key, Item.data).where(Item.key.in_(list(keys))))
    return {key: data for key, data in rows}


def fetched(session: Session, keys: Sequence[str]) -> dict[str, bytes | None]:
    """The records by key, as many as fit into one answer. The value is None for a key that the
    database does not have."""
    rows = session.execute(select(Item.key, Item.size).where(Item.key.in_(keys)))
    chosen = within(dict.fromkeys(keys, 0) | {key: size for key, size in rows}, MAX_FETCHED)
    return {**dict.fromkeys(chosen), **data_of(session, chosen)}


def counting(session: Session, reader: Records, id: str) -> Record | None:
    """The version of the record with this id that `reader` uses; None if there is none."""
    texts = session.scalars(select(Item.key).where(*_of_id(id)))
    for name in ranked(filter(None, (Name.parse(text, reader.keyring) for text in texts))):
        with contextlib.suppress(RecordDamaged):
            return reader.read(name, data_of(session, [name.text])[name.text])
    return None


def put(
    session: Session, reader: Records, key: str, data: bytes, by: Caller
) -> Literal["added", "known"]:
    """Store a record, and overwrite nothing.

    Raises:
        RecordDamaged: the record is invalid, or its key is not `key`.
        UsageError: the quota is used up, or an attempt's record is too uncertain.
    """
    item = item_of(reader, key, data)
    item.token, item.stored = by.token, now(session)
    if key not in (there := data_of(session, [key])):
        _check_replaces(session, item, by)
        blobs.check_quota(session, Item, by, item.size)
        with contextlib.suppress(IntegrityError), session.begin_nested():
            session.add(item)
            note(session, by, "put", key)
            session.flush()
            return "added"
        there = data_of(session, [key])  # another server was first
    if there.get(key) != data:
        raise RecordDamaged(f"{key[:80]}: the server has another record under this key")
    return "known"


def _check_replaces(session: Session, item: Item, by: Caller) -> None:
    """Raise UsageError if an attempt's uncertain record would replace a clear one."""
    if by.attempt is None or is_clear(decode(item.data)):
        return
    same = (Item.record_key == item.record_key, Item.terms == item.terms)
    if any(is_clear(decode(data)) for data in session.scalars(select(Item.data).where(*same))):
        raise UsageError(
            "this tuning was cut short, raced nothing or was too noisy to tell: the earlier record "
            "stays in use"
        )


def item_of(reader: Records, key: str, data: bytes) -> Item:
    """The row of a record; raises RecordDamaged as `put` does."""
    record, name, data = sound(reader, key, data)
    known, trust = to_plain(fields(record.key)), trust_of(record)
    target, origin = name.target
    libraries = dict.fromkeys(one.partition("==")[0] for one in record.key.libraries)
    return Item(
        key=key,
        data=data,
        size=len(data),
        record_key=name.record_key,
        model=record.key.model[:12],
        id=name.id,
        batch=name.batch,
        target=target,
        origin=origin,
        called=record.target.name,
        file=record.target.name.partition(":")[0],
        code=record.target.code,
        family=record.family,
        command=command_digest(record.key.task.command),
        device=record.key.environment.device.name,
        fields=json.dumps(known),
        terms=terms_of(known),
        speedup=0.0 if trust == "doubtful" else record.winner(record.use).speedup,
        trust=trust,
        framework=", ".join(libraries) or "torch",
        created=record.provenance.created,
    )


def trust_of(record: Record) -> Trust:
    """How far a record's speed-up can be trusted."""
    if record.stale:
        return "stale"
    if doubtful(record):
        return "doubtful"
    return "unverified" if unverified(record, record.winner(record.use).config) else "verified"


def count(session: Session) -> int:
    """The number of versions of all records."""
    return session.scalar(select(func.count()).select_from(Item)) or 0


def newest(session: Session, id: str, *where: ColumnElement[bool]) -> Row[str, float] | None:
    """Device and speed-up of the newest version of a record; None if there is none."""
    query = select(Item.device, Item.speedup).where(*_of_id(id), *where)
    return session.execute(query.order_by(Item.created.desc()).limit(1)).first()


def _of_id(id: str) -> Clauses:
    key, _at, batch = id.partition("@")
    return [Item.id == key, Item.batch == int(batch or 0)]
