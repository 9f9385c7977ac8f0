"""The key of a record in a store. It says which record this is, and which version of it.

A new measurement, explanation or verification is a new version beside the old one. So stores can be
merged in any order, and no writer can undo another's write. The names alone decide which version
counts. What the reader or their team signed comes first: only the owner of a key can make the tag
at the end of a name. Then fresh versions come before stale ones, more effort before less, and newer
before older. So nobody can hide another's work.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from advisor.cache.domain import is_moment
from advisor.cache.key import fingerprint
from advisor.cache.record import EFFORTS, Record, Target
from advisor.cache.signing import NO_KEYS, KeyRing

PREFIX = "record/"
_HEX = r"([0-9a-f]{12})"
_TIME = r"([0-9a-f]{14})"
_NAME = re.compile(
    rf"{PREFIX}{_HEX}/{_HEX}/{_HEX}/{_HEX}/([1-9][0-9]{{0,9}})/([0-9])(s?)"
    rf"\.{_TIME}\.{_TIME}\.{_HEX}(?:\.{_HEX})?"
)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class StoreKey(Struct, frozen=True, kw_only=True):
    """A key in a store. `record_key`: MODEL/ID/BATCH, the same for all versions of a record and its
    artifacts; `trusted`: its tag is by one of the reader's keys."""

    text: str
    record_key: str
    trusted: bool = False

    @property
    def record_id(self) -> str:
        """The record's id as people see and type it: 'ae1bff61eea5@128'."""
        return "@".join(self.record_key.split("/")[1:])


class Name(StoreKey, frozen=True, kw_only=True):
    """record/MODEL/TARGET/ORIGIN/ID/BATCH/EFFORT[s].CREATED.REVISED.DIGEST[.TAG], each digest 12
    hex characters, times in microseconds; 's' if the record is stale.

    `target`: digests of the target's name and origin; `effort`: from 1, or 0 for an unknown one;
    `digest`: of the encoded record.
    """

    target: tuple[str, str]
    id: str
    batch: int
    effort: int
    stale: bool
    created: int
    revised: int
    digest: str

    def is_of(self, data: object) -> bool:
        return isinstance(data, bytes) and _digest(data) == self.digest

    @classmethod
    def parse(cls, text: str, keyring: KeyRing = NO_KEYS) -> Name | None:
        found = _NAME.fullmatch(text)
        if not found:
            return None
        model, target, origin, id, batch, effort, stale, created, revised, digest, tag = (
            found.groups()
        )
        return cls(
            text=text,
            record_key=f"{model}/{id}/{batch}",
            trusted=bool(tag) and keyring.trusts(text),
            target=(target, origin),
            id=id,
            batch=int(batch),
            effort=int(effort),
            stale=bool(stale),
            created=int(created, 16),
            revised=int(revised, 16),
            digest=digest,
        )

    @classmethod
    def of(cls, record: Record, data: bytes, keyring: KeyRing = NO_KEYS) -> Name:
        """The name of a record with these encoded bytes, tagged if there is a key."""
        made = record.provenance
        effort = EFFORTS.index(made.effort) + 1 if made.effort in EFFORTS else 0
        model, _, place = record_key(record).partition("/")
        state = f"{effort}{'s' * bool(record.stale)}"
        times = f"{_time(made.created)}.{_time(record.revised)}"
        text = "/".join((model, *target_key(record.target), place, f"{state}.{times}"))
        name = cls.parse(keyring.tagged(f"{PREFIX}{text}.{_digest(data)}"), keyring)
        assert name is not None
        return name


def record_key(record: Record) -> str:
    """MODEL/ID/BATCH, as in `StoreKey`."""
    return f"{record.key.model[:12]}/{record.key.id}/{record.batch}"


def target_key(target: Target) -> tuple[str, str]:
    """The digests of a target's name and origin, as in `Name.target`."""
    return text_digest(target.name), text_digest(target.origin)


def text_digest(text: str) -> str:
    """12 hex characters of a target's name, or of its origin."""
    return fingerprint(text)[:12]


def command_digest(command: Sequence[str]) -> str:
    """The digest of a command's words without its numbers and their options, such as '--epochs 90'
    and '--lr=0.1'; '' for no command."""
    found: list[str] = []
    for word in command:
        _option, equals, text = word.partition("=")
        if not _NUMBER.fullmatch(text if equals else word):
            found.append(word)
        elif not equals and found and found[-1].startswith("-"):
            found.pop()
    return fingerprint(found)[:12] if command else ""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _time(seconds: float) -> str:
    return f"{min(max(0, int(seconds * 1e6)), 2**56 - 1):014x}"


def ranked(names: Iterable[Name]) -> list[Name]:
    """Versions of one record, the one that counts first; this file's docstring has the order. Of
    several revisions of one measurement, the last one comes first."""
    sides = {name: _side(name) for name in names}
    last = {side: 0 for side in sides.values()}
    for name, side in sides.items():
        last[side] = max(last[side], name.revised)

    def order(name: Name) -> tuple[object, ...]:
        trusted, possible, created = side = sides[name]
        fresh = name.revised == last[side], not name.stale
        return trusted, possible, *fresh, name.effort, created, name.revised, name.digest

    return sorted(sides, key=order, reverse=True)


def _side(name: Name) -> tuple[bool, bool, int]:
    """Whether the reader signed a name, whether its times are possible, and the first of them."""
    times = {name.created, name.revised or name.created}
    return name.trusted, all(is_moment(one / 1e6) for one in times), name.created
