"""Times what the steps of this process wait for: the other ranks of its job, and the loader."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from advisor.tuners.act.pilot.protocol import RankStep

_Span = tuple[float, float]  # start and end, in microseconds


class ExchangeTimer:
    """Profiles the steps of this process: of a GPU its kernels, of a CPU its operators. Ranks start
    their profilers at different times, so only steps after `begin` count."""

    def __init__(self, device: torch.device) -> None:
        activity = torch.profiler.ProfilerActivity
        self._of_gpu = device.type == "cuda"
        kinds = [activity.CUDA if self._of_gpu else activity.CPU]
        self._profile: Any = torch.profiler.profile(activities=kinds)
        try:
            self._profile.start()
        except RuntimeError:  # the script profiles itself
            self._profile = None
        self.begin()

    def begin(self) -> None:
        self._began_ns = time.time_ns()

    def end(self, steps: int, seconds: float, loads_s: float) -> tuple[RankStep, ...]:
        """The mean of `steps` steps that took `seconds`, of which they waited `loads_s` for data;
        nothing if they could not be profiled."""
        if self._profile is None:
            return ()
        self._profile.stop()
        before_us = (self._began_ns - self._profile.profiler.kineto_results.trace_start_ns()) / 1e3
        found = spans(self._profile.events() or (), of_gpu=self._of_gpu)
        exchanges, work = ([(max(a, before_us), b) for a, b in one] for one in found)
        loads_s = min(loads_s, seconds)
        waits_s = min(covered([*exchanges, *work]) - covered(work), 1e6 * (seconds - loads_s)) / 1e6
        step_s, waits_s, loads_s = (one / max(1, steps) for one in (seconds, waits_s, loads_s))
        return (RankStep(step_s=step_s, waits_s=waits_s, loads_s=loads_s),)


def spans(events: Iterable[Any], *, of_gpu: bool) -> tuple[list[_Span], list[_Span]]:
    """When exchanges ran, and when this process computed, by a profiler's events."""
    exchanges, work = list[_Span](), list[_Span]()
    for one in events:
        span = one.time_range.start, one.time_range.end
        if of_gpu:
            if one.device_type.name == "CUDA" and not getattr(one, "is_user_annotation", False):
                (exchanges if "nccl" in one.name.lower() else work).append(span)
        elif one.name.startswith("gloo:"):  # from its call to its result, by gloo's threads
            exchanges.append(span)
        elif one.name.startswith(("aten::", "Optimizer.step")):
            work.append(span)
    return exchanges, work


def covered(spans: Sequence[_Span]) -> float:
    """How long at least one of these spans lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
