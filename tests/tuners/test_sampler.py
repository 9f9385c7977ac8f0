"""The sampler: an Optuna sampler that finds good configs, cheaply, and repeats none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import optuna
import pytest
from optuna.distributions import CategoricalDistribution

from advisor.cache.config import Config
from advisor.tuners.knobs import compiles
from advisor.tuners.search.sampler import FAILED, SECONDS, GainPerSecond
from tests.builders import MadeUp, space

SPACE = space(use="capture", full=True, batches=(64, 128, 256))
CONFIGS = [config for batch in SPACE.batches for config in SPACE.configs(batch)]
DISTRIBUTIONS = {name: CategoricalDistribution(values) for name, values in SPACE.choices.items()}
Gains = Mapping[tuple[str, object], float]


def gains(seed: int) -> Gains:
    """What each value makes a step faster by, which multiply."""
    draw = random.Random(seed)
    return {(n, v): 2 ** draw.gauss(0, 0.2) for n, vs in SPACE.choices.items() for v in vs}


def rate(of: Gains, config: Config) -> float:
    fits = config.batch < 256 or config["precision"] != "default"
    return fits * 1000.0 * MadeUp(SPACE.default, gains=of).speedup(config)


def seconds(config: Config) -> float:
    return 100.0 if compiles(config) else 1.0


def tried(
    of: Gains, seed: int, trials: int, among: Sequence[Config] = CONFIGS, *, weighed: bool = True
) -> list[Config]:
    """What a sampler chooses; unless `weighed` every trial takes a second."""
    study, done = optuna.create_study(direction="maximize"), list[Config]()
    study.sampler = GainPerSecond(
        seed=seed,
        among=lambda: [config for config in among if config not in done],
        best=lambda: study.best_value,
    )
    for _ in range(trials):
        trial = study.ask(DISTRIBUTIONS)
        done.append(Config(trial.params))
        trial.set_user_attr(SECONDS, seconds(done[-1]) if weighed else 1.0)
        trial.set_user_attr(FAILED, rate(of, done[-1]) == 0)
        study.tell(trial, rate(of, done[-1]))
    return done


@pytest.mark.parametrize("seed", range(3))
def test_it_comes_near_the_best_and_repeats_none(seed: int) -> None:
    of = gains(seed)
    found = tried(of, seed, 40)
    assert len(set(found)) == 40 < len(CONFIGS) / 5
    assert max(rate(of, one) for one in found) >= 0.99 * max(rate(of, one) for one in CONFIGS)


def test_what_is_cheap_comes_first() -> None:
    of = {pair: gain for pair, gain in gains(0).items() if pair[0] != "compile"}
    spent = [
        sum(map(seconds, itertools.chain(*(tried(of, n, 20, weighed=weighed) for n in range(3)))))
        for weighed in (False, True)
    ]
    assert spent[1] < 0.8 * spent[0]


def test_likely_failures_are_avoided_and_none_left_is_no_error() -> None:
    of = gains(2)
    # A twelfth of all fail: the samplers must learn where, not leave.
    assert sum(rate(of, one) == 0 for one in tried(of, 3, 40)) <= 6
    assert set(tried(of, 0, 4, CONFIGS[:5])[1:]) <= set(CONFIGS[:5])
