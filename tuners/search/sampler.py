"""What to measure next: the config with the most gain to expect per second of measuring.

A Gaussian process on the logarithm of samples/s, whose covariance adds up over knobs and over
pairs of knobs: most knobs multiply a step's speed, some only together. Another on the logarithm of
the seconds that a trial took. Expected improvement: Jones, Schonlau and Welch, Efficient Global
Optimization of Expensive Black-Box Functions, 1998; per second of cost: Snoek, Larochelle and
Adams, Practical Bayesian Optimization of Machine Learning Algorithms, 2012, 3.2; additive
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
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from advisor.cache.config import Config, Value

SECONDS = "seconds"
"""The trial's user attribute that says what it cost; without it, the time that the trial took."""
FAILED = "failed"
"""The user attribute of a trial that is complete for other samplers, but did not run."""

LEVELS = 64
"""Values of a number that are considered, where it can have more: evenly spaced."""
MOST = 2000
"""Configs that are weighed at a time; of more than that, so many drawn at random."""

SHARES = ((0.0, 1.0, 0.0), (0.1, 0.6, 0.3), (0.1, 0.3, 0.6))
"""Of the variance: in common, of single knobs, of pairs. The likeliest is taken."""
NOISES = (0.003, 0.02, 0.1)
"""Standard deviations of one measurement, as fractions of the spread between configs."""
REACH = 2.0
"""Doublings of a number, as of the batch size, over which it stays alike."""
RANGE = 3.0
"""Reaches in the range of a number that is suggested from low to high."""

TINY = 1e-300
"""In place of 0, whose logarithm is infinite."""

Array = NDArray[np.float64]


class GainPerSecond(optuna.samplers.BaseSampler):
    """An Optuna sampler for one objective; it never proposes a config twice while others are left.

    Works on choices, whole numbers and steps; of a continuous number it considers LEVELS values.
    Trials that failed, were pruned, or carry the user attribute FAILED say nothing of speed, but
    how likely others are to run. Before two have run it draws at random.

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
        self._among = among
        self._best = best
        self._random = random.Random(seed)
        self._independent = optuna.samplers.RandomSampler(seed=seed)

    def reseed_rng(self) -> None:
        """As every process of a parallel study needs it."""
        self._random.seed()
        self._independent.reseed_rng()

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """All that every complete trial was asked for: sampled together."""
        return optuna.search_space.intersection_search_space(study.get_trials(deepcopy=False))

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The next config; nothing where all are tried."""
        if not search_space:
            return {}
        seen = _seen(study, search_space)
        if self._among is None:
            left = _grid(search_space, seen, self._random)
        else:
            left = [Config(config) for config in self._among()]
        finished = {config: one for config, one in seen.items() if one.state.is_finished()}
        if not left:
            return {}
        ran = [_ran(one) for one in finished.values()]
        if sum(ran) < 2:
            return dict(self._random.choice(left))
        sign = -1.0 if study.direction == StudyDirection.MINIMIZE else 1.0
        values = [float(t.value or 0) for t, ok in zip(finished.values(), ran, strict=True) if ok]
        best = sign * max(sign * v for v in values) if self._best is None else self._best()
        # Factors where everything is above zero, as speeds and times are; else differences.
        scale = math.log if min(*values, best) > 0 else float
        gain = _Gain(
            scores=sign * np.array([scale(value) for value in values]),
            best=sign * scale(best),
            seconds=[_seconds(one) for one in finished.values()],
            ran=ran,
        )
        return dict(left[gain.most(list(finished), left, search_space)])

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Of what no finished trial has: at random."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)


def _seen(study: Study, space: Mapping[str, BaseDistribution]) -> dict[Config, FrozenTrial]:
    """The trials by their config, those that run included; of one tried again the one that ran."""
    found: dict[Config, FrozenTrial] = {}
    for one in study.get_trials(deepcopy=False):
        if one.state == TrialState.WAITING or not space.keys() <= one.params.keys():
            continue
        config = Config({name: one.params[name] for name in space})
        if config not in found or not _ran(found[config]):
            found[config] = one
    return found


def _ran(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.COMPLETE and not trial.user_attrs.get(FAILED, False)


def _seconds(trial: FrozenTrial) -> float:
    if SECONDS in trial.user_attrs:
        return float(trial.user_attrs[SECONDS])
    return trial.duration.total_seconds() if trial.duration else 1.0


def _levels(distribution: BaseDistribution) -> Sequence[Any]:
    """The values of a distribution, LEVELS at most of a number."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    whole = isinstance(distribution, IntDistribution)
    if step and (high - low) / step < LEVELS:
        values = [low + i * step for i in range(round((high - low) / step) + 1)]
    else:
        space = np.geomspace if distribution.log else np.linspace
        values = [min(high, max(low, float(value))) for value in space(low, high, LEVELS)]
        if step:
            values = [low + round((value - low) / step) * step for value in values]
    return list(dict.fromkeys(int(v) if whole else float(v) for v in values))


def _grid(
    space: Mapping[str, BaseDistribution], tried: Mapping[Config, object], draw: random.Random
) -> list[Config]:
    """The configs not tried, MOST at most."""
    levels = [_levels(distribution) for distribution in space.values()]
    if math.prod(map(len, levels)) <= MOST:
        drawn = [Config(dict(zip(space, row, strict=True))) for row in itertools.product(*levels)]
    else:
        drawn = [
            Config({n: draw.choice(values) for n, values in zip(space, levels, strict=True)})
            for _ in range(MOST)
        ]
    return [config for config in dict.fromkeys(drawn) if config not in tried]


class _Gain:
    """What is known of the finished trials: scores of those that ran, seconds and fate of all."""

    def __init__(
        self, *, scores: Array, best: float, seconds: Sequence[float], ran: Sequence[bool]
    ) -> None:
        self._scores, self._best = scores, best
        self._seconds, self._ran = seconds, ran

    def most(
        self, tried: list[Config], left: list[Config], space: Mapping[str, BaseDistribution]
    ) -> int:
        """The index of the config with the most gain per second."""
        alike = _Alike(tried, left, space)
        ran = alike
        if not all(self._ran):
            kept = [c for c, good in zip(tried, self._ran, strict=True) if good]
            ran = _Alike(kept, left, space)
        mean, deviation = _fit(ran, self._scores)
        cost, _ = _fit(alike, np.log(np.maximum(self._seconds, 1e-3)))
        gain = np.maximum(_expected_improvement(mean, deviation, self._best), TINY)
        score = np.log(gain) - cost
        if not all(self._ran):
            runs, doubt = _fit(alike, np.array(self._ran, float))
            score += np.log(np.maximum(_below((runs - 0.5) / doubt), TINY))
        return int(score.argmax())


class _Alike:
    """Likeness of configs, knob by knob: 1 where equal, less for numbers further apart."""

    def __init__(
        self, tried: list[Config], left: list[Config], space: Mapping[str, BaseDistribution]
    ) -> None:
        self.among = self._sums(tried, tried, space)
        self.across = self._sums(left, tried, space)

    @staticmethod
    def _sums(
        ours: list[Config], theirs: list[Config], space: Mapping[str, BaseDistribution]
    ) -> tuple[Array, Array]:
        """Sums over knobs, and over pairs of knobs, each as a share of their number."""
        first = np.zeros((len(ours), len(theirs)))
        squares = np.zeros_like(first)
        for name, distribution in space.items():
            a, b = [c[name] for c in ours], [c[name] for c in theirs]
            alike = _likeness(a, b, distribution)
            first += alike
            squares += alike**2
        pairs = (first**2 - squares) / 2
        count = len(space)
        return first / max(1, count), pairs / max(1, count * (count - 1) // 2)


def _likeness(a: list[Value], b: list[Value], distribution: BaseDistribution) -> Array:
    x, y = (np.array([_place(v, distribution) for v in values]) for values in (a, b))
    if x.dtype.kind == y.dtype.kind == "f":
        return np.asarray(np.exp(-np.abs(x[:, None] - y[None, :])), dtype=float)
    return np.asarray(x[:, None] == y[None, :], dtype=float)


def _place(value: Value, distribution: BaseDistribution) -> float | str:
    """Where a number stands, in reaches; what is none is itself."""
    if isinstance(distribution, IntDistribution | FloatDistribution):
        low, high, number = (float(v) for v in (distribution.low, distribution.high, value or 0))
        if distribution.log:
            return math.log2(number) / REACH
        return RANGE * number / (high - low)
    assert isinstance(distribution, CategoricalDistribution)
    if all(type(choice) is int and choice >= 0 for choice in distribution.choices):
        return math.log2(1 + int(value or 0)) / REACH
    return repr(value)


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
