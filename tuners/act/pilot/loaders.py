"""A script's DataLoaders, and advisor's workers that prefetch batches for them.

A loader gets workers in the middle of an epoch, and loses them again. Workers fetch the sampler's
remaining batches, in the script's own order. If workers are ended or fail, the loader itself
fetches the batches that they have not delivered. No sample is left out or seen twice.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from traceback import walk_stack
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from advisor.cache import settings
from advisor.tuners import host, worker_limits
from advisor.tuners.act.hooks import Patch
from advisor.tuners.faults import Stopped, failure
from advisor.tuners.knobs import LoaderFacts

_NO_BATCH = object()
_MADE_LATELY = 8  # batches of each worker that tell how fast workers are
BATCH_TIMEOUT_S = 60.0  # a forked worker may hang on a lock that its parent held
# The call stack that began an iterator: it stays the same if each epoch makes a new loader.
_CallSite = tuple[tuple[CodeType, int], ...]


class _AdvisorLoader(DataLoader[Any]):
    """A loader of advisor's, whose workers prefetch for a script's loader."""


@dataclass(slots=True)
class _LoaderEpoch:
    """One iterator of a DataLoader. Workers' settings are keyword arguments of a DataLoader."""

    loader: DataLoader[Any] | None  # None if its own workers run, which may refer to it
    call_site: _CallSite
    workers: int
    pinned: bool
    own: dict[str, Any]  # the settings of its own workers, if advisor has replaced them
    why: str  # why advisor has not replaced them, if it was to
    made: _Made | None  # what its workers make; None without workers
    prefetcher: Prefetcher | None = None  # None until advisor has started workers for it
    batches: Any = _NO_BATCH  # the workers' iterator; None without it, _NO_BATCH until decided


class _Made:
    """The batches that workers made lately, and the seconds that they worked on them, in memory
    that forked workers share. `taken`: those that a block took."""

    def __init__(self, workers: int) -> None:
        self._workers, self.taken = workers, 0
        self._shared = memoryview(mmap.mmap(-1, 16 * workers)).cast("d")
        self._before = self._next = (0.0, 0.0)  # batches and seconds that do not count any more

    def add(self, worker: int, seconds: float) -> None:
        """In the worker's process."""
        self._shared[2 * worker] += 1
        self._shared[2 * worker + 1] += seconds

    @property
    def per_s(self) -> float:
        """The most batches that all these workers could make in a second; 0: not known."""
        made, took = sum(self._shared[::2]), sum(self._shared[1::2])
        if made - self._next[0] > _MADE_LATELY * self._workers:  # first ones read from a cold disk
            self._before, self._next = self._next, (made, took)
        made, took = made - self._before[0], took - self._before[1]
        return self._workers * made / took if took else 0.0


class Loaders:
    """A script's loaders, their workers, and how long its main thread waits for them.

    Args:
        failed: called with the exception that ended advisor's workers; the script goes on.
        override: whether to replace loaders' own workers too, with their settings until `set`.
    """

    def __init__(self, failed: Callable[[Exception], None], *, override: bool = False) -> None:
        self._failed, self._override = failed, override
        self.waited_s = 0.0  # seconds waited for batches since `begin_block`
        self._began = 0.0  # when a block began
        self._made: dict[tuple[_CallSite, int], _Made] = {}  # by where workers start, their number
        self._making: _Made | None = None  # of the workers that start now, or of this worker
        self.batches = self.samples = 0  # of an epoch of the feeding loader; 0 if unknown
        self.feeding: Callable[[], Any] = lambda: None  # the iterator of the last training batch
        self._batch_bytes = self._most = 0
        self._looking = True
        self._feeding: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self._call_sites: set[_CallSite] = set()
        self._observed: tuple[int, bool, str, int] | None = None
        self._epochs: weakref.WeakKeyDictionary[Any, _LoaderEpoch] = weakref.WeakKeyDictionary()
        self._given: dict[str, Any] = {}
        self._patches = [
            Patch(DataLoader, "__iter__", self._begin),
            Patch(_BaseDataLoaderIter, "__next__", self._timed),
            Patch(_MapDatasetFetcher, "fetch", self._fetched),
            Patch(_IterableDatasetFetcher, "fetch", self._fetched),
        ]

    def know(self, before: Loaders) -> None:
        """Take over the iterators that began under another object."""
        self._epochs.update(before._epochs)

    def restart_observation(self) -> None:
        """Forget the loaders seen before the first step, such as one for a check of evaluation."""
        self._feeding.clear()
        self._call_sites.clear()
        self._observed = None

    def seen(self) -> LoaderFacts:
        """Return facts on the loader that feeds the steps, and stop observing it."""
        self._looking = False
        if self._observed is None:
            return LoaderFacts()
        workers, pinned, why, factor = self._observed
        there = worker_limits.workers(self._batch_bytes)
        tuned = not why and (factor or not workers)
        most = there if tuned else 0
        # The script's own number of workers stays possible.
        self._most = max(most, workers) if tuned else 0
        return LoaderFacts(
            workers=workers, pinned=pinned, prefetch_factor=factor, most=most, room=there, why=why
        )

    def begin_block(self) -> None:
        self.waited_s, self._began = 0.0, time.perf_counter()
        for made in self._made.values():
            made.taken = 0

    @property
    def load(self) -> float:
        """A block's batches over those that workers can make in its time, at their last pace."""
        took_s = time.perf_counter() - self._began
        paces = [(made.taken, made.per_s) for made in self._made.values() if made.taken]
        return max([0.0, *(taken / (took_s * pace) for taken, pace in paces if pace)])

    @property
    def prefetched(self) -> int:
        """Batches that workers have ready or are loading."""
        return sum(_outstanding(one)[0] for one in list(self._epochs))

    @property
    def at_work(self) -> bool:
        """Whether advisor changes how batches are loaded."""
        return bool(self._given) or self._override

    def set(self, given: Mapping[str, Any]) -> None:
        """End advisor's workers, and start new ones with these settings, if they give a number of
        workers, for the loaders that feed the steps."""
        self._given = {}
        for epoch in list(self._epochs.values()):
            batches, epoch.batches = epoch.batches, _NO_BATCH
            if epoch.prefetcher is not None and batches not in (None, _NO_BATCH):
                batches._shutdown_workers()
                epoch.prefetcher.requeue()
        if workers := min(given.get("num_workers", 0), self._most):
            self._given = {**given, "num_workers": workers}
            if wanted := given.get("prefetch_factor"):
                fits = worker_limits.batches_that_fit(self._batch_bytes * workers) - 1
                factor = max(worker_limits.PREFETCH_FACTOR, min(wanted, fits))
                self._given["prefetch_factor"] = int(factor)

    def remove(self) -> None:
        """Restore the loaders. Workers that replace a loader's own ones stay until their epoch is
        over."""
        self.set({})
        self._override = False
        if not any(epoch.own for epoch in self._epochs.values()):
            for patch in self._patches:
                patch.remove()

    def _begin(self, plain: Callable[[Any], Any], loader: DataLoader[Any]) -> Any:
        workers, timeout, own, why = loader.num_workers, loader.timeout, {}, ""
        if self._override and workers > 0 and not isinstance(loader, _AdvisorLoader):
            why = _why_untouched(loader)
            if not why:
                own = {"num_workers": workers, "prefetch_factor": loader.prefetch_factor}
                loader.num_workers, loader.timeout = 0, 0
        call_site = tuple((frame.f_code, line) for frame, line in walk_stack(sys._getframe()))
        if count := loader.num_workers:  # 0 if advisor replaces them
            self._making = self._made.get((call_site, count)) or _Made(count)
            self._made[call_site, count] = self._making
        made = self._making
        try:
            iterator = plain(loader)
        finally:
            self._making = None
            if own:
                loader.num_workers, loader.timeout = workers, timeout
        known, pinned = loader if own or not workers else None, loader.pin_memory
        self._epochs[iterator] = _LoaderEpoch(known, call_site, workers, pinned, own, why, made)
        return iterator

    def _fetched(self, plain: Callable[[Any, Any], Any], fetcher: Any, index: Any) -> Any:
        if self._making is None:
            return plain(fetcher, index)
        began, batch = time.perf_counter(), plain(fetcher, index)
        if (worker := get_worker_info()) is not None:
            self._making.add(worker.id, time.perf_counter() - began)
        return batch

    def _timed(self, plain: Callable[[Any], Any], iterator: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return plain(iterator)
        began, epoch = time.perf_counter(), self._epochs.get(iterator)
        if torch.is_grad_enabled():
            self.feeding = weakref.ref(iterator)
        try:
            batch = _NO_BATCH if epoch is None else self._from_workers(iterator, epoch, plain)
            if batch is _NO_BATCH:
                batch = plain(iterator)
                self._took(iterator)
            if epoch is not None and self._looking and torch.is_grad_enabled():
                self._observe(epoch, batch)
                with contextlib.suppress(Exception):  # of any kind: the script's sampler has no len
                    self.batches = max(self.batches, len(iterator))
                    self.samples = max(self.samples, len(iterator._index_sampler.sampler))
            return batch
        finally:
            self.waited_s += time.perf_counter() - began

    def _from_workers(self, iterator: Any, epoch: _LoaderEpoch, plain: Callable[[Any], Any]) -> Any:
        """The next batch of advisor's workers; _NO_BATCH without workers, or if they fail."""
        if not self._given and not epoch.own:
            return _NO_BATCH
        try:
            if epoch.batches is _NO_BATCH:
                self._start_workers(iterator, epoch)
            if epoch.prefetcher is None or epoch.batches is None:
                return _NO_BATCH
            batch = plain(epoch.batches)
            epoch.prefetcher.out.popleft()
        except StopIteration:
            return _NO_BATCH
        except Exception as exc:  # of any kind: the loader fetches by itself
            self.set({})
            epoch.own = {}
            self._override = False
            if not isinstance(exc, Stopped):
                exc = Stopped("unfed", f"{failure(exc)[1]}; the loader goes on by itself")
            self._failed(exc)
            return _NO_BATCH
        self._took(epoch.batches)
        return batch

    def _took(self, iterator: Any) -> None:
        epoch = self._epochs.get(iterator)
        if epoch is not None and epoch.made is not None:
            epoch.made.taken += 1

    def _observe(self, epoch: _LoaderEpoch, batch: Any) -> None:
        loader, why = epoch.loader, epoch.why
        size = sum(one.nbytes for one in tree_leaves(batch) if isinstance(one, Tensor))
        self._batch_bytes = max(self._batch_bytes, size)
        if loader is not None:
            if loader in self._feeding:
                return
            self._feeding.add(loader)
            self._call_sites.add(epoch.call_site)
            why = _why_untouched(loader)
        observed = (epoch.workers, epoch.pinned, why, epoch.own.get("prefetch_factor", 0))
        self._observed = max(self._observed or observed, observed)

    def _start_workers(self, iterator: Any, epoch: _LoaderEpoch) -> None:
        loader, epoch.batches = epoch.loader, None
        feeds = loader in self._feeding or epoch.call_site in self._call_sites
        given = self._given if feeds and self._given else epoch.own
        if loader is not None and given:
            if why := _why_untouched(loader):  # a file may have been opened since `seen`
                raise Stopped("unfed", why)
            epoch.prefetcher = epoch.prefetcher or Prefetcher(iterator)
            epoch.batches = epoch.prefetcher.start(loader, given)


class Prefetcher:
    """The remaining indices of one iterator's sampler. It must not refer to its workers, which
    refer to it: the workers must end once the script drops its iterator."""

    def __init__(self, iterator: Any) -> None:
        self._seed = int(iterator._base_seed)
        self._left: Iterator[Any] = iterator._sampler_iter
        iterator._sampler_iter = self
        self._back: deque[Any] = deque()
        self.out: deque[Any] = deque()  # indices that workers have and have not delivered
        self._raised: Exception | None = None

    def __next__(self) -> Any:
        if self._back:
            return self._back.popleft()
        if self._raised is not None:
            raise self._raised
        return next(self._left)

    def _indices(self) -> Iterator[Any]:
        while True:
            try:
                index = next(self)
            except StopIteration:
                return
            except Exception as exc:  # of the script's own sampler: raised in its turn
                self._raised = exc
                return
            self.out.append(index)
            yield index

    def start(self, loader: DataLoader[Any], given: Mapping[str, Any]) -> Any:
        self._seed += 1
        indices: Any = self._indices()
        how: dict[str, Any] = {"sampler": indices, "batch_size": None}
        if loader.batch_sampler is not None:
            how = {"batch_sampler": indices}
        try:
            found: Any = iter(
                _AdvisorLoader(
                    loader.dataset,
                    **how,
                    **{**given, "pin_memory": loader.pin_memory or given.get("pin_memory", False)},
                    collate_fn=loader.collate_fn,
                    worker_init_fn=loader.worker_init_fn,
                    timeout=BATCH_TIMEOUT_S,
                    # Not the script's generator, whose numbers must stay the same.
                    generator=torch.Generator().manual_seed(self._seed % 2**63),
                    multiprocessing_context="fork",
                )
            )
        except Exception:
            self.requeue()
            raise
        if found._worker_pids_set:
            # A worker's death is noticed when its batch is due, and not before.
            torch._C._remove_worker_pids(id(found))
            found._worker_pids_set = False
        return found

    def requeue(self) -> None:
        """Take back the indices that workers have not delivered."""
        self._back.extendleft(reversed(self.out))
        self.out.clear()


def _outstanding(iterator: Any) -> tuple[int, int]:
    """(Batches that an iterator has requested from its workers, unfinished batches)."""
    if not isinstance(iterator, _MultiProcessingDataLoaderIter) or iterator._shutdown:
        return 0, 0
    # If memory is pinned, finished ones wait in a second queue.
    queues: set[Any] = {iterator._worker_result_queue, iterator._data_queue}
    ready: int = sum(one.qsize() for one in queues)
    asked: int = iterator._tasks_outstanding
    return asked, max(0, asked - ready)


def _why_untouched(loader: DataLoader[Any]) -> str:
    """Why a loader gets no workers of advisor's; '' if it may have some."""
    context = loader.multiprocessing_context
    if context is not None and context.get_start_method() != "fork":
        return "the loader: its workers are not forked"
    if loader.persistent_workers:  # started once, they draw one seed from the sampler's generator
        return "the loader: its workers stay from one epoch to the next"
    if settings.is_on("ADVISOR_KEEP_LOADER"):
        return "the loader: ADVISOR_KEEP_LOADER is set"
    if isinstance(loader.dataset, IterableDataset | MapDataPipe):
        return "the loader: every worker would read all of an IterableDataset"
    # None: the script has not chosen; asking for the default would choose it.
    if (method := multiprocessing.get_start_method(allow_none=True)) not in (None, "fork"):
        return f"the loader: processes are started by {method!r} here, not forked"
    if multiprocessing.current_process().daemon:
        return "the loader: a daemon process may start no workers"
    if files := host.files_read():
        return f"the loader: {files[0]} is open, and workers would share its file position"
    return ""
