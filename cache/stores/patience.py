"""Waiting for a store no longer than it is worth."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

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
    """An act in another thread. `given_up`: nobody waits for it any more."""

    def __init__(self, act: Callable[[], T], until: float, late: Callable[[T], None] | None):
        self._act, self._until, self._late = act, until, late
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._given_up = False
        self._done = threading.Event()

    def run(self) -> None:
        _asked.until = self._until if self._late is None else None
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

    @property
    def over(self) -> bool:
        """Whether it ended while somebody waited for it."""
        return self._done.is_set() and not self._given_up


class _Worker:
    """A daemon thread that makes one attempt after another."""

    def __init__(self) -> None:
        self._attempts: SimpleQueue[_Attempt[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="advisor: a store", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        """Make the next attempt, which nothing holds on to afterwards; False where it is to end."""
        attempt = self._attempts.get()
        if attempt is not None:
            attempt.run()
        return attempt is not None

    def make(self, attempt: _Attempt[Any]) -> None:
        self._attempts.put(attempt)

    def leave(self) -> None:
        """Have it end once its attempt is over."""
        self._attempts.put(None)

    def end(self) -> None:
        """Have it end now, where it is idle."""
        self.leave()
        self._thread.join(_ENDING_S)


_ENDING_S = 1.0
_idle: list[_Worker] = []
"""At most one is kept, for the next act."""


def _end_idle() -> None:
    """Before a fork: a child has none of its parent's threads, and Python warns of them."""
    while _idle:
        _idle.pop().end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_end_idle, after_in_child=_idle.clear)


def within(
    seconds: float, act: Callable[[], T], what: str, late: Callable[[T], None] | None = None
) -> T:
    """What act() returns, if it does so within some seconds.

    Timeouts of sockets do not bound it: looking up a host's name has none, and each byte of a slow
    answer starts them anew; nor does anything bound a network file system that is away. An act that
    is late goes on in its daemon thread, and `late` gets its result; without `late` it is told so
    by `left` and `go_on`, and ends where it looks there. The next act has another thread then.

    Raises:
        StoreError: it is late; or what act() raised.
    """
    attempt = _Attempt(act, time.monotonic() + seconds, late)
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.make(attempt)
    try:
        found = attempt.wait(seconds)
    finally:
        if attempt.over and not _idle:
            _idle.append(worker)
        else:
            worker.leave()
    if not found:
        raise StoreError(f"cache {what}: no answer within {seconds * 1e3:.0f} ms")
    return found[0]
