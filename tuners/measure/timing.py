"""Clocks of a device, and when steps have settled. Knows nothing of models, caching or choosing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

WARM_STEPS = 3
WARM_S = 1.0


class Clock(Protocol):
    """Where time comes from; a test gives one that needs no device."""

    def synchronize(self) -> None:
        """Wait for all that the device was given to do."""

    def now(self) -> float:
        """Wall-clock seconds."""

    def mark(self) -> object:
        """A point in the device's own stream of work."""

    def between(self, start: object, end: object) -> float:
        """Device seconds between two marks; 0 where the device has no clock of its own."""


class CpuClock:
    """The host's clock: what it calls is over when the call returns."""

    def synchronize(self) -> None:
        pass

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> object:
        return None

    def between(self, start: object, end: object) -> float:
        return 0.0


class CudaClock:
    """The host's clock beside a GPU with events of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: object, end: object) -> float:
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1000.0


_: type[Clock] = CpuClock
__: Callable[[torch.device], Clock] = CudaClock


def clock_of(device: torch.device) -> Clock:
    """The clock for work on a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def warm_up(step: Callable[[], None], clock: Clock, start: Callable[[], None]) -> None:
    """Run `start`, then steps until they settle.

    Algorithm search and allocation happen in the first steps. Settled: the last WARM_STEPS agree
    within a tenth, or WARM_S is spent on them and they get no faster. One step after the first
    always runs; the second and third of a compiled one record its CUDA graphs.
    """
    first, spent = _timed(start, clock), 0.0
    times: list[float] = []
    while True:
        times.append(_timed(step, clock))
        spent += times[-1]
        last = times[-WARM_STEPS:]
        if len(times) >= WARM_STEPS and max(last) <= 1.1 * min(last):
            return
        if spent >= WARM_S and times[-1] >= 0.5 * (times[-2] if len(times) > 1 else first):
            return


def _timed(step: Callable[[], None], clock: Clock) -> float:
    clock.synchronize()
    start = clock.now()
    step()
    clock.synchronize()
    return clock.now() - start
