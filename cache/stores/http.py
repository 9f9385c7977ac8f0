"""A server of the team's, started by `advisor serve`: asked by what is looked for, in one request.

The key of a record holds the digest of its bytes, so what came once is never asked for again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import time
import weakref
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

import msgpack

from advisor.cache.codec import MAX_BYTES
from advisor.cache.name import MARKS, PREFIX
from advisor.cache.seal import own_folder
from advisor.cache.stores import by_many
from advisor.cache.stores.filesystem import open_regular
from advisor.cache.stores.patience import go_on, left
from advisor.cache.stores.url import RemoteUrl
from advisor.errors import RecordDamaged, StoreError, UsageError

if TYPE_CHECKING:
    from http.client import HTTPConnection

    from advisor.cache.stores import Narrowing

PATIENCE_S = 0.25
"""What a server may cost `apply`, unless its URL says ?timeout=: TLS alone is three round trips."""
MOST = 64
"""Records asked for in one request."""
MOST_ANSWER = 36 * 2**20
"""Bytes of one answer, unpacked."""
MSGPACK, JSON, BYTES = "application/vnd.msgpack", "application/json", "application/octet-stream"
_OWN = ("timeout", "insecure")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MOST_IDLE = 4
_MOST_WAITS = 8
"""Times that one request is made again where the server asks for that."""
_KEY = re.compile(rf"(?:{PREFIX}|{MARKS})[0-9a-fs./]{{1,200}}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{8,512}")
_LISTED = re.compile(r"(https?://\S+)\s+(\S+)")


class HttpStore:
    """http[s]://HOST[:PORT][/PATH][?timeout=250ms&insecure=1].

    The token is $ADVISOR_TOKEN's, else the one that a line 'https://HOST TOKEN' has in the file
    $ADVISOR_TOKEN_FILE, or in $XDG_DATA_HOME/advisor/tokens. It goes to no other machine in the
    clear, unless the URL says insecure=1. $SSL_CERT_FILE names another list of authorities.
    """

    studies: Path | None = None

    def __init__(self, url: str) -> None:
        given = RemoteUrl.parse(url, _OWN)
        self.url = given.shown
        self.patience_s = given.seconds("timeout", PATIENCE_S)
        parts = urlsplit(given.bare)
        self._tls = parts.scheme == "https"
        self._address = given.address(443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        if parts.query or "@" in parts.netloc:
            raise UsageError(
                f"cache URL {self.url!r}: expected {parts.scheme}://HOST[:PORT][/PATH], with the "
                "options timeout and insecure alone; the token goes into ADVISOR_TOKEN"
            )
        if not (self._tls or self._address[0] in _LOOPBACK or "insecure" in given.options):
            raise UsageError(
                f"cache URL {self.url!r}: would send the token in the clear; use https://, or add "
                "?insecure=1 in a network that nobody else reads"
            )
        # Without a lock, which a forked child could find held for ever.
        self._idle: list[tuple[int, HTTPConnection]] = []
        weakref.finalize(self, _close, self._idle)
        self._came: dict[str, bytes] = {}
        self._looks: dict[str, tuple[str, list[str]]] = {}

    def reach(self) -> None:
        try:
            socket.create_connection(self._address, timeout=self.patience_s).close()
        except OSError as exc:
            raise StoreError(f"cache {self.url}: {exc.strerror or exc}") from exc

    def load(self) -> None:
        import http.client  # noqa: F401 # only to have it in memory

        if self._tls:
            import ssl  # noqa: F401

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
            raise self._foreign("no items in its answer")
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
            answer = self._json(data)
            keys = answer.get("keys")
            if not isinstance(keys, list):
                raise self._foreign("no keys in its answer")
            page = [self._key(key) for key in keys]
            if page and page[0] <= after:
                raise self._foreign("its pages go round in a circle")
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
                raise self._foreign("no items in its answer")
            said = dict(self._item(one) for one in items)
            if not said.keys() & {*asked[:MOST]}:
                raise self._foreign("it answers to something else")
            found |= {key: data for key, data in said.items() if data and key in asked}
            asked = [key for key in asked if key not in said]
        return found

    def put(self, key: str, data: bytes) -> None:
        self.ask("PUT", f"/api/records/{quote(key)}", body=data, kind=BYTES)

    def delete(self, key: str) -> bool:
        if not _KEY.fullmatch(key):
            return False
        status, _headers, _data = self.ask("DELETE", f"/api/records/{quote(key)}", accepts=(404,))
        self._came, self._looks = {}, {}
        return status != 404

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
        found = self._json(self.ask("GET", "/api/self")[2])
        if not {"writes", "records"} <= found.keys():
            raise self._foreign("it does not say what the token may do")
        return found

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        kind: str = "",
        headers: Mapping[str, str] | None = None,
        accepts: Container[int] = (),
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer that is none of a fault, or is one of `accepts`.

        Raises:
            StoreError: nobody answers, or with a refusal. RecordDamaged: of what was sent.
        """
        sent = {"Accept-Encoding": "gzip", **(headers or {})}
        if token := _token(self._origin):
            sent["Authorization"] = f"Bearer {token}"
        if kind:
            sent["Content-Type"] = kind
        until = time.monotonic() + self.patience_s
        for _turn in range(_MOST_WAITS):
            status, said, data = self._exchange(method, path, body, sent)
            pause = _pause(said) if status in (429, 503) else 0.0
            if not pause or time.monotonic() + pause > until:
                break
            time.sleep(pause)
            go_on()
        if status < 300 or status == 304 or status in accepts:
            return status, said, data
        raise self._refused(status, said, data)

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        from http.client import HTTPException

        for connection, again in self._connections():
            try:
                connection.timeout = left(self.patience_s)
                if connection.sock is not None:
                    connection.sock.settimeout(connection.timeout)
                connection.request(method, self._path + path, body, dict(headers))
                answer = connection.getresponse()
                data = answer.read(MOST_ANSWER + 1)
                said = {name.lower(): value for name, value in answer.getheaders()}
                if answer.will_close or not answer.isclosed():
                    connection.close()
                else:
                    self._keep(connection)
                return answer.status, said, self._inflated(data, said)
            except (OSError, HTTPException, ValueError) as exc:
                connection.close()
                if not again:
                    reason = getattr(exc, "strerror", "") or str(exc) or type(exc).__name__
                    raise StoreError(f"cache {self.url}: {reason}") from exc
        raise AssertionError

    def _connections(self) -> Iterator[tuple[HTTPConnection, bool]]:
        """One that is open, and where the server has left it, a new one. Of every request here the
        second makes no difference."""
        try:
            pid, idle = self._idle.pop()
        except IndexError:
            pass
        else:
            if pid == os.getpid():
                yield idle, True
            else:  # none is shared with a parent process
                idle.close()
        yield self._new(), False

    def _new(self) -> HTTPConnection:
        import http.client

        host, port = self._address
        if not self._tls:
            return http.client.HTTPConnection(host, port, timeout=self.patience_s)
        import ssl

        try:
            context = ssl.create_default_context()
        except OSError as exc:  # of $SSL_CERT_FILE
            raise StoreError(f"cache {self.url}: certificates: {exc}") from exc
        return http.client.HTTPSConnection(host, port, timeout=self.patience_s, context=context)

    def _keep(self, connection: HTTPConnection) -> None:
        if len(self._idle) < _MOST_IDLE:
            self._idle.append((os.getpid(), connection))
        else:
            connection.close()

    def _inflated(self, data: bytes, headers: Mapping[str, str]) -> bytes:
        if headers.get("content-encoding") == "gzip":
            unzip = zlib.decompressobj(wbits=31)
            try:
                data = unzip.decompress(data, MOST_ANSWER + 1)
            except zlib.error as exc:
                raise self._foreign("its answer is cut or damaged") from exc
        if len(data) > MOST_ANSWER:
            raise self._foreign(f"its answer is larger than {MOST_ANSWER} bytes")
        return data

    @property
    def _origin(self) -> str:
        host, port = self._address
        scheme, usual = ("https", 443) if self._tls else ("http", 80)
        return f"{scheme}://{host}" + (f":{port}" if port != usual else "")

    def _refused(self, status: int, headers: Mapping[str, str], data: bytes) -> StoreError:
        said = ""
        with contextlib.suppress(StoreError):
            said = str(self._json(data).get("detail", ""))[:300]
        what = f"cache {self.url}: {said or f'HTTP {status}'}"
        if status == 401:
            return StoreError(f"{what}; set ADVISOR_TOKEN to one of this server's")
        if status in (301, 302, 303, 307, 308):
            where = headers.get("location", "elsewhere").partition("?")[0][:200]
            return StoreError(f"cache {self.url}: sends on to {where}; name that server itself")
        return RecordDamaged(what) if status in (409, 413, 422) else StoreError(what)

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
            raise self._foreign("its answer is no msgpack") from exc
        if not isinstance(found, dict):
            raise self._foreign("its answer is no map")
        return found

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise self._foreign("its answer is no JSON") from exc
        if not isinstance(found, dict):
            raise self._foreign("its answer is no map")
        return found

    def _key(self, value: object) -> str:
        if not isinstance(value, str) or not _KEY.fullmatch(value):
            raise self._foreign(f"it names a record {str(value)[:60]!r}")
        return value

    def _item(self, value: object) -> tuple[str, bytes]:
        """A key and its bytes; none where it is gone, or did not come along."""
        if isinstance(value, list) and len(value) == 2:
            key, data = value
            if data is None or isinstance(data, bytes):
                return self._key(key), data or b""
        raise self._foreign("its items are no records")

    def _foreign(self, what: str) -> StoreError:
        return StoreError(f"cache {self.url}: no server of advisor's answers there ({what})")


def _close(idle: Iterable[tuple[int, HTTPConnection]]) -> None:
    for _pid, connection in idle:
        connection.close()


def _pause(headers: Mapping[str, str]) -> float:
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 5 else 0.0


def _token(origin: str) -> str:
    """The token for a server, '' for none.

    Raises:
        UsageError: it is none, or others can read its file.
    """
    token = os.environ.get("ADVISOR_TOKEN", "").strip()
    if not token:
        named = os.environ.get("ADVISOR_TOKEN_FILE", "")
        folder = own_folder()
        if named or folder is not None:
            token = _listed(Path(named) if named else folder / "tokens", origin, bool(named))  # type: ignore[operator]
    if token and not _TOKEN.fullmatch(token):
        raise UsageError("ADVISOR_TOKEN: no token; expected what `advisor token` printed")
    return token


def _listed(path: Path, origin: str, must: bool) -> str:
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"{path}: holds tokens and others can read it; run: chmod 600 it")
            text = file.read(2**16).decode()
    except FileNotFoundError as exc:
        if not must:
            return ""
        raise UsageError(f"ADVISOR_TOKEN_FILE {str(path)!r}: there is no such file") from exc
    except (OSError, ValueError) as exc:
        raise UsageError(f"ADVISOR_TOKEN_FILE {str(path)!r}: cannot be read ({exc})") from exc
    found: Sequence[tuple[str, str]] = _LISTED.findall(text)
    return next((token for url, token in found if url.rstrip("/") == origin), "")


def _proof(store: HttpStore) -> Narrowing:
    return store
