"""Places that keep records: the protocol, how a URL becomes a store, and records in one."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, cast

from advisor.cache.codec import decode, encode
from advisor.cache.key import fingerprint
from advisor.cache.record import Record
from advisor.errors import RecordDamaged, UsageError


class Store(Protocol):
    """Bytes under text keys. Reading creates nothing; a write is whole or absent.

    Every method but `health` raises StoreDamaged for a corrupt store, and StoreError for one that
    cannot be reached, read or written now.
    """

    @property
    def url(self) -> str:
        """What `open_store` takes to open it again."""

    @property
    def studies(self) -> Path:
        """A local folder for the studies that belong to it; it may not exist yet."""

    def keys(self) -> list[str]:
        """All keys, sorted; none where there is no store yet."""

    def get(self, key: str) -> bytes | None:
        """What was put, or None. Raises RecordDamaged where it is not what a store puts."""

    def put(self, key: str, data: bytes) -> None:
        """Keep data under key, in place of what is there."""

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""

    def check_writable(self) -> None:
        """Raise where `put` would; nothing is made where there is no store yet."""

    def health(self) -> str:
        """'ok', 'ok, read-only', 'empty', 'damaged: ...' or 'unusable: ...'."""

    def set_aside(self) -> Path:
        """Move the damaged store away; where it is now."""


SCHEMES: dict[str, tuple[str, str]] = {
    "disk": ("advisor.cache.disk:DiskStore", "pip install diskcache"),
}
"""Scheme → the class, called with what follows 'scheme:', and what installs its needs."""


def open_store(url: str | None = None) -> Store:
    """The store at a URL such as 'disk:/some/folder'; a bare path means disk.

    None: $ADVISOR_CACHE, else the user's cache folder. Nothing is touched yet.

    Raises:
        UsageError: the scheme is unknown, or what it needs is not installed.
    """
    url = url or os.environ.get("ADVISOR_CACHE") or _default_url()
    found = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]+):(.*)", url, re.DOTALL)
    scheme, place = (found[1].lower(), found[2]) if found else ("disk", url)
    if scheme not in SCHEMES:
        raise UsageError(
            f"cache URL {url!r}: unknown scheme {scheme!r}, expected {', '.join(SCHEMES)}; "
            "set --cache or ADVISOR_CACHE to a folder, e.g. disk:/data/advisor"
        )
    place = re.sub(r"^//(?=/)", "", place)
    if not place or "\0" in place:
        raise UsageError(f"cache URL {url!r}: names no place, expected e.g. {scheme}:/data/advisor")
    where, hint = SCHEMES[scheme]
    module, _, name = where.partition(":")
    try:
        store = getattr(importlib.import_module(module), name)
    except ImportError as exc:
        raise UsageError(f"cache URL {url!r}: {exc}; run: {hint}") from exc
    return cast(Store, store(place))


def _default_url() -> str:
    import platformdirs

    return "disk:" + platformdirs.user_cache_dir("advisor", appauthor=False)


_PREFIX = "record/"


def record_key(record: Record) -> str:
    """The text key of a record: record/MODEL/TARGET/ID, 12 hex characters each."""
    return f"{_PREFIX}{record.key.model[:12]}/{_target_part(record.target.name)}/{record.id}"


def _target_part(name: str) -> str:
    return fingerprint(name)[:12]


_decode = functools.lru_cache(maxsize=64)(decode)


class Records:
    """The records in a store.

    Attributes:
        store: where they are.
        damaged: one line for each record that the last `all`, `find` or `get` could not read.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.damaged: list[str] = []

    def put(self, record: Record) -> None:
        """Keep it, in place of an older one of the same key and target."""
        self.store.put(record_key(record), encode(record))

    def all(self) -> list[Record]:
        """Every record that can be read."""
        return self._load(self._keys())

    def find(self, model: str | None = None, target: str | None = None) -> list[Record]:
        """The records of a model fingerprint, a target name, or both."""
        wanted = (
            None if model is None else model[:12],
            None if target is None else _target_part(target),
        )
        keys = [
            key
            for key in self._keys()
            if all(w in (None, part) for w, part in zip(wanted, key.split("/")[1:3], strict=True))
        ]
        return [
            record
            for record in self._load(keys)
            if model in (None, record.key.model) and target in (None, record.target.name)
        ]

    def get(self, id_prefix: str) -> Record:
        """The record whose id begins so; of several targets with the same key, the newest.

        Raises:
            UsageError: none does, or records with different ids do. RecordDamaged: it cannot be
                read.
        """
        keys = [key for key in self._keys() if _id(key).startswith(id_prefix)] if id_prefix else []
        ids = sorted({_id(key) for key in keys})
        if not ids:
            raise UsageError(f"key {id_prefix!r}: no such record; run: advisor show")
        if len(ids) > 1:
            raise UsageError(f"key {id_prefix!r}: several begin so: {', '.join(ids)}; give more")
        found = self._load(keys)
        if not found:
            raise RecordDamaged("; ".join(self.damaged) or f"record {ids[0]} was just removed")
        return max(found, key=lambda record: record.provenance.created)

    def delete(self, record: Record | str) -> bool:
        """Remove a record, or what lies under its text key; whether it was there."""
        return self.store.delete(record if isinstance(record, str) else record_key(record))

    def delete_damaged(self, id_prefix: str = "") -> int:
        """Remove every record that cannot be read and whose id begins so; how many there were."""
        keys = [key for key in self._keys() if _id(key).startswith(id_prefix)]
        return sum(self.delete(key) for key in keys if not self._load([key]) and self.damaged)

    def _keys(self) -> list[str]:
        keys = self.store.keys()
        return [key for key in keys if key.startswith(_PREFIX) and key.count("/") == 3]

    def _load(self, keys: Iterable[str]) -> list[Record]:
        found: list[Record] = []
        self.damaged = []
        for key in keys:
            try:
                data = self.store.get(key)
                if data is not None:
                    found.append(_decode(data))
            except RecordDamaged as exc:
                self.damaged.append(f"{_id(key)}: {exc}")
        return found


def _id(key: str) -> str:
    return key.rpartition("/")[2]
