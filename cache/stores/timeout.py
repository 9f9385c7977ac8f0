"""Waiting for a store no longer than its answer is worth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from advisor.errors import StoreError

T = TypeVar("T")

_thread = threading.local()


def time_left(most: float) -> float:
    """Seconds until this thread's deadline, at most `most`; 0 once it has passed."""
    deadline: float | None = getattr(_thread, "deadline", None)
    return most if deadline is None else max(0.0, min(most, deadline - time.monotonic()))


def check_deadline() -> None:
    """Raise StoreError if this thread's deadline has passed."""
    if time_left(1.0) <= 0:
        raise StoreError("cache: took longer than its deadline; given up")


class _Attempt(Generic[T]):
    """A call in a daemon thread."""

    def __init__(
        self, act: Callable[[], T], deadline: float | None, late: Callable[[T], None] | None
    ) -> None:
        self._act, self._deadline, self._late = act, deadline, late
        self._lock = threading.Lock()
        self._given_up = False
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="advisor: a store", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _thread.deadline = self._deadline
        try:
            result = self._act()
        except BaseException as exc:
            self._error = exc
            return
        with self._lock:
            self._result.append(result)
        if self._given_up and self._late is not None:
            self._late(result)

    def wait(self, seconds: float) -> list[T]:
        """The result; none if it is late. Raises what the call raised."""
        self._thread.join(seconds)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._given_up = not self._result
            return self._result


def run_with_timeout(
    seconds: float, act: Callable[[], T], what: str, late: Callable[[T], None] | None = None
) -> T:
    """What act() returns, if it returns in time.

    Socket timeouts are not enough: a name lookup has none, each byte of a slow answer restarts
    them, and nothing bounds a network file system that hangs. A late call goes on in its daemon
    thread, and `late` gets its result. Without `late` its `check_deadline` raises.

    Raises:
        StoreError: it is late; or what act() raised.
    """
    deadline = time.monotonic() + seconds if late is None else None
    found = _Attempt(act, deadline, late).wait(seconds)
    if not found:
        raise StoreError(f"cache {what}: no answer within {seconds * 1e3:.0f} ms")
    return found[0]
