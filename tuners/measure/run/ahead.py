"""Configs of a run built beside it, while the script waits at the boundary of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from advisor.cache.config import Config
from advisor.tuners.act.pilot.handing import PLACE
from advisor.tuners.environment import free_bytes
from advisor.tuners.measure.run.run import Run
from advisor.tuners.measure.runner import Builder, Built, Tell
from advisor.tuners.measure.worker.ahead import Ahead, most_by_cores
from advisor.tuners.measure.worker.parent import Place
from advisor.tuners.measure.worker.wire import Job
from advisor.tuners.scratch import Scratch

NOT_AHEAD = "compiled one after the other"
"""What a run comes to whose calls cannot be made elsewhere."""


class HandedAhead:
    """A Builder of what a run hands over.

    A process that cannot make the calls tells nothing of a config, which the script may still
    train with: where none could, it goes on as without this.

    Args:
        job: the run's task and device, and the folder that takes what is handed over.
        notice: told, once, why nothing can be built.
        tell: told how far builds are.
    """

    def __init__(self, run: Run, job: Job, notice: Callable[[str], None], tell: Tell) -> None:
        self._run, self._job, self._notice, self._tell = run, job, notice, tell
        self._able = True

    @classmethod
    @contextlib.contextmanager
    def beside(
        cls, run: Run, job: Job, notice: Callable[[str], None], tell: Tell
    ) -> Iterator[HandedAhead]:
        """One whose folder, of this user's alone, is there as long as the context."""
        with Scratch() as folder:
            yield cls(run, dataclasses.replace(job, handed=str(folder)), notice, tell)

    @property
    def folder(self) -> Path:
        """That takes what is handed over."""
        return Path(self._job.handed)

    def room(self, peak_bytes: int) -> int:
        """As `Builder.room`."""
        if most_by_cores() < 2:
            return 1
        ahead = self._handed(self._run.own)
        return ahead.room(peak_bytes) if ahead is not None else 1

    def build(
        self, configs: Sequence[Config], *, room: int, deadline_s: float
    ) -> dict[Config, Built]:
        """As `Builder.build`."""
        ahead = self._handed(configs[0])
        if ahead is None:
            return {}
        built = ahead.build(configs, room=room, deadline_s=deadline_s)
        if not any(one.measurement.ok for one in built.values()):
            self._give_up(next(iter(built.values())).measurement.reason)
            return {}
        # Beside the script there is less memory.
        return {c: one for c, one in built.items() if one.measurement.outcome != "out_of_memory"}

    def _handed(self, config: Config) -> Ahead | None:
        """What builds, once the calls of the script's next step are handed over."""
        if self._able and (why := self._run.hand(config, self.folder)):
            self._give_up(why)
        if not self._able:
            return None
        told = json.loads((self.folder / PLACE).read_text())
        place = Place(python=told["python"], environment=told["environment"], folder=told["folder"])
        return Ahead(self._job, self, place=place, tell=self._tell)

    def free_bytes(self) -> int:
        """As `Beside.free_bytes`: what the script has left."""
        return free_bytes(self._job.device)

    def _give_up(self, why: str) -> None:
        self._able = False
        self._notice(f"{NOT_AHEAD}, not several at once: {why}")


_: type[Builder] = HandedAhead
