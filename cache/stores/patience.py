"""Waiting for a store no longer than it is worth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from advisor.errors import StoreError

T = TypeVar("T")

_asked = threading.local()


def left(most: float) -> float:
    """Seconds that this thread's act may still take, at most `most`; 0 once it is late."""
    until: float | None = getattr(_asked, "until", None)
    return most if until is None else max(0.0, min(most, until - time.monotonic()))


def go_on() -> None:
    """Raise StoreError where nobody waits for this thread's act any more."""
    if left(1.0) <= 0:
        raise StoreError("cache: asked for longer than it is worth; given up")


class _Attempt(Generic[T]):
    """An act in a thread of its own. `given_up`: nobody waits for it any more."""

    def __init__(self, act: Callable[[], T], late: Callable[[T], None] | None) -> None:
        self._act, self._late = act, late
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._given_up = False
        self._done = threading.Event()

    def run(self, until: float) -> None:
        if self._late is None:
            _asked.until = until
        try:
            result = self._act()
        except BaseException as exc:
            self._error = exc
            self._done.set()
            return
        with self._lock:
            self._result.append(result)
            self._done.set()
            given_up = self._given_up
        if given_up and self._late is not None:
            self._late(result)

    def wait(self, seconds: float) -> list[T]:
        """The result; nothing where it is not there in time. Raises what the act raised."""
        self._done.wait(seconds)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._given_up = not self._result
            return self._result


def within(
    seconds: float, act: Callable[[], T], what: str, late: Callable[[T], None] | None = None
) -> T:
    """What act() returns, if it does so within some seconds.

    Timeouts of sockets do not bound it: looking up a host's name has none, and each byte of a slow
    answer starts them anew; nor does anything bound a network file system that is away. An act that
    is late goes on in a daemon thread, and `late` gets its result; without `late` it is told so by
    `left` and `go_on`, and ends where it looks there.

    Raises:
        StoreError: it is late; or what act() raised.
    """
    attempt = _Attempt(act, late)
    until = time.monotonic() + seconds
    threading.Thread(
        target=attempt.run, args=(until,), name=f"advisor: {what}", daemon=True
    ).start()
    found = attempt.wait(seconds)
    if not found:
        raise StoreError(f"cache {what}: no answer within {seconds * 1e3:.0f} ms")
    return found[0]
