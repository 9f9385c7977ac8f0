"""What goes on without a word is told of now and then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def ticking(tell: Callable[[float], None], first_s: float, every_s: float) -> Iterator[None]:
    """While this is entered, `tell` is called from another thread with the seconds so far: after
    `first_s`, then each `every_s`. It is called no more once this is left."""
    over = threading.Event()

    def run() -> None:
        began = time.monotonic()
        wait_s = first_s
        while not over.wait(wait_s):
            tell(time.monotonic() - began)
            wait_s = every_s

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
