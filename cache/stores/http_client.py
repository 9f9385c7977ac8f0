"""Requests to a team's server, with the token for that server."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from advisor.cache.settings import ProjectUrl
from advisor.cache.signing import own_folder
from advisor.cache.stores.filesystem import open_regular
from advisor.cache.stores.timeout import time_left
from advisor.cache.stores.url import RemoteUrl
from advisor.errors import RecordDamaged, StoreError, Unauthorized, UsageError, printable

if TYPE_CHECKING:
    import urllib3

T = TypeVar("T")

MOST_ANSWER = 36 * 2**20
"""Bytes of one answer, unpacked."""
JSON, BYTES = "application/json", "application/octet-stream"
MAP = msgspec.json.Decoder(dict[str, Any])
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MOST_TRIES = 8
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{8,512}")
_LISTED = re.compile(r"(https?://\S+)\s+(\S+)")


class Answer(NamedTuple):
    """`headers`: their names in any case."""

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
        self.given = RemoteUrl.parse(url, ("timeout", "insecure"))
        self.url = self.given.shown
        self._token = token
        self._of_project = isinstance(url, ProjectUrl)
        self._shown = f"{called} {self.url}"
        parts = urlsplit(self.given.bare)
        self._tls = parts.scheme == "https"
        self.address = self.given.address(443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        if token:
            _check_token(token, "token")
        if parts.query or "@" in parts.netloc:
            raise UsageError(
                f"{self._shown}: expected {parts.scheme}://HOST[:PORT][/PATH], with the "
                "options timeout and insecure alone; the token goes into ADVISOR_TOKEN"
            )
        plain = not self._tls and self.address[0] not in _LOOPBACK
        if plain and "insecure" not in self.given.options:
            raise UsageError(
                f"{self._shown}: would send the token in the clear; use https://, or add "
                "?insecure=1 in a network that nobody else reads"
            )
        if plain and self._of_project:
            raise UsageError(
                f"{self._shown}: pyproject.toml may not say insecure=1; use https://, or set "
                "ADVISOR_CACHE to this URL"
            )
        self._opened: tuple[int, urllib3.HTTPConnectionPool] | None = None

    def load(self) -> None:
        """Import what a request needs."""
        import urllib3  # noqa: F401 # only to have it in memory

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
        """Return the answer. A busy server is asked again when it says, within `patience_s`; every
        request here has the same effect when it is sent twice.

        Args:
            kind: the media type of the body.
            accepts: error statuses that are answers, too.
            most: bytes that an answer may have.

        Raises:
            StoreError: nobody answers, or with an error. Unauthorized: because of the token.
            RecordDamaged: because of what was sent. UsageError: the token is malformed.
        """
        from urllib3.exceptions import HTTPError

        sent = {"Accept-Encoding": "gzip", **(headers or {})}
        token = self._token or _token(self.origin, from_environment=not self._of_project)
        sent |= {"Authorization": f"Bearer {token}"} if token else {}
        sent |= {"Content-Type": kind} if kind else {}
        try:
            response = self._pool().urlopen(
                method,
                self._path + path,
                body,
                sent,
                _retry(time.monotonic() + patience_s),
                redirect=False,
                timeout=time_left(patience_s),
                preload_content=False,
            )
            data = response.read(most + 1)
            if len(data) > most:
                response.close()
                raise self.foreign(f"its answer is larger than {most} bytes")
            response.release_conn()
        except (OSError, HTTPError, ValueError) as exc:
            raise StoreError(f"{self._shown}: {_reason(exc)}") from exc
        answer = Answer(response.status, response.headers, data)
        if answer.status < 300 or answer.status in (304, *accepts):
            return answer
        raise self._refused(answer, bool(token))

    def _pool(self) -> urllib3.HTTPConnectionPool:
        # A connection is not shared with a parent process.
        if self._opened is None or self._opened[0] != os.getpid():
            import ssl

            import urllib3

            host, port = self.address
            pool = urllib3.HTTPConnectionPool(host, port, maxsize=4)
            if self._tls:
                context = ssl.create_default_context()
                pool = urllib3.HTTPSConnectionPool(host, port, maxsize=4, ssl_context=context)
            self._opened = os.getpid(), pool
        return self._opened[1]

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
        """Decode an answer. Raises StoreError if it is malformed."""
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


def _retry(until: float) -> urllib3.Retry:
    """Ask again once after a lost connection, and when a busy server says, but not after `until`
    and not after a timeout."""
    from urllib3 import Retry
    from urllib3.exceptions import MaxRetryError, ReadTimeoutError

    class WithinPatience(Retry):
        def increment(self, *args: Any, **more: Any) -> Any:
            response, error = more.get("response"), more.get("error")
            if isinstance(error, ReadTimeoutError):
                raise error
            if response is not None:
                pause = self.get_retry_after(response) or 0.0
                if time.monotonic() + pause > until or time_left(pause) < pause:
                    raise MaxRetryError(more["_pool"], None)
            return super().increment(*args, **more)

    return WithinPatience(
        _MOST_TRIES, connect=0, read=1, other=0, allowed_methods=None, raise_on_status=False
    )


def _reason(exc: BaseException) -> str:
    """What went wrong, without urllib3's wrappers."""
    for inner in (getattr(exc, "reason", None), *exc.args[1:]):
        if isinstance(inner, BaseException):
            return _reason(inner)
    text = getattr(exc.__cause__ or exc, "strerror", "") or str(exc).rpartition("): ")[2]
    return text or type(exc).__name__


def _check_token(token: str, name: str) -> None:
    """Raise UsageError if a token is malformed."""
    if not _TOKEN.fullmatch(token):
        raise UsageError(f"{name}: no token; expected what `advisor token` printed")


def _token(origin: str, from_environment: bool) -> str:
    """The token for a server, '' for none. Raises UsageError if it is malformed, or others can
    read its file."""
    token = os.environ.get("ADVISOR_TOKEN", "").strip() if from_environment else ""
    if not token:
        named, folder = os.environ.get("ADVISOR_TOKEN_FILE", ""), own_folder()
        if named:
            token = _listed(Path(named), origin)
        elif folder is not None and (folder / "tokens").exists():
            token = _listed(folder / "tokens", origin)
    if token:
        _check_token(token, "ADVISOR_TOKEN")
    return token


def _listed(path: Path, origin: str) -> str:
    """The token for a server in a file of lines 'https://HOST TOKEN'."""
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"{path}: holds tokens and others can read it; run: chmod 600 it")
            text = file.read(2**16).decode()
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", "") or exc
        raise UsageError(f"ADVISOR_TOKEN_FILE {str(path)!r}: cannot be read ({why})") from exc
    found: list[tuple[str, str]] = _LISTED.findall(text)
    return next((token for url, token in found if url.rstrip("/") == origin), "")
