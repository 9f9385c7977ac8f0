"""Deadlines for threads that read stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

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


def run_with_timeout(
    seconds: float, act: Callable[[], T], what: str, late: Callable[[T], None] | None = None
) -> T:
    """Return act(), run in a daemon thread. Raises StoreError if it is late.

    Socket timeouts are not enough: a name lookup has none, each byte of a slow answer restarts
    them, and a network file system may hang. A late call continues in its thread, and `late` gets
    its result. Without `late`, `check_deadline` stops the call.
    """
    deadline = time.monotonic() + seconds if late is None else None
    future: Future[T] = Future()

    def run() -> None:
        _thread.deadline = deadline
        try:
            future.set_result(act())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, name="advisor: a store", daemon=True).start()
    wait((future,), seconds)
    if future.done():
        return future.result()
    if late is not None:
        future.add_done_callback(lambda done: done.exception() or late(done.result()))
    raise StoreError(f"cache {what}: no answer within {seconds * 1e3:.0f} ms")
