"""Any file system of fsspec: S3, Google Cloud Storage, Azure and others; one file per record."""

from __future__ import annotations

import errno
import importlib.util
import os
import posixpath
import secrets
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from advisor.cache.stores.dir import file_of, keys_of
from advisor.cache.stores.store import BLOBS, MAX_BYTES, Remote, blob_key, bounded
from advisor.cache.stores.url import PATIENCE_S, RemoteUrl
from advisor.errors import RecordDamaged, StoreError, UsageError

T = TypeVar("T")

_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"}
"""Protocols whose writes are atomic."""
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


class FilesStore(Remote):
    """s3://BUCKET/PREFIX, gs://, az://, ...[?timeout=500ms&endpoint=https://HOST].

    Files are called as in `DirStore`. Credentials are those of the file system's own tools;
    `endpoint` is for S3 servers other than Amazon's.
    """

    def __init__(self, url: str) -> None:
        given = RemoteUrl.parse(url, _OWN)
        super().__init__(given, PATIENCE_S)
        self._bare = given.bare
        self._endpoint = given.options.get("endpoint", "")
        if self._endpoint:
            self.address = _address(self._endpoint, self.url)
        self._protocol = given.bare.partition(":")[0]
        # Nothing is imported yet: that takes a second, and an earlier store may have the record.
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

    def load(self) -> None:
        from fsspec import get_filesystem_class

        try:
            get_filesystem_class(self._protocol)
        except (ImportError, ValueError) as exc:
            raise StoreError(f"cache {self.url}: {exc}") from exc

    def keys(self) -> list[str]:
        names: list[Any] = self._do(
            lambda fs, root: fs.ls(root, detail=False, refresh=True), absent=[]
        )
        return keys_of(posixpath.basename(str(name)) for name in names)

    def sizes(self, start: str = BLOBS) -> dict[str, int]:
        def listed(fs: Any, root: str) -> list[Any]:
            found: list[Any] = fs.ls(f"{root}/{BLOBS}".rstrip("/"), detail=True, refresh=True)
            return found

        files: list[Any] = self._do(listed, absent=[])
        named = ((posixpath.basename(str(one["name"])), int(one["size"] or 0)) for one in files)
        return {key: size for name, size in named if (key := blob_key(name, start))}

    def get(self, key: str, most: int = MAX_BYTES) -> bytes | None:
        name = file_of(key)
        found = self._do(
            lambda fs, root: fs.cat_file(f"{root}/{name}", start=0, end=most + 1), absent=None
        )
        return None if found is None else bounded(key, bytes(found), most)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes | RecordDamaged]:
        names = {key: file_of(key) for key in keys}
        if not names:
            return {}

        def fetch(fs: Any, root: str) -> dict[str, bytes | RecordDamaged]:
            paths = [f"{root}/{name}" for name in names.values()]
            parts = fs.cat_ranges(
                paths, [0] * len(paths), [MAX_BYTES + 1] * len(paths), on_error="return"
            )
            found: dict[str, bytes | RecordDamaged] = {}
            for key, part in zip(names, parts, strict=True):
                if isinstance(part, bytes | bytearray):
                    found[key] = bytes(part)
                elif not _is_absent(part):
                    raise part
            return found

        return self._do(fetch, absent={})

    def put(self, key: str, data: bytes) -> None:
        name = file_of(key)

        def write(fs: Any, root: str) -> None:
            path = f"{root}/{name}"
            if self._protocol in _WHOLE:
                fs.pipe_file(path, data)
                return
            folder = posixpath.dirname(path)
            fs.makedirs(folder, exist_ok=True)
            temporary = f"{folder}/.writing-{secrets.token_hex(8)}"
            fs.pipe_file(temporary, data)
            fs.mv(temporary, path)

        self._do(write)

    def delete(self, key: str) -> bool:
        name = file_of(key)

        def remove(fs: Any, root: str) -> bool:
            there = bool(fs.exists(f"{root}/{name}"))
            if there:
                fs.rm_file(f"{root}/{name}")
            return there

        return self._do(remove, absent=False)

    def check_writable(self) -> None:
        self.keys()  # only a write could tell more

    def _do(self, act: Callable[[Any, str], T], **absent: T) -> T:
        """What act(file system, root) returns; `absent` if it asks for a missing file.

        Raises:
            StoreError: it fails.
        """
        try:
            fs, root = self._file_system()
            return act(fs, root)
        except Exception as exc:  # each file system raises kinds of its own
            if absent and _is_absent(exc):
                return absent["absent"]
            reason = " ".join(str(exc).split())[:200] or type(exc).__name__
            raise StoreError(f"cache {self.url}: {reason}") from exc

    def _file_system(self) -> tuple[Any, str]:
        # A forked child has no copy of its event loop's thread; patience may have grown.
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
            self._opened = state, fs, root.rstrip("/")
        return self._opened[1], self._opened[2]


def _address(endpoint: str, url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(endpoint)
        return parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError as exc:
        raise UsageError(f"cache URL {url!r}: endpoint: expected https://HOST[:PORT]") from exc


def _is_absent(exc: object) -> bool:
    return isinstance(exc, FileNotFoundError) or getattr(exc, "errno", None) == errno.ENOENT
