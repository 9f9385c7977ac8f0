"""What to measure next: the config with the most gain to expect per second of measuring.

A Gaussian process on the logarithm of the speed-up, whose covariance adds up over knobs and over
pairs of knobs: most knobs multiply a step's speed, some only together. Others on the logarithm of a
trial's seconds, and on whether it runs. Expected improvement: Jones, Schonlau and Welch, Efficient
Global Optimization of Expensive Black-Box Functions, 1998; per second of cost: Snoek, Larochelle
and Adams, Practical Bayesian Optimization of Machine Learning Algorithms, 2012, 3.2; additive
covariances: Duvenaud, Nickisch and Rasmussen, Additive Gaussian Processes, 2011.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from advisor.cache.config import Config, Value
from advisor.tuners.decisions import CLEARLY

SECONDS = "seconds"
"""The trial's user attribute that says what it cost; without it, the time that the trial took."""
FAILED = "failed"
"""The user attribute of a trial that is complete for other samplers, but did not run."""

MOST_CONFIGS = 2000
"""Configs that are weighed at a time; of more than that, so many drawn at random."""
TINY = 1e-300
"""In place of 0, whose logarithm is infinite."""

Array = NDArray[np.float64]


class GainPerSecond(optuna.samplers.RandomSampler):
    """An Optuna sampler for choices and one value above zero that is to be as high as can be.

    It proposes no config twice while others are left. Trials that failed, were pruned, or carry the
    user attribute FAILED say nothing of speed, but how likely others are to run. Before two have
    run it draws at random; so it does of what no finished trial has, and of what is no choice.

    Args:
        seed: of its draws.
        among: the configs that may be proposed now; default: all that were not tried.
        best: the value that an improvement is counted from; default: the best trial's.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        among: Callable[[], Sequence[Mapping[str, Value]]] | None = None,
        best: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(seed)
        self._among, self._best = among, best
        self._random = random.Random(seed)

    def reseed_rng(self) -> None:
        """As every process of a parallel study needs it."""
        super().reseed_rng()
        self._random.seed()

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """The choices that every complete trial was asked for: sampled together."""
        space = optuna.search_space.intersection_search_space(study.get_trials(deepcopy=False))
        return {n: one for n, one in space.items() if isinstance(one, CategoricalDistribution)}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The next config; nothing where all are tried.

        Raises:
            ValueError: the study minimizes.
        """
        if study.direction != StudyDirection.MAXIMIZE:
            raise ValueError("GainPerSecond maximizes; create the study with direction='maximize'")
        seen = _seen(study, list(search_space)) if search_space else {}
        if self._among is None:
            left = self._untried(search_space, seen)
        else:
            left = list(map(Config, self._among()))
        if not seen or not left:
            return {}
        tried = {config: one for config, one in seen.items() if one.state.is_finished()}
        ran = np.array([_ran(one) for one in tried.values()])
        if ran.sum() < 2:
            return dict(self._random.choice(left))
        values = np.array([one.value or 0.0 for one in tried.values()])[ran]
        best = float(values.max()) if self._best is None else self._best()
        working = [config for config, ok in zip(tried, ran, strict=True) if ok]
        mean, deviation = _fit(working, np.log(np.maximum(values, TINY)), left)
        gain = _expected_improvement(mean, deviation, math.log(max(best, TINY)))
        seconds = np.array([_seconds(one) for one in tried.values()])
        cost, _ = _fit(list(tried), np.log(np.maximum(seconds, 1e-3)), left)
        score = np.log(np.maximum(gain, TINY)) - cost
        if not ran.all():
            runs, doubt = _fit(list(tried), ran.astype(float), left)
            score += np.log(np.maximum(_below((runs - 0.5) / doubt), TINY))
        return dict(left[int(score.argmax())])

    def _untried(
        self, space: Mapping[str, BaseDistribution], seen: Mapping[Config, object]
    ) -> list[Config]:
        choices = [
            one.choices for one in space.values() if isinstance(one, CategoricalDistribution)
        ]
        if math.prod(map(len, choices)) <= MOST_CONFIGS:
            rows = list(itertools.product(*choices))
        else:
            rows = [tuple(map(self._random.choice, choices)) for _ in range(MOST_CONFIGS)]
        drawn = (Config(dict(zip(space, row, strict=True))) for row in rows)
        return [config for config in dict.fromkeys(drawn) if config not in seen]


def _seen(study: Study, names: Sequence[str]) -> dict[Config, FrozenTrial]:
    """The trials by their config, those that run included; of one tried again the one that ran."""
    found: dict[Config, FrozenTrial] = {}
    for one in study.get_trials(deepcopy=False):
        if one.state == TrialState.WAITING or not one.params.keys() >= set(names):
            continue
        config = Config({name: one.params[name] for name in names})
        if config not in found or not _ran(found[config]):
            found[config] = one
    return found


def _ran(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.COMPLETE and not trial.user_attrs.get(FAILED, False)


def _seconds(trial: FrozenTrial) -> float:
    if SECONDS in trial.user_attrs:
        return float(trial.user_attrs[SECONDS])
    return trial.duration.total_seconds() if trial.duration else 1.0


def _covariance(ours: Sequence[Config], theirs: Sequence[Config]) -> Array:
    """One part in four is common to all, two are of single knobs, one is of pairs of them."""
    alike = np.zeros((len(ours), len(theirs)))
    for name in ours[0]:
        a, b = (np.array([repr(one[name]) for one in configs]) for configs in (ours, theirs))
        alike += a[:, None] == b[None, :]
    found: Array = (1 + alike / len(ours[0])) ** 2 / 4
    return found


def _fit(tried: Sequence[Config], values: Array, left: Sequence[Config]) -> tuple[Array, Array]:
    """Mean and standard deviation of what is left, given what was tried."""
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
