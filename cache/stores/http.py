"""A server of the team's, started by `advisor serve`: asked by what is looked for, in one request.

The key of a record holds the digest of its bytes, so what came once is never asked for again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from advisor.cache.name import PREFIX
from advisor.cache.stores.http_client import BYTES, JSON, Answer, HttpClient
from advisor.cache.stores.store import (
    BLOBS,
    MAX_BYTES,
    Narrowing,
    Remote,
    blob_key,
    bounded,
    is_blob,
)
from advisor.cache.stores.timeout import check_deadline
from advisor.errors import RecordDamaged, StoreError

T = TypeVar("T")
P = TypeVar("P", bound="_Keys | _Sizes")

PATIENCE_S = 0.25
"""What a server may cost `apply`, unless its URL says ?timeout=: TLS alone is three round trips."""
_REFUSAL = 2**12
"""Bytes that a refusal may have."""
MOST = 64
"""Records asked for in one request."""
_KEY = re.compile(rf"{PREFIX}[0-9a-fs./]{{1,200}}")


class _Keys(msgspec.Struct):
    keys: list[str]
    more: bool = False

    @property
    def names(self) -> Collection[str]:
        return self.keys


class _Sizes(msgspec.Struct):
    sizes: dict[str, int]
    more: bool = False

    @property
    def names(self) -> Collection[str]:
        return self.sizes


class _Rights(msgspec.Struct):
    writes: bool


class _Items(msgspec.Struct):
    items: list[tuple[str, bytes | None]]


# Made here, because a class must not be described by two threads at once; see `codec`.
_KEYS, _SIZES = msgspec.json.Decoder(_Keys), msgspec.json.Decoder(_Sizes)
_RIGHTS, _ITEMS = msgspec.json.Decoder(_Rights), msgspec.msgpack.Decoder(_Items)


class HttpStore(Remote):
    """A URL as `HttpClient` takes it."""

    def __init__(self, url: str, *, token: str = "") -> None:
        self.client = HttpClient(url, token=token)
        super().__init__(self.client.given, PATIENCE_S)
        self.address = self.client.address
        self._came: dict[str, bytes] = {}

    def load(self) -> None:
        self.client.load()

    def narrowed(self, question: Mapping[str, Any]) -> list[str]:
        asked = urlencode(
            {k: json.dumps(v) if k == "wanted" else v for k, v in question.items()}, doseq=True
        )
        pairs = self._items(self._request("GET", f"/api/lookup?{asked}").data)
        self._came = {key: data for key, data in pairs if data}
        return [key for key, _data in pairs]

    def keys(self) -> list[str]:
        return [
            self._checked(key) for page in self._pages(_KEYS, "/api/records") for key in page.keys
        ]

    def sizes(self, start: str = BLOBS) -> dict[str, int]:
        found: dict[str, int] = {}
        for page in self._pages(_SIZES, "/api/artifacts", start=start.removeprefix(BLOBS)):
            if not all(blob_key(name, BLOBS) for name in page.sizes):
                raise self.client.foreign("it names artifacts that are none")
            found |= page.sizes
        return {key: size for name, size in found.items() if (key := blob_key(name, start))}

    def get_many(
        self, keys: Iterable[str], most: int = MAX_BYTES
    ) -> dict[str, bytes | RecordDamaged]:
        found: dict[str, bytes | RecordDamaged] = {}
        asked = []
        for key in keys:
            if is_blob(key):
                answer = self._request("GET", f"/api/{key}", accepts=(404,), most=most + _REFUSAL)
                if answer.status != 404:
                    found[key] = bounded(key, answer.data, most)
            elif key in self._came:
                found[key] = self._came[key]
            elif _KEY.fullmatch(key):
                asked.append(key)
        while asked:
            check_deadline()
            body = json.dumps({"keys": asked[:MOST]}).encode()
            answer = self._request("POST", "/api/records", body=body, kind=JSON)
            said = dict(self._items(answer.data))
            if not said.keys() & {*asked[:MOST]}:
                raise self.client.foreign("it answers to something else")
            found |= {key: data for key, data in said.items() if data and key in asked}
            asked = [key for key in asked if key not in said]
        return found

    def put(self, key: str, data: bytes) -> None:
        self._request("PUT", self._place(key), body=data, kind=BYTES)

    def delete(self, key: str) -> bool:
        if not is_blob(key) and not _KEY.fullmatch(key):
            return False
        self._came = {}
        return self._request("DELETE", self._place(key), accepts=(404,)).status != 404

    def check_writable(self) -> None:
        if not self._get(_RIGHTS, "/api/self").writes:
            raise StoreError(f"cache {self.url}: this token may read and not write")

    def _request(self, method: str, path: str, **how: Any) -> Answer:
        return self.client.request(method, path, patience_s=self.patience_s, **how)

    def _get(self, decoder: msgspec.json.Decoder[T], path: str) -> T:
        return self.client.decoded(self._request("GET", path).data, decoder)

    def _pages(self, decoder: msgspec.json.Decoder[P], path: str, **query: str) -> Iterator[P]:
        """The pages of a sorted list."""
        after, more = "", True
        while more:
            check_deadline()
            page = self._get(decoder, f"{path}?{urlencode({'after': after, **query})}")
            if any(name <= after for name in page.names):
                raise self.client.foreign("its pages go round in a circle")
            yield page
            after, more = max(page.names, default=""), page.more and bool(page.names)

    @staticmethod
    def _place(key: str) -> str:
        return f"/api/{key}" if is_blob(key) else f"/api/records/{quote(key)}"

    def _items(self, data: bytes) -> list[tuple[str, bytes]]:
        """Keys with their bytes; b'' for one that is gone, or comes in a later answer."""
        items = self.client.decoded(data, _ITEMS).items
        return [(self._checked(key), found or b"") for key, found in items]

    def _checked(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise self.client.foreign(f"it names a record {key[:60]!r}")
        return key


def _fits(store: HttpStore) -> Narrowing:
    return store
