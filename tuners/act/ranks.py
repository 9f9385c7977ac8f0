"""Checks that all ranks of a job have the same advice: ranks that differ would hang. Ranks compare
through the process group's store, which needs no device, no pickle and no communicator."""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

from advisor.errors import RanksDiffer
from advisor.tuners.decisions import AWAITED_S
from advisor.tuners.faults import Stopped

APART = (
    "the ranks are at different steps, as if not all of them had the same optimizers; only jobs "
    "whose ranks train alike are tuned"
)
_comparisons, _failures = itertools.count(), itertools.count()


class Group(NamedTuple):
    """The default process group: this process's rank, the number of ranks, and the store."""

    store: Any
    rank: int
    size: int

    @classmethod
    def current(cls) -> Group | None:
        """The group; None if torch.distributed is not initialised, or has one rank."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return None
        if not distributed.is_initialized() or distributed.get_world_size() < 2:
            return None
        store = distributed.distributed_c10d._get_default_store()
        return cls(store, distributed.get_rank(), distributed.get_world_size())

    def get(self, key: str, seconds: float) -> bytes | None:
        """The value that another rank sets for a key; None if none comes within `seconds`."""
        try:
            self.store.wait([key], timedelta(seconds=seconds))
            found: bytes = self.store.get(key)
        except RuntimeError:  # DistNetworkError, or DistStoreError, also for a timeout
            return None
        return found

    def meet(self, key: str, *, waits: bool = True) -> bool:
        """Whether all ranks have come to this point; `waits`: wait for AWAITED_S at most. All who
        wait get the same answer: a rank that gives up counts as `size` ranks."""
        count = self.store.add(f"{key}/count", 1)
        if count == self.size:
            self.store.set(key, b"1")
            return True
        if not waits or count > self.size:
            return False
        if self.get(key, AWAITED_S) is not None:
            return True
        return bool(self.store.add(f"{key}/count", self.size) % self.size == 0)


def named() -> str:
    """'rank 1: ' in a job of several ranks, else ''."""
    group = Group.current()
    alone = group is None and os.environ.get("WORLD_SIZE", "1") == "1"
    return "" if alone else f"rank {group.rank if group else os.environ.get('RANK', '?')}: "


def all_failed() -> bool:
    """Whether all ranks of a job come to this point after an exception; True without ranks."""
    group = Group.current()
    return group is None or group.meet(f"advisor/failed/{next(_failures)}")


def common(names: Iterable[str]) -> set[str]:
    """The names that all ranks give, which call this at the same step. Raises Stopped."""
    found, group = {*names}, Group.current()
    if group is None:
        return found
    key = f"advisor/common/{next(_comparisons)}"
    group.store.set(f"{key}/{group.rank}", " ".join(["-", *found]))  # a value may not be empty
    if not group.meet(key):
        raise Stopped("unclear", APART)
    for rank in range(group.size):
        found &= {*group.store.get(f"{key}/{rank}").decode().split()}
    return found


def compare(digest: str) -> bool:
    """Compare this rank's advice with the other ranks'. Returns whether there is a process group.

    Each rank appends its digest to one list and reads the list: of two ranks that differ, the later
    sees both digests. The store may end with rank 0, so rank 0 waits until all have read the list.
    Raises RanksDiffer if a rank differs from the most common advice, or the store is gone.
    """
    group = Group.current()
    if group is None:
        return False
    key = f"advisor/digests/{next(_comparisons)}"
    try:
        group.store.append(f"{key}/all", f"{group.rank}={digest} ")
        all_came = group.meet(f"{key}/there")
        listed = group.store.get(f"{key}/all").decode().split()
        if all_came:
            group.meet(f"{key}/read", waits=group.rank == 0)
    except RuntimeError as exc:  # DistNetworkError
        raise RanksDiffer(
            f"rank {group.rank} of {group.size} cannot compare its advice with the others': the "
            "process group's store is gone, most likely with rank 0. See what rank 0 printed"
        ) from exc
    by_rank = {int(rank): each for rank, _, each in (one.partition("=") for one in listed)}
    common = Counter(by_rank[rank] for rank in sorted(by_rank)).most_common(1)[0][0]
    other = [rank for rank in sorted(by_rank) if by_rank[rank] != common]
    if other:
        shown = ", ".join(map(str, other[:16])) + (", ..." if len(other) > 16 else "")
        raise RanksDiffer(
            f"rank{'s' * (len(other) > 1)} {shown} of {group.size} would train with other advice "
            f"than the rest, which would hang: this is rank {group.rank} with {digest}. Call "
            "advisor.apply() after torch.distributed.init_process_group(), so that rank 0 decides, "
            "or give all ranks the same cache"
        )
    return True
