"""A team's Redis: one string per key, and sorted sets of the keys of records and of blobs.

The sets are indexes, so that a lookup does not scan a server that others use too. The score of a
key is when it expires.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

from advisor.cache.settings import ProjectUrl
from advisor.cache.stores.store import BLOBS, MAX_BYTES, Remote, bounded, is_blob
from advisor.cache.stores.url import PATIENCE_S, RemoteUrl
from advisor.errors import RecordDamaged, StoreError, UsageError

if TYPE_CHECKING:
    import redis

T = TypeVar("T")


class RedisStore(Remote):
    """redis[s]://[USER:PASSWORD@]HOST[:PORT][/DATABASE][?prefix=advisor&ttl=90d&timeout=50ms].

    Other options go to redis-py, e.g. ssl_ca_certs=FILE. User and password may be in
    $ADVISOR_REDIS_USERNAME and $ADVISOR_REDIS_PASSWORD instead, which are not sent to a
    `ProjectUrl`.
    """

    def __init__(self, url: str) -> None:
        given = RemoteUrl.parse(url, ("prefix", "ttl", "timeout"))
        super().__init__(given, PATIENCE_S)
        self.address = given.address(6379)
        self._ttl_s = given.seconds("ttl", 0.0)
        prefix = given.options.get("prefix", "advisor")
        if not prefix or set(prefix) & set("{}*?[]"):
            raise UsageError(f"cache URL {self.url!r}: prefix={prefix}: expected a plain name")
        # In braces: a cluster then keeps all of it on one node, as the transactions need.
        self._prefix = f"{{{prefix}}}:"
        self._bare = given.bare if isinstance(url, ProjectUrl) else _with_login(given.bare)
        database = urlsplit(given.bare).path.strip("/")
        if database and not database.isdecimal():
            raise UsageError(f"cache URL {self.url!r}: database {database!r}: expected a number")

    def load(self) -> None:
        import redis.retry  # noqa: F401 # only to have it in memory

    def keys(self) -> list[str]:
        return self._indexed("names")

    def sizes(self, start: str = BLOBS) -> dict[str, int]:
        keys = [key for key in self._indexed("artifacts") if key.startswith(start)]
        return {key: size for key, size in self._each(keys, "strlen") if type(size) is int and size}

    def get_many(
        self, keys: Iterable[str], most: int = MAX_BYTES
    ) -> dict[str, bytes | RecordDamaged]:
        wanted = [key for key in keys if self._index(key)]
        # Not MGET: what somebody planted may be of any size, and is not worth fetching whole.
        parts = self._each(wanted, "getrange", 0, most)
        return {key: _string(key, part, most) for key, part in parts if part != b""}

    def put(self, key: str, data: bytes) -> None:
        index = self._index(key)
        now = time.time()

        def act(pipeline: Any) -> None:
            pipeline.set(self._prefix + key, data, px=int(self._ttl_s * 1000) or None)
            pipeline.zadd(index, {key: now + self._ttl_s if self._ttl_s else "+inf"})
            pipeline.zremrangebyscore(index, "-inf", f"({now}")

        self._together(act)

    def delete(self, key: str) -> bool:
        index = self._index(key)
        return any(
            self._together(lambda pipeline: pipeline.delete(self._prefix + key).zrem(index, key))
        )

    def check_writable(self) -> None:
        # Nothing is stored: a key that is not there is removed.
        self._do(lambda r: r.zrem(f"{self._prefix}names", ""))

    def _index(self, key: str) -> str:
        """The name of the sorted set that a key is in."""
        return self._prefix + ("artifacts" if is_blob(key) else "names")

    def _indexed(self, index: str) -> list[str]:
        """The sorted keys in an index that have not expired."""
        found = self._do(lambda r: r.zrangebyscore(self._prefix + index, time.time(), "+inf"))
        return sorted(key.decode("utf-8", "replace") for key in found)

    def _each(self, keys: list[str], command: str, *arguments: int) -> Iterable[tuple[str, Any]]:
        """Each key with what a command returns for it, or with its error."""

        def act(r: Any) -> list[Any]:
            pipeline = r.pipeline(transaction=False)
            for key in keys:
                getattr(pipeline, command)(self._prefix + key, *arguments)
            found: list[Any] = pipeline.execute(raise_on_error=False)
            return found

        return zip(keys, self._do(act) if keys else [], strict=True)

    def _together(self, act: Callable[[Any], object]) -> list[Any]:
        """What the commands that act(pipeline) queues return, run as one transaction."""

        def run(r: Any) -> list[Any]:
            pipeline = r.pipeline(transaction=True)
            act(pipeline)
            found: list[Any] = pipeline.execute()
            return found

        return self._do(run)

    def _do(self, act: Callable[[Any], T]) -> T:
        """Return act(client).

        Raises:
            StoreError: the server does not answer, or with a refusal.
        """
        import redis

        try:
            return act(self._client)
        except redis.AuthenticationError as exc:
            raise StoreError(
                f"cache {self.url}: {exc}; set ADVISOR_REDIS_USERNAME and ADVISOR_REDIS_PASSWORD"
            ) from exc
        except (redis.RedisError, OSError, ValueError) as exc:  # ValueError: of its options' values
            raise StoreError(f"cache {self.url}: {str(exc) or type(exc).__name__}") from exc
        except TypeError as exc:
            said = str(exc).rpartition("argument ")[2]
            raise UsageError(f"cache URL {self.url!r}: unknown option {said}") from exc

    @functools.cached_property
    def _client(self) -> redis.Redis:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        each = self.patience_s / 2  # to connect and to answer
        return redis.Redis.from_url(
            self._bare,
            socket_connect_timeout=each,
            socket_timeout=each,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
        )


def _string(key: str, part: object, most: int) -> bytes | RecordDamaged:
    if isinstance(part, bytes):
        return bounded(key, part, most)
    return RecordDamaged(f"{key}: no string in Redis ({part}); refused")


def _with_login(url: str) -> str:
    parts = urlsplit(url)
    user = os.environ.get("ADVISOR_REDIS_USERNAME", "")
    password = os.environ.get("ADVISOR_REDIS_PASSWORD", "")
    if "@" in parts.netloc or not password:
        return url
    login = f"{quote(user, safe='')}:{quote(password, safe='')}"
    return urlunsplit(parts._replace(netloc=f"{login}@{parts.netloc}"))
