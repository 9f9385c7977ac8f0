"""A loader's batches without end, and how long a step waits for them.

Workers begin with nothing, and have batches ready once they have outrun a step: neither is a
speed. So timing starts once as many batches have come as the loader can hold ready, and covers
whole rounds of all workers, whose batches come together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

from torch.utils.data import DataLoader

from advisor.tuners import room
from advisor.tuners.act.pilot import hooks

WARM = 3
"""Batches before those that are timed, at least."""
LOOK_S = 0.5
"""Between two looks for workers that have ended by themselves."""


class Feeding:
    """The batches of a loader, one epoch after the other, until `close`.

    Attributes:
        settling: batches to take before timing.
        together: batches that come together, one of each worker.
        waited_s: seconds that were waited for batches.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        workers = loader.num_workers
        self.settling = max(WARM, workers * (loader.prefetch_factor or room.AHEAD))
        self.together = max(1, workers)
        self.waited_s = 0.0
        self._epoch: Any = None
        self._looking = ExitStack()
        self._looking.enter_context(hooks.looking(LOOK_S))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            RuntimeError: an epoch has none.
        """
        began = time.perf_counter()
        try:
            for fresh in (self._epoch is None, True):
                if fresh:
                    self._epoch = iter(self._loader)
                with suppress(StopIteration):
                    return next(self._epoch)
            raise RuntimeError("the loader gave no batch")
        finally:
            self.waited_s += time.perf_counter() - began

    def close(self) -> None:
        """End the loader's workers."""
        epoch, self._epoch = self._epoch, None
        self._looking.close()
        if epoch is not None and self._loader.num_workers:
            hooks.send_away(epoch)
