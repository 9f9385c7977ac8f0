"""Workers side by side, each on a device of its own, of devices that are alike.

Trials are spread over them. Two devices of one kind still differ by a per cent, so each is held
against its own measurement of one config, the anchor, and told as the first would have it. What
the host is the limit of is measured once more, while no other trial runs, unless those that were
have shown that their neighbours do not slow them down.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.errors import AdvisorError, WorkerError
from advisor.tuners.measure.runner import Runner
from advisor.tuners.measure.worker.wire import Facts

UNLIKE = 0.15
"""A device whose anchor differs by more is in use, or throttled: it is left out."""
ENOUGH = 2
"""Trials that were run beside others and then alone, after which their neighbours are judged."""
SLOWED = 1.05
"""As many times as fast alone: neighbours slow down what the host is the limit of."""
LOOK_S = 0.2
"""Between two looks whether a worker that was interrupted has come to an end."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A trial to run: see `Runner.measure`. `worth`: samples/s from which it is measured once more,
    alone, where others that ran beside it may have slowed it down."""

    config: Config
    seconds: float
    floor: float = 0.0
    worth: float = 0.0
    deadline_s: float | None = None

    def measured(self, runner: Runner, scale: float = 1.0) -> Measurement:
        """By a runner whose samples/s count `scale` times."""
        return runner.measure(
            self.config,
            seconds=self.seconds,
            floor=self.floor / scale,
            deadline_s=self.deadline_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A trial that was run: `seconds` by the wall clock, in which up to `beside` ran with it."""

    config: Config
    measured: Measurement
    seconds: float
    beside: int = 1


class Member(Runner, Protocol):
    """A runner on a device of its own; a Worker is one."""

    def describe(self) -> Facts:
        """As `Worker.describe`."""

    def interrupt(self) -> None:
        """From another thread: what it does now is over at once."""


def one_by_one(runner: Runner, asks: Iterable[Ask], now: Callable[[], float]) -> Iterator[Done]:
    """Each trial in its turn, where there is one device."""
    for ask in asks:
        began = now()
        measured = ask.measured(runner)
        yield Done(config=ask.config, measured=measured, seconds=now() - began)


@dataclass(slots=True, eq=False)
class _Lane:
    """A device: its samples/s count `scale` times; 0 where that is not known yet."""

    name: str
    member: Member
    scale: float = 0.0


class Fleet:
    """Measures on several devices at once; use it as a context.

    Args:
        members: by the name of their device; the first one's numbers are those that are told.
        notice: told of a device that is left out.
    """

    def __init__(
        self, members: Mapping[str, Member], notice: Callable[[str], None] = lambda _text: None
    ) -> None:
        self.lanes = [_Lane(name, member) for name, member in members.items()]
        self._notice = notice
        self._pool = ThreadPoolExecutor(len(self.lanes))
        self._running: dict[Future[Any], _Lane] = {}
        self._faster_alone: list[tuple[int, float]] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end()
        self._pool.shutdown()

    def describe(self) -> dict[str, Facts]:
        """Start all, and have each run a step; by device. One that cannot is left out.

        Raises:
            TargetError, TargetFailed, WorkerError: the first one cannot; see `Worker.describe`.
        """
        found = self._everywhere(lambda lane: lane.member.describe())
        return {lane.name: facts for lane, facts in found.items()}

    def each(self, asks: Iterable[Ask], anchor: Ask) -> Iterator[Done]:
        """Run trials as devices come free; they end in any order.

        The next one is asked for once there is a device for it, and all that ended was told.

        Args:
            anchor: the trial by which devices are held against one another, once; it is not run
                again where it is the first.

        Raises:
            WorkerError: no worker can be started on the first device any more.
        """
        asks = iter(asks)
        if not all(lane.scale for lane in self.lanes):
            head = list(itertools.islice(asks, 1))
            done = self._anchor(anchor)
            if [ask.config for ask in head] == [anchor.config]:
                yield done
            else:
                asks = itertools.chain(head, asks)
        yield from _Round(self, asks).each()

    def slows(self, count: int) -> bool:
        """Whether trials, so many at once, slow down what the host is the limit of, or may."""
        seen = [faster for beside, faster in self._faster_alone if beside >= count]
        return len(seen) < ENOUGH or statistics.median(seen) > SLOWED

    def saw(self, beside: Measurement, count: int, alone: Measurement) -> None:
        """What the host is the limit of was measured as one of so many, and then alone."""
        if beside.ok and alone.ok:
            self._faster_alone.append((count, alone.samples_per_s / beside.samples_per_s))

    def begin(self, lane: _Lane, work: Callable[[], T]) -> Future[T]:
        """Work on a device, in a thread of its own."""
        future = self._pool.submit(work)
        self._running[future] = lane
        future.add_done_callback(lambda done: self._running.pop(done))
        return future

    def end(self) -> None:
        """Interrupt what runs, until nothing does."""
        while running := dict(self._running):
            for lane in running.values():
                lane.member.interrupt()
            wait(running, timeout=LOOK_S)

    def leave_out(self, lane: _Lane, why: str) -> None:
        """Measure on this device no longer.

        Raises:
            WorkerError: it is the first.
        """
        if lane is self.lanes[0]:
            raise WorkerError(why)
        self.lanes.remove(lane)
        self._notice(f"{lane.name} is left out: {why}")

    def _everywhere(self, work: Callable[[_Lane], T], *, at_once: bool = True) -> dict[_Lane, T]:
        """What it gives on each device."""
        futures = {}
        for lane in self.lanes:
            futures[lane] = self.begin(lane, functools.partial(work, lane))
            if not at_once:
                wait(futures.values())
        found = {}
        for lane, future in futures.items():
            try:
                found[lane] = future.result()
            except AdvisorError as exc:
                if lane is self.lanes[0]:
                    raise
                self.leave_out(lane, str(exc))
        return found

    def _anchor(self, anchor: Ask) -> Done:
        """Hold the devices against one another; what the first one gave."""
        began = time.monotonic()

        def measured(lane: _Lane) -> Measurement:
            return anchor.measured(lane.member)

        found = self._everywhere(measured)
        count = len(found)
        if count > 1 and any(one.host_bound for one in found.values()):
            beside, found = found, self._everywhere(measured, at_once=False)
            for lane, alone in found.items():
                self.saw(beside[lane], count, alone)
        first = found[self.lanes[0]]
        for lane, one in found.items():
            if not one.ok:
                self.leave_out(lane, one.reason)
                continue
            lane.scale = first.samples_per_s / one.samples_per_s
            if abs(lane.scale - 1) > UNLIKE:
                self.leave_out(lane, f"{1 / lane.scale:.2f}x as fast as {self.lanes[0].name}")
        return Done(config=anchor.config, measured=first, seconds=time.monotonic() - began)


@dataclass(slots=True)
class _Trial:
    """One that runs; `before`: what it gave beside others, where it is measured again, alone."""

    lane: _Lane
    ask: Ask
    began: float
    before: Done | None = None
    beside: int = 1


class _Round:
    """One series of trials on its way."""

    def __init__(self, fleet: Fleet, asks: Iterator[Ask]) -> None:
        self._fleet, self._asks = fleet, asks
        self._left_out: collections.deque[Ask] = collections.deque()
        self._again: collections.deque[tuple[Ask, Done]] = collections.deque()
        self._trials: dict[Future[Measurement], _Trial] = {}

    def each(self) -> Iterator[Done]:
        try:
            while self._begin():
                ended, _ = wait(self._trials, return_when=FIRST_COMPLETED)
                for future in ended:
                    if done := self._done(self._trials.pop(future), future):
                        yield done
        finally:
            self._fleet.end()

    def _begin(self) -> bool:
        """Start what can be started; whether anything runs."""
        while lane := self._free():
            if self._again:
                if not self._trials:
                    self._start(lane, *self._again.popleft())
                break
            ask = self._left_out.popleft() if self._left_out else next(self._asks, None)
            if ask is None:
                break
            self._start(lane, ask)
        return bool(self._trials)

    def _free(self) -> _Lane | None:
        """A device for another trial; the first if that is free."""
        taken = [trial.lane for trial in self._trials.values()]
        return next((lane for lane in self._fleet.lanes if lane not in taken), None)

    def _start(self, lane: _Lane, ask: Ask, before: Done | None = None) -> None:
        future = self._fleet.begin(lane, lambda: ask.measured(lane.member, lane.scale))
        self._trials[future] = _Trial(lane, ask, time.monotonic(), before)
        for trial in self._trials.values():
            trial.beside = max(trial.beside, len(self._trials))

    def _done(self, trial: _Trial, future: Future[Measurement]) -> Done | None:
        """What is to be told of it; None where it is measured once more."""
        lane, ask, before = trial.lane, trial.ask, trial.before
        try:
            measured = _scaled(future.result(), lane.scale)
        except WorkerError as exc:
            self._fleet.leave_out(lane, str(exc))
            self._left_out.append(ask)
            return None
        done = Done(
            config=ask.config,
            measured=measured,
            seconds=time.monotonic() - trial.began,
            beside=trial.beside,
        )
        if before is not None:
            self._fleet.saw(before.measured, before.beside, measured)
        elif self._may_be_slowed(done) and measured.samples_per_s >= ask.worth:
            self._again.append((ask, done))
            return None
        return done

    def _may_be_slowed(self, done: Done) -> bool:
        return done.beside > 1 and done.measured.host_bound and self._fleet.slows(done.beside)


def _scaled(measured: Measurement, scale: float) -> Measurement:
    """As the first device would have it."""
    rates = {name: getattr(measured, name) * scale for name in ("samples_per_s", "low", "high")}
    times = {name: getattr(measured, name) / scale for name in ("step_s", "gpu_s")}
    blocks = tuple(seconds / scale for seconds in measured.blocks)
    return dataclasses.replace(measured, **rates, **times, blocks=blocks)
