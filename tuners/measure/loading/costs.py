"""What a sample costs a loader's worker, by part: its stack is looked at every few milliseconds.

Python tells of a signal once a call into a library has returned, and then in the function that
made it, which had the time since the look was due: decoding that takes ten milliseconds counts for
all looks due within them, though it was seen once. After operators and subscripts it tells of it as
the next call begins, which had none of that time: it was the caller's, or of what returned to it.
When they are due is drawn beforehand, one in each stretch of time, so that no part is in step with
them. A profiler that is told of each call would make those that are called often look dear.
"""

from __future__ import annotations

import collections
import dis
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, default_collate

from advisor.tuners.measure.loading.data import Data
from advisor.tuners.measure.loading.returned import Returned
from advisor.tuners.measure.worker.wire import Cost, Costs

EVERY_S, SOONEST_S = 0.002, 1e-6
"""More often what sleeps, as what waits for a disk, is woken too often. A timer of 0 is none."""
WARM = 2
"""Batches before those that are counted."""
LEAST = 3
"""Batches that are counted at least."""
TOO_SHORT = "its epoch is too short to tell what a sample costs"
COLLATE = "collate"
_FETCH = ("torch/utils/data/_utils/fetch.py", "fetch")
_OUTSIDE = (
    *("torch/utils/data/", "torch/nn/modules/module.py", "torch/utils/_contextlib.py"),
    *("torch/_compile.py", "torch/_dynamo/"),
)
"""Files that only pass a call on."""
_SEVERAL = frozenset({"Compose", "Sequential", "StandardTransform"})
"""Classes that are as many parts as they have."""
BEGINS = dis.opmap["RESUME"]
"""The instruction with which a call begins, and a generator goes on."""
_CALLS = frozenset({"forward", "__call__"})
"""Methods that are called by the name of their class."""


def costs(data: Data, batch: int, seconds: float) -> Costs:
    """What a sample costs a worker.

    A part is what the dataset's `__getitem__` (or `__iter__`) calls, each transform by itself, what
    it does without calling anything, and making a batch of samples.
    """
    looking = _Looking(data.collate or default_collate)
    how: dict[str, Any] = {"num_workers": 1, "batch_size": batch}
    loader: DataLoader[Any] = data.loader(**how)
    loader.collate_fn, loader.worker_init_fn = looking.collate, looking.begin
    seen = _seen(loader, seconds)
    before = min(WARM, len(seen) - 2)
    first, last = seen[before], seen[-1]
    samples = batch * (len(seen) - 1 - before)
    spent = {part: last.spent[part] - first.spent.get(part, 0.0) for part in last.spent}
    looked_s = sum(spent.values())
    if not looked_s:
        raise RuntimeError(TOO_SHORT)
    # Looks are shares of the time, and the time is known.
    one_s = (last.at_s - first.at_s) / looked_s / samples
    ordered = sorted(spent.items(), key=lambda one: -one[1])
    made = _made(data)
    places = {part: place for place, part in enumerate(made, 1) if part != COLLATE}
    parts = (
        Cost(
            part=part,
            seconds=spent_s * one_s,
            made_bytes=made.get(part, 0),
            place=places.get(part, 0),
        )
        for part, spent_s in ordered
        if part and spent_s
    )
    return Costs(parts=tuple(parts), samples=data.samples)


@dataclass(frozen=True, slots=True)
class _Spent:
    """What a worker's looks came to until some time, by part."""

    at_s: float
    spent: Mapping[str, float]


def _seen(loader: DataLoader[Any], seconds: float) -> list[_Spent]:
    """Until each batch: of the first epoch that lasts so long, or what it has."""
    found: list[_Spent] = []
    began = time.perf_counter()
    for _batch, spent in loader:
        found.append(spent)
        if len(found) > WARM + LEAST and time.perf_counter() - began >= seconds:
            break
    if len(found) < 2:
        raise RuntimeError(TOO_SHORT)
    return found


class _Looking:
    """Looks at its process, a worker, from the first batch after `begin` on; a batch comes with
    what was spent so far."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._spent: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._draw = random.Random(0)
        self._returned = Returned(_at)
        self._began_s, self._stretch, self._due_s = 0.0, 0, 0.0

    def begin(self, _worker: int) -> None:
        signal.signal(signal.SIGALRM, self._look)
        self._returned.learn()

    def collate(self, samples: list[Any]) -> tuple[Any, _Spent]:
        batch = self._collate(samples)
        if not self._began_s:
            self._returned.learnt()
            self._began_s = self._due_s = time.perf_counter()
            self._wake()
        return batch, _Spent(time.perf_counter(), dict(self._spent))

    def _look(self, _signal: int, frame: FrameType | None) -> None:
        at, spent_s = _begun(_outside(frame, _Looking._look.__code__)), EVERY_S * self._due()
        shares = self._returned.shares(at) if at is not None else {}
        for part, share in (shares or {_at(at): 1.0}).items():
            self._spent[part] += spent_s * share
        self._wake()

    def _due(self) -> int:
        """How many looks were due by now."""
        found, now = 0, time.perf_counter()
        while self._due_s <= now:
            found += 1
            self._stretch += 1
            self._due_s = self._began_s + EVERY_S * (self._stretch + self._draw.random())
        return found

    def _wake(self) -> None:
        after_s = self._due_s - time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, max(SOONEST_S, after_s))


def _at(frame: FrameType | None) -> str:
    return _part(frame, _Looking.collate.__code__)


def _outside(frame: FrameType | None, looker: CodeType) -> FrameType | None:
    """What a look interrupted, where a look itself is looked at."""
    found = frame
    while frame is not None:
        if frame.f_code is looker:
            found = frame.f_back
        frame = frame.f_back
    return found


def _begun(frame: FrameType | None) -> FrameType | None:
    """What had the time until now: a call that has only just begun had none of it."""
    if frame is None or frame.f_code.co_code[frame.f_lasti] != BEGINS:
        return frame
    return frame.f_back


def _made(data: Data) -> dict[str, int]:
    """Bytes that each part returns for a sample, in the order in which they first return."""
    found: dict[str, int] = {}

    def look(frame: FrameType, event: str, returned: Any) -> None:
        if event == "return" and returned is not None and (part := _own_part(frame)):
            found[part] = max(found.get(part, 0), _bytes(returned))

    loader = data.loader(batch_size=1)
    outside = sys.getprofile()
    sys.setprofile(look)
    try:
        batch = next(iter(loader))
    finally:
        sys.setprofile(outside)
    lengths = [one.shape[0] for one in tree_leaves(batch) if isinstance(one, Tensor) and one.dim()]
    return found | {COLLATE: _bytes(batch) // max([1, *lengths])}


def _own_part(frame: FrameType) -> str:
    """The part that a call is; '' where it is only in one, or in none."""
    inside = [one for one in _calls(frame) if not _passes_on(one)]
    return _name(frame) if len(inside) == 2 and inside[1] is frame else ""


def _bytes(value: Any) -> int:
    """Of tensors, arrays, images and bytes."""
    return sum(map(_leaf_bytes, tree_leaves(value)))


def _leaf_bytes(value: Any) -> int:
    if isinstance(value, bytes | bytearray):
        return len(value)
    if hasattr(value, "getbands"):  # PIL's
        return len(value.getbands()) * int(value.width) * int(value.height)
    found = getattr(value, "nbytes", 0)
    return found if isinstance(found, int) else 0


def _part(frame: FrameType | None, collate: object) -> str:
    """What a worker is at; '' where that is no sample."""
    calls = _calls(frame)
    if any(one.f_code is collate for one in calls):
        return COLLATE
    inside = [one for one in calls if not _passes_on(one)]
    if not inside:
        return ""
    sample, *parts = inside
    return _name(parts[0]) if parts else f"{_name(sample)} itself"


def _calls(frame: FrameType | None) -> list[FrameType]:
    """The calls within the fetching of a batch, the outermost first."""
    found: list[FrameType] = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_FETCH[0]) and code.co_name == _FETCH[1]:
            return found[::-1]
        found.append(frame)
        frame = frame.f_back
    return []


def _passes_on(frame: FrameType) -> bool:
    file = frame.f_code.co_filename.replace("\\", "/")
    return any(part in file for part in _OUTSIDE) or _class(frame) in _SEVERAL


def _class(frame: FrameType) -> str:
    holder = frame.f_locals.get("self")
    return "" if holder is None else type(holder).__name__


def _name(frame: FrameType) -> str:
    code = frame.f_code
    if code.co_name in _CALLS and (known := _class(frame)):
        return known
    return code.co_qualname.rpartition("<locals>.")[2]
