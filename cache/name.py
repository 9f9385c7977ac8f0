"""The name of a record in a store: what it is of, and which of two of one key counts.

Records are never changed in place: a record that is measured, explained or verified again is put
beside the one before it. So a store is a set that only grows until `advisor gc`, two stores are
merged by uniting them, in any order and as often as one likes, and no writer can undo another's
write. Which record of a key counts is told by the names alone, the same for every reader.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from advisor.cache.key import fingerprint
from advisor.cache.record import EFFORTS, Record
from advisor.errors import RecordDamaged

PREFIX = "record/"
_PART = r"([0-9a-f]{12})"
_NAME = re.compile(
    rf"{PREFIX}{_PART}/{_PART}/{_PART}/([1-9][0-9]{{0,9}})/"
    rf"([0-9])\.([0-9a-f]{{14}})\.([0-9a-f]{{14}})\.{_PART}"
)
_OLD = re.compile(rf"{PREFIX}{_PART}/{_PART}/{_PART}")


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """`rank`: 0 where marked stale, else by effort from 1 on. Times in microseconds; `digest` of
    the bytes."""

    rank: int = 0
    created: int = 0
    revised: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Name:
    """record/MODEL/TARGET/ID/BATCH/VERSION, each digest 12 hex characters.

    Attributes:
        text: whole, as a store has it.
        model: start of the model's fingerprint; `target` the digest of its target's name.
        id: the key's.
        batch: the user's; 0 where the name does not say. Records with all of these the same are
            versions of one another.
    """

    text: str
    model: str
    target: str
    id: str
    batch: int
    version: Version

    @property
    def place(self) -> str:
        """What all versions of one record have in common."""
        return f"{PREFIX}{self.model}/{self.target}/{self.id}/{self.batch}"

    def called(self, text: str) -> Name:
        """The same under the name that a store before format 2 has for it."""
        return dataclasses.replace(self, text=text)

    @staticmethod
    def place_of(record: Record) -> str:
        """The place of a record."""
        of = f"{record.key.model[:12]}/{target_part(record.target.name)}/{record.id}"
        return f"{PREFIX}{of}/{record.batch}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """The name in a store's key; None where it is none.

        A name without a version is of a store before format 2, which had one record of a key.
        """
        found = _NAME.fullmatch(text)
        if found:
            rank, created, revised = (
                int(found[part], base) for part, base in ((5, 10), (6, 16), (7, 16))
            )
            version = Version(rank, created, revised, found[8])
            return cls(text, found[1], found[2], found[3], int(found[4]), version)
        old = _OLD.fullmatch(text)
        return cls(text, old[1], old[2], old[3], 0, Version()) if old else None

    @classmethod
    def of(cls, record: Record, data: bytes) -> Name:
        """The name of a record whose encoded bytes these are."""
        made = record.provenance
        known = made.effort in EFFORTS and not record.stale
        version = Version(
            EFFORTS.index(made.effort) + 1 if known else 0,
            _microseconds(made.created),
            _microseconds(record.revised),
            hashlib.sha256(data).hexdigest()[:12],
        )
        place = cls.place_of(record)
        text = (
            f"{place}/{version.rank}.{version.created:014x}.{version.revised:014x}.{version.digest}"
        )
        target = target_part(record.target.name)
        return cls(text, record.key.model[:12], target, record.id, record.batch, version)


def target_part(name: str) -> str:
    """The digest of a target's name."""
    return fingerprint(name)[:12]


def _microseconds(seconds: float) -> int:
    return min(max(0, int(seconds * 1e6)), 2**56 - 1)


SUFFIX = ".msgpack"
_FILED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./]{0,200}")


def file_of(key: str) -> str:
    """The name of a file that holds what a store has under this key.

    Raises:
        RecordDamaged: it could lie outside the store's folder, or be hidden in it.
    """
    if not _FILED.fullmatch(key) or ".." in key:
        raise RecordDamaged(f"key {key!r}: no name of a record")
    return key.replace("/", "-") + SUFFIX


def keys_of(files: Iterable[str]) -> list[str]:
    """The keys, sorted, that the files of a folder hold; others, as what is being written, none."""
    return sorted(
        name.removesuffix(SUFFIX).replace("-", "/")
        for name in files
        if name.endswith(SUFFIX) and not name.startswith(".")
    )


def ranked(names: Iterable[Name]) -> list[Name]:
    """Versions of one record, the one that counts first.

    Of what was made of the same measurement, the last revision counts; of several measurements, one
    not marked stale, then the one of more effort, then the newer.
    """
    ordered = sorted(names, key=lambda name: name.version, reverse=True)
    last: dict[int, Name] = {}
    for name in ordered:
        known = last.get(name.version.created)
        if known is None or known.version.revised < name.version.revised:
            last[name.version.created] = name
    leading = sorted(last.values(), key=lambda name: name.version, reverse=True)
    return [*leading, *(name for name in ordered if name not in leading)]
