"""One HTTP connection after another to a server of the team's, with the token that is for it."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import time
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from advisor.cache.seal import own_folder
from advisor.cache.stores.filesystem import open_regular
from advisor.cache.stores.patience import go_on, left
from advisor.cache.stores.url import RemoteUrl
from advisor.errors import RecordDamaged, StoreError, Unauthorized, UsageError, printable

if TYPE_CHECKING:
    from http.client import HTTPConnection

PATIENCE_S = 0.25
"""What a server may cost `apply`, unless its URL says ?timeout=: TLS alone is three round trips."""
MOST_ANSWER = 36 * 2**20
"""Bytes of one answer, unpacked."""
JSON, BYTES = "application/json", "application/octet-stream"
_OWN = ("timeout", "insecure")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MOST_IDLE = 4
_MOST_WAITS = 8
"""Times that one request is made again where the server asks for that."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{8,512}")
_LISTED = re.compile(r"(https?://\S+)\s+(\S+)")


class Link:
    """http[s]://HOST[:PORT][/PATH][?timeout=250ms&insecure=1].

    The token is the one given, else $ADVISOR_TOKEN's, else the one that a line 'https://HOST TOKEN'
    has in the file $ADVISOR_TOKEN_FILE, or in $XDG_DATA_HOME/advisor/tokens. It goes to no other
    machine in the clear, unless the URL says insecure=1. $SSL_CERT_FILE names another list of
    authorities.

    Args:
        called: what messages call it.
    """

    def __init__(self, url: str, *, token: str = "", called: str = "cache") -> None:
        self._token = token
        given = RemoteUrl.parse(url, _OWN)
        self.url = given.shown
        self._shown = f"{called} {self.url}"
        self.patience_s = given.seconds("timeout", PATIENCE_S)
        parts = urlsplit(given.bare)
        self._tls = parts.scheme == "https"
        self._address = given.address(443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        if token and not _TOKEN.fullmatch(token):
            raise _no_token("token")
        if parts.query or "@" in parts.netloc:
            raise UsageError(
                f"{self._shown}: expected {parts.scheme}://HOST[:PORT][/PATH], with the "
                "options timeout and insecure alone; the token goes into ADVISOR_TOKEN"
            )
        if not (self._tls or self._address[0] in _LOOPBACK or "insecure" in given.options):
            raise UsageError(
                f"{self._shown}: would send the token in the clear; use https://, or add "
                "?insecure=1 in a network that nobody else reads"
            )
        # Without a lock, which a forked child could find held for ever.
        self._idle: list[tuple[int, HTTPConnection]] = []
        weakref.finalize(self, _close, self._idle)

    def reach(self) -> None:
        try:
            socket.create_connection(self._address, timeout=self.patience_s).close()
        except OSError as exc:
            raise StoreError(f"{self._shown}: {exc.strerror or exc}") from exc

    def load(self) -> None:
        import http.client  # noqa: F401 # only to have it in memory

        if self._tls:
            import ssl  # noqa: F401

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        kind: str = "",
        headers: Mapping[str, str] | None = None,
        accepts: Collection[int] = (),
        patience_s: float = 0.0,
        most: int = MOST_ANSWER,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer that is none of a fault.

        Args:
            kind: what the body is, as a media type.
            accepts: statuses of refusals that are answers, too.
            patience_s: 0 for the link's own.
            most: bytes that an answer may have.

        Raises:
            StoreError: nobody answers, or with a refusal. Unauthorized: of the token.
            RecordDamaged: of what was sent.
            UsageError: the token is none, or others can read its file.
        """
        patience_s = patience_s or self.patience_s
        sent = {"Accept-Encoding": "gzip", **(headers or {})}
        if token := self._token or _token(self.origin):
            sent["Authorization"] = f"Bearer {token}"
        if kind:
            sent["Content-Type"] = kind
        until = time.monotonic() + patience_s
        for _turn in range(_MOST_WAITS):
            status, said, data = self._exchange(method, path, body, sent, patience_s, most)
            pause = _pause(said) if status in (429, 503) else 0.0
            if not pause or time.monotonic() + pause > until:
                break
            time.sleep(pause)
            go_on()
        if status < 300 or status in (304, *accepts):
            return status, said, data
        raise self._refused(status, said, data)

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        patience_s: float,
        most: int,
    ) -> tuple[int, dict[str, str], bytes]:
        from http.client import HTTPException

        for connection, again in self._connections():
            try:
                connection.timeout = left(patience_s)
                if connection.sock is not None:
                    connection.sock.settimeout(connection.timeout)
                connection.request(method, self._path + path, body, dict(headers))
                answer = connection.getresponse()
                data = answer.read(most + 1)
                said = {name.lower(): value for name, value in answer.getheaders()}
                if answer.will_close or not answer.isclosed():
                    connection.close()
                else:
                    self._keep(connection)
                return answer.status, said, self._inflated(data, said, most)
            except (OSError, HTTPException, ValueError) as exc:
                connection.close()
                if not again:
                    reason = getattr(exc, "strerror", "") or str(exc) or type(exc).__name__
                    raise StoreError(f"{self._shown}: {reason}") from exc
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
            raise StoreError(f"{self._shown}: certificates: {exc}") from exc
        return http.client.HTTPSConnection(host, port, timeout=self.patience_s, context=context)

    def _keep(self, connection: HTTPConnection) -> None:
        if len(self._idle) < _MOST_IDLE:
            self._idle.append((os.getpid(), connection))
        else:
            connection.close()

    def _inflated(self, data: bytes, headers: Mapping[str, str], most: int) -> bytes:
        if headers.get("content-encoding") == "gzip":
            unzip = zlib.decompressobj(wbits=31)
            try:
                data = unzip.decompress(data, most + 1)
            except zlib.error as exc:
                raise self.foreign("its answer is cut or damaged") from exc
        if len(data) > most:
            raise self.foreign(f"its answer is larger than {most} bytes")
        return data

    @property
    def origin(self) -> str:
        """Scheme, host and port, as a token is listed for."""
        host, port = self._address
        scheme, usual = ("https", 443) if self._tls else ("http", 80)
        return f"{scheme}://{host}" + (f":{port}" if port != usual else "")

    def _refused(self, status: int, headers: Mapping[str, str], data: bytes) -> StoreError:
        what = f"{self._shown}: {self.detail(data) or f'HTTP {status}'}"
        if status == 401:
            return Unauthorized(f"{what}; set ADVISOR_TOKEN to one of this server's")
        if status == 403:
            return Unauthorized(what)
        if status in (301, 302, 303, 307, 308):
            where = headers.get("location", "elsewhere").partition("?")[0][:200]
            return StoreError(f"{self._shown}: sends on to {where}; name that server itself")
        return RecordDamaged(what) if status in (409, 413, 422) else StoreError(what)

    def read_json(self, data: bytes) -> dict[str, Any]:
        """The map that an answer holds.

        Raises:
            StoreError: it is none of advisor's.
        """
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise self.foreign("its answer is no JSON") from exc
        if not isinstance(found, dict):
            raise self.foreign("its answer is no map")
        return found

    def detail(self, data: bytes) -> str:
        """Why a server refuses, on one line; '' where its answer does not say."""
        try:
            return printable(str(self.read_json(data).get("detail", "")))[:300]
        except StoreError:
            return ""

    def foreign(self, what: str) -> StoreError:
        """What is raised where an answer is none of advisor's, as this version knows them."""
        return StoreError(
            f"{self._shown}: no server of advisor's answers there, or one of another version "
            f"({what})"
        )


def _close(idle: Iterable[tuple[int, HTTPConnection]]) -> None:
    for _pid, connection in idle:
        connection.close()


def _pause(headers: Mapping[str, str]) -> float:
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 5 else 0.0


def _no_token(what: str) -> UsageError:
    return UsageError(f"{what}: no token; expected what `advisor token` printed")


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
        raise _no_token("ADVISOR_TOKEN")
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
