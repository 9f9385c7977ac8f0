"""Graphs that hold collectives end before their process group does.

NCCL waits, in the end of a communicator and without limit, for every graph that it was captured in
(`localPersistentRefs` in its init.cc; pytorch issue #115388): a script that destroys its process
group, or just ends, would hang. So `torch.distributed.destroy_process_group` is wrapped while there
are such graphs, and they go at exit.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from typing import Any, Protocol

import torch.distributed
from torch.distributed import distributed_c10d


class Holder(Protocol):
    """Holds a graph with collectives in it."""

    def release(self) -> None:
        """Let go of it."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_PLACES: tuple[Any, ...] = (torch.distributed, distributed_c10d)
_destroy = distributed_c10d.destroy_process_group


def release_first(holder: Holder) -> None:
    """Have it let go before the process group is destroyed."""
    if not _holders:
        for place in _PLACES:
            place.destroy_process_group = _destroy_after
        atexit.register(_release)
    _holders.add(holder)


@functools.wraps(_destroy)
def _destroy_after(*args: Any, **kwargs: Any) -> None:
    _release()
    _destroy(*args, **kwargs)


def _release() -> None:
    for place in _PLACES:
        place.destroy_process_group = _destroy
    atexit.unregister(_release)
    for holder in list(_holders):
        holder.release()
    _holders.clear()
