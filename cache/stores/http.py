"""The team's server, which `advisor serve` starts, as a store. A lookup is a single request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from advisor.cache.name import PREFIX
from advisor.cache.stores.http_client import MAP, HttpClient
from advisor.cache.stores.store import BLOBS, MAX_BYTES, ByKey, Remote, blob_key, bounded, is_blob
from advisor.cache.stores.timeout import check_deadline
from advisor.errors import StoreError

HTTP_TIMEOUT_S = 0.25  # for `apply`, unless the URL says ?timeout=; TLS takes 3 round trips
_REFUSAL = 2**12  # most bytes of a refusal
RECORDS_AT_ONCE = 64  # records asked for in one request
_KEY = re.compile(rf"{PREFIX}[0-9a-fs./]{{1,200}}")


class _Page(msgspec.Struct):
    """A page of a sorted list: the keys of records, or the sizes of artifacts by name."""

    more: bool
    keys: list[str] = []
    sizes: dict[str, int] = {}


class _Items(msgspec.Struct):
    items: list[tuple[str, bytes | None]]


# Made here, because a class must not be described by two threads at once; see `codec`.
_PAGE = msgspec.json.Decoder(_Page)
_ITEMS = msgspec.msgpack.Decoder(_Items)


class HttpStore(Remote):
    """A URL as `HttpClient` takes it."""

    searches = True

    def __init__(self, url: str, *, token: str = "") -> None:
        self.client = HttpClient(url, token=token)
        super().__init__(self.client.given, HTTP_TIMEOUT_S)
        self._prefetched: dict[str, bytes] = {}

    def search(self, question: Mapping[str, Any]) -> list[str]:
        asked = urlencode(
            {k: json.dumps(v) if k == "wanted" else v for k, v in question.items()}, doseq=True
        )
        pairs = self._items("GET", f"/api/lookup?{asked}")
        self._prefetched = {key: data for key, data in pairs if data}
        return [key for key, _data in pairs]

    def keys(self) -> list[str]:
        return [self._checked(key) for page in self._pages("/api/records") for key in page.keys]

    def sizes(self, prefix: str = BLOBS) -> dict[str, int]:
        found: dict[str, int] = {}
        for page in self._pages("/api/artifacts", start=prefix.removeprefix(BLOBS)):
            if not all(blob_key(name, BLOBS) for name in page.sizes):
                raise self.client.unexpected("it lists malformed names of artifacts")
            found |= page.sizes
        return {key: size for name, size in found.items() if (key := blob_key(name, prefix))}

    def get_many(self, keys: Iterable[str], most: int = MAX_BYTES) -> ByKey:
        found: ByKey = {}
        asked = []
        for key in keys:
            if is_blob(key):
                status, data = self._ask("GET", f"/api/{key}", accepts=(404,), most=most + _REFUSAL)
                if status != 404:
                    found[key] = bounded(key, data, most)
            elif key in self._prefetched:
                found[key] = self._prefetched[key]
            elif _KEY.fullmatch(key):
                asked.append(key)
        while asked:
            check_deadline()
            said = dict(self._items("POST", "/api/records", body={"keys": asked[:RECORDS_AT_ONCE]}))
            if not said.keys() & {*asked[:RECORDS_AT_ONCE]}:
                raise self.client.unexpected("it answers another question")
            found |= {key: data for key, data in said.items() if data and key in asked}
            asked = [key for key in asked if key not in said]
        return found

    def put(self, key: str, data: bytes) -> None:
        self._ask("PUT", _path(key), body=data)

    def delete(self, key: str) -> bool:
        if not is_blob(key) and not _KEY.fullmatch(key):
            return False
        self._prefetched = {}
        return self._ask("DELETE", _path(key), accepts=(404,))[0] != 404

    def check_writable(self) -> None:
        said = self.client.decoded(self._ask("GET", "/api/self")[1], MAP)
        if said.get("writes") is not True:
            raise StoreError(f"cache {self.url}: this token may read, but not write")

    def _ask(self, method: str, path: str, **how: Any) -> tuple[int, bytes]:
        return self.client.request(method, path, timeout_s=self.timeout_s, **how)

    def _pages(self, path: str, **query: str) -> Iterator[_Page]:
        after, more = "", True
        while more:
            check_deadline()
            asked = f"{path}?{urlencode({'after': after, **query})}"
            page = self.client.decoded(self._ask("GET", asked)[1], _PAGE)
            names = [*page.keys, *page.sizes]
            if any(name <= after for name in names):
                raise self.client.unexpected("its list repeats earlier names and never ends")
            yield page
            after, more = max(names, default=""), page.more and bool(names)

    def _items(self, method: str, path: str, **how: Any) -> list[tuple[str, bytes]]:
        """Keys with their bytes; b'' for a key that is gone, or comes in a later answer."""
        items = self.client.decoded(self._ask(method, path, **how)[1], _ITEMS).items
        return [(self._checked(key), found or b"") for key, found in items]

    def _checked(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise self.client.unexpected(f"it names a record {key[:60]!r}")
        return key


def _path(key: str) -> str:
    return f"/api/{key}" if is_blob(key) else f"/api/records/{quote(key)}"
