"""The race and the verdict."""

from __future__ import annotations

import math
import random

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.errors import WorkerError
from advisor.tuners.length import Length, Pace
from advisor.tuners.search.race import Verdict, choose_input, decide, finalists, paired_ratio, race
from advisor.tuners.search.space import Space

SPACE = Space(
    {
        "precision": ("default", "bf16"),
        "channels_last": (False, True),
        "batch_size": (64, 128, 256),
    },
    inputs={"pin_memory": (False, True)},
)
DEFAULT = SPACE.default
FAST = DEFAULT.replace(precision="bf16", channels_last=True)
BF16 = DEFAULT.replace(precision="bf16")


class Steady:
    """A runner whose configs have a known speed, noise, and machine drift."""

    def __init__(self, rates: dict[Config, float], noise: float = 0.0, drift: float = 0.0) -> None:
        self.rates, self.noise, self.drift = rates, noise, drift
        self.order: list[Config] = []
        self.draw = random.Random(0)

    def measure(
        self, config: Config, *, seconds: float, stage: str = "compute", keep: bool = False
    ) -> Measurement:
        self.order.append(config)
        rate = self.rates[config]
        if not rate:
            return Measurement(outcome="out_of_memory")
        rate *= math.exp(self.draw.gauss(0, self.noise) - self.drift * len(self.order))
        return Measurement(outcome="ok", samples_per_s=rate, low=rate, high=rate)

    def release(self) -> None:
        pass


def run(runner: Steady, configs: list[Config]) -> dict[Config, list[float]]:
    return race(runner, configs, share_s=0.1, budget_s=1e9)


def test_turns_that_go_together_are_worth_less() -> None:
    apart = [1.0, 1.2] * 6
    together = [1.0] * 6 + [1.2] * 6
    one = [1.0] * 12
    narrow, wide = paired_ratio(apart, one), paired_ratio(together, one)
    assert narrow.mean == pytest.approx(wide.mean)
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)


def test_race_goes_there_and_back() -> None:
    runner = Steady({DEFAULT: 100.0, FAST: 200.0})
    run(runner, [DEFAULT, FAST])
    assert runner.order[:4] == [DEFAULT, FAST, FAST, DEFAULT]


def test_a_config_that_fails_once_is_out() -> None:
    rates = run(Steady({DEFAULT: 100.0, FAST: 0.0}), [DEFAULT, FAST])
    assert list(rates) == [DEFAULT]


def test_drift_of_the_machine_cancels() -> None:
    runner = Steady({DEFAULT: 100.0, FAST: 110.0}, drift=0.01)
    rates = run(runner, [DEFAULT, FAST])
    assert paired_ratio(rates[FAST], rates[DEFAULT]).mean == pytest.approx(1.10, abs=0.006)


def test_the_faster_config_is_chosen() -> None:
    rates = run(
        Steady({DEFAULT: 100.0, BF16: 130.0, FAST: 200.0}, noise=0.01), [DEFAULT, BF16, FAST]
    )
    verdict = decide(SPACE, rates, {FAST: 7})
    assert verdict.at_batch.config == FAST
    assert verdict.at_batch.speedup_low < 2.0 < verdict.at_batch.speedup_high
    assert verdict.at_batch.peak_bytes == 7
    assert verdict.baseline.config == DEFAULT


def test_noise_alone_is_hardly_ever_advice() -> None:
    fooled = 0
    for seed in range(300):
        runner = Steady({DEFAULT: 100.0, BF16: 100.0}, noise=0.03)
        runner.draw = random.Random(seed)
        verdict = decide(SPACE, run(runner, [DEFAULT, BF16]), {})
        fooled += verdict.at_batch.config != DEFAULT
    assert fooled / 300 < 0.05


def test_nothing_faster_means_the_default() -> None:
    rates = run(Steady({DEFAULT: 100.0, BF16: 100.5, FAST: 60.0}), [DEFAULT, BF16, FAST])
    assert decide(SPACE, rates, {}).at_batch.config == DEFAULT


def test_of_equals_the_one_that_changes_least() -> None:
    rates = run(Steady({DEFAULT: 100.0, BF16: 199.5, FAST: 200.0}), [DEFAULT, BF16, FAST])
    assert decide(SPACE, rates, {}).at_batch.config == BF16


def test_noise_does_not_buy_a_change() -> None:
    # FAST is ahead by 2% in turns that scatter by 10%: not told apart, so the simpler one it is.
    swing = [1.0, 0.9, 1.1, 1.0, 0.9, 1.1]
    rates = {
        DEFAULT: [100.0] * 6,
        BF16: [200.0 * s for s in swing],
        FAST: [204.0 * s for s in reversed(swing)],
    }
    assert decide(SPACE, rates, {}).at_batch.config == BF16
    steady = rates | {BF16: [200.0] * 6, FAST: [204.0] * 6}
    assert decide(SPACE, steady, {}).at_batch.config == FAST


def test_free_batch_is_the_smallest_near_the_best() -> None:
    rates = {
        DEFAULT: 100.0,
        FAST: 200.0,
        FAST.replace(batch_size=128): 392.0,
        FAST.replace(batch_size=256): 400.0,
    }
    verdict = decide(SPACE, run(Steady(rates), list(rates)), {})
    assert verdict.free is not None and verdict.free.batch == 128
    assert verdict.at_batch.batch == 64


def test_without_the_default_there_is_no_verdict() -> None:
    with pytest.raises(WorkerError):
        decide(SPACE, run(Steady({DEFAULT: 0.0, FAST: 1.0}), [DEFAULT, FAST]), {})


def test_finalists_hold_the_default_and_no_failure() -> None:
    def trial(number: int, config: Config, rate: float) -> Trial:
        outcome = "ok" if rate else "failed"
        return Trial(
            number=number,
            config=config,
            measurement=Measurement(outcome=outcome, samples_per_s=rate),
            stage="compute",
            origin="guess",
            seconds=1.0,
        )

    trials = [trial(0, DEFAULT, 10.0), trial(1, FAST, 30.0), trial(2, BF16, 0.0)]
    assert finalists(SPACE, trials) == [DEFAULT, FAST]


def test_losers_leave_the_race_and_close_ones_stay() -> None:
    slow = DEFAULT.replace(channels_last=True)
    runner = Steady({DEFAULT: 100.0, BF16: 199.0, FAST: 200.0, slow: 50.0}, noise=0.02)
    rates = run(runner, [DEFAULT, BF16, FAST, slow])
    assert len(rates[slow]) == 3
    assert len(rates[DEFAULT]) == len(rates[FAST]) == len(rates[BF16]) > 10


def test_a_steady_race_ends_early() -> None:
    rates = run(Steady({DEFAULT: 100.0, FAST: 200.0}), [DEFAULT, FAST])
    assert len(rates[DEFAULT]) == 3


def test_pinning_is_chosen_only_where_it_pays() -> None:
    pinned = FAST.replace(pin_memory=True)
    plain = FAST.replace(pin_memory=False)
    for rate, expected in ((150.0, True), (100.2, False), (80.0, False)):
        runner = Steady({plain: 100.0, pinned: rate})
        chosen, _seen = choose_input(runner, SPACE, FAST, share_s=0.1, budget_s=1e9)
        assert chosen == Config(pin_memory=expected)


def test_a_short_job_is_chosen_for_by_its_whole_time() -> None:
    rates = run(Steady({DEFAULT: 100.0, BF16: 150.0, FAST: 200.0}), [DEFAULT, BF16, FAST])
    first = {DEFAULT: 1.0, BF16: 1.0, FAST: 30.0}

    def chosen(steps: int) -> Verdict:
        job = Length(steps=steps, batch=64)

        def weigh(config: Config, rate: float) -> float:
            return job.rate(Pace(batch=64, first_step_s=first[config], step_s=64 / rate))

        return decide(SPACE, rates, {FAST: 7}, weigh)

    assert chosen(1).at_batch.config == DEFAULT
    assert chosen(100).at_batch.config == BF16
    verdict = chosen(1000)
    # What is told of it is the steady state, as ever.
    assert verdict.at_batch == decide(SPACE, rates, {FAST: 7}).at_batch
    assert verdict.at_batch.samples_per_s == 200.0


def test_the_cheap_leader_is_a_finalist_however_far_behind() -> None:
    space = Space(SPACE.choices | {"compile": ("none", "default")}, dear=("compile",))
    eager = space.default.replace(precision="bf16")
    names = {space.default: 10.0, eager: 15.0, eager.replace(compile="default"): 60.0}
    trials = [
        Trial(
            number=number,
            config=config,
            measurement=Measurement(outcome="ok", samples_per_s=rate),
            stage="compute",
            origin="guess",
            seconds=1.0,
        )
        for number, (config, rate) in enumerate(names.items())
    ]
    assert finalists(space, trials) == [space.default, eager.replace(compile="default"), eager]
