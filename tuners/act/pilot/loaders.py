"""What feeds a script's steps: its DataLoader, and workers that fetch ahead of it.

A loader without workers gets some in the middle of an epoch, and loses them again: what its
sampler has left to say goes to them in the script's own order, and what they have not delivered
when they are sent away, or fail, is fetched by the loader itself. No sample is left out, none is
seen twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from advisor.cache import settings
from advisor.tuners import faults, host, room
from advisor.tuners.act.pilot import hooks
from advisor.tuners.act.pilot.orders import Feed, Load, Unfed
from advisor.tuners.act.pilot.pinning import Pinner

if TYPE_CHECKING:
    from advisor.tuners.knobs import Loading

PATIENCE_S = 60.0
"""For a batch: workers may hang in what a library of the script had locked when they were forked.
"""

_NONE = object()
"""No batch."""

Place = tuple[tuple[CodeType, int], ...]
"""Lines of code, from the innermost one."""


class _Ours(DataLoader[Any]):
    """One whose workers fetch ahead of a script's."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """Where an iterator comes from.

    Attributes:
        loader: None of one with workers at work, which may hold on to it.
        own: how its script has workers work, as keyword arguments of a DataLoader, where they are
            in the pilot's hands.
        why: a loader with workers may not be taken into them, where that was asked for.
    """

    loader: DataLoader[Any] | None
    place: Place
    workers: int
    pinned: bool
    own: Mapping[str, Any]
    why: str

    @classmethod
    def of(cls, loader: DataLoader[Any], *, taken: bool, why: str) -> _Begun:
        workers = loader.num_workers
        own: dict[str, Any] = {}
        if taken:
            own = {"num_workers": workers, "prefetch_factor": loader.prefetch_factor}
        known = loader if taken or not workers else None
        return cls(known, _place(), workers, loader.pin_memory, own, why)


class Loaders:
    """The loaders of a script: which of them feed its steps, what these wait, and their workers.

    Only what the main thread fetches is seen.

    Args:
        failed: told what ended workers, as an Unfed; the script has gone on without them by then.
        override: whether loaders that have workers of their own are taken in hand too: workers
            that are the pilot's work as the script's would, until they are told otherwise.

    Attributes:
        waited_s: that the script has waited for its batches.
    """

    def __init__(self, failed: Callable[[Unfed], None], *, override: bool = False) -> None:
        self._override = override
        self.waited_s = 0.0
        self._taken, self._before = 0, Load()
        self._failed = failed
        self._looking = True
        self._feeding: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self._places: set[Place] = set()
        self._ways: set[tuple[int, bool, str, int]] = set()
        self._batch_bytes = 0
        self._most = 0
        self._begun: weakref.WeakKeyDictionary[Any, _Begun] = weakref.WeakKeyDictionary()
        self._ahead: weakref.WeakKeyDictionary[Any, Ahead | None] = weakref.WeakKeyDictionary()
        self._given: dict[str, Any] = {}
        self._pins = False
        self._pinners: weakref.WeakKeyDictionary[Any, Pinner] = weakref.WeakKeyDictionary()
        self._remove = hooks.on_batches(self._begin, self._timed)

    def look_anew(self) -> None:
        """What was fetched so far did not feed a step, as what a sanity check of evaluation did."""
        self._feeding.clear()
        self._places.clear()
        self._ways.clear()

    def seen(self) -> Loading:
        """What has fed the steps; it is looked at no more."""
        from advisor.tuners.knobs import Loading

        self._looking = False
        if not self._ways:
            return Loading()
        workers, pinned, why, ahead = max(self._ways)
        most = room.workers(self._batch_bytes)
        tuned = not why and (ahead or not workers)
        # What the script's own workers do stays possible.
        self._most = max(most, workers) if tuned else 0
        return Loading(
            workers=workers,
            pinned=pinned,
            pinnable=workers > 0 and not tuned and not settings.keeps_loader(),
            ahead=ahead,
            most=most if tuned else 0,
            room=most,
            why=why,
        )

    def begin_lap(self) -> None:
        """What workers do from here on is told by `fed`."""
        self._taken, self._before = 0, self._load()

    def fed(self) -> Feed:
        """What all workers, whoever started them, did since the lap began. What an iterator asks
        for as it begins is of `before`: no step has outrun its workers then."""
        return Feed(taken=self._taken, before=self._before, after=self._load())

    def _load(self) -> Load:
        loads = (_left(iterator, begun.workers) for iterator, begun in list(self._begun.items()))
        return sum(loads, Load())

    @property
    def at_work(self) -> bool:
        """Whether there are to be workers."""
        return bool(self._given) or self._override or self._pins

    def set(self, given: Mapping[str, Any]) -> None:
        """Have what feeds the steps work by these keyword arguments of a DataLoader from here on;
        without workers among them as it does by itself.

        Workers start anew: what they have fetched ahead under another config is not this one's.
        """
        self._given = {}
        for ahead in filter(None, list(self._ahead.values())):
            ahead.end()
        self._ahead.clear()
        self._pins = bool(given.get("pin_memory"))
        for pinner in () if self._pins else list(self._pinners.values()):
            pinner.stop()
        self._pinners = self._pinners if self._pins else weakref.WeakKeyDictionary()
        if workers := min(given.get("num_workers", 0), self._most):
            self._given = {**given, "num_workers": workers}
            if wanted := given.get("prefetch_factor"):
                fits = room.times(self._batch_bytes * workers) - 1
                self._given["prefetch_factor"] = int(max(room.AHEAD, min(wanted, fits)))

    def remove(self) -> None:
        """Leave the loaders as they were found; the script's own workers that are in the pilot's
        hands work until their epoch is over."""
        self.set({})
        self._override = False
        if not any(begun.own for begun in self._begun.values()):
            self._remove()

    def _begin(self, loader: DataLoader[Any], plain: Callable[[Any], Any]) -> Any:
        asked = self._override and loader.num_workers > 0 and not isinstance(loader, _Ours)
        why = _why_kept(loader) if asked else ""
        taken = asked and not why
        with hooks.without_workers(loader) if taken else contextlib.nullcontext():
            iterator = plain(loader)
        self._begun[iterator] = _Begun.of(loader, taken=taken, why=why)
        self._before += _left(iterator, loader.num_workers)
        return iterator

    def _timed(self, iterator: Any, plain: Callable[[Any], Any]) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return plain(iterator)
        began = time.perf_counter()
        try:
            return self._fetched(iterator, plain)
        finally:
            self.waited_s += time.perf_counter() - began

    def _fetched(self, iterator: Any, plain: Callable[[Any], Any]) -> Any:
        begun = self._begun.get(iterator)
        batch = self._by_workers(iterator, begun, plain) if begun is not None else _NONE
        if batch is _NONE:
            self._pin(iterator, begun)
            batch = plain(iterator)
            self._taken += begun is not None and begun.workers > 0
        if begun is not None and self._looking and torch.is_grad_enabled():
            self._saw(begun, batch)
        return batch

    def _pin(self, iterator: Any, begun: _Begun | None) -> None:
        """Pin what the script's own workers make for its steps, where that is asked for."""
        own = begun is not None and begun.workers > 0 and not begun.pinned
        if self._pins and own and iterator not in self._pinners and torch.is_grad_enabled():
            self._pinners[iterator] = Pinner(iterator)

    def _by_workers(self, iterator: Any, begun: _Begun, plain: Callable[[Any], Any]) -> Any:
        """The next batch as workers have fetched it ahead; _NONE where there are none, or no more
        batches, which the loader's own iterator says, or they fail."""
        if not self._given and not begun.own:
            return _NONE
        try:
            if (ahead := self._of(iterator, begun)) is None:
                return _NONE
            batch = ahead.next(plain)
        except StopIteration:
            return _NONE
        except Exception as exc:  # whatever it is: the loader fetches by itself
            self.set({})
            self._begun[iterator] = dataclasses.replace(begun, own={})
            self._override = False
            if not isinstance(exc, Unfed):
                exc = Unfed(f"{faults.told(exc)}; the loader goes on by itself")
            self._failed(exc)
            return _NONE
        self._taken += 1
        return batch

    def _saw(self, begun: _Begun, batch: Any) -> None:
        loader, why = begun.loader, begun.why
        self._batch_bytes = max(self._batch_bytes, _bytes(batch))
        if loader is not None:
            if loader in self._feeding:
                return
            self._feeding.add(loader)
            self._places.add(begun.place)
            why = _why_alone(loader)
        self._ways.add((begun.workers, begun.pinned, why, begun.own.get("prefetch_factor", 0)))

    def _of(self, iterator: Any, begun: _Begun) -> Ahead | None:
        """The workers of an iterator; None where it feeds no steps, or stays as it is.

        Raises:
            Unfed: it may have none any more.
        """
        if iterator not in self._ahead:
            loader, found = begun.loader, None
            feeds = loader in self._feeding or begun.place in self._places
            given = self._given if feeds and self._given else begun.own
            if loader is not None and given:
                if why := _why_alone(loader):  # since it was seen, as of a file opened meanwhile
                    raise Unfed(why)
                found = Ahead(iterator, loader, given)
            self._ahead[iterator] = found
        return self._ahead[iterator]


class Indices:
    """What a sampler has left to say; what was handed ahead of its time can be taken back."""

    def __init__(self, left: Iterator[Any]) -> None:
        self._left = left
        self._back: deque[Any] = deque()
        self._out: deque[Any] = deque()
        self._raised: Exception | None = None
        self.times = 0

    def __iter__(self) -> Indices:
        return self

    def __next__(self) -> Any:
        if self._back:
            return self._back.popleft()
        if self._raised is not None:
            raise self._raised
        return next(self._left)

    def ahead(self) -> Iterator[Any]:
        """Handed out before they are asked for."""
        self.times += 1
        while True:
            try:
                index = next(self)
            except StopIteration:
                return
            except Exception as exc:  # of the script's own sampler: raised when it is its turn
                self._raised = exc
                return
            self._out.append(index)
            yield index

    def delivered(self) -> None:
        """The batch of the first that was handed ahead."""
        self._out.popleft()

    def take_back(self) -> None:
        """All that were not delivered."""
        self._back.extendleft(reversed(self._out))
        self._out.clear()


class Ahead:
    """Workers that fetch ahead of one iterator of the script's.

    Args:
        given: keyword arguments of a DataLoader.
    """

    def __init__(self, iterator: Any, loader: DataLoader[Any], given: Mapping[str, Any]) -> None:
        left = hooks.indices_of(iterator)
        self._indices = left if isinstance(left, Indices) else Indices(left)
        hooks.fetch_by(iterator, self._indices)
        try:
            self._batches = self._begun(loader, hooks.seed_of(iterator), given)
        except Exception:
            self._indices.take_back()
            raise

    def _begun(self, loader: DataLoader[Any], seed: int, given: Mapping[str, Any]) -> Any:
        handed: Any = self._indices.ahead()
        batched = loader.batch_sampler is not None
        how: dict[str, Any] = {"batch_sampler": handed} if batched else {"sampler": handed}
        found = iter(
            _Ours(
                loader.dataset,
                **(how if batched else how | {"batch_size": None}),
                **{**given, "pin_memory": loader.pin_memory or given.get("pin_memory", False)},
                collate_fn=loader.collate_fn,
                worker_init_fn=loader.worker_init_fn,
                timeout=PATIENCE_S,
                # Not the script's: what it draws itself stays what it is.
                generator=torch.Generator().manual_seed((seed + self._indices.times) % 2**63),
                multiprocessing_context="fork",
            )
        )
        hooks.miss_quietly(found)
        return found

    def next(self, plain: Callable[[Any], Any]) -> Any:
        """The next batch; `plain` gives that of an iterator."""
        batch = plain(self._batches)
        self._indices.delivered()
        return batch

    def end(self) -> None:
        """Send the workers away; what they have not delivered is left to fetch."""
        hooks.send_away(self._batches)
        self._indices.take_back()


def _left(iterator: Any, workers: int) -> Load:
    unfinished = hooks.unfinished(iterator)
    return Load(busy=min(unfinished, workers), queued=max(0, unfinished - workers))


def _place() -> Place:
    """Where the script is: a loader that is made anew at each epoch is begun there too."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _why_alone(loader: DataLoader[Any]) -> str:
    """Why a loader without workers stays as it is; '' where it may have some."""
    if settings.keeps_loader():
        return "the loader: ADVISOR_KEEP_LOADER is set"
    if isinstance(loader.dataset, IterableDataset | MapDataPipe):
        return "the loader: of an IterableDataset every worker would read all"
    # None: the script has not chosen; asking for the default would choose it.
    if (method := multiprocessing.get_start_method(allow_none=True)) not in (None, "fork"):
        return f"the loader: processes are started by {method!r} here, not forked"
    if multiprocessing.current_process().daemon:
        return "the loader: this process may start no other"
    if files := host.files_read():
        return f"the loader: {files[0]} is open, and workers would share the place in it"
    return ""


def _why_kept(loader: DataLoader[Any]) -> str:
    """Why the workers of a loader are not taken in hand; '' where they may be."""
    context = loader.multiprocessing_context
    if context is not None and context.get_start_method() != "fork":
        return "the loader: its workers are not forked"
    if loader.persistent_workers:  # begun once, they draw once from what its sampler draws from
        return "the loader: its workers stay from one epoch to the next"
    return _why_alone(loader)


def _bytes(batch: Any) -> int:
    return sum(one.nbytes for one in tree_leaves(batch) if isinstance(one, Tensor))
