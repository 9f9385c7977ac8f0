"""The name of a record in a store, which says what it is of and which version counts.

Records are never changed in place. A new measurement, explanation or verification is a new version
beside the old one. So a store only grows until `advisor gc`, stores can be merged in any order, and
no writer can undo another's write. The names alone decide which version counts.

Neither the clock nor the writer's claims decide. A name ends in a tag that only the owner of a
signing key can make (see `seal`), and the reader's own keys come first: what the reader or their
team measured counts before what others did. Within each, what is not stale comes first, then more
effort, then the newer. So two readers may prefer different versions, and nobody can hide another's
work, whatever dates, efforts or marks they write.

To mark somebody else's version stale, a small signed item of its own is put beside it. It counts
for whoever signed it and their team.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from advisor.cache.domain import is_moment
from advisor.cache.key import fingerprint
from advisor.cache.record import EFFORTS, Record, Target
from advisor.cache.seal import UNSEALED, Seal

PREFIX = "record/"
MARKS = "mark/"
_PART = r"([0-9a-f]{12})"
_BATCH = r"([1-9][0-9]{0,9})"
_TAG = rf"(?:\.{_PART})?"
_NAME = re.compile(
    rf"{PREFIX}{_PART}/{_PART}/{_PART}/{_PART}/{_BATCH}/"
    rf"([0-9])(s?)\.([0-9a-f]{{14}})\.([0-9a-f]{{14}})\.{_PART}{_TAG}"
)
TARGET, ORIGIN = slice(20, 32), slice(33, 45)
"""Where a name has the digests of its target and origin, to filter thousands of names fast."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_MARK = re.compile(
    rf"{MARKS}{_PART}/{_PART}/{_BATCH}/{_PART}/([sf])\.([0-9a-f]{{14}})\.{_PART}{_TAG}"
)


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """`effort`: from 1, or 0 for an unknown one. Times in microseconds; `digest` of the bytes."""

    effort: int
    stale: bool
    created: int
    revised: int
    digest: str


@dataclass(frozen=True, slots=True)
class Name:
    """record/MODEL/TARGET/ORIGIN/ID/BATCH/VERSION[.TAG], each digest 12 hex characters.

    Attributes:
        text: whole, as a store has it.
        model: start of the model's fingerprint; `target` the digest of its target's name, `origin`
            of where that lay.
        id: the key's.
        batch: the user's.
        trusted: its tag was made with one of the reader's keys.
    """

    text: str
    model: str
    target: str
    origin: str
    id: str
    batch: int
    version: Version
    trusted: bool = False

    @property
    def place(self) -> str:
        """The same for all versions of a record, whatever name its target has."""
        return f"{self.model}/{self.id}/{self.batch}"

    @property
    def called(self) -> tuple[str, str]:
        """Target and origin: a record that was tuned under several has a name for each."""
        return self.target, self.origin

    @property
    def record_id(self) -> str:
        """As people see and type it: 'ae1bff61eea5@128'."""
        return f"{self.id}@{self.batch}"

    @property
    def untagged(self) -> str:
        """The part of the name that its tag signs."""
        place = f"{PREFIX}{self.model}/{self.target}/{self.origin}/{self.id}/{self.batch}"
        v = self.version
        return f"{place}/{v.effort}{'s' * v.stale}.{v.created:014x}.{v.revised:014x}.{v.digest}"

    @classmethod
    def parse(cls, text: str, seal: Seal = UNSEALED) -> Name | None:
        """The name that a store's key is; None if it is none."""
        found = _NAME.fullmatch(text)
        if not found:
            return None
        version = Version(
            int(found[6]), bool(found[7]), int(found[8], 16), int(found[9], 16), found[10]
        )
        trusted = bool(found[11]) and seal.tagged(text[: -len(found[11]) - 1], found[11])
        model, target, origin, id = found.group(1, 2, 3, 4)
        return cls(text, model, target, origin, id, int(found[5]), version, trusted)

    @classmethod
    def of(cls, record: Record, data: bytes, seal: Seal = UNSEALED) -> Name:
        """The name of a record with these encoded bytes, tagged if the seal has a key."""
        made = record.provenance
        version = Version(
            EFFORTS.index(made.effort) + 1 if made.effort in EFFORTS else 0,
            bool(record.stale),
            _microseconds(made.created),
            _microseconds(record.revised),
            _digest(data),
        )
        bare = cls(
            "",
            record.key.model[:12],
            *called(record.target),
            record.key.id,
            record.batch,
            version,
        )
        return replace(bare, text=_tagged(bare.untagged, seal), trusted=bool(seal.signs))


@dataclass(frozen=True, slots=True)
class Mark:
    """mark/MODEL/ID/BATCH/DIGEST/s.TIME.DIGEST[.TAG]: says that the version with the first digest
    is stale, or with f for s that it is not, whatever the version itself says."""

    text: str
    place: str
    of: str
    stale: bool
    made: int
    digest: str
    trusted: bool

    @property
    def record_id(self) -> str:
        """Of the record that is marked."""
        _model, key, batch = self.place.split("/")
        return f"{key}@{batch}"

    @property
    def version_of(self) -> tuple[str, str]:
        """Place and digest of the version that is marked."""
        return self.place, self.of

    @classmethod
    def parse(cls, text: str, seal: Seal = UNSEALED) -> Mark | None:
        """The mark that a store's key is; None if it is none."""
        found = _MARK.fullmatch(text)
        if not found:
            return None
        place = f"{found[1]}/{found[2]}/{found[3]}"
        trusted = bool(found[8]) and seal.tagged(text[: -len(found[8]) - 1], found[8])
        return cls(text, place, found[4], found[5] == "s", int(found[6], 16), found[7], trusted)

    @classmethod
    def on(cls, name: Name, stale: bool, seconds: float, data: bytes, seal: Seal) -> Mark:
        """A mark on a version; `data`: its encoded reason."""
        made, digest = _microseconds(seconds), _digest(data)
        bare = f"{MARKS}{name.place}/{name.version.digest}/{'fs'[stale]}.{made:014x}.{digest}"
        text = _tagged(bare, seal)
        return cls(text, name.place, name.version.digest, stale, made, digest, bool(seal.signs))


def _tagged(text: str, seal: Seal) -> str:
    return f"{text}.{seal.tag(text)}" if seal.signs else text


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def called(target: Target) -> tuple[str, str]:
    """As `Name.called`, of what was tuned."""
    return target_part(target.name), target_part(target.origin)


def target_part(name: str) -> str:
    """The digest of a target's name, or of its origin."""
    return fingerprint(name)[:12]


def command_part(command: Sequence[str]) -> str:
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


def _microseconds(seconds: float) -> int:
    return min(max(0, int(seconds * 1e6)), 2**56 - 1)


def ranked(names: Iterable[Name], stale: Mapping[str, bool] | None = None) -> list[Name]:
    """Versions of one record, the one that counts first; the head of this file has the order.

    Of several revisions of one measurement, the reader's own last one counts, or else the last.

    Args:
        stale: by the text of a name, what a mark says of it.
    """
    known = stale or {}

    def standing(name: Name) -> tuple[object, ...]:
        v = name.version
        fresh = not known.get(name.text, v.stale)
        return (*_side(name), fresh, v.effort, v.created, v.revised, v.digest)

    ordered = sorted(names, key=standing, reverse=True)
    last: dict[tuple[object, ...], Name] = {}
    for name in ordered:
        group = (*_side(name), name.version.created)
        before = last.get(group)
        if before is None or before.version.revised < name.version.revised:
            last[group] = name
    leading = {name.text for name in last.values()}
    # Stable: within each half the order is kept, and what others revised is behind on its side.
    return sorted(ordered, key=lambda name: (*map(_no, _side(name)), name.text not in leading))


def _side(name: Name) -> tuple[bool, bool]:
    v = name.version
    moments = [v.created / 1e6, *([v.revised / 1e6] if v.revised else [])]
    return name.trusted, all(map(is_moment, moments))


def _no(value: bool) -> bool:
    return not value
