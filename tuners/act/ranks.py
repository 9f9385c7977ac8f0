"""Several processes of one job: all must train alike, or they wait for one another for ever.

What they tell each other goes through the key-value store that every process group has: it needs
no device and no pickle, and works before NCCL has made a communicator.
"""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from typing import Any

from advisor.errors import RanksDiffer

GATHER_S = 10.0
"""For the other ranks' digests: those that come later compare themselves with all before them."""

_comparisons = itertools.count()


class Group:
    """The default process group: `rank` of `size`, and its store."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store = store
        self.rank = rank
        self.size = size

    @classmethod
    def current(cls) -> Group | None:
        """None where torch.distributed is not initialised, or alone."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return None
        if not distributed.is_initialized() or distributed.get_world_size() < 2:
            return None
        store = distributed.distributed_c10d._get_default_store()
        return cls(store, distributed.get_rank(), distributed.get_world_size())

    def get(self, key: str, seconds: float) -> bytes | None:
        """What another rank has put, or None where it does not come in time."""
        try:
            self.store.wait([key], timedelta(seconds=seconds))
            found: bytes = self.store.get(key)
        except RuntimeError:  # DistStoreError, DistNetworkError: a timeout is one
            return None
        return found

    def meet(self, key: str, *, waits: bool = True) -> bool:
        """Whether all ranks have come to this point; `waits`: within GATHER_S."""
        if self.store.add(f"{key}/count", 1) == self.size:
            self.store.set(key, b"1")
            return True
        return waits and self.get(key, GATHER_S) is not None


def compare(digest: str) -> bool:
    """Hold this rank's advice against that of the others; whether there is a process group.

    Each rank adds its digest to one list and reads it: of two that differ, at least the later one
    sees both. A rank that never calls this is waited for once, for GATHER_S. Rank 0, with which the
    store may go, goes on once all that came have read the list.

    Raises:
        RanksDiffer: which ranks differ from the most common advice, or rank 0 is gone.
    """
    group = Group.current()
    if group is None:
        return False
    try:
        by_rank = _digests(group, digest)
    except RuntimeError as exc:  # DistNetworkError
        raise RanksDiffer(
            f"rank {group.rank} of {group.size} cannot tell whether it has the others' advice: the "
            "process group's store is gone, most likely with rank 0, whose own message says why"
        ) from exc
    counts: dict[str, int] = {}
    for each in by_rank.values():
        counts[each] = counts.get(each, 0) + 1
    common = max(counts, key=lambda one: counts[one])
    other = [rank for rank, each in by_rank.items() if each != common]
    if other:
        listed = ", ".join(map(str, other[:16])) + (", ..." if len(other) > 16 else "")
        raise RanksDiffer(
            f"rank{'s' * (len(other) > 1)} {listed} of {group.size} would train with other advice "
            f"than the rest, which would hang: this is rank {group.rank} with {digest}. Call "
            "advisor.apply() after torch.distributed.init_process_group(), so that rank 0 decides, "
            "or give all ranks the same cache"
        )
    return True


def _digests(group: Group, digest: str) -> dict[int, str]:
    """Of each rank that came, this one's among them."""
    key = f"advisor/digests/{next(_comparisons)}"
    group.store.append(f"{key}/all", f"{group.rank}={digest} ")
    whole = group.meet(f"{key}/there")
    told = group.store.get(f"{key}/all").decode().split()
    if whole:
        group.meet(f"{key}/read", waits=group.rank == 0)
    return dict(sorted((int(r), d) for r, _, d in (one.partition("=") for one in told)))
