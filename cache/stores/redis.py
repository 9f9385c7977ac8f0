"""A team's Redis: one string a record, and a sorted set of their names.

The names are an index, so that looking up does not scan a server that others use too; the score of
a name is when its record expires.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit, urlunsplit

from advisor.cache.codec import MAX_BYTES
from advisor.cache.stores import by_many
from advisor.cache.stores.shelf import ARTIFACTS, plain, too_large
from advisor.cache.stores.url import PATIENCE_S, RemoteUrl
from advisor.errors import RecordDamaged, StoreError, UsageError

if TYPE_CHECKING:
    import redis

    from advisor.cache.stores import Remote, Shelf

_OWN = ("prefix", "ttl", "timeout")
_LASTING = "+inf"


class RedisStore:
    """redis[s]://[USER:PASSWORD@]HOST[:PORT][/DATABASE][?prefix=advisor&ttl=90d&timeout=50ms].

    Other options go to redis-py, e.g. ssl_ca_certs=FILE. User and password may be in
    $ADVISOR_REDIS_USERNAME and $ADVISOR_REDIS_PASSWORD instead.
    """

    studies: Path | None = None

    def __init__(self, url: str) -> None:
        # Not imported yet: that takes longer than to learn that the server is down.
        if importlib.util.find_spec("redis") is None:
            raise ModuleNotFoundError("the Python package redis is not installed")
        given = RemoteUrl.parse(url, _OWN)
        self.url = given.shown
        self.patience_s = given.seconds("timeout", PATIENCE_S)
        self._ttl_s = given.seconds("ttl", 0.0)
        prefix = given.options.get("prefix", "advisor")
        if not prefix or set(prefix) & set("{}*?[]"):
            raise UsageError(f"cache URL {self.url!r}: prefix={prefix}: expected a plain name")
        # In braces: a cluster then keeps all of it on one node, as the transactions need.
        self.prefix = f"{{{prefix}}}:"
        self._address = given.address(6379)
        self._bare = _with_login(given.bare)
        database = urlsplit(given.bare).path.strip("/")
        if database and not database.isdecimal():
            raise UsageError(f"cache URL {self.url!r}: database {database!r}: expected a number")
        self._client: redis.Redis | None = None
        self._pid = 0
        self._waits_s = 0.0

    def reach(self) -> None:
        try:
            socket.create_connection(self._address, timeout=self.patience_s).close()
        except OSError as exc:
            raise StoreError(f"cache {self.url}: {exc.strerror or exc}") from exc

    def load(self) -> None:
        import redis.retry  # noqa: F401 # only to have it in memory

    def keys(self) -> list[str]:
        return self.named(self._index)

    def named(self, index: str) -> list[str]:
        """The keys that an index names and that have not expired, sorted."""
        now = time.time()
        found = self.do(lambda r: r.zrangebyscore(index, now, _LASTING))
        return sorted(_text(name) for name in found)

    def get(self, key: str) -> bytes | None:
        return by_many(self.get_many, key)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes | RecordDamaged]:
        wanted = list(keys)
        if not wanted:
            return {}
        # Not MGET: what somebody planted may be of any size, and is not worth fetching whole.
        parts = self.do(
            lambda r: _run(
                r.pipeline(transaction=False),
                [("getrange", self.prefix + key, 0, MAX_BYTES) for key in wanted],
                raises=False,
            )
        )
        found: dict[str, bytes | RecordDamaged] = {}
        for key, part in zip(wanted, parts, strict=True):
            if isinstance(part, bytes):
                if part:
                    found[key] = part
            else:
                found[key] = RecordDamaged(f"{key}: no string in Redis ({part}); refused")
        return found

    @property
    def shelf(self) -> Shelf:
        return RedisShelf(self)

    def put(self, key: str, data: bytes) -> None:
        self.keep(self._index, key, data)

    def keep(self, index: str, key: str, data: bytes) -> None:
        """Keep data under a key that an index names, as long as the URL says."""
        ends = f"{time.time() + self._ttl_s}" if self._ttl_s else _LASTING
        expires: tuple[Any, ...] = ("PX", int(self._ttl_s * 1000)) if self._ttl_s else ()
        commands = [
            ("execute_command", "SET", self.prefix + key, data, *expires),
            ("execute_command", "ZADD", index, ends, key),
            ("zremrangebyscore", index, "-inf", f"({time.time()}"),
        ]
        self.do(lambda r: _run(r.pipeline(transaction=True), commands))

    def delete(self, key: str) -> bool:
        return self.remove(self._index, key)

    def remove(self, index: str, key: str) -> bool:
        """Remove what is under a key that an index names; whether it was there."""
        commands = [("delete", self.prefix + key), ("zrem", index, key)]
        return any(self.do(lambda r: _run(r.pipeline(transaction=True), commands)))

    def check_writable(self) -> None:
        # Nothing is stored: a name that is not there is taken out.
        self.do(lambda r: r.zrem(self._index, ""))

    def health(self) -> str:
        try:
            return "ok" if self.keys() else "empty"
        except StoreError as exc:
            return f"unusable: {exc}"

    def set_aside(self) -> Path:
        raise StoreError(f"cache {self.url}: a remote store is not moved aside; ask who runs it")

    @property
    def _index(self) -> str:
        return f"{self.prefix}names"

    def do(self, act: Any) -> Any:
        """What act(client) returns.

        Raises:
            StoreError: the server does not answer, or with a refusal.
        """
        import redis

        try:
            return act(self._connected())
        except redis.AuthenticationError as exc:
            raise StoreError(
                f"cache {self.url}: {exc}; set ADVISOR_REDIS_USERNAME and ADVISOR_REDIS_PASSWORD"
            ) from exc
        except redis.RedisError as exc:
            raise StoreError(f"cache {self.url}: {str(exc) or type(exc).__name__}") from exc
        except (OSError, ValueError) as exc:  # of its options' values, or certificates
            raise StoreError(f"cache {self.url}: {exc}") from exc
        except TypeError as exc:
            said = str(exc).rpartition("argument ")[2]
            raise UsageError(f"cache URL {self.url!r}: unknown option {said}") from exc

    def _connected(self) -> redis.Redis:
        # A connection is not shared with a parent process; patience may have grown.
        if self._client is None or (self._pid, self._waits_s) != (os.getpid(), self.patience_s):
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry

            each = self.patience_s / 2  # to connect and to answer
            self._client = redis.Redis.from_url(
                self._bare,
                socket_connect_timeout=each,
                socket_timeout=each,
                retry=Retry(NoBackoff(), 0),
                decode_responses=False,
            )
            self._pid, self._waits_s = os.getpid(), self.patience_s
        return self._client


class RedisShelf:
    """One string each, and a sorted set of their names beside that of the records."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._prefix = f"{store.prefix}{ARTIFACTS}/"
        self._index = f"{store.prefix}{ARTIFACTS}"

    def sizes(self, start: str = "") -> dict[str, int]:
        named = (name.removeprefix(f"{ARTIFACTS}/") for name in self._store.named(self._index))
        names = [name for name in named if name.startswith(start)]
        commands = [("strlen", self._prefix + name) for name in names]
        if not names:
            return {}
        sizes = self._store.do(lambda r: _run(r.pipeline(transaction=False), commands))
        return {name: int(size) for name, size in zip(names, sizes, strict=True) if size}

    def get(self, name: str, most: int) -> bytes | None:
        found = self._store.do(lambda r: r.getrange(self._prefix + plain(name), 0, most))
        if len(found) > most:
            raise too_large(name, most)
        return bytes(found) or None

    def put(self, name: str, data: bytes) -> None:
        self._store.keep(self._index, f"{ARTIFACTS}/{plain(name)}", data)

    def delete(self, name: str) -> bool:
        return self._store.remove(self._index, f"{ARTIFACTS}/{plain(name)}")


def _run(pipeline: Any, commands: list[tuple[Any, ...]], *, raises: bool = True) -> list[Any]:
    for name, *arguments in commands:
        getattr(pipeline, name)(*arguments)
    found: list[Any] = pipeline.execute(raise_on_error=raises)
    return found


def _text(name: object) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _with_login(url: str) -> str:
    parts = urlsplit(url)
    user = os.environ.get("ADVISOR_REDIS_USERNAME", "")
    password = os.environ.get("ADVISOR_REDIS_PASSWORD", "")
    if "@" in parts.netloc or not password:
        return url
    return urlunsplit(
        parts._replace(netloc=f"{quote(user, safe='')}:{quote(password, safe='')}@{parts.netloc}")
    )


def _proof(store: RedisStore) -> Remote:
    return store
