"""How a step is timed. Knows nothing of models, caching, printing or choosing.

Host and device run side by side, so a single step has no time of its own: blocks of steps are
timed, synchronised at their ends only, by the wall clock and by device events around the block.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

BLOCK_S = 0.1
MIN_BLOCKS = 6
HOPELESS_BLOCKS = 5
PRECISION = 0.01
"""Timing ends when the median's confidence interval is within this fraction of it."""
WARM_STEPS = 3
WARM_S = 1.0
BEHIND = 0.2
"""Of a step: what the device is behind the host after a block, at least, where it never waits."""
HOLD_S = 1.0
"""A device is held for no longer, however long a step takes."""
FASTEST_HZ = 3e9
"""No GPU's clock is faster."""
FIRST_STEPS = 4
"""Steps after the first that are looked at for what a job pays once."""


class Clock(Protocol):
    """Where time comes from; a test gives one that needs no device."""

    def synchronize(self) -> None: ...

    def now(self) -> float:
        """Wall-clock seconds."""

    def mark(self) -> object:
        """A point in the device's own stream of work."""

    def between(self, start: object, end: object) -> float:
        """Device seconds between two marks; 0 where the device has no clock of its own."""

    def hold(self, seconds: float) -> None:
        """Have the device wait so long, or longer, before it does what is issued next."""


class CpuClock:
    def synchronize(self) -> None:
        pass

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> object:
        return None

    def between(self, start: object, end: object) -> float:
        return 0.0

    def hold(self, seconds: float) -> None:
        pass


class CudaClock:
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

    def hold(self, seconds: float) -> None:
        torch.cuda._sleep(round(seconds * FASTEST_HZ))


_: type[Clock] = CpuClock
__: Callable[[torch.device], Clock] = CudaClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds per step: the median over blocks, its confidence interval, the raw blocks.

    `behind_s`: for how long the device works on once the host has issued a block.
    """

    step_s: float
    low_s: float
    high_s: float
    gpu_s: float
    behind_s: float
    first_step_s: float
    steps: int
    blocks: tuple[float, ...]


def warm_up(
    step: Callable[[], None], clock: Clock, start: Callable[[], None] | None = None
) -> tuple[float, float]:
    """Run until steps settle; (seconds of the first step, seconds of a settled one).

    `start`, where given, is the first step, with whatever else comes before a settled one.

    Algorithm search and allocation happen in the first steps. Settled: the last three agree
    within a tenth, or WARM_S is spent on them and they get no faster. One step after the first
    always runs; the second and third of a compiled one record its CUDA graphs.
    """
    first = _timed(start or step, clock)
    times: list[float] = []
    spent = 0.0
    while True:
        times.append(_timed(step, clock))
        spent += times[-1]
        last = times[-WARM_STEPS:]
        if len(times) >= WARM_STEPS and max(last) <= 1.1 * min(last):
            break
        if spent >= WARM_S and times[-1] >= 0.5 * (times[-2] if len(times) > 1 else first):
            break
    return first, min(times[-WARM_STEPS:])


def first_steps(
    step: Callable[[], None], clock: Clock, start: Callable[[], None] | None = None
) -> tuple[float, float]:
    """(Seconds of the first step and what the next take beyond a settled one, of a settled one).

    `start`, where given, is the first step with whatever else is paid before the next: a captured
    step's warm-up, its capture and the replays that are checked. The second and third step of a
    compiled model record its CUDA graphs: that is paid once too.
    """
    first = _timed(start or step, clock)
    later = [_timed(step, clock) for _ in range(FIRST_STEPS)]
    settled = min(later)
    # The last two are ordinary steps: what they differ by is noise.
    return first + sum(seconds - settled for seconds in later[:-2]), settled


def _timed(step: Callable[[], None], clock: Clock) -> float:
    clock.synchronize()
    start = clock.now()
    step()
    clock.synchronize()
    return clock.now() - start


def time_steps(
    step: Callable[[], None],
    clock: Clock,
    *,
    seconds: float,
    first_s: float,
    expected_s: float,
    least: int = 2,
    slowest_s: float = math.inf,
) -> Timing:
    """Time a warmed-up step in blocks for at most about `seconds`, less if it is steady.

    At least `least` blocks are run: two, so that there is a spread; one is enough where turns of
    a race give it. A step that is clearly slower than `slowest_s` is timed no longer:
    HOPELESS_BLOCKS that are all slower happen by chance, its median being faster, 1 time in 32.
    """
    per_block = max(1, round(BLOCK_S / max(expected_s, 1e-7)))
    blocks: list[float] = []
    gpu: list[float] = []
    behind: list[float] = []
    clock.synchronize()
    began = clock.now()
    while True:
        start, mark = clock.now(), clock.mark()
        for _step in range(per_block):
            step()
        end_mark, issued = clock.mark(), clock.now()
        clock.synchronize()
        ended = clock.now()
        blocks.append((ended - start) / per_block)
        behind.append(ended - issued)
        gpu.append(clock.between(mark, end_mark) / per_block)
        if len(blocks) >= HOPELESS_BLOCKS and min(blocks) > slowest_s:
            break
        if len(blocks) >= MIN_BLOCKS:
            low, high = median_interval(blocks)
            if high - low <= PRECISION * statistics.median(blocks):
                break
        if len(blocks) >= least and clock.now() - began >= seconds:
            break
    low, high = median_interval(blocks)
    return Timing(
        step_s=statistics.median(blocks),
        low_s=low,
        high_s=high,
        gpu_s=statistics.median(gpu),
        behind_s=statistics.median(behind),
        first_step_s=first_s,
        steps=per_block * len(blocks),
        blocks=tuple(blocks),
    )


def busy_share(step: Callable[[], None], clock: Clock, timing: Timing) -> float:
    """Share of a step's time in which the device works; 0 where it has no clock of its own.

    After a block it is behind where the host is ahead of it. Where it is not, the host may be the
    limit, or may wait for it in every step, as fp16's scaler does: that is told by a step that the
    device begins when the host has issued what it can, and goes through without a gap.
    """
    if not timing.gpu_s or timing.behind_s >= BEHIND * timing.step_s:
        return float(timing.gpu_s > 0)
    clock.synchronize()
    clock.hold(min(timing.step_s, HOLD_S))
    start = clock.mark()
    step()
    end = clock.mark()
    clock.synchronize()
    return min(1.0, clock.between(start, end) / timing.step_s)


def median_interval(values: list[float]) -> tuple[float, float]:
    """Distribution-free 95% confidence interval of the median, from order statistics.

    The widest symmetric ranks that exclude at most 2.5% on each side under Binomial(n, 1/2);
    below six values that is the whole range (Conover, Practical Nonparametric Statistics, 3.2).
    """
    ordered = sorted(values)
    n = len(ordered)
    below, probability, term = 0, 0.0, 0.5**n
    while probability + term <= 0.025:
        probability += term
        term *= (n - below) / (below + 1)
        below += 1
    rank = max(below - 1, 0)
    return ordered[rank], ordered[n - 1 - rank]
