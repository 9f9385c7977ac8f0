"""What to measure next: the config with the most gain to expect per second of measuring.

A Gaussian process on the logarithm of the speed-up, whose covariance adds up over knobs and over
pairs of knobs: most knobs multiply a step's speed, some only together. Two more predict a trial's
seconds (as a logarithm), and whether it runs. Expected improvement: Jones, Schonlau and Welch,
Efficient Global Optimization of Expensive Black-Box Functions, 1998; per second of cost: Snoek,
Larochelle and Adams, Practical Bayesian Optimization of Machine Learning Algorithms, 2012, 3.2;
additive covariances: Duvenaud, Nickisch and Rasmussen, Additive Gaussian Processes, 2011.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from advisor.cache.config import Config
from advisor.tuners.decisions import CLEARLY

SECONDS, FAILURE = "seconds", "failed"
"""User attributes of each trial: its cost; whether its config failed, because for other samplers
the trial of a failed config is complete."""
MIN_POSITIVE = 1e-300
"""In place of 0, whose logarithm is infinite."""

Array = NDArray[np.float64]


class GainPerSecond(optuna.samplers.RandomSampler):
    """An Optuna sampler for categorical choices, which maximizes one value above zero.

    Failed trials say nothing about speed, but predict which configs run. Before two trials have
    run, the sampler draws at random. `among` returns the configs that may be proposed now, `best`
    the value that an improvement is counted from.
    """

    def __init__(
        self, *, seed: int, among: Callable[[], Sequence[Config]], best: Callable[[], float]
    ) -> None:
        super().__init__(seed)
        self._among, self._best = among, best
        self._random = random.Random(seed)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return optuna.search_space.intersection_search_space(study.get_trials(deepcopy=False))

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        left = self._among()
        if not trials or not left:
            return {}
        # If a config was tried again, a trial that ran counts.
        trials.sort(key=lambda one: not one.user_attrs[FAILURE])
        tried = {Config(one.params): one for one in trials}
        ran = np.array([not one.user_attrs[FAILURE] for one in tried.values()])
        if ran.sum() < 2:
            return dict(self._random.choice(left))
        values = np.array([one.value or 0.0 for one in tried.values()])[ran]
        working = [config for config, ok in zip(tried, ran, strict=True) if ok]
        mean, deviation = _fit(working, np.log(np.maximum(values, MIN_POSITIVE)), left)
        gain = _expected_improvement(mean, deviation, math.log(max(self._best(), MIN_POSITIVE)))
        seconds = np.array([one.user_attrs[SECONDS] for one in tried.values()])
        cost, _ = _fit(list(tried), np.log(np.maximum(seconds, 1e-3)), left)
        score = np.log(np.maximum(gain, MIN_POSITIVE)) - cost
        if not ran.all():
            runs, doubt = _fit(list(tried), ran.astype(float), left)
            score += np.log(np.maximum(_below((runs - 0.5) / doubt), MIN_POSITIVE))
        return dict(left[int(score.argmax())])


def _covariance(ours: Sequence[Config], theirs: Sequence[Config]) -> Array:
    """A quarter is common to all configs, half is of single knobs, a quarter of pairs of knobs."""
    alike = np.zeros((len(ours), len(theirs)))
    for name in ours[0]:
        a, b = (np.array([repr(one[name]) for one in configs]) for configs in (ours, theirs))
        alike += a[:, None] == b[None, :]
    found: Array = (1 + alike / len(ours[0])) ** 2 / 4
    return found


def _fit(tried: Sequence[Config], values: Array, left: Sequence[Config]) -> tuple[Array, Array]:
    """Predicted mean and standard deviation of the configs in `left`, given those in `tried`."""
    centre, spread = float(values.mean()), float(values.std()) or 1.0
    noise = CLEARLY - 1  # of one measurement, as a fraction of the spread between configs
    among = _covariance(tried, tried) + noise**2 * np.eye(len(tried))
    across = _covariance(left, tried)
    solved = np.linalg.solve(among, np.column_stack([(values - centre) / spread, across.T]))
    variance = 1 - (across * solved[:, 1:].T).sum(axis=1)
    mean: Array = centre + spread * (across @ solved[:, 0])
    return mean, spread * np.sqrt(np.maximum(1e-12, variance))


def _expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    z = (mean - best) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    gain: Array = deviation * (z * _below(z) + density)
    return gain


def _below(z: Array) -> Array:
    """The normal distribution's share below z; numpy has no error function."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
