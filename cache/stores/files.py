"""Whatever fsspec reaches: S3, Google Cloud Storage, Azure and others; one file a record."""

from __future__ import annotations

import errno
import importlib.util
import os
import posixpath
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from advisor.cache.codec import MAX_BYTES
from advisor.cache.name import file_of, keys_of
from advisor.cache.stores.shelf import ARTIFACTS, is_plain, plain, too_large
from advisor.cache.stores.url import PATIENCE_S, RemoteUrl
from advisor.errors import RecordDamaged, StoreError, UsageError

if TYPE_CHECKING:
    from advisor.cache.stores import Remote, Shelf

_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"}
"""Protocols whose writes are whole or absent by themselves."""
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
_OWN = ("timeout", "endpoint")


class FileSystemStore:
    """s3://BUCKET/PREFIX, gs://, az://, ...[?timeout=500ms&endpoint=https://HOST].

    Credentials are the ones that the file system's own tools use; `endpoint` is for S3 servers
    other than Amazon's.
    """

    studies: Path | None = None

    def __init__(self, url: str) -> None:
        given = RemoteUrl.parse(url, _OWN)
        self.url = given.shown
        self.patience_s = given.seconds("timeout", PATIENCE_S)
        self._bare = given.bare
        self._endpoint = given.options.get("endpoint", "")
        self._protocol = given.bare.partition(":")[0]
        # Nothing is imported yet: that takes a second, and a store before this may have it all.
        needed = _PACKAGES.get(self._protocol, "fsspec")
        if importlib.util.find_spec("fsspec") is None or importlib.util.find_spec(needed) is None:
            raise ModuleNotFoundError(f"the Python package {needed} is not installed")
        if self._protocol not in _PACKAGES:
            from fsspec import available_protocols

            if self._protocol not in available_protocols():
                raise UsageError(
                    f"cache URL {self.url!r}: neither advisor nor fsspec knows {self._protocol!r}; "
                    "set --cache or ADVISOR_CACHE to a folder, e.g. dir:/data/advisor"
                )
        self._opened: tuple[tuple[int, float], Any, str] | None = None

    def reach(self) -> None:
        if not self._endpoint:
            return  # its own tools know where it is
        parts = urlsplit(self._endpoint)
        try:
            address = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
            socket.create_connection(address, timeout=self.patience_s).close()
        except (OSError, ValueError) as exc:
            raise StoreError(f"cache {self.url}: {getattr(exc, 'strerror', '') or exc}") from exc

    def load(self) -> None:
        from fsspec import get_filesystem_class

        try:
            get_filesystem_class(self._protocol)
        except (ImportError, ValueError) as exc:
            raise StoreError(f"cache {self.url}: {exc}") from exc

    def keys(self) -> list[str]:
        names = self.do(lambda fs, root: fs.ls(root, detail=False, refresh=True), absent=[])
        return keys_of(posixpath.basename(str(name)) for name in names)

    def get(self, key: str) -> bytes | None:
        found = self.do(
            lambda fs, root: fs.cat_file(_path(root, key), start=0, end=MAX_BYTES + 1), absent=None
        )
        return None if found is None else bytes(found)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes | RecordDamaged]:
        wanted = list(keys)
        if not wanted:
            return {}

        def fetch(fs: Any, root: str) -> dict[str, bytes]:
            paths = [_path(root, key) for key in wanted]
            parts = fs.cat_ranges(
                paths, [0] * len(paths), [MAX_BYTES + 1] * len(paths), on_error="return"
            )
            found = {}
            for key, part in zip(wanted, parts, strict=True):
                if isinstance(part, bytes | bytearray):
                    found[key] = bytes(part)
                elif not _is_absent(part):
                    raise part
            return found

        data: dict[str, bytes | RecordDamaged] = self.do(fetch, absent={})
        return data

    def put(self, key: str, data: bytes) -> None:
        self.do(lambda fs, root: self.write(fs, root, file_of(key), data))

    def write(self, fs: Any, folder: str, name: str, data: bytes) -> None:
        """Put a file into a folder of a file system, whole or not at all."""
        folder = folder.rstrip("/")
        if self._protocol in _WHOLE:
            fs.pipe_file(f"{folder}/{name}", data)
            return
        fs.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/.writing-{secrets.token_hex(8)}"
        fs.pipe_file(temporary, data)
        fs.mv(temporary, f"{folder}/{name}")

    def delete(self, key: str) -> bool:
        def remove(fs: Any, root: str) -> bool:
            if not fs.exists(_path(root, key)):
                return False
            fs.rm_file(_path(root, key))
            return True

        return bool(self.do(remove, absent=False))

    def check_writable(self) -> None:
        self.keys()  # no more can be known without writing

    def health(self) -> str:
        try:
            return "ok" if self.keys() else "empty"
        except StoreError as exc:
            return f"unusable: {exc}"

    def set_aside(self) -> Path:
        raise StoreError(f"cache {self.url}: a remote store is not moved aside; ask who runs it")

    @property
    def shelf(self) -> Shelf:
        return FileSystemShelf(self)

    def do(self, act: Any, **absent: Any) -> Any:
        """What act(file system, root) returns, `absent` where what it asks for is not there.

        Raises:
            StoreError: it cannot be had.
        """
        try:
            fs, root = self._file_system()
            return act(fs, root)
        except StoreError:
            raise
        except Exception as exc:  # each file system raises kinds of its own
            if absent and _is_absent(exc):
                return absent["absent"]
            reason = " ".join(str(exc).split())[:200] or type(exc).__name__
            raise StoreError(f"cache {self.url}: {reason}") from exc

    def _file_system(self) -> tuple[Any, str]:
        # Its loop is a thread, which a forked child does not have; patience may have grown.
        state = os.getpid(), self.patience_s
        if self._opened is None or self._opened[0] != state:
            options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
            if self._protocol in ("s3", "s3a"):
                options["config_kwargs"] = {
                    "connect_timeout": self.patience_s,
                    "read_timeout": self.patience_s,
                    "retries": {"max_attempts": 1},
                }
                if self._endpoint:
                    options["endpoint_url"] = self._endpoint
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(self._bare, **options)
            self._opened = state, fs, root
        return self._opened[1], self._opened[2]


class FileSystemShelf:
    """A folder beside the records of a store."""

    def __init__(self, store: FileSystemStore) -> None:
        self._store = store

    def sizes(self, start: str = "") -> dict[str, int]:
        def listed(fs: Any, root: str) -> dict[str, int]:
            files = fs.ls(_folder(root), detail=True, refresh=True)
            named = ((posixpath.basename(str(one["name"])), one["size"]) for one in files)
            return {name: int(size or 0) for name, size in named if is_plain(name, start)}

        found: dict[str, int] = self._store.do(listed, absent={})
        return found

    def get(self, name: str, most: int) -> bytes | None:
        plain(name)

        def fetch(fs: Any, root: str) -> Any:
            return fs.cat_file(f"{_folder(root)}/{name}", start=0, end=most + 1)

        found = self._store.do(fetch, absent=None)
        if found is not None and len(found) > most:
            raise too_large(name, most)
        return None if found is None else bytes(found)

    def put(self, name: str, data: bytes) -> None:
        plain(name)
        self._store.do(lambda fs, root: self._store.write(fs, _folder(root), name, data))

    def delete(self, name: str) -> bool:
        plain(name)

        def remove(fs: Any, root: str) -> bool:
            there = fs.exists(f"{_folder(root)}/{name}")
            if there:
                fs.rm_file(f"{_folder(root)}/{name}")
            return bool(there)

        return bool(self._store.do(remove, absent=False))


def _folder(root: str) -> str:
    return f"{root.rstrip('/')}/{ARTIFACTS}"


def _path(root: str, key: str) -> str:
    return f"{root.rstrip('/')}/{file_of(key)}"


def _is_absent(exc: object) -> bool:
    return isinstance(exc, FileNotFoundError) or getattr(exc, "errno", None) == errno.ENOENT


def _proof(store: FileSystemStore) -> Remote:
    return store
