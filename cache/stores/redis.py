"""A team's Redis: one string per key, and sorted sets of the keys of records and of blobs.

The sets are indexes, so that a lookup does not scan a server that others use too. The score of a
key is when it expires.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

from advisor.cache.settings import ProjectUrl
from advisor.cache.stores.store import BLOBS, MAX_BYTES, Remote, bounded, is_blob
from advisor.cache.stores.url import PATIENCE_S, RemoteUrl
from advisor.errors import RecordDamaged, StoreError, UsageError

if TYPE_CHECKING:
    import redis

T = TypeVar("T")

_OWN = ("prefix", "ttl", "timeout")
_LASTING = "+inf"


class RedisStore(Remote):
    """redis[s]://[USER:PASSWORD@]HOST[:PORT][/DATABASE][?prefix=advisor&ttl=90d&timeout=50ms].

    Other options go to redis-py, e.g. ssl_ca_certs=FILE. User and password may be in
    $ADVISOR_REDIS_USERNAME and $ADVISOR_REDIS_PASSWORD instead, which are not sent to a
    `ProjectUrl`.
    """

    def __init__(self, url: str) -> None:
        # Not imported yet: that takes longer than to learn that the server is down.
        if importlib.util.find_spec("redis") is None:
            raise ModuleNotFoundError("the Python package redis is not installed")
        given = RemoteUrl.parse(url, _OWN)
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
        self._client: redis.Redis | None = None
        self._pid = 0
        self._waits_s = 0.0

    def load(self) -> None:
        import redis.retry  # noqa: F401 # only to have it in memory

    def keys(self) -> list[str]:
        return self._indexed("names")

    def sizes(self, start: str = BLOBS) -> dict[str, int]:
        keys = [key for key in self._indexed("artifacts") if key.startswith(start)]
        sizes = self._read_each("strlen", {key: () for key in keys})
        return {
            key: size for key, size in zip(keys, sizes, strict=True) if type(size) is int and size
        }

    def get(self, key: str, most: int = MAX_BYTES) -> bytes | None:
        is_blob(key)
        (part,) = self._read_each("getrange", {key: (0, most)})
        return bounded(key, _string(key, part), most) or None

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes | RecordDamaged]:
        wanted = list(keys)
        # Not MGET: what somebody planted may be of any size, and is not worth fetching whole.
        parts = self._read_each("getrange", {key: (0, MAX_BYTES) for key in wanted})
        found: dict[str, bytes | RecordDamaged] = {}
        for key, part in zip(wanted, parts, strict=True):
            try:
                if data := _string(key, part):
                    found[key] = data
            except RecordDamaged as exc:
                found[key] = exc
        return found

    def put(self, key: str, data: bytes) -> None:
        index = self._index(key)
        ends = f"{time.time() + self._ttl_s}" if self._ttl_s else _LASTING
        expires: tuple[Any, ...] = ("PX", int(self._ttl_s * 1000)) if self._ttl_s else ()

        def act(r: Any) -> None:
            pipeline = r.pipeline(transaction=True)
            pipeline.execute_command("SET", self._prefix + key, data, *expires)
            pipeline.execute_command("ZADD", index, ends, key)
            pipeline.zremrangebyscore(index, "-inf", f"({time.time()}")
            pipeline.execute()

        self._do(act)

    def delete(self, key: str) -> bool:
        index = self._index(key)

        def act(r: Any) -> bool:
            pipeline = r.pipeline(transaction=True)
            pipeline.delete(self._prefix + key)
            pipeline.zrem(index, key)
            return any(pipeline.execute())

        return self._do(act)

    def check_writable(self) -> None:
        # Nothing is stored: a key that is not there is removed.
        self._do(lambda r: r.zrem(f"{self._prefix}names", ""))

    def _index(self, key: str) -> str:
        """The name of the sorted set that a key is in."""
        return self._prefix + ("artifacts" if is_blob(key) else "names")

    def _indexed(self, index: str) -> list[str]:
        """The sorted keys in an index that have not expired."""
        now = time.time()
        found = self._do(lambda r: r.zrangebyscore(self._prefix + index, now, _LASTING))
        return sorted(key.decode("utf-8", "replace") for key in found)

    def _read_each(self, command: str, keys: Mapping[str, tuple[int, ...]]) -> list[Any]:
        """What a command says of each key, given some more arguments; an error where it fails."""

        def act(r: Any) -> list[Any]:
            pipeline = r.pipeline(transaction=False)
            for key, arguments in keys.items():
                getattr(pipeline, command)(self._prefix + key, *arguments)
            found: list[Any] = pipeline.execute(raise_on_error=False)
            return found

        return self._do(act) if keys else []

    def _do(self, act: Callable[[Any], T]) -> T:
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


def _string(key: str, part: object) -> bytes:
    if not isinstance(part, bytes):
        raise RecordDamaged(f"{key}: no string in Redis ({part}); refused")
    return part


def _with_login(url: str) -> str:
    parts = urlsplit(url)
    user = os.environ.get("ADVISOR_REDIS_USERNAME", "")
    password = os.environ.get("ADVISOR_REDIS_PASSWORD", "")
    if "@" in parts.netloc or not password:
        return url
    return urlunsplit(
        parts._replace(netloc=f"{quote(user, safe='')}:{quote(password, safe='')}@{parts.netloc}")
    )
