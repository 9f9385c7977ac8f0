"""Several configs built at once, each in a process of its own; a worker finds them compiled."""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.tuners import host
from advisor.tuners.environment import is_exclusive
from advisor.tuners.measure.runner import Builder, Built
from advisor.tuners.measure.worker.parent import Place, Worker
from advisor.tuners.measure.worker.wire import Job

CORES = 2
"""For each process: one that traces and lowers, and at times all of them for kernels."""
HOST_BYTES = 6 * 2**30
"""Of the host's memory: PyTorch with CUDA, Inductor, and the processes that compile kernels."""
CONTEXT_BYTES = 2**30
"""Of the device's memory, beside what a step takes: a CUDA context and what libraries keep."""
MOST = 8
LATE, LATE_LEAST_S = 3.0, 30.0
"""Once half of them are built, the others are given up after so many times as long, and this."""
LONGER = 1.25
"""As many times as long as the others may take what is compiled to be compared."""
TELL_S = 1.0
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


class Beside(Protocol):
    """What measures, and waits while something is built."""

    def free_bytes(self) -> int:
        """Of the device's memory now; 0 where that cannot be told."""


class Ahead:
    """A Builder beside what measures.

    Args:
        beside: a worker holds nothing on the device meanwhile.
        compared: a model that draws random numbers is compiled anew to be compared with fp32, its
            draws fixed: where there is room, that is done beside, too.
        place: of the processes that build; None: this process's own.
    """

    def __init__(
        self, job: Job, beside: Beside, *, compared: bool = False, place: Place | None = None
    ) -> None:
        self._job = job
        self._beside = beside
        self._compared = compared
        self._place = place
        self._room = 1

    def room(self, peak_bytes: int) -> int:
        """As `Builder.room`: by the cores, the host's memory and the device's.

        Raises:
            WorkerError: no worker can be started any more.
        """
        self._room = max(1, self._most(peak_bytes))
        return self._room

    def _most(self, peak_bytes: int) -> int:
        most = most_by_cores()
        if most < 2:
            return 1
        if self._job.device.startswith("cpu"):
            return max(1, min(most, host.free_bytes() // (HOST_BYTES + peak_bytes)))
        if is_exclusive(self._job.device):
            return 1
        most = min(most, host.free_bytes() // HOST_BYTES)
        free = min(self._beside.free_bytes(), self._job.task.max_memory or math.inf)
        return max(1, min(most, int(free // (CONTEXT_BYTES + peak_bytes))))

    def build(
        self,
        configs: Sequence[Config],
        *,
        deadline_s: float,
        tell: Callable[[Sequence[Config], float], None],
    ) -> dict[Config, Built]:
        """As `Builder.build`."""
        began = time.monotonic()
        also = configs[: max(0, self._room - len(configs))] if self._compared else ()
        count = len(configs) + len(also)
        # Twice as many as there are cores for: they seldom all compile kernels at a time.
        threads = str(max(1, 2 * host.cores() // count))
        theirs = self._place.environment if self._place else os.environ
        environment = {} if _THREADS in theirs else {_THREADS: threads}
        # A run holds some of it meanwhile.
        memory = min(filter(None, (host.memory_limit(), host.free_bytes())), default=0) // count
        built: dict[Config, Built] = {}
        with contextlib.ExitStack() as stack:

            def begin(config: Config, *, compared: bool) -> Worker:
                worker = Worker(self._job, deadline_s=deadline_s, place=self._place)
                stack.enter_context(worker)
                worker.begin(config, environment=environment, memory=memory, compared=compared)
                return worker

            begun = {}
            for config in configs:
                worker = begin(config, compared=False)
                begun[worker.fileno()] = worker, config
            beside = [begin(config, compared=True) for config in also]
            until_s = deadline_s
            while begun and (spent_s := time.monotonic() - began) < until_s:
                tell([config for _, config in begun.values()], spent_s)
                for pipe in select.select(begun, [], [], min(TELL_S, until_s - spent_s))[0]:
                    worker, config = begun[pipe]
                    if measured := worker.heard():
                        del begun[pipe]
                        worker.stop()
                        seconds = time.monotonic() - began
                        built[config] = Built(measurement=measured, seconds=seconds)
                        until_s = min(until_s, _patience_s(built, len(configs)))
            spent_s = time.monotonic() - began
            _wait(beside, min((LONGER - 1) * spent_s, deadline_s - spent_s))
        late = Measurement(outcome="timed_out", reason=f"not built within {until_s:.0f} s")
        for _, config in begun.values():
            built[config] = Built(measurement=late, seconds=until_s)
        return built


def most_by_cores() -> int:
    """How many may be built at once, as far as this host has cores for them."""
    return min(MOST, host.cores() // CORES)


def _wait(begun: Sequence[Worker], seconds: float) -> None:
    """Until it was heard of all, for so long at most."""
    until = time.monotonic() + seconds
    left = {worker.fileno(): worker for worker in begun}
    while left and (left_s := until - time.monotonic()) > 0:
        for pipe in select.select(left, [], [], left_s)[0]:
            if left[pipe].heard():
                del left[pipe]


def _patience_s(built: Mapping[Config, Built], most: int) -> float:
    """Seconds after which what is not built is given up, by those that are."""
    took = sorted(one.seconds for one in built.values() if one.measurement.ok)
    if 2 * len(took) < most:
        return math.inf
    return max(LATE_LEAST_S, LATE * took[(most - 1) // 2])


_: type[Builder] = Ahead
