"""The Optuna study of a search: on disk, opened whatever became of its file, asked and told.

A study lies in a journal file of its own, which Optuna's tools and dashboard open. A line of it
that cannot be read (a full disk, a power cut) costs that trial, not the others.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import (
    BaseJournalBackend,
    JournalFileBackend,
    JournalFileSymlinkLock,
)
from optuna.trial import FrozenTrial, TrialState

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.errors import RecordDamaged, UsageError
from advisor.tuners.search.sampler import FAILED, SECONDS
from advisor.tuners.search.space import Space

MOST_BYTES = 256 * 2**20
"""A journal of a thousand trials takes 5 MB."""
OUT, SETTLED = "passed over", "settled"
"""Attributes: of a trial that was not measured; of a study, how many of its trials are of runs that
ended before a race."""
BESIDE = "beside"
"""Attribute of a trial: as many ran while it did, on devices of their own."""
MOST_DROPPED = 100
"""Lines that are JSON and make no sense; after as many nothing is taken from a journal."""

SENSELESS = (
    *(AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError),
    optuna.exceptions.OptunaError,
)
"""What Optuna raises on a journal that it cannot replay."""
UNWRITABLE = (*SENSELESS, OSError, RuntimeError)
"""What it raises where it cannot write one, the half line left by that included."""

# Optuna's storages/journal/_storage.py, JournalOperation.
_CREATE_STUDY, _CREATE_TRIAL = 0, 4


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
        study = _opened(path, name)
        kept = _add(study, _salvaged(lines, name))
    except OSError as exc:
        study = optuna.create_study(study_name=name, direction="maximize")
        return study, f"the search cannot be saved: {exc}; if it is interrupted it starts anew"
    return study, (
        f"the journal of this search was damaged ({fault:.200}); it is kept as {aside.name}, and "
        f"the search goes on with the {kept} trials that could be read"
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


def _read(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The lines that can be read, and what is wrong with the others; a missing file has none."""
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
        lines = [_parsed(line) for line in file]
    bad = lines.count(None)
    return [line for line in lines if line is not None], (
        f"{bad} of {len(lines)} lines cannot be read" if bad else ""
    )


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _free(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


class _Lines(BaseJournalBackend):
    """Lines in place of a file; `at` is the one that Optuna asked for last."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.lines = lines
        self.at = 0

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        for number in range(log_number_from, len(self.lines)):
            self.at = number
            yield self.lines[number]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.lines += logs


def _salvaged(lines: list[dict[str, Any]], name: str) -> list[FrozenTrial]:
    """The trials that are whole in what could be read."""
    backend = _Lines(list(_mended(lines, name)))
    for _ in range(MOST_DROPPED):
        try:
            study = optuna.load_study(study_name=name, storage=JournalStorage(backend))
            trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        except SENSELESS:
            if backend.at >= len(backend.lines):
                return []
            del backend.lines[backend.at]
            continue
        usual = collections.Counter(frozenset(t.params) for t in trials).most_common(1)
        return [t for t in trials if frozenset(t.params) == usual[0][0]]
    return []


def _mended(lines: Iterable[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """The lines, with one put in where the beginning of a study or a trial was lost: Optuna numbers
    trials by their order, so that without it all later ones would be taken for others."""
    study = {"op_code": _CREATE_STUDY, "worker_id": "", "study_name": name, "directions": [2]}
    began = trials = 0
    for line in lines:
        if line.get("op_code") == _CREATE_STUDY:
            began += 1
        elif not began:
            began += 1
            yield study
        if line.get("op_code") == _CREATE_TRIAL:
            trials += 1
        number = line.get("trial_id")
        while isinstance(number, int) and trials <= number < trials + MOST_DROPPED:
            yield {"op_code": _CREATE_TRIAL, "worker_id": "", "study_id": 0, "datetime_start": None}
            trials += 1
        yield line
    if not began:
        yield study


def _add(study: optuna.Study, trials: Iterable[FrozenTrial]) -> int:
    """Add the trials that Optuna takes; how many those were."""
    added = 0
    for trial in trials:
        try:
            study.add_trial(trial)
        except SENSELESS:
            continue
        added += 1
    return added


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
        self._told: list[Trial] = []
        self._beside: dict[int, int] = {}

    def resume(self) -> tuple[list[Trial], list[Config]]:
        """The trials of earlier runs, and what was in flight when one of them was interrupted."""
        try:
            for _ in self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                self.study.tell(self.study.ask(), state=TrialState.FAIL)
            running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            for frozen in running:
                self.study.tell(frozen.number, state=TrialState.FAIL)
        except UNWRITABLE as exc:
            self._forgo(exc)
        frozen_trials = self.study.get_trials(deepcopy=False)
        self._told = [one for frozen in frozen_trials if (one := self._trial(frozen))]
        beside = ((frozen.number, frozen.user_attrs.get(BESIDE)) for frozen in frozen_trials)
        self._beside = {at: n for at, n in beside if isinstance(n, int) and n > 1}
        failed = [t for t in frozen_trials if t.state == TrialState.FAIL]
        interrupted = [Config(t.params) for t in failed if not t.user_attrs.get(OUT)]
        return list(self._told), interrupted

    @property
    def spent_s(self) -> float:
        """Seconds of the trials that were told, but for those of runs that `settle`d."""
        settled = self.study.user_attrs.get(SETTLED, 0)
        own = (trial for trial in self._told if trial.number >= settled)
        return sum(trial.seconds / self._beside.get(trial.number, 1) for trial in own)

    def settle(self) -> None:
        """The time of what was tried until now is no later run's: this one ends without a race."""
        try:
            self.study.set_user_attr(SETTLED, len(self.study.get_trials(deepcopy=False)))
        except UNWRITABLE as exc:
            self._forgo(exc)

    def _trial(self, frozen: FrozenTrial) -> Trial | None:
        """As it was told; None for what was not, or is of no config here."""
        kept = frozen.user_attrs
        try:
            config = Config(frozen.params)
            measured = from_plain(Measurement, kept["measurement"])
            seconds, origin = float(kept[SECONDS]), str(kept["origin"])
        except (KeyError, TypeError, ValueError, RecordDamaged, UsageError):
            return None
        if not self._space.holds(config) or not 0 <= seconds < float("inf"):
            return None
        return Trial(
            number=frozen.number,
            config=config,
            measurement=measured,
            stage="compute",
            origin=origin,
            seconds=seconds,
        )

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

    def tell(self, asked: optuna.Trial, trial: Trial, *, beside: int = 1) -> None:
        """What the trial gave; with it as many as `beside` ran at once."""
        measured = trial.measurement
        self._told.append(trial)
        self._beside[trial.number] = beside
        try:
            if beside > 1:
                asked.set_user_attr(BESIDE, beside)
            asked.set_user_attr("measurement", to_plain(measured))
            asked.set_user_attr(SECONDS, trial.seconds)
            if not measured.ok:
                asked.set_user_attr(FAILED, True)
            # A failure's throughput is nothing: finite, so that any sampler learns to stay away.
            self.study.tell(asked, measured.samples_per_s if measured.ok else 0.0)
        except UNWRITABLE as exc:
            self._forgo(exc)

    def pass_over(self, asked: optuna.Trial) -> None:
        """The trial is not measured, and a later run may."""
        try:
            asked.set_user_attr(OUT, True)
            self.study.tell(asked, state=TrialState.FAIL)
        except UNWRITABLE as exc:
            self._forgo(exc)

    def _forgo(self, exc: BaseException) -> None:
        self._notice(f"the search cannot be saved any more: {exc}; it goes on in memory")
        self.study = optuna.create_study(direction="maximize", sampler=self.study.sampler)
        for trial in self._told:
            ok = trial.measurement.ok
            attrs: dict[str, Any] = {SECONDS: trial.seconds} | ({} if ok else {FAILED: True})
            self.study.add_trial(
                optuna.trial.create_trial(
                    params=dict(trial.config),
                    distributions=self._distributions,
                    value=trial.measurement.samples_per_s if ok else 0.0,
                    user_attrs=attrs,
                )
            )
