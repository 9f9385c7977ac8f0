"""A task's own data as a worker measures it."""

from __future__ import annotations

from typing import Any

from advisor.cache.record import Measurement
from advisor.cache.task import Task
from advisor.tuners.act.advice import Advice
from advisor.tuners.measure.loading import timed
from advisor.tuners.measure.loading.costs import costs
from advisor.tuners.measure.loading.described import described
from advisor.tuners.measure.loading.timed import Fed
from advisor.tuners.measure.timing import Clock
from advisor.tuners.measure.worker.wire import Costs


class Loadable:
    """Data that is there: its loader by itself, and with a step.

    Attributes:
        facts: what is known of it.
        batch: one, on the host.

    Raises:
        TargetError, TargetFailed: as `described`.
    """

    def __init__(self, task: Task, *, made_batches: bool) -> None:
        self._size = task.batch
        self.batch: tuple[Any, Any]
        self._data, self.facts, self.batch = described(task, made_batches=made_batches)

    def alone(self, advice: Advice, seconds: float) -> Measurement:
        """The loader as it is advised, without a step."""
        loader = self._data.loader(**advice.loader)
        return timed.alone(loader, self._size, seconds)

    def costs(self, seconds: float) -> Costs:
        """What a sample costs a worker."""
        return costs(self._data, self._size, seconds)

    def fed(self, workload: Fed, advice: Advice, seconds: float, clock: Clock) -> Measurement:
        """A workload that the loader feeds as it is advised."""
        loader = self._data.loader(**advice.loader)
        return timed.fed(workload, loader, self._size, seconds, clock)
