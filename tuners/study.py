"""The Optuna study over a runner: guesses, a climb over batch sizes, then the sampler.

Every config that is told to the study was really measured. A study is resumed by opening it
again: finished trials are read back, and what was in flight is tried once more.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config, Value
from advisor.cache.record import Measurement, Trial
from advisor.errors import WorkerError
from advisor.tuners import guesses
from advisor.tuners.runner import Runner
from advisor.tuners.space import Space

REPEATS = 10
"""Proposals of known configs in a row after which one not yet tried is drawn instead."""
PATIENCE = 12
"""Trials without a better config at any batch after which the sampler stops."""
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
        first: tuple[Config, ...] = (),
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
        for config in (*self._first, *guesses.first(self._space)):
            if self._space.holds(config):
                self._try(config, "guess")
        self._climb()
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

    def _climb(self) -> None:
        """Double the batch while it gains, from what leads where the device is the limit."""
        batches = sorted(self._space.batches)
        above = [batch for batch in batches if batch > self._space.batches[0]]
        below = [batch for batch in batches if batch < self._space.batches[0]]
        leader = self.best(self._space.batches[0])
        if above:
            probe = above[min(1, len(above) - 1)]
            for config in guesses.at_large_batch(self._space, leader.config, probe):
                self._try(config, "climb")
        top = self.best()
        flat = 0
        for batch in above:
            tried = self._try(top.config.replace(batch_size=batch), "climb")
            if tried is None or batch <= int(top.config["batch_size"] or 0):
                continue
            gained = tried.measurement.samples_per_s >= GAIN * top.measurement.samples_per_s
            flat = 0 if gained else flat + 1
            top = max(top, tried, key=lambda trial: trial.measurement.samples_per_s)
            if flat == 2 or not tried.measurement.ok:
                break
        for batch in reversed(below):
            self._try(top.config.replace(batch_size=batch), "climb")

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
        tpe = optuna.samplers.TPESampler(
            seed=self._seed + len(self.trials), n_startup_trials=8, multivariate=True
        )
        draw = random.Random(self._seed + len(self.trials))
        user = self._space.batches[0]
        stale = 0
        for turn in itertools.count():
            # Two thirds of the trials at the user's batch: that is what apply() serves.
            fixed = user if turn % 3 < 2 else None
            config = self._propose(tpe, draw, fixed) or self._propose(tpe, draw, None)
            if config is None or stale >= PATIENCE:
                return
            before = (self._rate(user), self._rate(None))
            if self._try(config, "sampler") is None and not self._affords(config):
                if not self._affords(self._space.default):
                    return
                stale += 1
                continue
            stale = 0 if (self._rate(user), self._rate(None)) != before else stale + 1

    def _rate(self, batch: int | None) -> float:
        return self.best(batch).measurement.samples_per_s

    def _propose(
        self, tpe: optuna.samplers.BaseSampler, draw: random.Random, batch: int | None
    ) -> Config | None:
        """A config not yet tried, from the sampler or, when it repeats itself, at random."""
        batches = self._space.batches if batch is None else (batch,)
        left = [
            config
            for size in batches
            for config in self._space.configs(size)
            if config not in self._known and not self._cannot_fit(config)
        ]
        if not left:
            return None
        # In a study of its own: the one on disk holds only what was really measured.
        mirror = optuna.create_study(direction="maximize", sampler=tpe)
        for trial in self.trials:
            rate = trial.measurement.samples_per_s if trial.measurement.ok else 0.0
            mirror.add_trial(
                optuna.trial.create_trial(
                    params=dict(trial.config), distributions=self._distributions, value=rate
                )
            )
        waiting = set(left)
        for _ in range(REPEATS):
            fixed = {name: self._space.choices[name][0] for name in self._space.dear}
            mirror.enqueue_trial(fixed if batch is None else fixed | {"batch_size": batch})
            asked = mirror.ask(self._distributions)
            config = Config(asked.params)
            mirror.tell(asked, state=TrialState.FAIL)
            if config in waiting:
                return config
        return draw.choice(left)

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
        """Whether a smaller batch of the same config ran out of memory."""
        batch = int(config["batch_size"] or 0)
        same = config.without("batch_size")
        return any(
            trial.measurement.outcome == "out_of_memory"
            and int(trial.config["batch_size"] or 0) <= batch
            and trial.config.without("batch_size") == same
            for trial in self.trials
        )

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
        measured = self._runner.measure(config, seconds=self._share_s)
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
