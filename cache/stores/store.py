"""The interface of every store: bytes under text keys."""

from __future__ import annotations

import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from advisor.cache.stores.url import RemoteUrl
from advisor.errors import RecordDamaged, StoreDamaged, StoreError

MAX_BYTES = 2**20
"""Of one encoded record. Real ones take 20-200 KB; small objects grow thirtyfold when decoded."""
BLOBS = "artifacts/"
"""How the keys of blobs begin."""
_BLOB = re.compile(rf"{BLOBS}[0-9a-f][0-9a-f-]{{0,120}}\.[0-9a-f]{{12}}")


class Store(ABC):
    """Bytes under text keys. Reading creates nothing; a write is whole or absent.

    The key of a blob, which may have many MiB, begins with BLOBS. Every method but `health` raises
    StoreDamaged for a corrupt store, and StoreError if the store cannot be read or written.

    Attributes:
        url: what `open_store` takes to open it again, without passwords.
        studies: a local folder for the studies of this store, which may not exist yet.
        takes_blobs: whether blobs can be put here.
    """

    url: str
    studies: Path | None = None
    takes_blobs = True

    @abstractmethod
    def keys(self) -> list[str]:
        """The keys of all records, sorted, without those of blobs; [] if there is no store yet."""

    def sizes(self, start: str = BLOBS) -> Mapping[str, int]:
        """The bytes of each blob whose key begins with `start`."""
        return {}

    def get(self, key: str, most: int = MAX_BYTES) -> bytes | None:
        """The data of one key, None if it is absent.

        Raises:
            RecordDamaged: it is larger than `most` bytes, or not what a store writes.
        """
        found = self.get_many([key], most).get(key)
        if isinstance(found, RecordDamaged):
            raise found
        return found

    @abstractmethod
    def get_many(
        self, keys: Iterable[str], most: int = MAX_BYTES
    ) -> dict[str, bytes | RecordDamaged]:
        """The data of several keys, without absent ones."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Store data under a key, replacing what is there."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""

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
        """Move a damaged store away; its new path."""
        raise StoreError(f"cache {self.url}: cannot be moved away; remove what is damaged")

    def leftovers(self) -> list[Path]:
        """Files that killed writers left behind."""
        return []


class Remote(Store):
    """A store on the network, which may not answer.

    Attributes:
        patience_s: seconds that a reader waits for it, in total. Set before the first request.
        address: host and port to connect to; None if only its client library knows.
    """

    def __init__(self, given: RemoteUrl, patience_s: float) -> None:
        self.url = given.shown
        self.patience_s = given.seconds("timeout", patience_s)
        self.address: tuple[str, int] | None = None

    def check_reachable(self) -> None:
        """Raise StoreError if nobody listens there, before a client library is imported."""
        if self.address is None:
            return
        try:
            socket.create_connection(self.address, timeout=self.patience_s).close()
        except OSError as exc:
            raise StoreError(f"cache {self.url}: {exc.strerror or exc}") from exc

    @abstractmethod
    def load(self) -> None:
        """Import the client library, which takes this machine's time and not the store's."""


@runtime_checkable
class Narrowing(Protocol):
    """A remote store that searches its records: a lookup is one request."""

    def narrowed(self, question: Mapping[str, Any]) -> list[str]:
        """The keys that answer a question, as `RecordFilter.questions` has it: of many the nearest.
        `get_many` of these keys makes no further request."""


def is_blob(key: str) -> bool:
    """Whether a key is of a blob.

    Raises:
        RecordDamaged: it begins like one and could lead to another place.
    """
    if not key.startswith(BLOBS):
        return False
    if not _BLOB.fullmatch(key):
        raise RecordDamaged(f"key {key[:80]!r}: no name of a blob; refused")
    return True


def blob_key(name: str, start: str) -> str:
    """The key of a blob with this file name; '' if it is none, or does not begin with `start`."""
    key = BLOBS + name
    return key if key.startswith(start) and _BLOB.fullmatch(key) else ""


def bounded(key: str, data: bytes, most: int) -> bytes | RecordDamaged:
    """The data of a key, or the error if it is larger than `most` bytes."""
    if len(data) > most:
        return RecordDamaged(f"{key}: larger than {most} bytes; refused")
    return data
