"""Artifacts: the code that torch.compile made for a config, stored next to its record.

PyTorch unpickles and runs them. So nothing in a record leads to them: they are blobs of a store,
under a key that only the owner of a signing key can make. Nothing in them is parsed before the
signature of one of the reader's keys over all of it was verified. Then they must have been made for
this record, config, device and software. RecordDamaged says why artifacts are refused.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgpack
from msgspec import Struct

from advisor.cache.codec import describe, from_plain, to_plain
from advisor.cache.config import Config
from advisor.cache.key import Environment
from advisor.cache.name import StoreKey, record_key
from advisor.cache.record import Record
from advisor.cache.signing import ARTIFACTS, NO_KEYS, KeyRing
from advisor.cache.stores import BLOBS, ByteStore, Remote
from advisor.errors import RecordDamaged, RecordNewer, StoreError

_ANY = b"advisor artifacts "
_START = _ANY + b"1\n"
_BODY = len(_START) + 32
_LEVEL = 1  # zlib's: a quarter of the size at 100 MB/s; higher ones gain little
_MAX_RATIO = 32
OTHER_KEY = "signed with another's key"  # if no key of the reader made the name's tag
LABEL = r"([0-9a-f]{12})-([0-9a-f]{12})-([1-9][0-9]{0,9})-([0-9a-f]{12})\.([0-9a-f]{12})"
"""The pattern of `Label.name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Versions of torch, of Triton, '' for none, and of Python."""

    torch: str
    triton: str
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose(Tools):
    """What artifacts are loaded for. `record`: its key in a store; `config`: `compiled_digest`."""

    record: str
    config: str
    kind: str
    device: str
    capability: str
    driver: str

    @classmethod
    def of(cls, record: Record, config: Config, where: Environment, tools: Tools) -> Purpose:
        """The purpose of running a config of a record in an environment."""
        return cls(
            record=record_key(record),
            config=compiled_digest(record, config),
            kind=where.device.kind,
            device=where.device.name,
            capability=where.device.capability,
            driver=where.software.driver,
            **to_plain(tools),
        )

    @property
    def label(self) -> str:
        return f"{self.record.replace('/', '-')}-{self.config}"


describe(Purpose)


def compiled_digest(record: Record, config: Config) -> str:
    """The digest of a config without its input pipeline, which is not compiled."""
    return config.without(*record.input).digest


class Label(StoreKey, frozen=True, kw_only=True):
    """The key of some artifacts. `name`: the key without BLOBS, MODEL-ID-BATCH-CONFIG.TAG, all but
    BATCH 12 hex characters; `config`: as `compiled_digest`."""

    config: str

    @property
    def name(self) -> str:
        return self.text.removeprefix(BLOBS)

    @classmethod
    def parse(cls, name: str, keyring: KeyRing = NO_KEYS) -> Label | None:
        found = re.fullmatch(LABEL, name)
        return found and cls(
            text=BLOBS + name,
            record_key="/".join(found.group(1, 2, 3)),
            trusted=keyring.trusts(name),
            config=found[4],
        )


def pack_artifacts(data: bytes, purpose: Purpose, keyring: KeyRing) -> bytes:
    packed = {"purpose": to_plain(purpose), "data": zlib.compress(data, _LEVEL)}
    body: bytes = msgpack.packb(packed)
    return _START + keyring.sign(body, ARTIFACTS) + body


def unpack_artifacts(packed: bytes, purpose: Purpose, keyring: KeyRing) -> bytes:
    """The artifacts in a blob, if they may be loaded for a purpose."""
    found, data = _verified(packed, keyring)
    made, needed = to_plain(found), to_plain(purpose)
    differing = [
        f"{name} {made[name] or 'none'}, here {needed[name] or 'none'}"
        for name in made
        if made[name] != needed[name]
    ]
    if differing:
        raise RecordDamaged(f"artifacts: made for {', '.join(differing)}; refused")
    inflating, unpacked = zlib.decompressobj(), b""
    with contextlib.suppress(zlib.error):
        unpacked = inflating.decompress(data, _MAX_RATIO * len(packed))
    if not inflating.eof:
        raise RecordDamaged("artifacts: too large when unpacked, or cut; refused")
    return unpacked


def _verified(packed: bytes, keyring: KeyRing) -> tuple[Purpose, bytes]:
    """The purpose of signed artifacts, and their compressed data."""
    if not packed.startswith(_START):
        kind = RecordNewer if packed.startswith(_ANY) else RecordDamaged
        raise kind("artifacts: in an unknown format; refused")
    if not keyring.verify(packed[len(_START) : _BODY], packed[_BODY:], ARTIFACTS):
        raise RecordDamaged("artifacts: not signed by you or your team, or changed since; refused")
    # The owner of a key wrote what follows, perhaps with another version of advisor.
    try:
        found = msgpack.unpackb(packed[_BODY:], max_bin_len=len(packed))
        return from_plain(Purpose, found["purpose"]), memoryview(found["data"]).tobytes()
    except (ValueError, KeyError, TypeError) as exc:
        raise RecordNewer(f"artifacts: not as this version writes them ({exc}); refused") from exc


class StoredArtifacts(Struct, frozen=True, kw_only=True):
    """Artifacts that may be loaded, and the URL of their store. `size`: packed."""

    data: bytes
    size: int
    store: str


class Artifacts:
    """The artifacts in some stores, which are searched in order.

    Args:
        keyring: only its keys that no other user can have count.
        most: most bytes of one config's artifacts, packed; 0: no artifacts are kept or loaded.
    """

    def __init__(self, stores: Sequence[ByteStore], keyring: KeyRing, most: int) -> None:
        self.most = most
        self._stores, self._given, self._keyring = stores, keyring, keyring.for_code

    @property
    def unsigned(self) -> str:
        """Why artifacts cannot be signed; '' if they can."""
        return "" if self._keyring.signs else self._given.exposed or "no key signs it"

    def keep(self, data: bytes, purpose: Purpose, store: ByteStore) -> int:
        """Put artifacts into a store. Returns their packed size, or 0 if there is no safe key to
        sign with, or they are too large."""
        if self._keyring.signs and self.most:
            packed = pack_artifacts(data, purpose, self._keyring)
            if len(packed) <= self.most:
                store.put(BLOBS + self._keyring.tagged(purpose.label), packed)
                return len(packed)
        return 0

    def find(self, purpose: Purpose) -> StoredArtifacts | None:
        """The artifacts to load for a purpose, or None. They are copied into the first local store
        among those searched before."""
        if not self.most:
            return None
        failed: list[StoreError] = []
        keys = [f"{BLOBS}{purpose.label}.{tag}" for tag in self._keyring.tags(purpose.label)]
        for store, key in itertools.product(self._stores, keys):
            try:
                if (packed := store.get(key, self.most)) is None:
                    continue
                data = unpack_artifacts(packed, purpose, self._keyring)
            except StoreError as exc:
                failed.append(exc)
                continue
            self._copy(key, packed, self._stores[: self._stores.index(store)])
            return StoredArtifacts(data=data, size=len(packed), store=store.url)
        if failed:
            raise failed[0]
        there = (label for _store, label, _size in self.listed(f"{purpose.label}."))
        reasons = {self._why_untrusted(label) for label in there if not label.trusted}
        if reasons:  # what the reader can repair comes first
            raise RecordDamaged(f"artifacts: {min(reasons, key=OTHER_KEY.__eq__)}; refused")
        return None

    @staticmethod
    def _copy(key: str, packed: bytes, before: Sequence[ByteStore]) -> None:
        for store in before:
            if not isinstance(store, Remote):
                with contextlib.suppress(StoreError):
                    return store.put(key, packed)

    def on(self, store: ByteStore, start: str = "") -> dict[Label, int]:
        """The artifacts in a store whose names begin with `start`, or whose record's key does, with
        their size in bytes."""
        sizes = store.sizes(BLOBS + start.replace("/", "-")).items()
        found = ((Label.parse(key.removeprefix(BLOBS), self._keyring), size) for key, size in sizes)
        return {label: size for label, size in found if label}

    def listed(self, start: str = "") -> Iterator[tuple[ByteStore, Label, int]]:
        """As `on`, in all stores that can be read."""
        for store in self._stores:
            with contextlib.suppress(StoreError):
                yield from ((store, label, size) for label, size in self.on(store, start).items())

    def fault(self, store: ByteStore, label: Label) -> str:
        """Why this reader never loads a label's artifacts from a store; '' if it may load them."""
        if not label.trusted:
            return self._why_untrusted(label)
        try:
            if not self.most:
                return "none are loaded (ADVISOR_MAX_ARTIFACTS)"
            self.checked(store, label)
            return ""
        except StoreError as exc:
            return bare_reason(exc)

    def _why_untrusted(self, label: Label) -> str:
        """Why a label without a tag of the safe keys is not trusted."""
        return self._given.exposed if self._given.trusts(label.name) else OTHER_KEY

    def checked(self, store: ByteStore, label: Label) -> bytes | None:
        """A label's packed artifacts in a store, verified, or None. Raises RecordDamaged."""
        packed = store.get(label.text, self.most)
        if packed is not None:
            purpose, _data = _verified(packed, self._keyring)
            if not label.name.startswith(f"{purpose.label}."):
                raise RecordDamaged("artifacts: made for another record or config; refused")
        return packed


def bare_reason(exc: StoreError) -> str:
    """The text of an error about artifacts, without 'artifacts:' and 'refused'."""
    return str(exc).removeprefix("artifacts: ").removesuffix("; refused")
