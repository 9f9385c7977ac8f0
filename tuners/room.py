"""What room this host has for the workers of one process's loader: cores, memory, shared memory."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from advisor.cache.shown import size
from advisor.tuners import host

MOST = 32
"""Workers of one process: each is a copy of it."""
AHEAD = 2
"""Batches that each worker has ready, unless it is told otherwise: PyTorch's own."""
PREFETCHED = AHEAD + 1
"""Batches of each worker in shared memory: one is on its way."""
SHARE = 0.5
"""Of the memory that is free, and of all that is shared, what they may take."""
FULL = 0.9
"""Of what is free of shared memory now, what batches of a known size may take."""


def cores() -> int:
    """Those of one process of a job."""
    return max(1, host.cores() // _ranks())


def workers(batch_bytes: int) -> int:
    """How many make sense beside a run's own process, which they are forked of."""
    most = min(cores(), MOST)
    fits = SHARE * host.free_bytes() / (_ranks() * max(1, host.own_bytes()))
    fits = min(fits, times(PREFETCHED * batch_bytes))
    # What is free is never the same twice: a power of two is more often.
    return most if fits >= most else 1 << int(fits).bit_length() >> 1


def times(size: int) -> float:
    """Times that so many bytes fit into the share of one process of a job of the memory through
    which workers hand batches over."""
    return SHARE * host.shared_bytes() / (_ranks() * size) if size else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a worker hands over at a time: bytes, and tensors, each of them a file."""

    bytes: int = 0
    tensors: int = 0


def has_files(batch: Batch, workers: int, ahead: int) -> bool:
    """Whether this process may open those of what so many workers have ready."""
    return _ready(workers, ahead) * batch.tensors <= FULL * host.files_left()


def lacking(batch: Batch, workers: int, ahead: int) -> str:
    """What this host lacks for so many workers with so many batches `ahead` each; '' for nothing.

    A batch that does not fit into /dev/shm ends its worker by SIGBUS.
    """
    there = _ready(workers, ahead)
    needs, free = there * batch.bytes, host.shared_free_bytes()
    if needs > FULL * free / _ranks():
        return (
            f"{there} batches of {size(batch.bytes)} do not fit into /dev/shm, of which "
            f"{size(free)} is free; in a container give more, as docker's --shm-size"
        )
    if not has_files(batch, workers, ahead):
        return (
            f"{there} batches of {batch.tensors:,} tensors are more files than this process may "
            'open (ulimit -n); torch.multiprocessing.set_sharing_strategy("file_system") opens '
            "none"
        )
    return ""


def _ready(workers: int, ahead: int) -> int:
    """Batches in shared memory at most: one more is trained on."""
    return workers * ahead + 1


def _ranks() -> int:
    """Processes of the job on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
