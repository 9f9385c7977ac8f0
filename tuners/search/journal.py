"""The Optuna study of a search: on disk, opened whatever became of its file, asked and told.

A study lies in a journal file of its own, which Optuna's tools and dashboard open. A line of it
that cannot be read (a full disk, a power cut) costs the trials from there on, not those before.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.errors import RecordDamaged, UsageError
from advisor.tuners.measure.place import Compared
from advisor.tuners.search.ratio import Ratio
from advisor.tuners.search.sampler import FAILED, SECONDS
from advisor.tuners.search.space import Space

MOST_BYTES = 256 * 2**20
"""A journal of a thousand trials takes 5 MB."""
RATIO, COMPARED = "ratio", "compared"
"""Attributes of a trial: its speed-up with the ends of its interval; how the comparison with fp32
ended, as (outcome, reason, what it blames)."""

SENSELESS = (
    *(AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError),
    optuna.exceptions.OptunaError,
)
"""What Optuna raises on a journal that it cannot replay."""
UNWRITABLE = (*SENSELESS, OSError, RuntimeError)
"""What it raises where it cannot write one, the half line left by that included."""


def open_study(folder: Path, name: str, *, fresh: bool = False) -> tuple[optuna.Study, str]:
    """The study `name`, and what is to be told of it; '' where all is well.

    The caller holds the study's lock. What is no plain file, or cannot be read whole, is moved
    aside as NAME.journal.damaged-N; what could be read of it is in the study. Where nothing can be
    written the study is in memory.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = folder / f"{name}.journal"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Optuna's own, left by a process that was killed while it wrote: else it waits 30 s.
        Path(f"{path}.lock").unlink(missing_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        lines, fault = _read(path)
        if not fault:
            try:
                return _opened(path, name), ""
            except SENSELESS as exc:
                fault = f"{type(exc).__name__}: {exc}"
        aside = _free(path)
        path.rename(aside)
        study = _salvaged(path, name, lines)
    except OSError as exc:
        study = optuna.create_study(study_name=name, direction="maximize")
        return study, f"the search cannot be saved: {exc}; if it is interrupted it starts anew"
    return study, (
        f"the journal of this search was damaged ({fault:.200}); it is kept as {aside.name}, and "
        "the search goes on with the trials before that"
    )


class _Lock(JournalFileSymlinkLock):
    """Optuna's own, in which an interruption stays one: as the lock is taken or given back it would
    end as an error of the lock, as of a journal that cannot be written, and be lost."""

    def release(self) -> None:
        try:
            super().release()
        except (OSError, RuntimeError) as exc:
            cause = exc.__context__
            while cause is not None:
                if isinstance(cause, KeyboardInterrupt):
                    raise cause from None
                cause = cause.__context__
            raise


def _opened(path: Path, name: str) -> optuna.Study:
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(path), lock_obj=_Lock(str(path)))),
        study_name=name,
        direction="maximize",
        load_if_exists=True,
    )


def _read(path: Path) -> tuple[list[bytes], str]:
    """The lines before the first that cannot be read, and what is wrong."""
    try:
        # Neither what a link points to is read, nor is a pipe waited for.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return [], ""
    except OSError as exc:
        return [], exc.strerror or str(exc)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
        os.close(handle)
        return [], f"no plain file of at most {MOST_BYTES} bytes"
    with os.fdopen(handle, "rb") as file:
        lines = list(file)
    good = list(itertools.takewhile(_is_whole, lines))
    return good, f"line {len(good) + 1} of {len(lines)} cannot be read" * (len(good) < len(lines))


def _is_whole(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _free(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _salvaged(path: Path, name: str, lines: Sequence[bytes]) -> optuna.Study:
    """The study of as many lines, from the first on, as Optuna can replay."""

    def fails(count: int) -> bool:
        path.write_bytes(b"".join(lines[:count]))
        try:
            _opened(path, name)
        except SENSELESS:
            return True
        return False

    good = bisect.bisect_left(range(len(lines) + 1), True, key=fails) - 1
    path.write_bytes(b"".join(lines[: max(0, good)]))
    return _opened(path, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A trial of an earlier run of the same study."""

    trial: Trial
    ratio: Ratio
    compared: Compared | None


class Journal:
    """The study that is asked, and told what was measured.

    Where its file cannot be written any more it goes on in memory, with what was told so far.

    Args:
        notice: told so.
    """

    def __init__(
        self, study: optuna.Study, space: Space, notice: Callable[[str], None] = lambda _text: None
    ) -> None:
        self.study = study
        self._space = space
        self._notice = notice
        self._distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(values) for name, values in space.choices.items()
        }
        self._told: list[tuple[Config, float, dict[str, Any]]] = []

    def resume(self) -> list[Known]:
        """The trials of earlier runs; what was in flight when one was interrupted is open again."""
        try:
            for _ in self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                self.study.tell(self.study.ask(), state=TrialState.FAIL)
            running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            for frozen in running:
                self.study.tell(frozen.number, state=TrialState.FAIL)
        except UNWRITABLE as exc:
            self._forgo(exc)
        found = [
            one for frozen in self.study.get_trials(deepcopy=False) if (one := self._of(frozen))
        ]
        self._told = [(one.trial.config, one.ratio.mean, _attributes(one)) for one in found]
        return found

    def _of(self, frozen: FrozenTrial) -> Known | None:
        """As it was told; None for what was not, or is of no config here."""
        kept = frozen.user_attrs
        try:
            config = Config(frozen.params)
            measured = from_plain(Measurement, kept["measurement"])
            seconds, origin = float(kept[SECONDS]), str(kept["origin"])
            mean, low, high = (float(number) for number in kept[RATIO])
            compared = Compared(*map(str, kept[COMPARED])) if kept.get(COMPARED) else None
        except (KeyError, TypeError, ValueError, RecordDamaged, UsageError):
            return None
        if not self._space.holds(config) or not 0 <= seconds < math.inf:
            return None
        if not (0 <= low <= mean <= high and math.isfinite(mean)):
            return None
        trial = Trial(
            number=frozen.number,
            config=config,
            measurement=measured,
            stage="compute",
            origin=origin,
            seconds=seconds,
        )
        return Known(trial=trial, ratio=Ratio(mean=mean, low=low, high=high), compared=compared)

    def ask(self, origin: str, config: Mapping[str, Any] | None = None) -> optuna.Trial:
        """The next trial: of a config, or of a part of one; without one the sampler chooses."""
        try:
            return self._ask(origin, config)
        except UNWRITABLE as exc:
            self._forgo(exc)
            return self._ask(origin, config)

    def _ask(self, origin: str, config: Mapping[str, Any] | None) -> optuna.Trial:
        if config is not None:
            self.study.enqueue_trial(dict(config))
        asked = self.study.ask(self._distributions)
        asked.set_user_attr("origin", origin)
        return asked

    def tell(self, asked: optuna.Trial, known: Known, turns: Iterable[float]) -> None:
        """What a visit gave; `turns` are the ratios of its turns: its intermediate values."""
        value, attributes = known.ratio.mean, _attributes(known)
        self._told.append((known.trial.config, value, attributes))
        try:
            for step, turn in enumerate(turns):
                asked.report(turn, step)
            for name, attribute in attributes.items():
                asked.set_user_attr(name, attribute)
            # A failure's speed-up is nothing: finite, so that any sampler learns to stay away.
            self.study.tell(asked, value if known.trial.measurement.ok else 0.0)
        except UNWRITABLE as exc:
            self._forgo(exc)

    def pass_over(self, asked: optuna.Trial) -> None:
        """The trial is not measured, and a later run may."""
        try:
            self.study.tell(asked, state=TrialState.FAIL)
        except UNWRITABLE as exc:
            self._forgo(exc)

    def _forgo(self, exc: BaseException) -> None:
        self._notice(f"the search cannot be saved any more: {exc}; it goes on in memory")
        self.study = optuna.create_study(direction="maximize", sampler=self.study.sampler)
        for config, value, attributes in self._told:
            self.study.add_trial(
                optuna.trial.create_trial(
                    params=dict(config),
                    distributions=self._distributions,
                    value=0.0 if attributes.get(FAILED) else value,
                    user_attrs=attributes,
                )
            )


def _attributes(known: Known) -> dict[str, Any]:
    trial, ratio, compared = known.trial, known.ratio, known.compared
    found: dict[str, Any] = {
        "measurement": to_plain(trial.measurement),
        SECONDS: trial.seconds,
        RATIO: (ratio.mean, ratio.low, ratio.high),
        "origin": trial.origin,
    }
    if compared is not None:
        found[COMPARED] = (compared.outcome, compared.reason, compared.blames)
    if not trial.measurement.ok:
        found[FAILED] = True
    return found
