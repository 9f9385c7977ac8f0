"""Stores of records, and how URLs become stores."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from advisor.cache.settings import Cache, cache_urls
from advisor.cache.stores.filesystem import absolute_path, network, not_a_link
from advisor.cache.stores.store import BLOBS as BLOBS
from advisor.cache.stores.store import ByteStore as ByteStore
from advisor.cache.stores.store import Remote as Remote
from advisor.cache.stores.url import without_password
from advisor.errors import UsageError, reason

SCHEMES: dict[str, tuple[str, str, str]] = {
    "disk": ("disk:DiskStore", "", ""),
    "dir": ("dir:DirStore", "", ""),
    "pack": ("disk:PackStore", "", ""),
    "redis": ("redis:RedisStore", "redis", "redis"),
    "rediss": ("redis:RedisStore", "redis", "redis"),
    "http": ("http:HttpStore", "", ""),
    "https": ("http:HttpStore", "", ""),
    "s3": ("files:FilesStore", "s3fs", "s3"),
    "gs": ("files:FilesStore", "gcsfs", "gcs"),
    "az": ("files:FilesStore", "adlfs", "azure"),
    "abfs": ("files:FilesStore", "adlfs", "azure"),
}
"""Scheme → the module and class, called with the place if it is local, else with the whole URL;
the package that it needs; and the extra of advisor that installs that."""
_OTHER = ("files:FilesStore", "fsspec", "")  # for any other scheme with '//'
_LOCAL = ("disk", "dir", "pack")
_SET = "set ADVISOR_CACHE to a folder, e.g. dir:/data/advisor"


def open_stores(cache: Cache = None, *, fallback: bool = False) -> tuple[ByteStore, ...]:
    """The stores to look into, in order; `cache` as in `settings.cache_urls`. If it names none, the
    user's cache folder. With `fallback`, this folder also follows if all stores are remote."""
    stores = tuple(open_store(url) for url in cache_urls(cache))
    if not stores:
        return (open_store(_user_folder()),)
    if fallback and all(isinstance(store, Remote) for store in stores):
        with contextlib.suppress(UsageError):  # a user without a home has only the stores named
            stores = (*stores, open_store(_user_folder()))
    return stores


def open_store(url: str) -> ByteStore:
    """The store at one URL such as 'dir:/some/folder'. Nothing is touched yet. Raises UsageError if
    the scheme is unknown, or what it needs is not installed.

    A bare path is a `disk` store, or `dir` on a network file system or where such files lie.
    """
    found = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]+):(.*)", url, re.DOTALL)
    scheme, place = (found[1].lower(), found[2]) if found else ("", url)
    wrong = f"cache URL {without_password(url)!r}"
    if scheme == "memory":
        raise UsageError(f"{wrong}: a store in memory ends with its process; {_SET}")
    local = scheme in ("", *_LOCAL)
    if not (place if local else place.strip("/")) or "\0" in place:
        e_g = "dir:/data/advisor" if local or scheme not in SCHEMES else f"{scheme}://host/place"
        raise UsageError(f"{wrong}: names no place, expected e.g. {e_g}")
    if local:
        place = re.sub(r"^//(?=/)", "", place)
        scheme = scheme or _kind_of(absolute_path(place))
    elif place.startswith("//"):
        place = type(url)(scheme + url[len(scheme) :])  # a project's URL stays one
    elif scheme in SCHEMES:
        raise UsageError(f"{wrong}: expected {scheme}://...")
    else:
        known = ", ".join(f"{name}:" for name in SCHEMES)
        raise UsageError(
            f"{wrong}: unknown scheme {scheme!r}, expected {known} or another of fsspec's; {_SET}"
        )
    where, needed, extra = SCHEMES.get(scheme, _OTHER)
    # Not imported yet: that may take a second, and an earlier store may have the record.
    if needed and importlib.util.find_spec(needed) is None:
        remedy = f"; run: pip install 'torch-advisor[{extra}]'" if extra else ""
        raise UsageError(f"{wrong}: the Python package {needed} is not installed{remedy}")
    module, _, name = where.partition(":")
    return cast(ByteStore, getattr(importlib.import_module(f"{__name__}.{module}"), name)(place))


def _kind_of(path: Path) -> str:
    """'disk' or 'dir', for a bare path."""
    if os.path.isdir(path / "records"):  # noqa: PTH112 # Path's raises, e.g. for a long name
        return "disk"
    with contextlib.suppress(OSError):
        return "dir" if network(path) or any(path.glob("record-*.msgpack")) else "disk"
    return "disk"


def store_note(store: ByteStore) -> str:
    """A note for people on the file system of a store, or ''."""
    kind = network(store.studies) if store.studies is not None else ""
    if kind and store.url.startswith("disk:"):
        return f"on {kind}, where SQLite corrupts: use dir:{store.url.partition(':')[2]}"
    return f"on {kind}" if kind else ""


def _user_folder() -> str:
    """The user's cache folder. Raises UsageError if the user has none."""
    import platformdirs

    try:
        folder = platformdirs.user_cache_dir("advisor", appauthor=False)
    except (OSError, RuntimeError, KeyError, ValueError) as exc:
        raise UsageError(f"you have no cache folder ({reason(exc)}); {_SET}") from exc
    if not os.path.isabs(folder):  # noqa: PTH117 # '~' of a user whom the system does not know
        raise UsageError(f"you have no cache folder, because you have no home; {_SET}")
    return folder


def studies_of(stores: Sequence[ByteStore]) -> Path:
    """The studies folder of the first store that has one, else one in the user's cache folder.
    Raises UsageError if the user has none, StoreError if the folder is a link."""
    folders = (store.studies for store in stores)
    return not_a_link(next(filter(None, folders), None) or Path(_user_folder()) / "studies")
