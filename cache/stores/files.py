"""Any file system of fsspec: S3, Google Cloud Storage, Azure and others; one file per record."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import secrets
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from advisor.cache.stores.dir import file_of, keys_of
from advisor.cache.stores.filesystem import WRITING
from advisor.cache.stores.store import BLOBS, MAX_BYTES, ByKey, Remote, blob_key, bounded
from advisor.cache.stores.url import RemoteUrl
from advisor.errors import StoreError, UsageError

_S3 = {"s3", "s3a"}
_KNOWN = {*_S3, "gs", "gcs", "az", "abfs", "abfss"}
_ATOMIC = {*_KNOWN, "adl", "oci", "oss", "memory"}  # protocols whose writes are atomic


class FilesStore(Remote):
    """s3://BUCKET/PREFIX, gs://, az://, ...[?timeout=500ms&endpoint=https://HOST].

    Files are named as in `DirStore`. Credentials are those of the file system's own tools;
    `endpoint` is for S3 servers other than Amazon's.
    """

    def __init__(self, url: str) -> None:
        given = RemoteUrl(url, "timeout", "endpoint")
        super().__init__(given)
        self._bare = given.bare
        self._endpoint = given.options.get("endpoint", "")
        with contextlib.suppress(ValueError):  # the client reports a malformed endpoint
            parts = urlsplit(self._endpoint)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            self.address = (parts.hostname, port) if parts.hostname else None
        self._protocol = given.bare.partition(":")[0]
        self._opened: tuple[int, Any, str] | None = None
        if self._protocol not in _KNOWN:
            from fsspec import available_protocols

            if self._protocol not in available_protocols():
                raise UsageError(
                    f"cache URL {self.url!r}: neither advisor nor fsspec knows {self._protocol!r}; "
                    "set --cache or ADVISOR_CACHE to a folder, e.g. dir:/data/advisor"
                )

    def load(self) -> None:
        from fsspec import get_filesystem_class

        try:
            get_filesystem_class(self._protocol)
        except (ImportError, ValueError) as exc:
            raise StoreError(f"cache {self.url}: {exc}") from exc

    def keys(self) -> list[str]:
        return keys_of(self._listed(""))

    def sizes(self, prefix: str = BLOBS) -> dict[str, int]:
        sizes = self._listed(BLOBS)
        return {key: size for name, size in sizes.items() if (key := blob_key(name, prefix))}

    def get_many(self, keys: Iterable[str], most: int = MAX_BYTES) -> ByKey:
        names = {key: file_of(key) for key in keys}
        if not names:
            return {}
        with self._file_system() as (fs, root):
            paths = [f"{root}/{name}" for name in names.values()]
            starts, ends = [0] * len(paths), [most + 1] * len(paths)
            found = fs.cat_ranges(paths, starts, ends, on_error="return")
            parts = [(k, one) for k, one in zip(names, found, strict=True) if not _absent(one)]
            for _key, part in parts:
                if isinstance(part, Exception):
                    raise part
        return {key: bounded(key, bytes(part), most) for key, part in parts}

    def put(self, key: str, data: bytes) -> None:
        name = file_of(key)
        with self._file_system() as (fs, root):
            path = f"{root}/{name}"
            if self._protocol in _ATOMIC:
                fs.pipe_file(path, data)
                return
            folder = posixpath.dirname(path)
            fs.makedirs(folder, exist_ok=True)
            temporary = f"{folder}/{WRITING}{secrets.token_hex(8)}"
            fs.pipe_file(temporary, data)
            fs.mv(temporary, path)

    def delete(self, key: str) -> bool:
        name = file_of(key)
        with self._file_system() as (fs, root):
            if there := bool(fs.exists(f"{root}/{name}")):
                fs.rm_file(f"{root}/{name}")
            return there

    def check_writable(self) -> None:
        self.keys()  # only a write could show more

    def _listed(self, folder: str) -> dict[str, int]:
        """The names of the files in a folder below the root, with their sizes."""
        with self._file_system() as (fs, root):
            try:
                found = fs.ls(f"{root}/{folder}".rstrip("/"), detail=True, refresh=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            return {posixpath.basename(str(one["name"])): int(one["size"] or 0) for one in found}

    @contextlib.contextmanager
    def _file_system(self) -> Iterator[tuple[Any, str]]:
        """Context manager: yields the file system and the root. Errors inside become StoreError."""
        try:
            # A forked child has no copy of the event loop's thread.
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = os.getpid(), *self._connected()
            yield self._opened[1:]
        except Exception as exc:  # each file system raises its own types
            reason = " ".join(str(exc).split())[:200] or type(exc).__name__
            raise StoreError(f"cache {self.url}: {reason}") from exc

    def _connected(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self._protocol in _S3:
            options["config_kwargs"] = {
                "connect_timeout": self.timeout_s,
                "read_timeout": self.timeout_s,
                "retries": {"max_attempts": 1},
            }
            options["endpoint_url"] = self._endpoint or None
        fs, root = url_to_fs(self._bare, **options)
        return fs, root.rstrip("/")


def _absent(part: object) -> bool:
    return isinstance(part, FileNotFoundError) or getattr(part, "errno", None) == errno.ENOENT
