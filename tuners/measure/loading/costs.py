"""What a sample costs a loader's worker, by part: its stack is looked at every few milliseconds.

Python tells of a signal once a call into a library has returned, and then in the function that
made it: the time since the last look is that function's. So decoding that takes ten milliseconds
counts as ten, though it was seen once. A profiler that is told of each call would make those that
are called often look dear.
"""

from __future__ import annotations

import collections
import random
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, default_collate

from advisor.tuners.measure.loading.data import Data

EVERY_S, LEAST_S = 0.005, 0.0005
"""More often what sleeps, as what waits for a disk, is woken too often."""
WARM = 2
"""Batches before those that are counted."""
LEAST = 3
"""Batches that are counted at least."""
COLLATE = "collate"
_FETCH = ("torch/utils/data/_utils/fetch.py", "fetch")
_OUTSIDE = (
    *("torch/utils/data/", "torch/nn/modules/module.py", "torch/utils/_contextlib.py"),
    *("torch/_compile.py", "torch/_dynamo/"),
)
"""Files that only pass a call on."""
_SEVERAL = frozenset({"Compose", "Sequential", "StandardTransform"})
"""Classes that are as many parts as they have."""
_CALLS = frozenset({"forward", "__call__"})
"""Methods that are called by the name of their class."""


def costs(data: Data, batch: int, seconds: float) -> dict[str, float]:
    """Seconds of one worker for a sample, by part, the dearest first.

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
    spent = {part: last[part] - first.get(part, 0.0) for part in last if part}
    ordered = sorted(spent.items(), key=lambda one: -one[1])
    samples = batch * (len(seen) - 1 - before)
    return {part: spent_s / samples for part, spent_s in ordered if spent_s}


def _seen(loader: DataLoader[Any], seconds: float) -> list[dict[str, float]]:
    """What was spent until each batch: of the first epoch that lasts so long, or what it has."""
    found: list[dict[str, float]] = []
    began = time.perf_counter()
    for _batch, spent in loader:
        found.append(spent)
        if len(found) > WARM + LEAST and time.perf_counter() - began >= seconds:
            break
    if len(found) < 2:
        raise RuntimeError("an epoch of one batch is too short to tell what a sample costs")
    return found


class _Looking:
    """Looks at its process, a worker, from `begin` on; a batch comes with what was spent so far."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._spent: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._last = 0.0
        self._draw = random.Random(0)

    def begin(self, _worker: int) -> None:
        self._last = time.perf_counter()
        signal.signal(signal.SIGALRM, self._look)
        self._wake()

    def collate(self, samples: list[Any]) -> tuple[Any, dict[str, float]]:
        return self._collate(samples), dict(self._spent)

    def _look(self, _signal: int, frame: FrameType | None) -> None:
        now = time.perf_counter()
        self._spent[_part(frame, _Looking.collate.__code__)] += now - self._last
        self._last = now
        self._wake()

    def _wake(self) -> None:
        # Without memory, so that it is never in step with what it looks at.
        signal.setitimer(signal.ITIMER_REAL, LEAST_S + self._draw.expovariate(1 / EVERY_S))


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
