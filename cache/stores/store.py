"""The interface of every store: bytes under text keys."""

from __future__ import annotations

import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from advisor.cache.stores.url import TIMEOUT_S, RemoteUrl
from advisor.errors import RecordDamaged, StoreDamaged, StoreError, reason

MAX_BYTES = 2**20  # of an encoded record; real ones have 20-200 KB, and decoding needs up to 30x
BLOBS = "artifacts/"  # prefix of the keys of blobs
ByKey = dict[str, bytes | RecordDamaged]  # data by key, or why it is refused
_BLOB = re.compile(rf"{BLOBS}[0-9a-f][0-9a-f-]{{0,120}}\.[0-9a-f]{{12}}")


class ByteStore(ABC):
    """Bytes under text keys. Reading creates nothing; a write is whole or absent.

    The key of a blob, which may have many MiB, begins with BLOBS. Every method but `health` raises
    StoreDamaged for a corrupt store, and StoreError if the store cannot be read or written.

    `url`: what `open_store` takes, without passwords; `studies`: a local folder for the studies of
    this store, which may not exist yet; `searches`: whether it has `search`.
    """

    url: str
    studies: Path | None = None
    searches = False

    @abstractmethod
    def keys(self) -> list[str]:
        """The sorted keys of all records, without those of blobs."""

    def sizes(self, prefix: str = BLOBS) -> Mapping[str, int]:
        """The bytes of each blob whose key begins with `prefix`."""
        return {}

    def search(self, question: Mapping[str, Any]) -> list[str]:
        """The keys of the nearest records for a question of `RecordFilter.question`. `get_many` of
        these keys makes no further request."""
        raise NotImplementedError

    def get(self, key: str, most: int = MAX_BYTES) -> bytes | None:
        """The data of one key; None if the key is absent. Raises RecordDamaged if the data is
        larger than `most` bytes, or no store wrote it."""
        found = self.get_many([key], most).get(key)
        if isinstance(found, RecordDamaged):
            raise found
        return found

    @abstractmethod
    def get_many(self, keys: Iterable[str], most: int = MAX_BYTES) -> ByKey:
        """The data of several keys, without absent ones."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Store data under a key, replacing earlier data."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove a key. Returns whether it was there."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise StoreError if `put` would, without writing anything."""

    def health(self) -> str:
        """'ok', 'ok, read-only', 'empty', 'damaged: ...' or 'unusable: ...'."""
        readable = False
        try:
            if not self.keys():
                return "empty"
            readable = True
            self.check_writable()
        except StoreDamaged as exc:
            return f"damaged: {exc.__cause__ or exc}"
        except StoreError as exc:
            return "ok, read-only" if readable else f"unusable: {exc}"
        return "ok"

    def quarantine(self) -> Path:
        """Move a damaged store away. Returns its new path."""
        raise StoreError(f"cache {self.url}: cannot be moved away; remove the damaged data")


class Remote(ByteStore):
    """A store on the network, which may not answer. `timeout_s`: most seconds that a reader waits;
    `address`: host and port to try before a slow client library is imported."""

    address: tuple[str, int] | None = None

    def __init__(self, given: RemoteUrl, timeout_s: float = TIMEOUT_S) -> None:
        self.url = given.shown
        self.timeout_s = given.seconds("timeout", timeout_s)

    def check_reachable(self) -> None:
        """Raise StoreError if no server listens at `address`."""
        try:
            if self.address is not None:
                socket.create_connection(self.address, timeout=self.timeout_s).close()
        except OSError as exc:
            raise StoreError(f"cache {self.url}: {reason(exc)}") from exc

    def load(self) -> None:
        """Import the client library. This does not count against the store's time limit."""


def is_blob(key: str) -> bool:
    """Whether a key is a blob's. Raises RecordDamaged if it only begins like one."""
    if key.startswith(BLOBS) and not _BLOB.fullmatch(key):
        raise RecordDamaged(f"key {key[:80]!r}: not a blob's key; refused")
    return key.startswith(BLOBS)


def blob_key(name: str, prefix: str) -> str:
    """The key of the blob in a file; '' if the file has none, or the key lacks `prefix`."""
    key = BLOBS + name
    return key if key.startswith(prefix) and _BLOB.fullmatch(key) else ""


def bounded(key: str, data: bytes, most: int) -> bytes | RecordDamaged:
    """The data of a key, or the error if it is larger than `most` bytes."""
    if len(data) > most:
        return RecordDamaged(f"{key}: larger than {most} bytes; refused")
    return data
