"""The Optuna sampler: it finds good configs at low cost and repeats none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import optuna
import pytest
from optuna.distributions import CategoricalDistribution

from advisor.cache.config import Config
from advisor.tuners.search.sampler import FAILURE, SECONDS, GainPerSecond

CHOICES = {
    "precision": ["default", "tf32", "bf16", "fp16"],
    "layout": [False, True],
    "search": [False, True],
    "fused": [False, True],
    "compile": ["none", "default", "graphs"],
    "batch_size": [64, 128, 256],
}
CONFIGS = [
    Config(dict(zip(CHOICES, values, strict=True)))
    for values in itertools.product(*CHOICES.values())
]
DISTRIBUTIONS = {name: CategoricalDistribution(values) for name, values in CHOICES.items()}


class Machine:
    """Speeds are products over knobs and some pairs. Compiling costs 100 times as much."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.single = {(n, v): draw.gauss(0, 0.2) for n, vs in CHOICES.items() for v in vs}
        pairs = itertools.product(CHOICES["precision"], CHOICES["layout"])
        self.pair = {pair: draw.gauss(0, 0.1) for pair in pairs}

    def rate(self, config: Config) -> float:
        if config["batch_size"] == 256 and config["precision"] == "default":
            return 0.0  # does not fit
        logs = sum(self.single[name, value] for name, value in config.items())
        return 1000.0 * 2.0 ** (logs + self.pair[config["precision"], config["layout"]])

    def seconds(self, config: Config) -> float:
        return 1.0 if config["compile"] == "none" else 100.0

    def sample(
        self, seed: int, trials: int, among: Sequence[Config] = CONFIGS, *, with_costs: bool = True
    ) -> list[Config]:
        """Return the sampled configs. Without `with_costs`, each trial costs a second."""
        study, tried = optuna.create_study(direction="maximize"), list[Config]()
        study.sampler = GainPerSecond(
            seed=seed,
            among=lambda: [config for config in among if config not in tried],
            best=lambda: study.best_value,
        )
        for _ in range(trials):
            trial = study.ask(DISTRIBUTIONS)
            config = Config(trial.params)
            trial.set_user_attr(SECONDS, self.seconds(config) if with_costs else 1.0)
            trial.set_user_attr(FAILURE, self.rate(config) == 0)
            study.tell(trial, self.rate(config))
            tried.append(config)
        return tried


@pytest.mark.parametrize("seed", range(3))
def test_40_trials_come_near_the_best_of_288_and_repeat_none(seed: int) -> None:
    machine = Machine(seed)
    tried = machine.sample(seed, 40)
    assert len(set(tried)) == 40 and tried[:3] == machine.sample(seed, 3)
    best = max(map(machine.rate, CONFIGS))
    assert max(map(machine.rate, tried)) >= 0.99 * best


def test_sampler_prefers_cheap_configs() -> None:
    machine = Machine(0)
    machine.single |= {("compile", value): 0.0 for value in CHOICES["compile"]}
    spent = {}
    for with_costs in (False, True):
        tried = [machine.sample(seed, 20, with_costs=with_costs) for seed in range(3)]
        spent[with_costs] = sum(map(machine.seconds, itertools.chain(*tried)))
    assert spent[True] < 0.8 * spent[False]


def test_likely_failures_are_avoided_and_few_candidates_suffice() -> None:
    machine = Machine(2)
    failed = [config for config in machine.sample(3, 40) if machine.rate(config) == 0]
    assert len(failed) <= 6  # 1/12 of all configs fail
    candidates = CONFIGS[:5]
    assert set(machine.sample(0, 4, candidates)[1:]) <= set(candidates)
