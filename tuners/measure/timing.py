"""Clocks of a device. Knows nothing of models, caching or choosing."""

from __future__ import annotations

import time

import torch


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
