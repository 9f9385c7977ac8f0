"""Clocks of a device, and when steps have settled. Knows nothing of models, caching or choosing."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

WARM_STEPS, WARM_S = 3, 1.0


class Clock:
    """Wall clock, and for a GPU its own clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def now(self) -> float:
        """Wall-clock seconds."""
        return time.perf_counter()

    def mark(self) -> torch.cuda.Event | None:
        """A point in the device's stream of work; None if it has no clock."""
        if self._device is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: torch.cuda.Event | None, end: torch.cuda.Event | None) -> float:
        """Device seconds between two marks; 0 if it has no clock."""
        return start.elapsed_time(end) / 1000.0 if start is not None and end is not None else 0.0


def warm_up(step: Callable[[], None], clock: Clock, start: Callable[[], None]) -> None:
    """Run `start`, then steps until they settle: algorithm search and allocation come first.

    Settled: the last WARM_STEPS agree within a tenth, or took WARM_S without getting faster. A
    compiled step records its CUDA graphs in its second and third run.
    """
    last, spent = _timed(start, clock), 0.0
    times: list[float] = []
    while True:
        times.append(_timed(step, clock))
        spent += times[-1]
        recent = times[-WARM_STEPS:]
        if len(times) >= WARM_STEPS and max(recent) <= 1.1 * min(recent):
            return
        if spent >= WARM_S and times[-1] >= 0.5 * last:
            return
        last = times[-1]


def _timed(step: Callable[[], None], clock: Clock) -> float:
    clock.synchronize()
    start = clock.now()
    step()
    clock.synchronize()
    return clock.now() - start
