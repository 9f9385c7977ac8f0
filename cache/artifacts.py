"""What torch.compile made for a config, kept beside its record: a fresh process loads it, and has
its first step in seconds.

Artifacts are code: PyTorch unpickles them, and runs what it finds. So they are no part of a record,
and nothing that a record says leads to them. They are blobs of a store, under a key that only the
owner of a signing key can make. Nothing in them is parsed before one of the reader's own keys has
proved who wrote all of it. Then it must have been made for this very record and config, on this
very device and software.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
import msgspec

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.cache.key import Environment
from advisor.cache.record import Record
from advisor.cache.seal import ARTIFACTS, UNSEALED, Seal
from advisor.cache.stores import BLOBS, Remote, Store
from advisor.errors import RecordDamaged, RecordNewer, StoreError

_ANY = b"advisor artifacts "
_START = _ANY + b"1\n"
_BODY = len(_START) + 32
"""Where it begins, behind the signature."""
_LEVEL = 1
"""Of zlib: a quarter of the size at 100 MB/s; more takes much longer for little."""
_MOST_TIMES = 32
"""As many times its own size is what was packed."""
ANOTHERS = "signed with another's key"
"""Why artifacts are not loaded of which no more than the name is looked at."""
Kind = Literal["superseded", "damaged", "oversized"]
"""Why artifacts may go, in one word."""
LABEL = r"([0-9a-f]{12})-([0-9a-f]{12})-([1-9][0-9]{0,9})-([0-9a-f]{12})\.([0-9a-f]{12})"
"""Of `Label.name`, as a regular expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What compiled: versions of torch, of Triton, '' for none, and of Python."""

    torch: str
    triton: str
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """What artifacts were made for: for anything else they are not loaded.

    Attributes:
        record: its place, as names have it.
        config: the digest of what was compiled; see `compiled_of`.
    """

    record: str
    config: str
    kind: str
    device: str
    capability: str
    driver: str
    torch: str
    triton: str
    python: str

    @classmethod
    def of(cls, record: Record, config: Config, where: Environment, tools: Tools) -> Purpose:
        """To run a config of a record somewhere."""
        return cls(
            record=place_of(record),
            config=compiled_of(record, config),
            kind=where.device.kind,
            device=where.device.name,
            capability=where.device.capability,
            driver=where.software.driver,
            torch=tools.torch,
            triton=tools.triton,
            python=tools.python,
        )

    @property
    def label(self) -> str:
        """As a label is, without its tag."""
        return f"{self.record.replace('/', '-')}-{self.config}"

    def apart(self, here: Purpose) -> str:
        """In what this differs from what is needed here; '' where in nothing."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(here), strict=True)
        names = (field.name for field in dataclasses.fields(self))
        differ = zip(names, pairs, strict=True)
        return ", ".join(
            f"{name} {there or 'none'}, here {now or 'none'}"
            for name, (there, now) in differ
            if there != now
        )


msgspec.json.Decoder(Purpose)  # described before threads use it; see `codec`


def place_of(record: Record) -> str:
    """As names have it."""
    return f"{record.key.model[:12]}/{record.key.id}/{record.batch}"


def compiled_of(record: Record, config: Config) -> str:
    """The digest of what of a config is compiled: how its input comes is none of it."""
    return config.without(*record.input).digest


@dataclass(frozen=True, slots=True)
class Label:
    """The key of some artifacts, which says what they are for.

    Attributes:
        name: MODEL-ID-BATCH-CONFIG.TAG, each part but the batch 12 hex characters.
        trusted: one of the reader's keys made the tag.
    """

    name: str
    record: str
    config: str
    trusted: bool

    @classmethod
    def parse(cls, name: str, seal: Seal = UNSEALED) -> Label | None:
        """None if the name is none of a label."""
        found = re.fullmatch(LABEL, name)
        if not found:
            return None
        model, id, batch, config, tag = found.groups()
        trusted = seal.tagged(name[: -len(tag) - 1], tag)
        return cls(name, f"{model}/{id}/{batch}", config, trusted)

    @property
    def text(self) -> str:
        """The key that a store has them under."""
        return BLOBS + self.name

    @property
    def record_id(self) -> str:
        """As people see and type it: 'ae1bff61eea5@128'."""
        _model, key, batch = self.record.split("/")
        return f"{key}@{batch}"


def sealed(data: bytes, purpose: Purpose, seal: Seal) -> bytes:
    """Artifacts as a store keeps them, signed with the seal's key."""
    packed = {"purpose": to_plain(purpose), "data": zlib.compress(data, _LEVEL)}
    body: bytes = msgpack.packb(packed)
    return _START + seal.mac(body, ARTIFACTS) + body


def is_signed(sealed: bytes, seal: Seal) -> bool:
    """Whether one of the seal's keys signed all of a blob."""
    return seal.made(sealed[len(_START) : _BODY], sealed[_BODY:], ARTIFACTS)


def opened(sealed: bytes, purpose: Purpose, seal: Seal) -> bytes:
    """The artifacts in a blob, if they may be loaded for a purpose.

    Raises:
        RecordDamaged: why they may not.
    """
    found, packed = _unsealed(sealed, seal)
    if apart := found.apart(purpose):
        raise RecordDamaged(f"artifacts: made for {apart}; refused")
    try:
        inflating = zlib.decompressobj()
        data = inflating.decompress(packed, _MOST_TIMES * len(sealed))
    except (TypeError, zlib.error) as exc:
        raise _strange(exc) from exc
    if not inflating.eof:
        raise RecordDamaged("artifacts: too large when unpacked; refused")
    return data


def check(sealed: bytes, label: Label, seal: Seal) -> None:
    """Check that a blob is whole, signed, and what its label says.

    Raises:
        RecordDamaged: it is not.
    """
    if not label.name.startswith(f"{_unsealed(sealed, seal)[0].label}."):
        raise RecordDamaged("artifacts: made for another record or config; refused")


def _unsealed(sealed: bytes, seal: Seal) -> tuple[Purpose, Any]:
    """What signed artifacts are for, and themselves, packed.

    Raises:
        RecordNewer: another version of advisor wrote them. RecordDamaged: they are refused.
    """
    if not sealed.startswith(_START):
        kind = RecordNewer if sealed.startswith(_ANY) else RecordDamaged
        raise kind("artifacts: none that this version reads; refused")
    if not is_signed(sealed, seal):
        raise RecordDamaged("artifacts: not signed by you or your team, or changed since; refused")
    # From here on it is what the owner of a key wrote; another version of advisor may have.
    try:
        found = msgpack.unpackb(sealed[_BODY:], max_bin_len=len(sealed))
        return from_plain(Purpose, found["purpose"]), found["data"]
    except (ValueError, KeyError, TypeError) as exc:
        raise _strange(exc) from exc


def _strange(exc: Exception) -> RecordNewer:
    return RecordNewer(f"artifacts: not as this version writes them ({exc}); refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Artifacts that may be loaded, and where they were. `size`: packed."""

    data: bytes
    size: int
    store: str


class Artifacts:
    """The artifacts in some stores, which are looked through in order.

    Args:
        seal: of its keys those alone count that no other user may have.
        most: bytes that some may have, packed; 0: none are kept or loaded.
    """

    def __init__(self, stores: Sequence[Store], seal: Seal, most: int) -> None:
        self._stores, self._given, self._most = stores, seal, most
        self._seal = seal.for_code

    @property
    def loads(self) -> bool:
        """Whether any may be kept or loaded."""
        return self._most > 0

    @property
    def unsigned(self) -> str:
        """Why none are signed; '' where they are."""
        return "" if self._seal.signs else self._given.exposed or "no key signs it"

    def keep(self, data: bytes, purpose: Purpose, store: Store) -> int:
        """Put artifacts into a store: their size there, packed.

        0 if none are kept: the store takes no blobs, there is no key to sign with that is nobody
        else's, or they are larger than permitted.

        Raises:
            StoreError: the store cannot be written.
        """
        if not store.takes_blobs or not self._seal.signs or not self._most:
            return 0
        packed = sealed(data, purpose, self._seal)
        if len(packed) > self._most:
            return 0
        store.put(f"{BLOBS}{purpose.label}.{self._seal.tag(purpose.label)}", packed)
        return len(packed)

    def find(self, purpose: Purpose) -> Found | None:
        """What may be loaded for a purpose, None where there is none. It is copied into the first
        local store of those before.

        Raises:
            StoreError: there may be some; why they cannot be had. RecordDamaged: or may not.
        """
        failed: list[StoreError] = []
        for number, store, key in self._places(purpose):
            try:
                packed = store.get(key, self._most)
                if packed is None:
                    continue
                data = opened(packed, purpose, self._seal)
            except StoreError as exc:
                failed.append(exc)
                continue
            self._copy(key, packed, self._stores[:number])
            return Found(data=data, size=len(packed), store=store.url)
        if failed:
            raise failed[0]
        if self._most:
            self._tell_of_others(purpose)
        return None

    def _tell_of_others(self, purpose: Purpose) -> None:
        """That there are artifacts for this of a key that does not count, if there are.

        Raises:
            RecordDamaged: that.
        """
        reasons: set[str] = set()
        for store in self._stores:
            with contextlib.suppress(StoreError):
                there = self.on(store, f"{purpose.label}.")
                reasons |= {self._why_not(label) for label in there if not label.trusted}
        if reasons:  # what the reader can mend is said first
            why = min(reasons, key=ANOTHERS.__eq__)
            raise RecordDamaged(f"artifacts: {why}; refused")

    def _places(self, purpose: Purpose) -> Iterator[tuple[int, Store, str]]:
        if self._most:
            for number, store in enumerate(self._stores):
                for tag in self._seal.tags(purpose.label):
                    yield number, store, f"{BLOBS}{purpose.label}.{tag}"

    @staticmethod
    def _copy(key: str, packed: bytes, before: Iterable[Store]) -> None:
        for store in before:
            if store.takes_blobs and not isinstance(store, Remote):
                with contextlib.suppress(StoreError):
                    store.put(key, packed)
                    return

    def on(self, store: Store, start: str = "") -> dict[Label, int]:
        """What a store has, with its size in bytes; of labels that begin so.

        Raises:
            StoreError: the store cannot be read.
        """
        sizes = store.sizes(BLOBS + start)
        found = (
            (Label.parse(key.removeprefix(BLOBS), self._seal), size) for key, size in sizes.items()
        )
        return {label: size for label, size in found if label}

    def listed(self, places: Collection[str]) -> Iterator[tuple[Store, Label, int]]:
        """Where there are artifacts of some records, and their size; stores that cannot be read are
        passed over."""
        for store in self._stores:
            with contextlib.suppress(StoreError):
                for label, size in self.on(store).items():
                    if label.record in places:
                        yield store, label, size

    def fault(self, store: Store, label: Label) -> str:
        """Why this reader never loads what a store has under a label; '' if it may be loaded for
        its purpose."""
        if not label.trusted:
            return self._why_not(label)
        if not self._most:
            return "none are loaded (ADVISOR_MAX_ARTIFACTS)"
        try:
            self.checked(store, label)
        except RecordDamaged as exc:
            return _bare(exc)
        except StoreError as exc:
            return str(exc)
        return ""

    def _why_not(self, label: Label) -> str:
        """Of what none of the keys that count for code has tagged."""
        given = Label.parse(label.name, self._given)
        return self._given.exposed if given and given.trusted else ANOTHERS

    def checked(self, store: Store, label: Label) -> bytes | None:
        """What a store has under a label, None if it is gone.

        Raises:
            RecordDamaged: it is refused. StoreError: the store cannot be read.
        """
        packed = store.get(label.text, self._most)
        if packed is not None:
            check(packed, label, self._seal)
        return packed

    def useless(
        self, store: Store, label: Label, size: int, advised: Mapping[str, Collection[str]]
    ) -> tuple[Kind, str] | None:
        """Why what a store has under a label may go; None if it may not.

        Args:
            advised: by each record's place, the configs that it advises, as `compiled_of`; none of
                a record that cannot be read.

        Raises:
            StoreError: the store cannot be read.
        """
        if label.record not in advised:
            return "superseded", "their record is gone"
        if size > self._most:
            return "oversized", f"larger than {self._most} bytes (ADVISOR_MAX_ARTIFACTS)"
        configs = advised[label.record]
        if configs and label.config not in configs:
            return "superseded", "their config is advised no more"
        try:
            self.checked(store, label)
        except RecordNewer:  # not for this version to judge
            return None
        except RecordDamaged as exc:
            return "damaged", _bare(exc)
        return None


def _bare(exc: RecordDamaged) -> str:
    """What is wrong with artifacts, without saying of what it is and what comes of it."""
    return str(exc).removeprefix("artifacts: ").removesuffix("; refused")
