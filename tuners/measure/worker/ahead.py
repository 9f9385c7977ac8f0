"""Several configs built at once, each in a process of its own; a worker finds them compiled."""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.tuners import host
from advisor.tuners.environment import is_exclusive
from advisor.tuners.measure.runner import Builder, Built, Tell
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
        tell: told how far they are.
    """

    def __init__(
        self,
        job: Job,
        beside: Beside,
        *,
        compared: bool = False,
        place: Place | None = None,
        tell: Tell = lambda _left, _seconds: None,
    ) -> None:
        self._job = job
        self._beside = beside
        self._compared = compared
        self._place = place or Place.here()
        self._tell = tell

    def room(self, peak_bytes: int) -> int:
        """As `Builder.room`: by the cores, the host's memory and the device's.

        Raises:
            WorkerError: no worker can be started any more.
        """
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
        self, configs: Sequence[Config], *, room: int, deadline_s: float
    ) -> dict[Config, Built]:
        """As `Builder.build`."""
        began = time.monotonic()
        beside = configs[: max(0, room - len(configs))] if self._compared else ()
        built: dict[Config, Built] = {}
        until_s = deadline_s
        with contextlib.ExitStack() as stack:
            left = self._begin(configs, beside, deadline_s, stack)
            while left and (spent_s := time.monotonic() - began) < until_s:
                if waited := [one.config for one in left.values() if not one.compared]:
                    self._tell(waited, spent_s)
                for pipe in select.select(left, [], [], min(TELL_S, until_s - spent_s))[0]:
                    if not (measured := left[pipe].worker.heard()):
                        continue
                    one = left.pop(pipe)
                    one.worker.stop()
                    if not one.compared:
                        seconds = time.monotonic() - began
                        built[one.config] = Built(measurement=measured, seconds=seconds)
                        until_s = min(until_s, _patience_s(built, len(configs)))
        late = Measurement(outcome="timed_out", reason=f"not built within {until_s:.0f} s")
        return {config: Built(measurement=late, seconds=until_s) for config in configs} | built

    def _begin(
        self,
        configs: Sequence[Config],
        beside: Sequence[Config],
        deadline_s: float,
        stack: contextlib.ExitStack,
    ) -> dict[int, _Begun]:
        """Builds, those of `beside` as they are compared, by what each is heard by."""
        count = len(configs) + len(beside)
        # Twice as many as there are cores for: they seldom all compile kernels at a time.
        threads = str(max(1, 2 * host.cores() // count))
        environment = {} if _THREADS in self._place.environment else {_THREADS: threads}
        # A run holds some of it meanwhile.
        memory = min(filter(None, (host.memory_limit(), host.free_bytes())), default=0) // count
        begun = {}
        for number, config in enumerate((*configs, *beside)):
            compared = number >= len(configs)
            worker = Worker(self._job, deadline_s=deadline_s, place=self._place)
            stack.enter_context(worker)
            worker.begin(config, environment=environment, memory=memory, compared=compared)
            begun[worker.fileno()] = _Begun(worker, config, compared)
        return begun


@dataclass(frozen=True, slots=True)
class _Begun:
    """A config that a worker of its own builds; `compared`: as it is to be compared."""

    worker: Worker
    config: Config
    compared: bool


def most_by_cores() -> int:
    """How many may be built at once, as far as this host has cores for them."""
    return min(MOST, host.cores() // CORES)


def _patience_s(built: Mapping[Config, Built], most: int) -> float:
    """Seconds after which what is not built is given up, by those of `most` that are."""
    if len(built) == most:
        return LONGER * max(one.seconds for one in built.values())
    took = sorted(one.seconds for one in built.values() if one.measurement.ok)
    if 2 * len(took) < most:
        return math.inf
    return max(LATE_LEAST_S, LATE * took[(most - 1) // 2])


_: type[Builder] = Ahead
