"""A team's Redis: one string per key, and sorted sets of the keys of records and of blobs, so that
a lookup does not scan a server that others use too. The score of a key is when it expires."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from advisor.cache.settings import ProjectUrl
from advisor.cache.stores.store import BLOBS, MAX_BYTES, ByKey, Remote, bounded, is_blob
from advisor.cache.stores.url import RemoteUrl
from advisor.errors import RecordDamaged, StoreError, UsageError

if TYPE_CHECKING:
    import redis


class RedisStore(Remote):
    """redis[s]://[USER:PASSWORD@]HOST[:PORT][/DATABASE][?prefix=advisor&ttl=90d&timeout=50ms].

    Other options go to redis-py, e.g. ssl_ca_certs=FILE. User and password may be in
    $ADVISOR_REDIS_USERNAME and $ADVISOR_REDIS_PASSWORD instead, which are not sent to a
    `ProjectUrl`.
    """

    def __init__(self, url: str) -> None:
        given = RemoteUrl(url, "prefix", "ttl", "timeout")
        super().__init__(given)
        self._ttl_s = given.seconds("ttl", 0.0)
        # In braces: a cluster then keeps all keys on one node, as the transactions need.
        self._prefix = f"{{{given.options.get('prefix', 'advisor')}}}:"
        self._bare = given.bare
        parts = urlsplit(given.bare)
        self.address = parts.hostname or "localhost", parts.port or 6379
        self._login = {} if "@" in parts.netloc or isinstance(url, ProjectUrl) else _login()
        database = parts.path.strip("/")
        if database and not database.isdecimal():
            raise UsageError(f"cache URL {self.url!r}: database {database!r}: expected a number")

    def load(self) -> None:
        import redis.retry  # noqa: F401

    def keys(self) -> list[str]:
        return self._indexed("names")

    def sizes(self, prefix: str = BLOBS) -> dict[str, int]:
        keys = [key for key in self._indexed("artifacts") if key.startswith(prefix)]
        return {key: size for key, size in self._each(keys, "strlen") if type(size) is int and size}

    def get_many(self, keys: Iterable[str], most: int = MAX_BYTES) -> ByKey:
        wanted = [key for key in keys if self._index(key)]
        # Not MGET, which would fetch planted data of any size.
        parts = self._each(wanted, "getrange", 0, most)
        return {
            key: bounded(key, part, most)
            if isinstance(part, bytes)
            else RecordDamaged(f"{key}: no string in Redis ({part}); refused")
            for key, part in parts
            if part != b""
        }

    def put(self, key: str, data: bytes) -> None:
        index, now = self._index(key), time.time()
        with self._server() as server:
            pipeline = server.pipeline(transaction=True)
            pipeline.set(self._prefix + key, data, px=int(self._ttl_s * 1000) or None)
            pipeline.zadd(index, {key: now + self._ttl_s if self._ttl_s else "+inf"})
            pipeline.zremrangebyscore(index, "-inf", f"({now}")
            pipeline.execute()

    def delete(self, key: str) -> bool:
        index = self._index(key)
        with self._server() as server:
            pipeline = server.pipeline(transaction=True)
            return any(pipeline.delete(self._prefix + key).zrem(index, key).execute())

    def check_writable(self) -> None:
        with self._server() as server:  # stores nothing: removes a key that does not exist
            server.zrem(f"{self._prefix}names", "")

    def _index(self, key: str) -> str:
        """The name of the sorted set that a key is in."""
        return self._prefix + ("artifacts" if is_blob(key) else "names")

    def _indexed(self, index: str) -> list[str]:
        """The sorted keys in an index that have not expired."""
        with self._server() as server:
            found = server.zrangebyscore(self._prefix + index, time.time(), "+inf")
        return sorted(key.decode("utf-8", "replace") for key in found)

    def _each(self, keys: list[str], command: str, *arguments: int) -> Iterable[tuple[str, Any]]:
        """Each key with the command's result for it, or with its error."""
        if not keys:
            return ()
        with self._server() as server:
            pipeline = server.pipeline(transaction=False)
            for key in keys:
                getattr(pipeline, command)(self._prefix + key, *arguments)
            return zip(keys, pipeline.execute(raise_on_error=False), strict=True)

    @contextlib.contextmanager
    def _server(self) -> Iterator[Any]:
        """Context manager: yields the client. Errors of the server inside become StoreError."""
        import redis

        try:
            yield self._client
        except redis.AuthenticationError as exc:
            raise StoreError(
                f"cache {self.url}: {exc}; set ADVISOR_REDIS_USERNAME and ADVISOR_REDIS_PASSWORD"
            ) from exc
        except (redis.RedisError, OSError, ValueError) as exc:  # ValueError: an option's value
            raise StoreError(f"cache {self.url}: {str(exc) or type(exc).__name__}") from exc
        except TypeError as exc:
            said = str(exc).rpartition("argument ")[2]
            raise UsageError(f"cache URL {self.url!r}: unknown option {said}") from exc

    @functools.cached_property
    def _client(self) -> redis.Redis:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        each = self.timeout_s / 2  # to connect and to answer
        return redis.Redis.from_url(
            self._bare,
            socket_connect_timeout=each,
            socket_timeout=each,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
            **self._login,
        )


def _login() -> dict[str, str | None]:
    """The login from the environment, for a URL without a login."""
    user = os.environ.get("ADVISOR_REDIS_USERNAME") or None
    password = os.environ.get("ADVISOR_REDIS_PASSWORD")
    return {"username": user, "password": password} if password else {}
