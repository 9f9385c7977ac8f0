"""What torch.compile made for a config, kept beside its record, so that a fresh process has its
first step in seconds.

Artifacts are code: PyTorch unpickles and runs them. So they are not part of a record, and nothing
in a record leads to them. They are blobs of a store, under a key that only the owner of a signing
key can make. Nothing in them is parsed before the signature of one of the reader's own keys over
all of it was verified. Then they must have been made for this record, config, device and software.
RecordDamaged says why artifacts are refused, StoreError why a store cannot be read or written.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from advisor.cache.codec import describe, from_plain, to_plain
from advisor.cache.config import Config
from advisor.cache.key import Environment
from advisor.cache.name import StoreKey, record_key
from advisor.cache.record import Record
from advisor.cache.signing import ARTIFACTS, NO_KEYS, KeyRing
from advisor.cache.stores import BLOBS, Remote, Store
from advisor.errors import RecordDamaged, RecordNewer, StoreError

_ANY = b"advisor artifacts "
_START = _ANY + b"1\n"
_BODY = len(_START) + 32
"""Where the body begins, behind the signature."""
_LEVEL = 1
"""Of zlib: a quarter of the size at 100 MB/s; higher levels take much longer for little."""
_MAX_RATIO = 32
"""Largest ratio of unpacked to packed size."""
OTHER_KEY = "signed with another's key"
"""Why artifacts are refused whose name has no tag of the reader's keys."""
LABEL = r"([0-9a-f]{12})-([0-9a-f]{12})-([1-9][0-9]{0,9})-([0-9a-f]{12})\.([0-9a-f]{12})"
"""The pattern of `Label.name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Versions of torch, of Triton, '' for none, and of Python."""

    torch: str
    triton: str
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """What artifacts were made for: for anything else they are not loaded.

    Attributes:
        record: its record key.
        config: as `compiled_digest`.
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
        """To run a config of a record in an environment."""
        return cls(
            record=record_key(record),
            config=compiled_digest(record, config),
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
        """The name of its artifacts, without the tag."""
        return f"{self.record.replace('/', '-')}-{self.config}"


describe(Purpose)


def compiled_digest(record: Record, config: Config) -> str:
    """The digest of what is compiled of a config: its input pipeline is not."""
    return config.without(*record.input).digest


class Label(StoreKey, frozen=True, kw_only=True):
    """The key of some artifacts.

    Attributes:
        name: MODEL-ID-BATCH-CONFIG.TAG, each part but the batch 12 hex characters; the key behind
            BLOBS.
        config: as `compiled_digest`.
    """

    name: str
    config: str

    @classmethod
    def parse(cls, name: str, keyring: KeyRing = NO_KEYS) -> Label | None:
        """The label with this name, or None."""
        found = re.fullmatch(LABEL, name)
        if not found:
            return None
        return cls(
            text=BLOBS + name,
            record_key="/".join(found.group(1, 2, 3)),
            trusted=keyring.trusts(name),
            name=name,
            config=found[4],
        )


def pack_artifacts(data: bytes, purpose: Purpose, keyring: KeyRing) -> bytes:
    """Artifacts as a store keeps them, signed."""
    packed = {"purpose": to_plain(purpose), "data": zlib.compress(data, _LEVEL)}
    body: bytes = msgpack.packb(packed)
    return _START + keyring.sign(body, ARTIFACTS) + body


def unpack_artifacts(packed: bytes, purpose: Purpose, keyring: KeyRing) -> bytes:
    """The artifacts in a blob, if they may be loaded for a purpose."""
    found, data = _verified(packed, keyring)
    made, needed = to_plain(found), to_plain(purpose)
    if differing := ", ".join(
        f"{name} {made[name] or 'none'}, here {needed[name] or 'none'}"
        for name in made
        if made[name] != needed[name]
    ):
        raise RecordDamaged(f"artifacts: made for {differing}; refused")
    try:
        inflating = zlib.decompressobj()
        unpacked = inflating.decompress(data, _MAX_RATIO * len(packed))
    except (TypeError, zlib.error) as exc:
        raise _unknown_form(exc) from exc
    if not inflating.eof:
        raise RecordDamaged("artifacts: too large when unpacked; refused")
    return unpacked


def _verified(packed: bytes, keyring: KeyRing) -> tuple[Purpose, Any]:
    """What signed artifacts are for, and their compressed data."""
    if not packed.startswith(_START):
        kind = RecordNewer if packed.startswith(_ANY) else RecordDamaged
        raise kind("artifacts: none that this version reads; refused")
    if not keyring.verify(packed[len(_START) : _BODY], packed[_BODY:], ARTIFACTS):
        raise RecordDamaged("artifacts: not signed by you or your team, or changed since; refused")
    # The owner of a key wrote what follows, perhaps with another version of advisor.
    try:
        found = msgpack.unpackb(packed[_BODY:], max_bin_len=len(packed))
        return from_plain(Purpose, found["purpose"]), found["data"]
    except (ValueError, KeyError, TypeError) as exc:
        raise _unknown_form(exc) from exc


def _unknown_form(exc: Exception) -> RecordNewer:
    return RecordNewer(f"artifacts: not as this version writes them ({exc}); refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Artifacts that may be loaded, and the URL of their store. `size`: packed."""

    data: bytes
    size: int
    store: str


class Artifacts:
    """The artifacts in some stores, which are searched in order.

    Args:
        keyring: only those of its keys count that no other user can have.
        most: bytes that the artifacts of one config may have, packed; 0: none are kept or loaded.
    """

    def __init__(self, stores: Sequence[Store], keyring: KeyRing, most: int) -> None:
        self.most = most
        self._stores, self._given, self._keyring = stores, keyring, keyring.for_code

    @property
    def unsigned(self) -> str:
        """Why artifacts cannot be signed; '' if they can."""
        return "" if self._keyring.signs else self._given.exposed or "no key signs it"

    def keep(self, data: bytes, purpose: Purpose, store: Store) -> int:
        """Put artifacts into a store; their packed size.

        0 if they are not kept: the store takes no blobs, there is no safe key to sign with, or
        they are larger than permitted.
        """
        if not store.takes_blobs or not self._keyring.signs or not self.most:
            return 0
        packed = pack_artifacts(data, purpose, self._keyring)
        if len(packed) > self.most:
            return 0
        store.put(BLOBS + self._keyring.tagged(purpose.label), packed)
        return len(packed)

    def find(self, purpose: Purpose) -> Found | None:
        """What may be loaded for a purpose, or None. It is copied into the first local store that
        was searched before.
        """
        if not self.most:
            return None
        failed: list[StoreError] = []
        for number, store in enumerate(self._stores):
            for tag in self._keyring.tags(purpose.label):
                key = f"{BLOBS}{purpose.label}.{tag}"
                try:
                    packed = store.get(key, self.most)
                    if packed is None:
                        continue
                    data = unpack_artifacts(packed, purpose, self._keyring)
                except StoreError as exc:
                    failed.append(exc)
                    continue
                self._copy(key, packed, self._stores[:number])
                return Found(data=data, size=len(packed), store=store.url)
        if not failed:
            failed = self._refused(purpose)
        if failed:
            raise failed[0]
        return None

    def _refused(self, purpose: Purpose) -> list[StoreError]:
        """Why artifacts that other keys signed for a purpose are not loaded: what the reader can
        repair first, nothing if there are none."""
        reasons: set[str] = set()
        for store in self._stores:
            with contextlib.suppress(StoreError):
                there = self.on(store, f"{purpose.label}.")
                reasons |= {self._why_untrusted(label) for label in there if not label.trusted}
        ordered = sorted(reasons, key=OTHER_KEY.__eq__)
        return [RecordDamaged(f"artifacts: {why}; refused") for why in ordered]

    @staticmethod
    def _copy(key: str, packed: bytes, before: Sequence[Store]) -> None:
        for store in before:
            if store.takes_blobs and not isinstance(store, Remote):
                with contextlib.suppress(StoreError):
                    store.put(key, packed)
                    return

    def on(self, store: Store, start: str = "") -> dict[Label, int]:
        """The artifacts in a store whose names begin with `start`, with their size in bytes."""
        sizes = store.sizes(BLOBS + start).items()
        found = ((Label.parse(key.removeprefix(BLOBS), self._keyring), size) for key, size in sizes)
        return {label: size for label, size in found if label}

    def listed(self, record_keys: Collection[str]) -> Iterator[tuple[Store, Label, int]]:
        """Where there are artifacts of some records, and their size, in stores that can be read."""
        for store in self._stores:
            with contextlib.suppress(StoreError):
                for label, size in self.on(store).items():
                    if label.record_key in record_keys:
                        yield store, label, size

    def fault(self, store: Store, label: Label) -> str:
        """Why this reader never loads what a store has under a label; '' if it may."""
        if not label.trusted:
            return self._why_untrusted(label)
        if not self.most:
            return "none are loaded (ADVISOR_MAX_ARTIFACTS)"
        try:
            self.checked(store, label)
        except StoreError as exc:
            return bare_reason(exc)
        return ""

    def _why_untrusted(self, label: Label) -> str:
        """Why a label without a tag of the safe keys is not trusted."""
        return self._given.exposed if self._given.trusts(label.name) else OTHER_KEY

    def checked(self, store: Store, label: Label) -> bytes | None:
        """What a store has under a label, or None: whole, signed, and what the label says."""
        packed = store.get(label.text, self.most)
        if packed is not None:
            purpose, _data = _verified(packed, self._keyring)
            if not label.name.startswith(f"{purpose.label}."):
                raise RecordDamaged("artifacts: made for another record or config; refused")
        return packed


def bare_reason(exc: StoreError) -> str:
    """What is wrong with artifacts, without naming them again."""
    return str(exc).removeprefix("artifacts: ").removesuffix("; refused")
