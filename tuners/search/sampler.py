"""What to measure next: the config with the most gain to expect per second of measuring.

A Gaussian process on the logarithm of samples/s, whose covariance adds up over knobs and over
pairs of knobs: most knobs multiply a step's speed, some only together. Another on the logarithm of
the seconds that a trial took. Expected improvement: Jones, Schonlau and Welch, Efficient Global
Optimization of Expensive Black-Box Functions, 1998; per second of cost: Snoek, Larochelle and
Adams, Practical Bayesian Optimization of Machine Learning Algorithms, 2012, 3.2; additive
covariances: Duvenaud, Nickisch and Rasmussen, Additive Gaussian Processes, 2011.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from advisor.cache.config import Config

SECONDS = "seconds"
"""The trial's user attribute that says what it cost."""

SHARES = ((0.0, 1.0, 0.0), (0.1, 0.6, 0.3), (0.1, 0.3, 0.6))
"""Of the variance: in common, of single knobs, of pairs. The likeliest is taken."""
NOISES = (0.003, 0.02, 0.1)
"""Standard deviations of one measurement, as fractions of the spread between configs."""
REACH = 2.0
"""Doublings of a number, as of the batch size, over which it stays alike."""

TINY = 1e-300
"""In place of 0, whose logarithm is infinite."""

Array = NDArray[np.float64]


class GainPerSecond(optuna.samplers.BaseSampler):
    """An Optuna sampler over a finite list of configs, of which it never proposes one twice.

    Trials that failed or ran out of memory are to be told with a value of 0: they say nothing of
    speed, but how likely others are to run. Before two have run it draws at random.

    Args:
        configs: those that may be proposed.
        best: samples/s that an improvement is counted from; None for the best trial's.
    """

    def __init__(
        self, configs: Sequence[Config], *, best: float | None = None, seed: int = 0
    ) -> None:
        self._configs = list(configs)
        self._best = best
        self._random = random.Random(seed)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """All knobs: they are sampled together."""
        return optuna.search_space.intersection_search_space(
            study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        )

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The next config; nothing where all are tried."""
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        tried = [Config(one.params) for one in done]
        left = [config for config in self._configs if config not in set(tried)]
        if not search_space or not left:
            return {}
        rates = [float(one.value or 0.0) for one in done]
        seconds = [float(one.user_attrs.get(SECONDS, 1.0)) for one in done]
        return dict(self._choose(tried, rates, seconds, left))

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Of a knob that no finished trial has: as in a config drawn at random."""
        values = [config[param_name] for config in self._configs if param_name in config]
        if not values:
            assert isinstance(param_distribution, optuna.distributions.CategoricalDistribution)
            values = list(param_distribution.choices)
        return self._random.choice(values)

    def _choose(
        self, tried: list[Config], rates: list[float], seconds: list[float], left: list[Config]
    ) -> Config:
        ok = [rate > 0 for rate in rates]
        if sum(ok) < 2:
            return self._random.choice(left)
        alike = _Alike(tried, left)
        ran = _Alike([c for c, good in zip(tried, ok, strict=True) if good], left)
        mean, deviation = _fit(ran, np.log([rate for rate in rates if rate > 0]))
        cost, _ = _fit(alike, np.log(np.maximum(seconds, 1e-3)))
        best = math.log(self._best or max(rates))
        gain = np.maximum(_expected_improvement(mean, deviation, best), TINY)
        score = np.log(gain) - cost
        if not all(ok):
            runs, doubt = _fit(alike, np.array(ok, float))
            score += np.log(np.maximum(_below((runs - 0.5) / doubt), TINY))
        return left[int(score.argmax())]


class _Alike:
    """Likeness of configs, knob by knob: 1 where equal, less for numbers further apart."""

    def __init__(self, tried: list[Config], left: list[Config]) -> None:
        names = sorted({name for config in tried for name in config})
        self.among = self._sums(tried, tried, names)
        self.across = self._sums(left, tried, names)
        self.knobs = len(names)

    @staticmethod
    def _sums(ours: list[Config], theirs: list[Config], names: list[str]) -> tuple[Array, Array]:
        """Sums over knobs, and over pairs of knobs, each as a share of their number."""
        first = np.zeros((len(ours), len(theirs)))
        squares = np.zeros_like(first)
        for name in names:
            a, b = [c.get(name) for c in ours], [c.get(name) for c in theirs]
            numbers = all(type(v) is int and v > 0 for v in (*a, *b))
            if numbers:
                x, y = np.log2(np.array(a, float)), np.log2(np.array(b, float))
                alike = np.exp(-np.abs(x[:, None] - y[None, :]) / REACH)
            else:
                x, y = np.array([repr(v) for v in a]), np.array([repr(v) for v in b])
                alike = (x[:, None] == y[None, :]).astype(float)
            first += alike
            squares += alike**2
        pairs = (first**2 - squares) / 2
        count = len(names)
        return first / max(1, count), pairs / max(1, count * (count - 1) // 2)


def _covariance(sums: tuple[Array, Array], shares: tuple[float, float, float]) -> Array:
    common, single, pair = shares
    return common + single * sums[0] + pair * sums[1]


def _fit(alike: _Alike, values: Array) -> tuple[Array, Array]:
    """Posterior mean and standard deviation of what is left, under the likeliest settings."""
    centre, spread = float(values.mean()), float(values.std()) or 1.0
    y = (values - centre) / spread
    fits = []
    for shares in SHARES:
        covariance = _covariance(alike.among, shares)
        for noise in NOISES:
            lower = np.linalg.cholesky(covariance + noise**2 * np.eye(len(y)))
            weights = np.linalg.solve(lower.T, np.linalg.solve(lower, y))
            likelihood = -0.5 * float(y @ weights) - float(np.log(np.diag(lower)).sum())
            fits.append((likelihood, shares, lower, weights))
    _, shares, lower, weights = max(fits, key=lambda fit: fit[0])
    across = _covariance(alike.across, shares)
    mean = across @ weights
    known = np.linalg.solve(lower, across.T)
    variance = np.maximum(1e-12, sum(shares) - (known**2).sum(axis=0))
    return centre + spread * mean, spread * np.sqrt(variance)


def _expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    z = (mean - best) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    gain: Array = deviation * (z * _below(z) + density)
    return gain


def _below(z: Array) -> Array:
    """The normal distribution's share below z; numpy has no error function."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
