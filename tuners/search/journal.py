"""The Optuna study of a search, in a journal on disk that opens even if the file is damaged.

Each study has a journal file of its own, which Optuna's tools and dashboard open. A line that
cannot be read (after a full disk or a power cut) costs this trial and later ones, not earlier ones.
"""

from __future__ import annotations

import bisect
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.cache.stores.filesystem import read_regular
from advisor.errors import RecordDamaged, UsageError
from advisor.tuners.measure.runner import Compared
from advisor.tuners.search.ratio import Ratio
from advisor.tuners.search.sampler import FAILURE, SECONDS
from advisor.tuners.search.space import Space

MAX_JOURNAL_BYTES = 256 * 2**20
"""A journal of a thousand trials takes 5 MB."""
RATIO, COMPARED = "ratio", "compared"
"""Attributes of a trial: (speed-up, low end, high end); (outcome, reason, cause) with fp32."""

SENSELESS = (
    *(AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError),
    optuna.exceptions.OptunaError,
)
"""Exceptions that Optuna raises for a journal that it cannot replay."""


class _NoLock(JournalFileSymlinkLock):
    """The caller holds the study's lock, so Optuna needs none of its own."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def open_study(folder: Path, name: str, *, fresh: bool = False) -> tuple[optuna.Study, str]:
    """Open the study `name`. Returns the study, and a notice for the user or ''.

    The caller holds the study's lock. A journal that is no plain file or is damaged is renamed to
    NAME.journal.damaged-N, and the study has the trials before the damage. If nothing can be
    written the study is in memory.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = folder / f"{name}.journal"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if fresh:
            path.unlink(missing_ok=True)
        lines, fault = _read(path)
        if not fault:
            try:
                return _opened(path, name), ""
            except SENSELESS as exc:
                fault = f"{type(exc).__name__}: {exc}"
        names = (path.with_name(f"{path.name}.damaged-{n}") for n in itertools.count(1))
        aside = next(one for one in names if not os.path.lexists(one))
        path.rename(aside)
        study = _salvaged(path, name, lines)
    except OSError as exc:
        study = optuna.create_study(study_name=name, direction="maximize")
        return study, f"the search cannot be saved: {exc}; if interrupted, it starts over"
    return study, (
        f"the journal of this search was damaged ({fault:.200}); it was renamed to {aside.name}, "
        "and the search continues with the trials before the damage"
    )


def _opened(path: Path, name: str) -> optuna.Study:
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(path), lock_obj=_NoLock(str(path)))),
        study_name=name,
        direction="maximize",
        load_if_exists=True,
    )


def _read(path: Path) -> tuple[list[bytes], str]:
    """The lines before the first unreadable one, and what is wrong with that one, or ''."""
    if path.is_symlink():
        return [], "a link, which is not followed"
    try:
        lines = list(io.BytesIO(read_regular(path, MAX_JOURNAL_BYTES)))
    except FileNotFoundError:
        return [], ""
    except OSError as exc:
        return [], exc.strerror or str(exc)
    good = list(itertools.takewhile(_is_whole, lines))
    return good, f"line {len(good) + 1} of {len(lines)} cannot be read" * (len(good) < len(lines))


def _is_whole(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _salvaged(path: Path, name: str, lines: Sequence[bytes]) -> optuna.Study:
    """Open a study of the first lines of a journal, of as many as Optuna can replay."""

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


class JournaledTrial(NamedTuple):
    """A trial, its speed-up, and how it compares with fp32 if that is known."""

    trial: Trial
    ratio: Ratio
    compared: Compared | None


class Journal:
    """Asks a study in memory for trials, and appends finished trials to `saved`, the study on disk.
    Calls `notice` once if `saved` can no longer be written."""

    def __init__(
        self,
        saved: optuna.Study,
        space: Space,
        sampler: optuna.samplers.BaseSampler | None = None,
        notice: Callable[[str], None] = lambda _text: None,
    ) -> None:
        # In memory; after `resume` with the trials of earlier runs.
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self._saved: optuna.Study | None = saved
        self._space, self._notice = space, notice
        self._choices: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(values) for name, values in space.choices.items()
        }

    def resume(self) -> list[JournaledTrial]:
        frozen = self._saved.get_trials(deepcopy=False) if self._saved else []
        found = [one for one in map(self._of, frozen) if one is not None]
        for one in found:
            self.study.add_trial(
                optuna.trial.create_trial(
                    params=dict(one.trial.config),
                    distributions=self._choices,
                    value=_value(one),
                    user_attrs=_attributes(one),
                )
            )
        return found

    def _of(self, frozen: FrozenTrial) -> JournaledTrial | None:
        """The trial that `tell` saved; None if it did not end, or the space lacks its config."""
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
        return JournaledTrial(trial, Ratio(mean=mean, low=low, high=high), compared)

    def ask(self, config: Mapping[str, Any] | None = None) -> optuna.Trial:
        """The next trial: of `config`, or of a config that the sampler chooses."""
        if config is not None:
            self.study.enqueue_trial(dict(config))
        return self.study.ask(self._choices)

    def tell(self, asked: optuna.Trial, known: JournaledTrial, turns: Iterable[float]) -> None:
        """End a trial. `turns` are the ratios of its turns, saved as its intermediate values."""
        for step, turn in enumerate(turns):
            asked.report(turn, step)
        for name, attribute in _attributes(known).items():
            asked.set_user_attr(name, attribute)
        told = self.study.tell(asked, _value(known))
        try:
            if self._saved is not None:
                self._saved.add_trial(told)
        except (*SENSELESS, OSError) as exc:
            self._saved = None
            self._notice(f"the search can no longer be saved: {exc}; it continues in memory")


def _value(known: JournaledTrial) -> float:
    """The value of a trial. A failure's is 0, so that any sampler learns to avoid its config."""
    return known.ratio.mean if known.trial.measurement.ok else 0.0


def _attributes(known: JournaledTrial) -> dict[str, Any]:
    trial, ratio, compared = known
    return {
        "measurement": to_plain(trial.measurement),
        SECONDS: trial.seconds,
        RATIO: (ratio.mean, ratio.low, ratio.high),
        COMPARED: compared and (compared.outcome, compared.reason, compared.blames),
        FAILURE: not trial.measurement.ok,
        "origin": trial.origin,
    }
