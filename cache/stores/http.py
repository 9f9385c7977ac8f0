"""A server of the team's, started by `advisor serve`: asked by what is looked for, in one request.

The key of a record holds the digest of its bytes, so what came once is never asked for again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import msgpack

from advisor.cache.codec import MAX_BYTES
from advisor.cache.name import MARKS, PREFIX
from advisor.cache.stores import by_many
from advisor.cache.stores.link import BYTES, JSON, Link
from advisor.cache.stores.patience import go_on
from advisor.cache.stores.shelf import ARTIFACTS, is_plain, plain, too_large
from advisor.errors import RecordDamaged, StoreError

if TYPE_CHECKING:
    from advisor.cache.stores import Narrowing, Shelf

_ARTIFACTS = f"/api/{ARTIFACTS}"
_REFUSAL = 2**12
"""Bytes that a refusal may have."""
MOST = 64
"""Records asked for in one request."""
_KEY = re.compile(rf"(?:{PREFIX}|{MARKS})[0-9a-fs./]{{1,200}}")


class HttpStore(Link):
    """http[s]://HOST[:PORT][/PATH][?timeout=250ms&insecure=1], as `Link` takes it."""

    studies: Path | None = None

    def __init__(self, url: str, *, token: str = "") -> None:
        super().__init__(url, token=token)
        self._came: dict[str, bytes] = {}
        self._looks: dict[str, tuple[str, list[str]]] = {}

    def narrowed(self, question: Mapping[str, Any]) -> list[str]:
        asked = urlencode(
            {k: json.dumps(v) if k == "wanted" else v for k, v in question.items()}, doseq=True
        )
        etag, keys = self._looks.get(asked, ("", []))
        headers = {"If-None-Match": etag} if etag else {}
        status, headers, data = self.ask("GET", f"/api/lookup?{asked}", headers=headers)
        if status == 304:
            return keys
        items = self._unpacked(data).get("items")
        if not isinstance(items, list):
            raise self.foreign("no items in its answer")
        pairs = [self._item(one) for one in items]
        self._came = {key: data for key, data in pairs if data}
        keys = [key for key, _data in pairs]
        self._looks = {asked: (headers.get("etag", ""), keys)}
        return keys

    def keys(self) -> list[str]:
        found: list[str] = []
        while True:
            go_on()
            after = found[-1] if found else ""
            _status, _headers, data = self.ask("GET", f"/api/records?after={quote(after, '')}")
            answer = self.read_json(data)
            keys = answer.get("keys")
            if not isinstance(keys, list):
                raise self.foreign("no keys in its answer")
            page = [self._key(key) for key in keys]
            if page and page[0] <= after:
                raise self.foreign("its pages go round in a circle")
            found += page
            if not answer.get("more") or not page:
                return found

    def get(self, key: str) -> bytes | None:
        return by_many(self.get_many, key)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes | RecordDamaged]:
        wanted = [key for key in keys if _KEY.fullmatch(key)]
        came = self._came
        found: dict[str, bytes | RecordDamaged] = {k: came[k] for k in wanted if k in came}
        asked = [key for key in wanted if key not in found]
        while asked:
            go_on()
            body = json.dumps({"keys": asked[:MOST]}).encode()
            _status, _headers, data = self.ask("POST", "/api/records", body=body, kind=JSON)
            items = self._unpacked(data).get("items")
            if not isinstance(items, list):
                raise self.foreign("no items in its answer")
            said = dict(self._item(one) for one in items)
            if not said.keys() & {*asked[:MOST]}:
                raise self.foreign("it answers to something else")
            found |= {key: data for key, data in said.items() if data and key in asked}
            asked = [key for key in asked if key not in said]
        return found

    def put(self, key: str, data: bytes) -> None:
        self.ask("PUT", f"/api/records/{quote(key)}", body=data, kind=BYTES)

    def delete(self, key: str) -> bool:
        if not _KEY.fullmatch(key):
            return False
        path = f"/api/records/{quote(key)}"
        status, _headers, _data = self.ask("DELETE", path, accepts=(404,))
        self._came, self._looks = {}, {}
        return status != 404

    @property
    def shelf(self) -> Shelf:
        return HttpShelf(self)

    def check_writable(self) -> None:
        if not self._self()["writes"]:
            raise StoreError(f"cache {self.url}: this token may read and not write")

    def health(self) -> str:
        try:
            said = self._self()
        except StoreError as exc:
            return f"unusable: {exc}"
        if not said["records"]:
            return "empty"
        return "ok" if said["writes"] else "ok, read-only"

    def set_aside(self) -> Path:
        raise StoreError(f"cache {self.url}: a remote store is not moved aside; ask who runs it")

    def _self(self) -> dict[str, Any]:
        found = self.read_json(self.ask("GET", "/api/self")[2])
        if not {"writes", "records"} <= found.keys():
            raise self.foreign("it does not say what the token may do")
        return found

    def _unpacked(self, data: bytes) -> dict[str, Any]:
        try:
            found = msgpack.unpackb(
                data,
                raw=False,
                strict_map_key=True,
                max_str_len=2**10,
                max_bin_len=MAX_BYTES,
                max_array_len=2**16,
                max_map_len=2**4,
                max_ext_len=0,
            )
        except Exception as exc:  # msgpack raises more kinds than it documents
            raise self.foreign("its answer is no msgpack") from exc
        if not isinstance(found, dict):
            raise self.foreign("its answer is no map")
        return found

    def _key(self, value: object) -> str:
        if not isinstance(value, str) or not _KEY.fullmatch(value):
            raise self.foreign(f"it names a record {str(value)[:60]!r}")
        return value

    def _item(self, value: object) -> tuple[str, bytes]:
        """A key and its bytes; none where it is gone, or did not come along."""
        if isinstance(value, list) and len(value) == 2:
            key, data = value
            if data is None or isinstance(data, bytes):
                return self._key(key), data or b""
        raise self.foreign("its items are no records")


class HttpShelf:
    """What a server keeps beside its records."""

    def __init__(self, store: HttpStore) -> None:
        self._store = store

    def sizes(self, start: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        while True:
            after = max(found, default="")
            asked = urlencode({"after": after, "start": start} if start else {"after": after})
            status, _headers, data = self._store.ask("GET", f"{_ARTIFACTS}?{asked}", accepts=(404,))
            if status == 404:  # a server from before there were any
                return found
            answer = self._store.read_json(data)
            page = answer.get("sizes")
            if not isinstance(page, dict) or not all(type(n) is int for n in page.values()):
                raise self._store.foreign("no sizes in its answer")
            if any(not is_plain(name) or name <= after for name in page):
                raise self._store.foreign("it names artifacts that are none")
            found |= page
            if not answer.get("more") or not page:
                # One from before it could be asked so says all.
                return {name: n for name, n in found.items() if name.startswith(start)}

    def get(self, name: str, most: int) -> bytes | None:
        status, _headers, data = self._store.ask(
            "GET", f"{_ARTIFACTS}/{plain(name)}", accepts=(404,), most=most + _REFUSAL
        )
        if status == 404:
            return None
        if len(data) > most:
            raise too_large(name, most)
        return data

    def put(self, name: str, data: bytes) -> None:
        self._store.ask("PUT", f"{_ARTIFACTS}/{plain(name)}", body=data, kind=BYTES)

    def delete(self, name: str) -> bool:
        path = f"{_ARTIFACTS}/{plain(name)}"
        status, _headers, _data = self._store.ask("DELETE", path, accepts=(404,))
        return status != 404


def _proof(store: HttpStore) -> Narrowing:
    return store
