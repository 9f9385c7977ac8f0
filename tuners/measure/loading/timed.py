"""How fast a loader is: by itself, and with the step that it feeds.

Workers begin with nothing, and have batches ready once they have outrun a step: neither is a
speed. A measurement begins where as many batches have come as lie ready at most, and lasts whole
rounds of all workers, whose batches come together.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.utils.data import DataLoader

from advisor.cache.record import Measurement
from advisor.tuners import host, room
from advisor.tuners.act.pilot import hooks
from advisor.tuners.measure.timing import BLOCK_S, Clock, CpuClock, median_interval

BLOCKS = 3
"""Of a measurement at least, where its time allows."""
WARM = 3
"""Steps with a loader before they are timed, at least."""
LOOK_S = 0.5
"""Between two looks for workers that have ended by themselves."""
OVERDUE, LATE = 4.0, 16.0
"""As many times what was given to a measurement it may take until it has its blocks, and until the
loader settles."""


class Fed(Protocol):
    """What trains on the batches that it is given; a Workload is one."""

    def feed(self, batches: Iterator[Any]) -> None:
        """Take the batches of the next steps from here."""

    def step(self) -> None:
        """Train on the next batch.

        Raises:
            StopIteration: there is none.
        """


@dataclass(slots=True)
class _Blocks:
    """Seconds per batch of each block of whole rounds.

    Args:
        settling: batches before the first block of an epoch.
        together: batches of a round.
        seconds: in which blocks are timed; `OVERDUE` times as long where there are too few.
        clock: where time comes from.
    """

    settling: int
    together: int
    seconds: float
    clock: Clock
    batches: int = 0
    times: list[float] = field(default_factory=list)
    _at: int = 0
    _since: float = 0.0
    _began: float | None = None
    _settled_s: float | None = None

    def begin(self) -> None:
        """An epoch begins."""
        self.batches, self._at, self._since = 0, 0, self._now()
        if self._began is None:
            self._began = self._since

    @property
    def settled(self) -> bool:
        """Whether what comes is timed."""
        return self.batches >= self.settling

    @property
    def spent_s(self) -> float:
        """Seconds since the first epoch began, as the host sees them."""
        return 0.0 if self._began is None else self.clock.now() - self._began

    def enough(self) -> bool:
        """Whether no more batches are wanted."""
        if self._settled_s is None:
            # Epochs that are over before: each is a block.
            return self.spent_s >= self.seconds * (1 if len(self.times) >= BLOCKS else LATE)
        most = self.seconds if len(self.times) >= BLOCKS else OVERDUE * self.seconds
        return self.spent_s - self._settled_s >= most

    def came(self) -> None:
        """A batch has come."""
        self.batches += 1
        if self.batches == self.settling:
            self._at, self._since = self.batches, self._now()
            if self._settled_s is None:
                self._settled_s = self.spent_s
        elif self.batches > self.settling:
            whole = (self.batches - self._at) % self.together == 0
            # The host's own time first: to wait for the device at each step would be another step.
            if whole and self.clock.now() - self._since >= BLOCK_S:
                self._end_block()

    def end(self) -> None:
        """The epoch is over, or no more is wanted: what came is a block where there is none yet,
        as is each epoch that did not settle."""
        unsettled = self._at == 0 and not self.enough()
        if self.batches > self._at and (unsettled or not self.times):
            self._end_block()

    def _end_block(self) -> None:
        now = self._now()
        self.times.append((now - self._since) / (self.batches - self._at))
        self._at, self._since = self.batches, now

    def _now(self) -> float:
        self.clock.synchronize()
        return self.clock.now()

    def measurement(self, batch: int, **more: Any) -> Measurement:
        """Of batches of so many samples.

        Raises:
            RuntimeError: none came.
        """
        if not self.times:
            raise RuntimeError("the loader gave no batch")
        low, high = median_interval(self.times)
        batch_s = statistics.median(self.times)
        return Measurement(
            outcome="ok",
            samples_per_s=batch / batch_s,
            low=batch / high,
            high=batch / low,
            step_s=batch_s,
            steps=self.batches,
            blocks=tuple(self.times),
            **more,
        )


def alone(loader: DataLoader[Any], batch: int, seconds: float) -> Measurement:
    """Its batches, taken as fast as they come.

    `first_step_s` is what an epoch's start takes beyond a batch; `peak_bytes` what its workers
    hold, where what they share with others counts in part.
    """
    blocks = _blocks(loader, seconds, CpuClock())
    first_s: list[float] = []
    held = 0
    with _epochs(loader) as epoch:
        while not blocks.enough():
            blocks.begin()
            began = blocks.spent_s
            for _ in epoch():
                if blocks.batches == 0:
                    first_s.append(blocks.spent_s - began)
                blocks.came()
                if blocks.enough():
                    break
            blocks.end()
            held = max(held, _held())
    batch_s = statistics.median(blocks.times) if blocks.times else 0.0
    start_s = statistics.median(first_s or [0.0]) - batch_s * max(1, loader.num_workers)
    return blocks.measurement(batch, first_step_s=max(0.0, start_s), peak_bytes=held)


def fed(
    workload: Fed, loader: DataLoader[Any], batch: int, seconds: float, clock: Clock
) -> Measurement:
    """Steps with a loader that begins for them. `waited`: share of their time that they wait for a
    batch."""
    blocks = _blocks(loader, seconds, clock)
    waiting = _Waiting(blocks)
    with _epochs(loader) as epoch:
        while not blocks.enough():
            blocks.begin()
            workload.feed(waiting.through(epoch()))
            _train(workload, blocks)
            blocks.end()
        waited = waiting.share  # before what ends the workers takes its time
    return blocks.measurement(batch, waited=waited)


def _train(workload: Fed, blocks: _Blocks) -> None:
    """Until the epoch is over, or enough is known."""
    while not blocks.enough():
        try:
            workload.step()
        except StopIteration:
            return
        blocks.came()


class _Waiting:
    """How long what takes batches has waited for them, from where they settle on."""

    def __init__(self, blocks: _Blocks) -> None:
        self._blocks = blocks
        self._waited_s = 0.0
        self._since_s: float | None = None

    def through(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            if self._since_s is None and self._blocks.settled:
                self._since_s, self._waited_s = self._blocks.spent_s, 0.0
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited_s += time.perf_counter() - began
            yield batch

    @property
    def share(self) -> float:
        """Of the time, from 0 to 1."""
        spent_s = self._blocks.spent_s - (self._since_s or 0.0)
        return min(1.0, self._waited_s / spent_s) if spent_s > 0 else 0.0


def _blocks(loader: DataLoader[Any], seconds: float, clock: Clock) -> _Blocks:
    workers = loader.num_workers
    ready = workers * (loader.prefetch_factor or room.AHEAD)
    return _Blocks(max(WARM, ready), max(1, workers), seconds, clock)


@contextmanager
def _epochs(loader: DataLoader[Any]) -> Iterator[Callable[[], Iterator[Any]]]:
    """What begins an epoch of it; in the end no worker is left."""
    begun: list[Any] = []

    def epoch() -> Iterator[Any]:
        begun[:] = [iter(loader)]
        batches: Iterator[Any] = begun[0]
        return batches

    try:
        with hooks.looking(LOOK_S):
            yield epoch
    finally:
        if loader.num_workers:
            for iterator in begun:
                hooks.send_away(iterator)


def _held() -> int:
    """Bytes of this process's workers."""
    workers = multiprocessing.active_children()
    return sum(host.proportional_bytes(one.pid) for one in workers if one.pid)
