"""Requests to a team's server, with the token for that server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
import stat
import time
import weakref
import zlib
from collections.abc import Collection, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from advisor.cache.settings import ProjectUrl
from advisor.cache.signing import own_folder
from advisor.cache.stores.filesystem import open_regular
from advisor.cache.stores.timeout import check_deadline, time_left
from advisor.cache.stores.url import RemoteUrl
from advisor.errors import RecordDamaged, StoreError, Unauthorized, UsageError, printable, reason

T = TypeVar("T")

MAX_ANSWER = 36 * 2**20  # bytes of one answer, unpacked
JSON, BYTES = "application/json", "application/octet-stream"
MAP = msgspec.json.Decoder(dict[str, Any])
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{8,512}")
_LISTED = re.compile(r"(https?://\S+)\s+(\S+)")


class HttpClient:
    """http[s]://HOST[:PORT][/PATH][?timeout=250ms&insecure=1]; messages call it `label`.

    The token is the one given, else $ADVISOR_TOKEN, else that of the line 'https://HOST TOKEN' in
    the file $ADVISOR_TOKEN_FILE or $XDG_DATA_HOME/advisor/tokens. $ADVISOR_TOKEN is not sent to a
    `ProjectUrl`, and no token leaves this machine unencrypted unless the user says insecure=1.
    """

    def __init__(self, url: str, *, token: str = "", label: str = "cache") -> None:
        self.given = RemoteUrl(url, "timeout", "insecure")
        self.url = self.given.shown
        self._token = _checked(token, "token")
        self._of_project = isinstance(url, ProjectUrl)
        self._shown = f"{label} {self.url}"
        parts = urlsplit(self.given.bare)
        scheme, usual = ("https", 443) if parts.scheme == "https" else ("http", 80)
        self._address = host, port = parts.hostname or "", parts.port or usual
        self.origin = f"{scheme}://{host}" + (f":{port}" if port != usual else "")
        self._path = parts.path.rstrip("/")
        self._idle: list[tuple[int, HTTPConnection]] = []
        weakref.finalize(self, _close, self._idle)
        if parts.query or "@" in parts.netloc or not parts.hostname:
            raise UsageError(
                f"{self._shown}: expected {scheme}://HOST[:PORT][/PATH], with the "
                "options timeout and insecure alone; the token goes into ADVISOR_TOKEN"
            )
        permitted = "insecure" in self.given.options and not self._of_project
        if scheme == "http" and host not in _LOOPBACK and not permitted:
            raise UsageError(
                f"{self._shown}: the token would be sent unencrypted; use https://, or, in a "
                "private network, add ?insecure=1 to the URL in ADVISOR_CACHE (not in "
                "pyproject.toml)"
            )

    def request(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        body: bytes | Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        accepts: Collection[int] = (),
        most: int = MAX_ANSWER,
    ) -> tuple[int, bytes]:
        """Return the status and the body of the answer. Every request has the same effect if it is
        sent twice.

        Args:
            body: bytes, or a mapping that is sent as JSON.
            accepts: error statuses that count as answers, too.
            most: most bytes of the answer.

        Raises:
            StoreError: no answer, or an error. Unauthorized: the server refuses the token.
            RecordDamaged: it refuses the data. UsageError: the token is malformed.
        """
        sent = {"Accept-Encoding": "gzip", **(headers or {})}
        token = self._token or _token(self.origin, from_environment=not self._of_project)
        sent |= {"Authorization": f"Bearer {token}"} if token else {}
        if body is not None:
            sent["Content-Type"] = BYTES if isinstance(body, bytes) else JSON
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            response, data = self._answer((method, self._path + path, body, sent), timeout_s, most)
        except (OSError, HTTPException, ValueError, zlib.error) as exc:
            raise StoreError(f"{self._shown}: {reason(exc) or type(exc).__name__}") from exc
        if len(data) > most:
            raise self.unexpected(f"its answer is larger than {most} bytes")
        if response.status < 300 or response.status in (304, *accepts):
            return response.status, data
        raise self._refused(response.status, response.headers.get("location"), data, bool(token))

    def _answer(
        self, question: tuple[Any, ...], timeout_s: float, most: int
    ) -> tuple[HTTPResponse, bytes]:
        """The answer to a request. The request is sent again once after a lost connection, and when
        a busy server says, but not after `timeout_s`."""
        until, lost = time.monotonic() + time_left(timeout_s), False
        while True:
            check_deadline()
            connection = self._connection(time_left(timeout_s))
            try:
                # The server may refuse before it has read the whole request.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(*question)
                with connection.getresponse() as response:
                    data = _body(response, most + 1)
                    is_whole = response.isclosed()
            except BaseException as exc:
                connection.close()
                if lost or not isinstance(exc, ConnectionError | ssl.SSLEOFError):
                    raise
                lost = True
                continue
            if is_whole:
                self._idle.append((os.getpid(), connection))
            else:
                connection.close()
            said = response.headers.get("Retry-After", "") if response.status in (429, 503) else ""
            pause = int(said) if said.isdecimal() else 0
            if not pause or time.monotonic() + pause > until:
                return response, data
            time.sleep(pause)

    def _connection(self, timeout_s: float) -> HTTPConnection:
        """A kept connection or a new one; a process never uses its parent's connections."""
        with contextlib.suppress(IndexError):
            process, kept = self._idle.pop()
            if process == os.getpid() and kept.sock is not None:
                kept.sock.settimeout(timeout_s)
                return kept
            kept.close()
        kind = HTTPSConnection if self.origin.startswith("https") else HTTPConnection
        return kind(*self._address, timeout=timeout_s)

    def _refused(
        self, status: int, location: str | None, data: bytes, with_token: bool
    ) -> StoreError:
        what = f"{self._shown}: {self.detail(data) or f'HTTP {status}'}"
        if status in (401, 403):
            remedy = "; set ADVISOR_TOKEN to one of this server's tokens"
            if self._of_project and not with_token:
                remedy = (
                    "; ADVISOR_TOKEN is not sent to a server that only pyproject.toml names: set "
                    f"ADVISOR_CACHE to its URL, or add '{self.origin} TOKEN' to your file of tokens"
                )
            return Unauthorized(what + remedy * (status == 401))
        if status < 400:
            where = (location or "elsewhere").partition("?")[0][:200]
            return StoreError(f"{self._shown}: redirects to {where}; give that server's URL")
        return RecordDamaged(what) if status in (409, 413, 422) else StoreError(what)

    def decoded(
        self, data: bytes, decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]
    ) -> T:
        """Decode an answer. Raises StoreError if it is malformed."""
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise self.unexpected(printable(str(exc))[:200]) from exc

    def detail(self, data: bytes) -> str:
        """Why a server refuses, on one line; '' if its answer does not say."""
        try:
            return printable(str(self.decoded(data, MAP).get("detail", "")))[:300]
        except StoreError:
            return ""

    def unexpected(self, what: str) -> StoreError:
        """The error for an answer that this version of advisor does not understand."""
        return StoreError(
            f"{self._shown}: this is no advisor server, or one of another version ({what}); check "
            "the URL"
        )


def _close(connections: list[tuple[int, HTTPConnection]]) -> None:
    for _process, connection in connections:
        connection.close()


def _body(response: HTTPResponse, most: int) -> bytes:
    """The first `most` bytes of an answer, unpacked."""
    data = response.read(most)
    if response.length and len(data) < most:
        raise IncompleteRead(data, response.length)
    if response.headers.get("Content-Encoding") == "gzip":
        return zlib.decompressobj(wbits=31).decompress(data, most)
    return data


def _checked(token: str, name: str) -> str:
    """The token, '' for none. Raises UsageError if it is malformed."""
    if token and not _TOKEN.fullmatch(token):
        raise UsageError(f"{name}: malformed token; expected one that `advisor token` printed")
    return token


def _token(origin: str, from_environment: bool) -> str:
    """The token for a server, '' for none. Raises UsageError if it is malformed, or others can
    read its file."""
    token = os.environ.get("ADVISOR_TOKEN", "").strip() if from_environment else ""
    named, folder = os.environ.get("ADVISOR_TOKEN_FILE", ""), own_folder()
    path = Path(named) if named else folder and folder / "tokens"
    if not token and path and (named or path.exists()):
        token = _listed(path, origin)
    return _checked(token, "ADVISOR_TOKEN")


def _listed(path: Path, origin: str) -> str:
    """The token for a server in a file of lines 'https://HOST TOKEN'."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"{path}: others can read these tokens; run chmod 600 on the file")
            text = file.read(2**16).decode()
    except (OSError, ValueError) as exc:
        raise UsageError(
            f"ADVISOR_TOKEN_FILE {str(path)!r}: cannot be read ({reason(exc)})"
        ) from exc
    found: list[tuple[str, str]] = _LISTED.findall(text)
    return next((token for url, token in found if url.rstrip("/") == origin), "")
