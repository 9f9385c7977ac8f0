"""The race and the verdict."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cache.config import Config
from advisor.cache.record import RACED, Measurement, Trial
from advisor.errors import WorkerError
from advisor.tuners import knobs
from advisor.tuners.decide.finalists import affordable, finalists
from advisor.tuners.decide.race import paired_ratio, race
from advisor.tuners.decide.winners import Verdict, choose, raced, untold
from advisor.tuners.length import Length, Pace
from advisor.tuners.search.plan import Clock, Part
from advisor.tuners.search.space import Space

SPACE = Space(
    {
        "precision": ("default", "bf16"),
        "channels_last": (False, True),
        "batch_size": (64, 128, 256),
    }
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
        self.time = 0.0
        self.built: set[Config] = set()
        self.build_s: dict[Config, float] = {}

    def now(self) -> float:
        return self.time

    def part(self, seconds: float = 1e9, reserve: float = 0.0) -> Part:
        """All of a budget, or all but a share in reserve."""
        return Clock(seconds, now=self.now).part(1.0 - reserve, reserve=reserve)

    def measure(
        self,
        config: Config,
        *,
        seconds: float,
        stage: str = "compute",
        keep: bool = False,
        floor: float = 0.0,
        deadline_s: float | None = None,
    ) -> Measurement:
        self.order.append(config)
        took = seconds + (0.0 if config in self.built else self.build_s.get(config, 0.0))
        if deadline_s is not None and took > deadline_s:
            self.time += deadline_s
            self.built.clear()  # with the worker that was killed
            return Measurement(outcome="timed_out", reason="simulated")
        self.time += took
        self.built.add(config)
        rate = self.rates[config]
        if not rate:
            return Measurement(outcome="out_of_memory")
        rate *= math.exp(self.draw.gauss(0, self.noise) - self.drift * len(self.order))
        return Measurement(outcome="ok", samples_per_s=rate, low=rate, high=rate)

    def release(self) -> None:
        pass


def run(runner: Steady, configs: list[Config]) -> dict[Config, list[float]]:
    return race(runner, configs, runner.part())


def test_turns_that_go_together_are_worth_less() -> None:
    apart = [1.0, 1.2] * 6
    together = [1.0] * 6 + [1.2] * 6
    one = [1.0] * 12
    narrow, wide = paired_ratio(apart, one), paired_ratio(together, one)
    assert narrow.mean == pytest.approx(wide.mean)
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)


def test_turns_that_are_apart_beyond_what_a_record_keeps_tell_nothing() -> None:
    """As of two threads for two busy cores: the whole record would be refused for it."""
    ratio = paired_ratio([1e3, 1.0], [1.0, 1.0])
    assert (ratio.low, ratio.high) == (0.0, math.inf)
    assert math.isfinite(paired_ratio([2.0, 1.0], [1.0, 1.0]).high)


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
    verdict = choose(SPACE, rates, {FAST: 7})
    assert verdict.winner("loop").config == FAST
    assert verdict.winner("loop").speedup_low < 2.0 < verdict.winner("loop").speedup_high
    assert verdict.winner("loop").peak_bytes == 7
    assert verdict.baseline.config == DEFAULT


def test_of_what_ties_fewer_workers_are_advised() -> None:
    space = Space({"batch_size": (64,), "num_workers": (0, 4, 8, 16)})
    held, four, eight, all_of_them = (
        space.default.replace(num_workers=number) for number in (0, 4, 8, 16)
    )
    rates = {held: [100.0] * 4, four: [150.0] * 4, eight: [200.0] * 4, all_of_them: [200.5] * 4}
    assert choose(space, rates, {}).winner("loop").config == eight


def test_noise_alone_is_hardly_ever_advice() -> None:
    fooled = 0
    for seed in range(300):
        runner = Steady({DEFAULT: 100.0, BF16: 100.0}, noise=0.03)
        runner.draw = random.Random(seed)
        verdict = choose(SPACE, run(runner, [DEFAULT, BF16]), {})
        fooled += verdict.winner("loop").config != DEFAULT
    assert fooled / 300 < 0.05


def test_nothing_faster_means_the_default() -> None:
    rates = run(Steady({DEFAULT: 100.0, BF16: 100.5, FAST: 60.0}), [DEFAULT, BF16, FAST])
    assert choose(SPACE, rates, {}).winner("loop").config == DEFAULT


def test_of_equals_the_one_that_changes_least() -> None:
    rates = run(Steady({DEFAULT: 100.0, BF16: 199.5, FAST: 200.0}), [DEFAULT, BF16, FAST])
    assert choose(SPACE, rates, {}).winner("loop").config == BF16


def test_noise_does_not_buy_a_change() -> None:
    # FAST is ahead by 2% in turns that scatter by 10%: not told apart, so the simpler one it is.
    swing = [1.0, 0.9, 1.1, 1.0, 0.9, 1.1]
    rates = {
        DEFAULT: [100.0] * 6,
        BF16: [200.0 * s for s in swing],
        FAST: [204.0 * s for s in reversed(swing)],
    }
    assert choose(SPACE, rates, {}).winner("loop").config == BF16
    # What is ahead by 8% is not given away for that.
    ahead = rates | {FAST: [216.0 * s for s in reversed(swing)]}
    assert choose(SPACE, ahead, {}).winner("loop").config == FAST
    steady = rates | {BF16: [200.0] * 6, FAST: [204.0] * 6}
    assert choose(SPACE, steady, {}).winner("loop").config == FAST


def test_free_batch_is_the_smallest_near_the_best() -> None:
    rates = {
        DEFAULT: 100.0,
        FAST: 200.0,
        FAST.replace(batch_size=128): 392.0,
        FAST.replace(batch_size=256): 400.0,
    }
    verdict = choose(SPACE, run(Steady(rates), list(rates)), {})
    assert verdict.winner("loop", free=True).batch == 128
    assert verdict.winner("loop").batch == 64


def test_without_the_default_there_is_no_verdict() -> None:
    with pytest.raises(WorkerError):
        choose(SPACE, run(Steady({DEFAULT: 0.0, FAST: 1.0}), [DEFAULT, FAST]), {})


def tried(rates: dict[Config, float]) -> list[Trial]:
    """The trials of configs by their samples/s, 0 for one that failed."""
    return [
        Trial(
            number=number,
            config=config,
            measurement=Measurement(
                outcome="ok" if rate else "failed",
                samples_per_s=rate,
                step_s=0.1,
                first_step_s=1.0,
            ),
            stage="compute",
            origin="guess",
            seconds=1.0,
        )
        for number, (config, rate) in enumerate(rates.items())
    ]


def test_finalists_hold_the_default_and_no_failure() -> None:
    trials = tried({DEFAULT: 10.0, FAST: 30.0, BF16: 0.0})
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


def test_a_short_job_is_chosen_for_by_its_whole_time() -> None:
    rates = run(Steady({DEFAULT: 100.0, BF16: 150.0, FAST: 200.0}), [DEFAULT, BF16, FAST])
    first = {DEFAULT: 1.0, BF16: 1.0, FAST: 30.0}

    def chosen(steps: int) -> Verdict:
        job = Length(steps=steps, batch=64)

        def weigh(config: Config, rate: float) -> float:
            return job.rate(Pace(batch=64, first_step_s=first[config], step_s=64 / rate))

        return choose(SPACE, rates, {FAST: 7}, weigh)

    assert chosen(1).winner("loop").config == DEFAULT
    assert chosen(100).winner("loop").config == BF16
    verdict = chosen(1000)
    # What is told of it is the steady state, as ever.
    assert verdict.winner("loop") == choose(SPACE, rates, {FAST: 7}).winner("loop")
    assert verdict.winner("loop").samples_per_s == 200.0


def test_the_cheap_leader_is_a_finalist_however_far_behind() -> None:
    space = Space(SPACE.choices | {"compile": ("none", "default")}, dear=("compile",))
    eager = space.default.replace(precision="bf16")
    trials = tried({space.default: 10.0, eager: 15.0, eager.replace(compile="default"): 60.0})
    assert finalists(space, trials) == [space.default, eager.replace(compile="default"), eager]


CUDA = Space(
    {
        "precision": ("default", "tf32", "bf16", "fp16"),
        "compile": ("none", "default"),
        "step_graph": (False, True),
        "batch_size": (64, 128, 256),
    },
    dear=("compile",),
)
PLAIN = CUDA.default
TF32 = PLAIN.replace(precision="tf32")
LOOPED = PLAIN.replace(precision="bf16")
GRAPHED = LOOPED.replace(step_graph=True)


def known(rates: dict[Config, float], turns: int = 6, scatter: float = 0.0) -> dict[Config, Any]:
    """What a race saw: turns that scatter about a rate, each config's in its own order."""
    draw = random.Random(1)
    return {
        c: [r * math.exp(draw.gauss(0, scatter)) for _ in range(turns)] for c, r in rates.items()
    }


def test_each_use_has_the_best_that_it_can_follow() -> None:
    rates = known({PLAIN: 100.0, TF32: 120.0, LOOPED: 150.0, GRAPHED: 400.0})
    verdict = choose(CUDA, rates, {})
    found = {use: verdict.winner(use).config for use in RACED}
    assert found == {"flags": TF32, "pilot": LOOPED, "loop": LOOPED, "capture": GRAPHED}
    # Each has its own interval against torch's default at the user's batch.
    assert [round(verdict.winner(use).speedup, 3) for use in RACED] == [1.2, 1.5, 1.5, 4.0]
    assert verdict.baseline.config == PLAIN and verdict.baseline.speedup == 1.0


def test_what_asks_more_and_gains_nothing_is_what_asks_less() -> None:
    for graphed in (150.5, 149.0, 90.0):
        verdict = choose(CUDA, known({PLAIN: 100.0, LOOPED: 150.0, GRAPHED: graphed}), {})
        assert verdict.winner("capture").config == LOOPED
    verdict = choose(CUDA, known({PLAIN: 100.0, TF32: 150.0, LOOPED: 150.9}), {})
    assert verdict.winner("loop").config == TF32


def test_of_fp16_and_bf16_within_noise_bf16_is_advised() -> None:
    fp16 = PLAIN.replace(precision="fp16")
    assert choose(CUDA, known({PLAIN: 100.0, fp16: 151.0, LOOPED: 150.0}), {}).winner(
        "loop"
    ).config == (LOOPED)
    assert choose(CUDA, known({PLAIN: 100.0, fp16: 160.0, LOOPED: 150.0}), {}).winner(
        "loop"
    ).config == (fp16)


def test_the_free_batch_meets_the_same_rule() -> None:
    """A record said 14.74x (0.27-795.91): two turns, which tell nothing."""
    large = GRAPHED.at(256)
    wild = known({PLAIN: 100.0, LOOPED: 150.0}) | {large: [100.0, 20000.0]}
    verdict = choose(CUDA, wild, {})
    assert all(verdict.winner(use, free=True).config == LOOPED for use in ("loop", "capture"))
    assert all(verdict.winner("flags", free=free).config == PLAIN for free in (False, True))
    # As fast as what asks less, at the same batch.
    both = {LOOPED.at(256): 300.0, large: 301.0}
    tied = choose(CUDA, known({PLAIN: 100.0, LOOPED: 150.0, GRAPHED: 200.0} | both), {})
    assert tied.winner("capture", free=True).config == LOOPED.at(256)
    assert tied.winner("capture").config == GRAPHED
    # Faster than the default, but not than what wins at the user's batch.
    same = choose(CUDA, known({PLAIN: 100.0, LOOPED: 150.0, LOOPED.at(256): 150.8}), {})
    assert same.winner("loop", free=True).config == LOOPED
    # Ahead by 13% in turns that swing by 50%.
    swing = [225.0, 127.5] * 3
    unsure = known({PLAIN: 100.0, LOOPED: 150.0}) | {LOOPED.at(256): swing}
    assert choose(CUDA, unsure, {}).winner("loop", free=True).samples_per_s == 150.0
    assert choose(CUDA, unsure, {}).winner("loop", free=True).batch == 64


def test_with_the_batch_free_nothing_worse_is_served_at_the_users() -> None:
    """Neither a tie nor clearly faster, as on a busy host: what is fixed is served free too."""
    noisy = known({PLAIN: 100.0, TF32: 150.0}) | {LOOPED: [260.0, 150.0] * 3}
    verdict = choose(CUDA, noisy, {})
    fixed, free = verdict.winner("loop"), verdict.winner("loop", free=True)
    assert fixed.config == LOOPED and free == fixed


@given(
    st.dictionaries(
        st.sampled_from([c for b in (64, 256) for c in CUDA.configs(b, dear=True)]),
        st.lists(st.floats(10.0, 1000.0), min_size=1, max_size=5),
        max_size=8,
    )
)
def test_every_winner_is_clearly_faster_or_the_default(rates: dict[Config, list[float]]) -> None:
    verdict = choose(CUDA, {PLAIN: [100.0, 101.0, 99.0]} | rates, {})
    assert {(one.use, one.free) for one in verdict.winners} == {
        (use, free) for use in RACED for free in (False, True)
    }
    for one in verdict.winners:
        choice = one.choice
        assert knobs.follows(one.use, choice.config, PLAIN)
        assert one.free or choice.batch == 64
        assert choice.config == PLAIN or (choice.speedup >= 1.01 and choice.speedup_low > 1.0)


def test_finalists_are_of_every_use_and_of_the_batches_that_lead() -> None:
    """Compiled at batch 128 and 256 they led the trials and were not raced: 6% were missed."""
    compiled = LOOPED.replace(compile="default")
    rates = {
        PLAIN: 100.0,
        TF32: 130.0,
        LOOPED: 300.0,
        compiled: 340.0,
        GRAPHED: 900.0,
        TF32.at(256): 150.0,
        LOOPED.at(256): 700.0,
        compiled.at(128): 1299.0,
        compiled.at(256): 1341.0,
    }
    trials = tried(rates)
    found = finalists(CUDA, trials)
    assert found[0] == PLAIN
    for config in (TF32, compiled, GRAPHED, TF32.at(256), compiled.at(128), compiled.at(256)):
        assert config in found
    runner = Steady({})
    assert affordable(found, trials, runner.part(1000.0), {}) == found
    short = affordable(found, trials, runner.part(6.0), {})
    assert short == found[: len(short)] and 2 <= len(short) < len(found)


def test_fewer_race_where_each_turn_takes_long_to_settle() -> None:
    """A run that waited for its data took 5 s a turn: in 48 s nine configs had one turn each."""
    rates = {PLAIN: 100.0, TF32: 130.0, LOOPED: 300.0, GRAPHED: 900.0}
    found = finalists(CUDA, quick := tried(rates))
    slow = [
        dataclasses.replace(one, measurement=dataclasses.replace(one.measurement, warm_s=4.0))
        for one in quick
    ]
    part = Steady({}).part
    assert affordable(found, quick, part(30.0), {}) == found
    assert affordable(found, slow, part(30.0), {}) == found[:2]


def test_of_many_that_are_near_the_first_race() -> None:
    choices = {name: CUDA.choices[name] for name in ("precision", "compile", "step_graph")}
    configs = [
        PLAIN.replace(**dict(zip(choices, values, strict=True)))
        for values in itertools.product(*choices.values())
    ]
    trials = tried({config: 100.0 + place for place, config in enumerate(configs)})
    graphed = configs[::-1][:4]
    # Two each of the lesser uses: a loop's are among those; a pilot and flags have no scaler.
    lesser = [LOOPED.replace(compile="default"), LOOPED, TF32, PLAIN]
    assert set(finalists(CUDA, trials)) == {*graphed, *lesser}


def test_what_a_graph_beats_stays_where_there_is_none() -> None:
    runner = Steady({PLAIN: 100.0, LOOPED: 150.0, GRAPHED: 400.0, TF32: 149.0}, noise=0.01)
    rates = run(runner, [PLAIN, LOOPED, GRAPHED, TF32])
    assert len(rates[LOOPED]) == len(rates[GRAPHED]) == len(rates[PLAIN])


@pytest.mark.parametrize("budget", [0.5, 3.0, 20.0])
def test_the_race_keeps_to_its_part(budget: float) -> None:
    runner = Steady({DEFAULT: 100.0, BF16: 150.0, FAST: 200.0}, noise=0.05)
    runner.build_s = {DEFAULT: 0.1, BF16: 0.1, FAST: 0.1}
    rates = race(runner, [DEFAULT, BF16, FAST], runner.part(budget))
    assert runner.time <= budget + 1.0
    assert DEFAULT in rates


def test_a_race_of_many_that_take_long_to_build_ends_in_time() -> None:
    many = [config for batch in CUDA.batches for config in CUDA.configs(batch)]
    runner = Steady({config: 100.0 for config in many})
    runner.build_s = dict.fromkeys(many, 1.0)
    rates = race(runner, many, runner.part(6.0))
    assert runner.time <= 8.0 and 1 < len(rates) < len(many)


def test_half_of_a_race_is_kept_for_turns() -> None:
    """GPT-2's race built all its finalists, and had one turn of each to tell them by."""
    many = [config for batch in CUDA.batches for config in CUDA.configs(batch)]
    runner = Steady({config: 100.0 + n for n, config in enumerate(many)})
    runner.build_s = dict.fromkeys(many, 1.0)
    rates = race(runner, many, runner.part(12.0))
    assert len(rates) >= 2 and min(map(len, rates.values())) >= 2


def test_what_is_compiled_again_for_the_race_has_its_deadline_too() -> None:
    runner = Steady({DEFAULT: 100.0, BF16: 150.0, FAST: 200.0})
    runner.build_s = {FAST: 300.0}
    expected = {FAST: 8.0}
    rates = race(
        runner,
        [DEFAULT, FAST, BF16],
        runner.part(60.0),
        build_s=lambda config: expected.get(config, 0.1),
    )
    assert runner.time <= 60.0
    # It is given up in time for the others to be told apart.
    assert FAST not in rates and len(rates[BF16]) >= 3
    slow = Steady({DEFAULT: 100.0, FAST: 200.0})
    slow.build_s = {FAST: 300.0}
    race(slow, [DEFAULT, FAST], slow.part(30.0))
    assert slow.time <= 35.0


def test_a_race_that_cannot_tell_goes_on_into_its_reserve() -> None:
    spent = []
    for noise in (0.0, 0.2):
        runner = Steady({DEFAULT: 100.0, FAST: 130.0}, noise=noise)
        race(runner, [DEFAULT, FAST], runner.part(20.0, reserve=0.5))
        spent.append(runner.time)
    assert spent[0] < 10.0 and 15.0 < spent[1] <= 21.0


def test_what_could_not_be_told_is_said() -> None:
    rates = known({PLAIN: 100.0, LOOPED: 120.0, GRAPHED: 400.0}, turns=3, scatter=0.2)
    choices = raced(CUDA, rates, {})
    verdict = choose(CUDA, rates, {})
    assert GRAPHED in {choice.config for choice in untold(CUDA, choices, verdict)}
    steady = known({PLAIN: 100.0, LOOPED: 120.0, GRAPHED: 400.0}, scatter=0.001)
    assert untold(CUDA, raced(CUDA, steady, {}), choose(CUDA, steady, {})) == []
