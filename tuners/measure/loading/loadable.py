"""A task's own data as a worker measures it."""

from __future__ import annotations

from advisor.cache.task import Task
from advisor.tuners.act.advice import Advice
from advisor.tuners.measure.loading import timed
from advisor.tuners.measure.loading.costs import costs
from advisor.tuners.measure.loading.described import described
from advisor.tuners.measure.loading.timed import Feeding
from advisor.tuners.measure.worker.wire import Costs


class Loadable:
    """Data that is there: its loader by itself, and its batches for steps.

    Attributes:
        facts: what is known of it.
        batches: some, on the host.

    Raises:
        TargetError, TargetFailed: as `described`.
    """

    def __init__(self, task: Task, *, made_batches: bool) -> None:
        self._size = task.batch
        self._data, self.facts, self.batches = described(task, made_batches=made_batches)

    def rate(self, advice: Advice, seconds: float) -> float:
        """Samples per second of the loader as it is advised, without a step."""
        batch = advice.batch_size or self._size
        return timed.rate(self._data.loader(**advice.loader), batch, seconds)

    def feeding(self, advice: Advice) -> Feeding:
        """The batches of the loader as it is advised."""
        return Feeding(self._data.loader(**advice.loader))

    def costs(self, seconds: float) -> Costs:
        """What a sample costs a worker."""
        return costs(self._data, self._size, seconds)
