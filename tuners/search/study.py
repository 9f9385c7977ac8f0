"""The Optuna study over a runner: guesses, a climb over batch sizes, then the sampler.

Every config that is told to the study was really measured. A study is resumed by opening it
again: finished trials are read back, and what was in flight is tried once more.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config, Value
from advisor.cache.record import Measurement, Trial
from advisor.errors import WorkerError
from advisor.tuners.measure.runner import Runner
from advisor.tuners.search import guesses
from advisor.tuners.search.memory import needed
from advisor.tuners.search.sampler import SECONDS, GainPerSecond
from advisor.tuners.search.space import Space

REPEATS = 10
"""Proposals of known configs in a row after which one not yet tried is drawn instead."""
PATIENCE = 12
"""Trials without a better config after which the sampler stops."""
LEADING = 1
"""Guesses before the first look at a large batch."""
HOPELESS = 0.6
"""Below this fraction of the fastest at its batch a config is measured no longer."""
EAGER = 0.5
"""Share of the budget for guesses and larger batches where a dear knob is to be tried after."""
DEAR_S = 30.0
"""Seconds that must be left for a config that compiles."""
REBUILT = 2
"""Times that what leads is built, and compiled, again once the search is over: to hold it against
fp32, and through a DataLoader."""
GAIN = 1.03
"""A doubling of the batch that gains less is not worth its memory."""

_log = logging.getLogger("advisor.study")

OnTrial = Callable[[Trial], None]


class MakeSampler(Protocol):
    def __call__(
        self, configs: Sequence[Config], *, best: float | None, seed: int
    ) -> optuna.samplers.BaseSampler: ...


def open_study(folder: Path, name: str, *, fresh: bool = False) -> optuna.Study:
    """The study `name`, in a journal file of its own that Optuna's tools and dashboard open."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{name}.journal"
    if fresh:
        path.unlink(missing_ok=True)
    storage = JournalStorage(JournalFileBackend(str(path)))
    return optuna.create_study(
        storage=storage, study_name=name, direction="maximize", load_if_exists=True
    )


class Search:
    """Tries configs of a space until time, trials or ideas run out.

    Args:
        study: where trials are kept.
        share_s: seconds of timed steps for one trial.
        budget_s: wall seconds for the search, those of a resumed study counted in.
        limit: trials at most, or None.
        first: configs to try before the guesses, from records that nearly fit.
        memory: bytes that a config may take; 0 where that is not known.
        sampler: makes the Optuna sampler that proposes one of some configs.
        on_trial: called after each trial, never during one.
        now: wall clock in seconds.
    """

    def __init__(
        self,
        runner: Runner,
        space: Space,
        study: optuna.Study,
        *,
        share_s: float,
        budget_s: float,
        limit: int | None = None,
        seed: int = 0,
        first: Sequence[Config] = (),
        memory: int = 0,
        sampler: MakeSampler = GainPerSecond,
        on_trial: OnTrial = lambda _trial: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._space = space
        self._study = study
        self._share_s = share_s
        self._budget_s = budget_s
        spares = bool(space.dear) and (1 - EAGER) * budget_s >= DEAR_S
        self._stage_s = budget_s * (EAGER if spares else 1.0)
        self._limit = limit
        self._seed = seed
        self._first = first
        self._memory = memory
        self._sampler = sampler
        self._on_trial = on_trial
        self._now = now
        self._distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(values) for name, values in space.choices.items()
        }
        self.trials: list[Trial] = []
        self._known: dict[Config, Trial] = {}
        self._attempts: dict[Config, int] = {}
        self._resume()
        self._spent_before = sum(trial.seconds for trial in self.trials)
        self._began = now()

    @property
    def spent_s(self) -> float:
        """Seconds of search, earlier runs of the same study counted in."""
        return self._spent_before + self._now() - self._began

    def _resume(self) -> None:
        for _ in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._study.tell(self._study.ask(), state=TrialState.FAIL)
        for frozen in self._study.get_trials(deepcopy=False):
            if frozen.state == TrialState.RUNNING:
                self._study.tell(frozen.number, state=TrialState.FAIL)
                config = Config(frozen.params)
                self._attempts[config] = self._attempts.get(config, 0) + 1
            elif "measurement" in frozen.user_attrs:
                self._remember(
                    Trial(
                        number=frozen.number,
                        config=Config(frozen.params),
                        measurement=from_plain(Measurement, frozen.user_attrs["measurement"]),
                        stage="compute",
                        origin=frozen.user_attrs["origin"],
                        seconds=frozen.user_attrs["seconds"],
                    )
                )

    def _remember(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._known[trial.config] = trial

    def known(self, config: Config) -> Trial:
        """The trial of a config that was tried."""
        return self._known[config]

    def run(self) -> list[Trial]:
        """All trials, those of earlier runs first.

        Raises:
            WorkerError: torch's default cannot be measured, so that nothing could be compared.
        """
        default = self._try(self._space.default, "default", always=True)
        if default is None or not default.measurement.ok:
            reason = default.measurement.reason if default else "interrupted twice"
            raise WorkerError(f"torch's default could not be measured: {reason}")
        user = self._space.batches[0]
        guessed = [c for c in guesses.first(self._space) if self._space.holds(c)]
        for config in self._first:
            if self._space.holds(config):
                self._try(config, "near record")
        for config in guessed[:LEADING]:
            self._try(config, "guess")
        self._probe_large()
        for config in guessed[LEADING:]:
            self._try(config, "guess")
        self._settle_batch()
        self._stage_s = self._budget_s
        self._try_dear()
        self._stage_s -= REBUILT * self.best(user).measurement.first_step_s
        for config in guesses.searched(self._space, self.best(user).config):
            self._try(config, "guess")
        self._sample()
        return self.trials

    def best(self, batch: int | None = None) -> Trial:
        """The fastest trial, at one batch size or at any."""
        return max(
            (
                t
                for t in self.trials
                if t.measurement.ok and batch in (None, t.config["batch_size"])
            ),
            key=lambda trial: trial.measurement.samples_per_s,
        )

    def _probe_large(self) -> None:
        """What leads where the device is the limit, at the largest batch that is sure to fit."""
        user = self._space.batches[0]
        peak = self._known[self._space.default].measurement.peak_bytes
        sure = [
            batch
            for batch in self._space.batches
            if batch > user and (not self._memory or peak * batch / user <= self._memory)
        ]
        if not sure:
            return
        for config in guesses.at_large_batch(self._space, self.best(user).config, max(sure)):
            self._try(config, "large")

    def _settle_batch(self) -> None:
        """From the fastest batch up while that gains, then down while it costs nothing.

        Advised with the batch free is the smallest batch that is about as fast as any.
        """
        batches = sorted(self._space.batches)
        top = self.best()
        for batch in batches[batches.index(int(top.config["batch_size"] or 0)) + 1 :]:
            tried = self._try(top.config.replace(batch_size=batch), "climb")
            if tried is None or not tried.measurement.ok:
                break
            gained = tried.measurement.samples_per_s >= GAIN * top.measurement.samples_per_s
            top = max(top, tried, key=lambda trial: trial.measurement.samples_per_s)
            if not gained:
                break
        at = batches.index(int(top.config["batch_size"] or 0))
        for batch in reversed(batches[:at]):
            tried = self._try(top.config.replace(batch_size=batch), "climb")
            if tried is not None and (
                tried.measurement.samples_per_s < top.measurement.samples_per_s / GAIN
            ):
                break

    def _try_dear(self) -> None:
        """Dear knobs, cheapest value first, on what leads at the user's batch and at any.

        At a small batch the host hides what the device could do; the leader of the large ones
        shows it, and compilation is what takes the host out of the way.
        """
        user = self._space.batches[0]
        leaders = (self.best().config.replace(batch_size=user), self.best(user).config)
        for leader in dict.fromkeys(leaders):
            for name in self._space.dear:
                for value in self._space.choices[name][1:]:
                    if self._hung(name, value):
                        continue
                    config = self._space.combined(leader, name, value)
                    if self.left_s >= DEAR_S and self._space.holds(config):
                        self._try(config, "leader")

    def _hung(self, name: str, value: Value) -> bool:
        """Whether a value of a dear knob ran into its deadline on another leader."""
        return any(
            t.measurement.outcome == "timed_out" and t.config[name] == value for t in self.trials
        )

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._budget_s - self.spent_s

    def _sample(self) -> None:
        """Until PATIENCE trials in a row gained nothing, at the user's batch and with it free."""
        user = self._space.batches[0]
        stale: dict[int | None, int] = {user: 0}
        if len(self._space.batches) > 1:
            stale[None] = 0
        for turn in itertools.count():
            open_ = [batch for batch, count in stale.items() if count < PATIENCE]
            if not open_ or not self._affords(self._space.default):
                return
            # Two thirds of the trials at the user's batch: that is what apply() serves.
            batch = open_[0] if turn % 3 < 2 else open_[-1]
            config = self._propose(batch)
            if config is None:
                stale[batch] = PATIENCE
                continue
            before = self._rate(batch)
            self._try(config, "sampler")
            stale[batch] = 0 if self._rate(batch) > before else stale[batch] + 1

    def _compiles(self) -> bool:
        """Whether there is time for a dear config, with a sampler that counts what it costs."""
        return self._sampler is GainPerSecond and self._stage_s - self.spent_s >= DEAR_S

    def _rate(self, batch: int | None) -> float:
        return self.best(batch).measurement.samples_per_s

    def _propose(self, batch: int | None) -> Config | None:
        """A config not yet tried, at one batch size or at any; None where none is left."""
        batches = self._space.batches if batch is None else (batch,)
        left = [
            config
            for size in batches
            for config in self._space.configs(size, dear=self._compiles())
            if config not in self._known
            and not self._cannot_fit(config)
            and not any(self._hung(name, config[name]) for name in self._space.dear)
        ]
        if not left:
            return None
        seed = self._seed + len(self.trials)
        sampler = self._sampler(left, best=self._rate(batch), seed=seed)
        # In a study of its own: the one on disk holds only what was really measured.
        mirror = optuna.create_study(direction="maximize", sampler=sampler)
        for trial in self.trials:
            mirror.add_trial(
                optuna.trial.create_trial(
                    params=dict(trial.config),
                    distributions=self._distributions,
                    value=trial.measurement.samples_per_s if trial.measurement.ok else 0.0,
                    user_attrs={SECONDS: trial.seconds},
                )
            )
        waiting = set(left)
        for _ in range(REPEATS):
            fixed = {name: self._space.choices[name][0] for name in self._space.dear}
            if not isinstance(sampler, GainPerSecond):
                mirror.enqueue_trial(fixed if batch is None else fixed | {"batch_size": batch})
            asked = mirror.ask(self._distributions)
            mirror.tell(asked, state=TrialState.FAIL)
            if Config(asked.params) in waiting:
                return Config(asked.params)
        return random.Random(seed).choice(left)

    def _hopeless(self, config: Config) -> float:
        """Samples/s with which a config could be neither a finalist nor a leader."""
        rates = [
            trial.measurement.samples_per_s
            for trial in self.trials
            if trial.measurement.ok and trial.config["batch_size"] == config["batch_size"]
        ]
        return HOPELESS * max(rates, default=0.0)

    def _affords(self, config: Config) -> bool:
        """Whether about six steps of the default's length fit in the time and trials left."""
        if self._limit is not None and len(self.trials) >= self._limit:
            return False
        left = self._stage_s - self.spent_s
        if left <= 0:
            return False
        default = self._known.get(self._space.default)
        if default is None:
            return True
        step_s = default.measurement.step_s
        scale = int(config["batch_size"] or 1) / self._space.batches[0]
        return 6 * step_s * max(1.0, scale) <= left

    def _cannot_fit(self, config: Config) -> bool:
        """Whether a config needs more memory than there is, by what others took."""
        most = needed(self.trials, config)
        return most == float("inf") or 0 < self._memory < most

    def _try(self, config: Config, origin: str, *, always: bool = False) -> Trial | None:
        """Measure a config, once; None where it is not to be tried."""
        if config in self._known:
            return self._known[config]
        if self._attempts.get(config, 0) >= 2:
            # Twice the tuner itself did not survive it.
            return None
        if self._cannot_fit(config) or not (always or self._affords(config)):
            return None
        self._study.enqueue_trial(dict(config), user_attrs={"origin": origin})
        asked = self._study.ask(self._distributions)
        start = self._now()
        measured = self._runner.measure(config, seconds=self._share_s, floor=self._hopeless(config))
        trial = Trial(
            number=asked.number,
            config=config,
            measurement=measured,
            stage="compute",
            origin=origin,
            seconds=self._now() - start,
        )
        asked.set_user_attr("measurement", to_plain(measured))
        asked.set_user_attr("seconds", trial.seconds)
        # A failure's throughput is nothing: finite, so that the sampler learns to stay away.
        self._study.tell(asked, measured.samples_per_s if measured.ok else 0.0)
        self._remember(trial)
        self._on_trial(trial)
        return trial
