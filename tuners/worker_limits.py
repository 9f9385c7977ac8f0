"""How many loader workers this host has room for: cores, memory, shared memory, open files."""

from __future__ import annotations

import math

from advisor.cache.shown import size
from advisor.tuners import host
from advisor.tuners.environment import env_int

MAX_WORKERS = 32  # workers of one process: each is a copy of it
PREFETCH_FACTOR = 2  # PyTorch's own prefetch_factor
WORKER_MEMORY_SHARE = 0.5
"""Of free memory, and of all shared memory, for workers whose batches are not known yet."""


def cores() -> int:
    return max(1, host.cores() // _ranks())


def workers(batch_bytes: int) -> int:
    """How many workers make sense for a running script, of whose process each is a fork."""
    most = min(cores(), MAX_WORKERS)
    fits = WORKER_MEMORY_SHARE * host.free_bytes() / (_ranks() * max(1, host.own_bytes()))
    fits = min(fits, batches_that_fit((PREFETCH_FACTOR + 1) * batch_bytes))  # one is on its way
    # A power of two, because free memory varies from run to run.
    return most if fits >= most else 1 << int(fits).bit_length() >> 1


def batches_that_fit(size: int) -> float:
    """How many batches of this size fit into one process's part of the shared memory."""
    return WORKER_MEMORY_SHARE * host.shared_bytes()[0] / (_ranks() * size) if size else math.inf


def has_files(tensors: int, workers: int) -> bool:
    """Whether this process may open the files of so many workers: one for each tensor of a batch
    that is ready."""
    return _batches_ready(workers) * tensors <= host.USABLE_SHARE * host.files_left()


def shortage(batch_bytes: int, tensors: int, workers: int) -> str:
    """What this host lacks for so many workers with such batches; '' for nothing. A batch that does
    not fit into /dev/shm ends its worker by SIGBUS."""
    there = _batches_ready(workers)
    _, free = host.shared_bytes()
    if there * batch_bytes > host.USABLE_SHARE * free / _ranks():
        return (
            f"{there} batches of {size(batch_bytes)} do not fit into /dev/shm, of which "
            f"{size(free)} is free; in a container give more, as docker's --shm-size"
        )
    if not has_files(tensors, workers):
        return (
            f"{there} batches of {tensors:,} tensors are more files than this process may "
            'open (ulimit -n); torch.multiprocessing.set_sharing_strategy("file_system") opens '
            "none"
        )
    return ""


def _batches_ready(workers: int) -> int:
    return workers * PREFETCH_FACTOR + 1  # one more is trained on


def _ranks() -> int:
    return max(1, env_int("LOCAL_WORLD_SIZE", 1))
