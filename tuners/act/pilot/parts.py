"""The parts of a step: the names of those of its memory, and its micro-batches."""

from __future__ import annotations

import re

from advisor.cache.config import Config

MICRO = "micro-batches"
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations and temporary memory",
    "peak": "peak: all of these",
    "fragmentation": "reserved beyond the peak (fragmentation)",
    "others": "other processes, and CUDA itself",
    "host": "activations on the host",
    "blocks": "activations that {block}s compute again",
}
"""By its name in a breakdown: how a part is shown."""
FIXED = ("weights", "gradients", "optimizer_state")
"""Parts that are the same at any batch."""


def unmodified_bytes(memory: Config) -> int:
    """The peak that the unmodified script would have, from the breakdown of steps that save memory:
    an estimate. 0 if it is not known."""
    return size_of(memory, "peak", "host", "blocks") if "host" in memory else 0


def size_of(memory: Config, *parts: str) -> int:
    """Bytes of these parts of a breakdown together; an unknown part counts as 0."""
    return sum(one for name in parts if type(one := memory.get(name)) is int)


def micro_batches(others: str) -> int:
    """Calls of the model in a step of each process of a run, by `Task.others`; 1 for a workload."""
    found = re.search(rf"(?:^|; )(\d{{1,9}}) {MICRO}(?:;|$)", others)
    return max(1, int(found[1])) if found else 1
