"""What configs pay before their steps settle: measured where there is time, else the most seen."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.tuners.knobs import FORMATS, PAYING, compiles
from advisor.tuners.length import WARM, first_step_seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a process finds compiled when it starts, and leaves.

    Attributes:
        anew: nothing, as the caches on disk are empty; else what was compiled on this machine.
        loads: a file of artifacts that it loads as part of its first step.
        saves: a file into which it puts the artifacts of what it needed.
    """

    anew: bool = True
    loads: Path | None = None
    saves: Path | None = None


ANEW = Compiled()
_UNFIT = r'[\\/:*?"<>|]'
"""In a file's name, of those of a user's."""


def empty_caches(folder: str) -> dict[str, str]:
    """Environment variables that have a process compile with empty caches, in an empty folder."""
    return {f"{name}_CACHE_DIR": f"{folder}/{name}" for name in ("TORCHINDUCTOR", "TRITON")}


def inductor_folder() -> str:
    """Where Inductor keeps what it compiles, by itself (torch._inductor.runtime.cache_dir_utils,
    which takes seconds to import)."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return f"{tempfile.gettempdir()}/torchinductor_{re.sub(_UNFIT, '_', user)}"


class Starter(Protocol):
    """Runs the first steps of a config in a process of its own."""

    def start(self, config: Config, *, deadline_s: float, compiled: Compiled = ANEW) -> Measurement:
        """`first_step_s` is what they pay once."""

    def save(self, config: Config, file: Path) -> None:
        """Put into a file the artifacts of all that was compiled in the process which has a config
        at work; no file where that is over."""


class Starts:
    """First steps of configs, in seconds.

    A trial's own first step is as it fell in that process: another may have paid for it. So the
    default and what was chosen are started once more, each in a process of its own.

    Args:
        process_s: seconds to start a process, to know what can be afforded.
        left_s: seconds left for all of it.
        folder: takes artifacts; None where none are kept.
    """

    def __init__(
        self,
        starter: Starter,
        trials: Sequence[Trial],
        *,
        process_s: float,
        left_s: Callable[[], float],
        folder: Path | None = None,
    ) -> None:
        self._starter = starter
        self._trials = trials
        self._process_s = process_s
        self._left_s = left_s
        self._folder = folder
        self.fresh: dict[Config, float] = {}
        """Those measured in a process of their own."""
        self.loaded: dict[Config, float] = {}
        """The same, with artifacts loaded."""
        self.artifacts: dict[Config, Path] = {}
        """Those that were saved."""
        self._raced: Path | None = None

    def measure(self, default: Config, configs: Iterable[Config]) -> None:
        """Start the default and these, as far as the time goes; nothing without the default."""
        for config in dict.fromkeys([default, *configs]):
            if config in self.fresh:
                continue
            left = self._left_s()
            if self._process_s + self.seen(config) <= left:
                measured = self._start(config, left)
                if measured.ok:
                    self.fresh[config] = measured.first_step_s
            # Others are told by what they take more than the default does, started alike.
            if default not in self.fresh:
                return

    def save_raced(self, configs: Iterable[Config]) -> None:
        """While these are at work in one process, save the artifacts of all of them: for those that
        there will be no time to start."""
        raced = next(filter(compiles, configs), None)
        if self._folder is not None and raced is not None:
            file = self._folder / "raced"
            self._starter.save(raced, file)
            self._raced = file if file.exists() else None

    def keep(self, default: Config, configs: Iterable[Config]) -> None:
        """Save the artifacts of these alone where they were not yet, by what is compiled on this
        machine, and then see what loading those of the first gives, as far as the time goes."""
        chosen = [config for config in dict.fromkeys(configs) if compiles(config)]
        for config in chosen if self._folder is not None else ():
            if config not in self.artifacts and self._warm_s(config) <= self._left_s():
                self._start(config, self._left_s(), anew=False)
            # In a race every switch is set. PyTorch finds compiled code by those of the number
            # format, and tells one that was set to its default from one that was left alone, as a
            # script does: it compiles anew.
            if self._raced is not None and config.changed(default).keys() & {*FORMATS}:
                self.artifacts.setdefault(config, self._raced)
        for config in chosen[:1]:
            file = self.artifacts.get(config)
            left = self._left_s()
            if file is not None and self._warm_s(config) <= left:
                loads = Compiled(loads=file)
                measured = self._starter.start(config, deadline_s=left, compiled=loads)
                if measured.ok:
                    self.loaded[config] = measured.first_step_s

    def _start(self, config: Config, left_s: float, *, anew: bool = True) -> Measurement:
        if self._folder is None or not compiles(config):
            return self._starter.start(config, deadline_s=left_s)
        file = self._folder / config.digest
        compiled = Compiled(anew=anew, saves=file)
        measured = self._starter.start(config, deadline_s=left_s, compiled=compiled)
        if measured.ok and file.exists():
            self.artifacts[config] = file
        return measured

    def _warm_s(self, config: Config) -> float:
        """What starting a config takes where nothing of it has to be compiled."""
        return self._process_s + self.seen(config) / WARM

    def seen(self, config: Config) -> float:
        """The slowest first step among trials that pay for the same; 0 where there is none."""
        return first_step_seen(self._trials, config, PAYING)

    def of(self, config: Config, default: Config) -> float:
        """Seconds of a config's first step, as in a fresh process."""
        if config in self.fresh:
            return self.fresh[config]
        loading = max(0.0, self.fresh.get(default, 0.0) - self.seen(default))
        return self.seen(config) + loading
