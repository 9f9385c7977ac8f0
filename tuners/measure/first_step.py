"""What configs pay before their steps settle: measured where there is time, else the most seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.tuners.knobs import PAYING
from advisor.tuners.length import first_step_seen


class Starter(Protocol):
    """Runs the first steps of a config in a process of its own."""

    def start(self, config: Config, *, deadline_s: float) -> Measurement:
        """`first_step_s` is what they pay once."""


class Starts:
    """First steps of configs, in seconds.

    A trial's own first step is as it fell in that process: another may have paid for it. So the
    default and what was chosen are started once more, each in a process of its own.

    Args:
        process_s: seconds to start a process, to know what can be afforded.
        left_s: seconds left for all of it.
    """

    def __init__(
        self,
        starter: Starter,
        trials: Sequence[Trial],
        *,
        process_s: float,
        left_s: Callable[[], float],
    ) -> None:
        self._starter = starter
        self._trials = trials
        self._process_s = process_s
        self._left_s = left_s
        self.fresh: dict[Config, float] = {}
        """Those measured in a process of their own."""

    def measure(self, default: Config, configs: Iterable[Config]) -> None:
        """Start the default and these, as far as the time goes; nothing without the default."""
        for config in dict.fromkeys([default, *configs]):
            if config in self.fresh:
                continue
            left = self._left_s()
            if self._process_s + self.seen(config) <= left:
                measured = self._starter.start(config, deadline_s=left)
                if measured.ok:
                    self.fresh[config] = measured.first_step_s
            # Others are told by what they take more than the default does, started alike.
            if default not in self.fresh:
                return

    def seen(self, config: Config) -> float:
        """The slowest first step among trials that pay for the same; 0 where there is none."""
        return first_step_seen(self._trials, config, PAYING)

    def of(self, config: Config, default: Config) -> float:
        """Seconds of a config's first step, as in a fresh process."""
        if config in self.fresh:
            return self.fresh[config]
        loading = max(0.0, self.fresh.get(default, 0.0) - self.seen(default))
        return self.seen(config) + loading
