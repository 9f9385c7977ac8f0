"""Requests to a team's server, with the token for that server."""

from __future__ import annotations

import os
import re
import stat
import time
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from advisor.cache.seal import own_folder
from advisor.cache.settings import ProjectUrl
from advisor.cache.stores.filesystem import open_regular
from advisor.cache.stores.timeout import check_deadline, time_left
from advisor.cache.stores.url import RemoteUrl
from advisor.errors import RecordDamaged, StoreError, Unauthorized, UsageError, printable

if TYPE_CHECKING:
    from http.client import HTTPConnection

T = TypeVar("T")

MOST_ANSWER = 36 * 2**20
"""Bytes of one answer, unpacked."""
JSON, BYTES = "application/json", "application/octet-stream"
MAP = msgspec.json.Decoder(dict[str, Any])
_OWN = ("timeout", "insecure")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MOST_IDLE = 4
_MOST_TRIES = 8
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{8,512}")
_LISTED = re.compile(r"(https?://\S+)\s+(\S+)")


class Answer(NamedTuple):
    """`headers`: their names in lower case."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class HttpClient:
    """http[s]://HOST[:PORT][/PATH][?timeout=250ms&insecure=1].

    The token is the one given, else $ADVISOR_TOKEN, else that of the line 'https://HOST TOKEN' in
    the file $ADVISOR_TOKEN_FILE or $XDG_DATA_HOME/advisor/tokens. $ADVISOR_TOKEN is not sent to a
    `ProjectUrl`, and no token leaves this machine unencrypted unless the user says insecure=1.
    $SSL_CERT_FILE names another list of authorities.

    Args:
        called: what messages call the server.
    """

    def __init__(self, url: str, *, token: str = "", called: str = "cache") -> None:
        self.given = RemoteUrl.parse(url, _OWN)
        self.url = self.given.shown
        self._token = token
        self._of_project = isinstance(url, ProjectUrl)
        self._shown = f"{called} {self.url}"
        parts = urlsplit(self.given.bare)
        self._tls = parts.scheme == "https"
        self.address = self.given.address(443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        if token and not _TOKEN.fullmatch(token):
            raise _no_token("token")
        if parts.query or "@" in parts.netloc:
            raise UsageError(
                f"{self._shown}: expected {parts.scheme}://HOST[:PORT][/PATH], with the "
                "options timeout and insecure alone; the token goes into ADVISOR_TOKEN"
            )
        if not (self._tls or self.address[0] in _LOOPBACK):
            self._check_insecure()
        # Without a lock, which a forked child could find held for ever.
        self._idle: list[tuple[int, HTTPConnection]] = []
        weakref.finalize(self, _close, self._idle)

    def _check_insecure(self) -> None:
        if "insecure" not in self.given.options:
            raise UsageError(
                f"{self._shown}: would send the token in the clear; use https://, or add "
                "?insecure=1 in a network that nobody else reads"
            )
        if self._of_project:
            raise UsageError(
                f"{self._shown}: pyproject.toml may not say insecure=1; use https://, or set "
                "ADVISOR_CACHE to this URL"
            )

    def load(self) -> None:
        """Import what a request needs."""
        import http.client  # noqa: F401 # only to have it in memory

        if self._tls:
            import ssl  # noqa: F401

    def request(
        self,
        method: str,
        path: str,
        *,
        patience_s: float,
        body: bytes | None = None,
        kind: str = "",
        headers: Mapping[str, str] | None = None,
        accepts: Collection[int] = (),
        most: int = MOST_ANSWER,
    ) -> Answer:
        """The answer to a request, which is repeated while the server says when to come back.

        Every request here has the same effect when it is sent twice.

        Args:
            kind: the media type of the body.
            accepts: error statuses that are answers, too.
            most: bytes that an answer may have.

        Raises:
            StoreError: nobody answers, or with an error. Unauthorized: because of the token.
            RecordDamaged: because of what was sent.
            UsageError: the token has no such form, or others can read its file.
        """
        sent = {"Accept-Encoding": "gzip", **(headers or {})}
        token = self._token or _token(self.origin, from_environment=not self._of_project)
        if token:
            sent["Authorization"] = f"Bearer {token}"
        if kind:
            sent["Content-Type"] = kind
        until = time.monotonic() + patience_s
        for _try in range(_MOST_TRIES):
            answer = self._exchange(method, path, body, sent, patience_s, most)
            pause = _retry_after(answer)
            if not pause or time.monotonic() + pause > until:
                break
            time.sleep(pause)
            check_deadline()
        if answer.status < 300 or answer.status in (304, *accepts):
            return answer
        raise self._refused(answer, bool(token))

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        patience_s: float,
        most: int,
    ) -> Answer:
        from http.client import HTTPException

        for connection, may_be_closed in self._connections():
            try:
                connection.timeout = time_left(patience_s)
                if connection.sock is not None:
                    connection.sock.settimeout(connection.timeout)
                connection.request(method, self._path + path, body, dict(headers))
                response = connection.getresponse()
                data = response.read(most + 1)
                said = {name.lower(): value for name, value in response.getheaders()}
                if response.will_close or not response.isclosed() or len(self._idle) >= _MOST_IDLE:
                    connection.close()
                else:
                    self._idle.append((os.getpid(), connection))
                return Answer(response.status, said, self._inflated(data, said, most))
            except (OSError, HTTPException, ValueError) as exc:
                connection.close()
                if not may_be_closed:
                    reason = getattr(exc, "strerror", "") or str(exc) or type(exc).__name__
                    raise StoreError(f"{self._shown}: {reason}") from exc
        raise AssertionError

    def _connections(self) -> Iterator[tuple[HTTPConnection, bool]]:
        """An open connection, which the server may have closed, if there is one; then a new one."""
        import http.client

        while self._idle:
            pid, idle = self._idle.pop()
            if pid == os.getpid():
                yield idle, True
                break
            idle.close()  # a parent process uses it
        host, port = self.address
        if not self._tls:
            yield http.client.HTTPConnection(host, port), False
            return
        import ssl

        try:
            context = ssl.create_default_context()
        except OSError as exc:  # of $SSL_CERT_FILE
            raise StoreError(f"{self._shown}: certificates: {exc}") from exc
        yield http.client.HTTPSConnection(host, port, context=context), False

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
        host, port = self.address
        scheme, usual = ("https", 443) if self._tls else ("http", 80)
        return f"{scheme}://{host}" + (f":{port}" if port != usual else "")

    def _refused(self, answer: Answer, with_token: bool) -> StoreError:
        status, headers, data = answer
        what = f"{self._shown}: {self.detail(data) or f'HTTP {status}'}"
        if status == 401 and self._of_project and not with_token:
            return Unauthorized(
                f"{what}; ADVISOR_TOKEN is not sent to a server that only pyproject.toml names: "
                f"set ADVISOR_CACHE to its URL, or add '{self.origin} TOKEN' to your file of tokens"
            )
        if status == 401:
            return Unauthorized(f"{what}; set ADVISOR_TOKEN to one of this server's")
        if status == 403:
            return Unauthorized(what)
        if status in (301, 302, 303, 307, 308):
            where = headers.get("location", "elsewhere").partition("?")[0][:200]
            return StoreError(f"{self._shown}: sends on to {where}; name that server itself")
        return RecordDamaged(what) if status in (409, 413, 422) else StoreError(what)

    def decoded(
        self, data: bytes, decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]
    ) -> T:
        """What an answer holds.

        Raises:
            StoreError: the decoder refuses it.
        """
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise self.foreign(printable(str(exc))[:200]) from exc

    def detail(self, data: bytes) -> str:
        """Why a server refuses, on one line; '' if its answer does not say."""
        try:
            said = self.decoded(data, MAP)
            return printable(str(said.get("detail", "")))[:300]
        except StoreError:
            return ""

    def foreign(self, what: str) -> StoreError:
        """The error for an answer that this version of advisor does not understand."""
        return StoreError(
            f"{self._shown}: no server of advisor's answers there, or one of another version "
            f"({what})"
        )


def _close(idle: Iterable[tuple[int, HTTPConnection]]) -> None:
    for _pid, connection in idle:
        connection.close()


def _retry_after(answer: Answer) -> float:
    """Seconds after which the server wants the request again; 0 for never."""
    text = answer.headers.get("retry-after", "") if answer.status in (429, 503) else ""
    return float(text) if text.isdecimal() and len(text) < 5 else 0.0


def _no_token(what: str) -> UsageError:
    return UsageError(f"{what}: no token; expected what `advisor token` printed")


def _token(origin: str, from_environment: bool) -> str:
    """The token for a server, '' for none.

    Raises:
        UsageError: it has no such form, or others can read its file.
    """
    token = os.environ.get("ADVISOR_TOKEN", "").strip() if from_environment else ""
    folder = own_folder()
    if not token and (named := os.environ.get("ADVISOR_TOKEN_FILE", "")):
        token = _listed(Path(named), origin, must_exist=True)
    elif not token and folder is not None:
        token = _listed(folder / "tokens", origin, must_exist=False)
    if token and not _TOKEN.fullmatch(token):
        raise _no_token("ADVISOR_TOKEN")
    return token


def _listed(path: Path, origin: str, must_exist: bool) -> str:
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"{path}: holds tokens and others can read it; run: chmod 600 it")
            text = file.read(2**16).decode()
    except FileNotFoundError as exc:
        if not must_exist:
            return ""
        raise UsageError(f"ADVISOR_TOKEN_FILE {str(path)!r}: there is no such file") from exc
    except (OSError, ValueError) as exc:
        raise UsageError(f"ADVISOR_TOKEN_FILE {str(path)!r}: cannot be read ({exc})") from exc
    found: list[tuple[str, str]] = _LISTED.findall(text)
    return next((token for url, token in found if url.rstrip("/") == origin), "")
