"""How many loader workers this host has room for: cores, memory, shared memory, open files."""

from __future__ import annotations

import math

from advisor.cache.shown import size
from advisor.tuners import host
from advisor.tuners.environment import env_int

MAX_WORKERS = 32  # workers of one process: each is a copy of it
PREFETCH_FACTOR = 2  # PyTorch's own prefetch_factor
WORKER_MEMORY_SHARE = 0.5
"""Fraction of free memory, and of all shared memory, for workers before any batch is known."""


def cores() -> int:
    return max(1, host.cores() // _ranks())


def workers(batch_bytes: int) -> int:
    """How many workers make sense for a running script; each is a fork of its process."""
    most = min(cores(), MAX_WORKERS)
    fits = WORKER_MEMORY_SHARE * host.free_bytes() / (_ranks() * max(1, host.own_bytes()))
    fits = min(fits, batches_that_fit((PREFETCH_FACTOR + 1) * batch_bytes))  # one is in transit
    # A power of two, because free memory varies from run to run.
    return most if fits >= most else 1 << int(fits).bit_length() >> 1


def batches_that_fit(size: int) -> float:
    """How many batches of this size fit into one process's part of the shared memory."""
    return WORKER_MEMORY_SHARE * host.shared_bytes()[0] / (_ranks() * size) if size else math.inf


def has_files(tensors: int, workers: int) -> bool:
    """Whether this process may open the files that `workers` workers need: one for each tensor of
    each batch that is ready."""
    return _batches_ready(workers) * tensors <= host.USABLE_SHARE * host.files_left()


def shortage(batch_bytes: int, tensors: int, workers: int) -> str:
    """Why this host cannot run `workers` workers with such batches; '' if it can. A batch that does
    not fit into /dev/shm kills its worker with SIGBUS."""
    there = _batches_ready(workers)
    _, free = host.shared_bytes()
    if there * batch_bytes > host.USABLE_SHARE * free / _ranks():
        return (
            f"{there} batches of {size(batch_bytes)} do not fit into /dev/shm, which has "
            f"{size(free)} free; in a container, raise its limit, e.g. docker's --shm-size"
        )
    if not has_files(tensors, workers):
        return (
            f"{there} batches of {tensors:,} tensors are more files than this process may open; "
            "raise ulimit -n, or call "
            'torch.multiprocessing.set_sharing_strategy("file_system")'
        )
    return ""


def _batches_ready(workers: int) -> int:
    return workers * PREFETCH_FACTOR + 1  # one more is trained on


def _ranks() -> int:
    return max(1, env_int("LOCAL_WORLD_SIZE", 1))
