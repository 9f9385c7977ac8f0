"""Pins the batches of a DataLoader whose workers the script started itself.

`DataLoader(pin_memory=True)` starts a thread when an epoch begins. This is the same thread for an
iterator that is already at work, and it can be stopped again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data._utils.pin_memory import pin_memory

AHEAD = 2
"""Batches that are pinned before the script asks for them."""
POLL_S = 0.5
"""Seconds after which the thread looks whether its iterator is still there."""


class Pinner:
    """Takes the place of the queue from which an iterator gets what its workers have made.

    Args:
        iterator: a DataLoader's, with workers, whose memory is not pinned.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = weakref.ref(iterator)
        self._queue = iterator._data_queue
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()
        self._running = True
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self._thread = threading.Thread(target=self._pin, daemon=True, name="advisor-pin")
        iterator._data_queue = self
        self._thread.start()

    def get(self, timeout: float | None = None) -> Any:
        """The next batch, as from the queue; raises what the queue raised."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready or not self._running, timeout):
                raise queue.Empty
            found = self._ready.popleft() if self._ready else None
            self._changed.notify_all()
        if found is None:
            return self._queue.get(timeout=timeout)
        if isinstance(found, Exception):
            raise found
        return found

    def qsize(self) -> int:
        """Batches that are ready here; others are in the queue itself."""
        return len(self._ready)

    def stop(self) -> None:
        """Pin no more. Batches that are ready come first, in memory that is not pinned."""
        with self._changed:
            self._running = False
            self._changed.notify_all()
        self._thread.join()
        self._ready = deque(map(_unpinned, self._ready))

    def _pin(self) -> None:
        torch.set_num_threads(1)  # of this thread
        if torch.cuda.is_available():
            torch.cuda.set_device(self._device)
        while self._wanted():
            try:
                found = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            except Exception as exc:  # for the script: a worker has died, or cannot be understood
                found = exc
            else:
                with contextlib.suppress(Exception):  # what cannot be pinned comes as it is
                    found = found[0], pin_memory(found[1])
            with self._changed:
                self._ready.append(found)
                self._running = self._running and not isinstance(found, Exception)
                self._changed.notify_all()

    def _wanted(self) -> bool:
        """Wait until another batch may be pinned; False once none is wanted any more."""
        while True:
            with self._changed:
                room = self._changed.wait_for(
                    lambda: len(self._ready) < AHEAD or not self._running, POLL_S
                )
            iterator = self._iterator()
            if iterator is None or iterator._shutdown or not self._running:
                return False
            if room:
                return True


def _unpinned(found: Any) -> Any:
    if isinstance(found, Exception):
        return found
    return found[0], pytree.tree_map_only(torch.Tensor, torch.clone, found[1])
