"""What a search ends in: nothing is advised that is wrong, and what is not verified is told."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.cache.record import RACED, Measurement
from advisor.tuners import knobs
from advisor.tuners.decide.verdict import REFERENCE_S, Decided, Terms, decide
from advisor.tuners.length import Length
from advisor.tuners.measure.first_step import ANEW, Compiled
from advisor.tuners.search.journal import open_study
from advisor.tuners.search.plan import Clock, Progress
from advisor.tuners.search.space import Space
from advisor.tuners.search.study import Scope, Search

CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": ("default", "tf32", "bf16"),
    "compile": ("none", "default"),
    "step_graph": (False, True),
    "batch_size": (64, 128),
}
DEFAULT = Config({name: values[0] for name, values in CHOICES.items()})
SPACE = Space(
    CHOICES,
    dear=("compile",),
    reference=DEFAULT.replace(precision="fp32"),
)
SPEED = {"default": 1.0, "fp32": 0.6, "tf32": 1.2, "bf16": 1.5}


class Machine:
    """A device by formula: its own clock, noise, and what becomes of each comparison.

    Building takes `first_s` (compiling ten times that), a step 10 ms, a comparison `verify_s`.
    """

    def __init__(
        self,
        *,
        noise: float = 0.01,
        first_s: float = 0.1,
        process_s: float = 1.0,
        verify_s: float = 0.5,
        numerics: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        self.noise, self.first_s, self.process_s = noise, first_s, process_s
        self.verify_s, self.numerics = verify_s, numerics or {}
        self.draw = random.Random(seed)
        self.time = 0.0
        self.built: set[Config] = set()
        self.compared: list[Config] = []
        self.started: list[Config] = []
        self.alive = True

    def now(self) -> float:
        return self.time

    def first_step_s(self, config: Config) -> float:
        return self.first_s * (1 if config.get("compile", "none") == "none" else 10)

    def rate(self, config: Config) -> float:
        rate = 6400.0 * SPEED[str(config["precision"])] * (config.batch / 64) ** 0.3
        rate *= 1.3 if config["compile"] == "default" else 1.0
        return rate * (2.0 if config["step_graph"] else 1.0)

    def _takes(self, seconds: float, deadline_s: float | None) -> bool:
        """Whether it is done in time; a worker that was killed is started again."""
        if not self.alive:
            seconds += self.process_s
        self.alive = deadline_s is None or seconds <= deadline_s
        self.time += seconds if self.alive else float(deadline_s or 0)
        if not self.alive:
            self.built.clear()
        return self.alive

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
        first = 0.0 if config in self.built else self.first_step_s(config)
        if not self._takes(first + seconds, deadline_s):
            return Measurement(outcome="timed_out", reason="simulated")
        if keep:
            self.built.add(config)
        rate = self.rate(config) * math.exp(self.draw.gauss(0, self.noise))
        return Measurement(
            outcome="ok",
            samples_per_s=rate,
            low=rate,
            high=rate,
            step_s=config.batch / rate,
            first_step_s=first,
            peak_bytes=config.batch,
        )

    def release(self) -> None:
        self.built.clear()

    def verify(
        self,
        config: Config,
        *,
        against: Config,
        steps: int,
        tolerance: float,
        deadline_s: float | None = None,
    ) -> Measurement:
        assert against == SPACE.reference and steps >= 8 and tolerance == 0.02
        self.compared.append(config)
        if not self._takes(self.first_step_s(config) + self.verify_s, deadline_s):
            return Measurement(outcome="timed_out", reason="simulated")
        for part, outcome in self.numerics.items():
            if part in knobs.described(config, DEFAULT):
                return Measurement(outcome=outcome, reason=f"{part} is {outcome}")
        return Measurement(outcome="ok")

    def start(self, config: Config, *, deadline_s: float, compiled: Compiled = ANEW) -> Measurement:
        self.started.append(config)
        self.alive = False
        took = self.process_s + 2 * self.first_step_s(config)
        self.time += min(took, deadline_s)
        if took > deadline_s:
            return Measurement(outcome="timed_out", reason="simulated")
        return Measurement(outcome="ok", first_step_s=took - self.process_s)

    def save(self, config: Config, file: Path) -> None:
        raise AssertionError("nothing is kept")


class Notices(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def notice(self, text: str) -> None:
        self.said.append(text)


def tuned(
    machine: Machine,
    folder: Path,
    budget_s: float = 300.0,
    said: Notices | None = None,
    space: Space = SPACE,
    **terms: Any,
) -> Decided:
    """As tune does."""
    said = said or Notices()
    study, _ = open_study(folder, f"{len(list(folder.iterdir()))}")
    search = Search(machine, space, study, Scope(clock=Clock(budget_s, now=machine.now)), Notices())
    search.run()
    given = {"tolerance": 0.02, "process_s": machine.process_s} | terms
    return decide(machine, space, search, Terms(**given), said)


def won(decided: Decided) -> dict[tuple[str, bool], Config]:
    return {(one.use, one.free): one.choice.config for one in decided.winners}


def outcomes(decided: Decided) -> dict[Config, str]:
    return {t.config.knobs: t.measurement.outcome for t in decided.trials if t.stage == "numerics"}


def test_each_use_gets_its_winner_verified_with_first_steps_and_input(tmp_path: Path) -> None:
    machine = Machine()
    decided = tuned(machine, tmp_path)
    flags = DEFAULT.replace(precision="tf32")
    loop = DEFAULT.replace(precision="bf16", compile="default")
    graph = loop.replace(step_graph=True)
    assert won(decided) == {
        (use, free): config.at(128 if free else 64)
        for use, config in zip(RACED, (flags, loop, loop, graph), strict=True)
        for free in (False, True)
    }
    assert outcomes(decided).items() >= {loop.knobs: "ok", graph.knobs: "ok"}.items()
    assert decided.input == Config()
    assert all(one.choice.first_step_s > 0 for one in decided.winners)
    assert all(choice.speedup_low > 0 for choice in decided.raced)
    assert {t.stage for t in decided.trials} == {"compute", "numerics"}
    assert [t.number for t in decided.trials] == list(range(len(decided.trials)))
    assert [t.config for t in decided.trials if t.origin == "reference"] == [SPACE.reference]
    for trial in decided.trials:
        if trial.origin in ("fp32", "reference"):
            took_s = machine.verify_s if trial.origin == "fp32" else REFERENCE_S
            took_s += machine.first_step_s(trial.config)
            # A worker that a first step has ended is started again.
            assert trial.seconds == pytest.approx(took_s, abs=1.001 * machine.process_s)


def test_what_is_not_in_memory_together_races_in_heats(tmp_path: Path) -> None:
    """GPT-2's finalists at its large batch took turns in being built."""
    machine = Machine(noise=0.01)
    peaks = [64] * 6 + [256]
    decided = tuned(machine, tmp_path, memory=sum(peaks))
    free = {one.use: one.choice for one in decided.winners if one.free}["loop"]
    assert free.batch > 64
    expected = machine.rate(free.config) / machine.rate(DEFAULT)
    assert free.speedup == pytest.approx(expected, rel=0.05)
    assert len(free.rounds) >= 2 and free.speedup_low > 1


def test_what_is_wrong_is_struck_out_everywhere(tmp_path: Path) -> None:
    """bf16 with a graph, and all that compiles, does not train like fp32."""
    said = Notices()
    decided = tuned(
        Machine(numerics={"compile": "wrong", "step_graph": "wrong"}), tmp_path, said=said
    )
    wrong = {knobs_ for knobs_, outcome in outcomes(decided).items() if outcome == "wrong"}
    assert len(wrong) >= 2
    served = [*(one.choice for one in decided.winners), *decided.raced]
    assert not wrong & {choice.config.knobs for choice in served}
    struck = [t for t in decided.trials if t.config.knobs in wrong]
    assert struck and all(t.measurement.outcome == "wrong" for t in struck)
    reasons = {"compile is wrong", "step_graph is wrong"}
    assert {t.measurement.reason for t in struck} == reasons
    assert {t.config.batch for t in struck} == {64, 128}
    assert won(decided)["loop", False] == DEFAULT.replace(precision="bf16")
    assert outcomes(decided)[DEFAULT.replace(precision="bf16").knobs] == "ok"
    assert any("struck out" in text for text in said.said)


def test_what_was_not_compared_does_not_win_by_a_value_that_is_wrong(tmp_path: Path) -> None:
    """One comparison alone fits: whatever else has bf16 in it is no better than what was struck."""
    machine = Machine(numerics={"bf16": "wrong"}, verify_s=9.0)
    decided = tuned(machine, tmp_path, budget_s=40.0)
    compared = [knobs_ for knobs_, outcome in outcomes(decided).items() if outcome == "wrong"]
    assert compared
    assert not any("bf16" in config.values() for config in won(decided).values())


@pytest.mark.parametrize("outcome", ["timed_out", "crashed", "failed"])
def test_a_comparison_that_could_not_be_made_is_remembered(tmp_path: Path, outcome: str) -> None:
    said = Notices()
    decided = tuned(Machine(numerics={"compile": outcome}), tmp_path, said=said)
    loop = won(decided)["loop", False]
    assert loop["compile"] == "default"
    assert outcomes(decided)[loop.knobs] == outcome
    assert any("not compared with fp32" in text and "compile" in text for text in said.said)


def test_what_there_is_no_time_to_compare_is_told(tmp_path: Path) -> None:
    said = Notices()
    machine = Machine(first_s=3.0)
    decided = tuned(machine, tmp_path, budget_s=12.0, said=said)
    doubtful = {c.knobs for c in won(decided).values() if knobs.doubtful(c)}
    for left_out in doubtful - set(outcomes(decided)):
        assert any(
            "not compared" in text and knobs.described(left_out) in text for text in said.said
        )
    assert tuned(Machine(), tmp_path, tolerance=0.0).trials[-1].stage != "numerics"


def test_every_doubtful_winner_is_compared_once_the_loops_first(tmp_path: Path) -> None:
    machine = Machine()
    decided = tuned(machine, tmp_path)
    assert len(machine.compared) == len(set(machine.compared))
    assert machine.compared[0] == won(decided)["loop", False]
    winners = {c.at(64) for c in won(decided).values() if knobs.doubtful(c)}
    assert winners <= set(machine.compared)


@pytest.mark.parametrize(
    ("budget_s", "first_s", "verify_s", "noise"),
    [
        (3.0, 0.1, 5.0, 0.1),
        (3.0, 1.0, 1.0, 0.01),
        (10.0, 5.0, 5.0, 0.1),
        (30.0, 0.1, 50.0, 0.3),
        (60.0, 5.0, 5.0, 0.1),
        (210.0, 5.0, 30.0, 0.1),
    ],
)
def test_the_budget_holds(
    tmp_path: Path, budget_s: float, first_s: float, verify_s: float, noise: float
) -> None:
    """210 s took 281 s, and 3 s took 16."""
    for length in (None, Length(steps=500, batch=64)):
        machine = Machine(first_s=first_s, process_s=2.0, verify_s=verify_s, noise=noise)
        decided = tuned(machine, tmp_path, budget_s, length=length)
        assert machine.time <= budget_s + max(5.0, 0.1 * budget_s)
        # What had one turn has no interval, and is not in the record as raced; the default is.
        others = [choice for choice in decided.raced if choice.config != DEFAULT]
        assert len(others) < len(decided.raced)
        assert all(math.isfinite(choice.speedup_high) for choice in others)


def test_comparisons_that_hang_keep_the_budget(tmp_path: Path) -> None:
    machine = Machine(verify_s=1e6)
    decided = tuned(machine, tmp_path, 60.0)
    assert machine.time <= 66.0
    assert "timed_out" in outcomes(decided).values()


COMPILES = {"none": 0.3, "cudagraphs": 6.0, "reduce-overhead": 32.0, "default": 16.0}
LAUNCHED = Space(
    CHOICES
    | {"step_graph": (False,), "batch_size": (64,), "compile": tuple(COMPILES)}
    | {name: (False, True) for name in ("channels_last", "fused_optimizer", "cudnn_benchmark")},
    dear=("compile",),
    reference=SPACE.reference,
)


class Launched(Machine):
    """A job of several processes, in seconds as on two H200: what "default" compiles
    "reduce-overhead" has compiled for the most part."""

    def first_step_s(self, config: Config) -> float:
        searched = 8.0 if config.get("cudnn_benchmark") else 0.0
        return searched + COMPILES[str(config.get("compile", "none"))] / (3 if searched else 1)

    def rate(self, config: Config) -> float:
        gain = 1.6 if config["compile"] == "reduce-overhead" else 1.0
        gain *= 1.27 if config["cudnn_benchmark"] else 1.0
        return gain * super().rate(config.replace(compile="none"))

    def measure(self, config: Config, **how: Any) -> Measurement:
        self.time += 0.7  # warm again
        return super().measure(config, **how | {"keep": True})

    def release(self) -> None:
        """A run keeps what it has called its models through."""

    def verify(self, config: Config, **how: Any) -> Measurement:
        return super().verify(config, **how | {"against": SPACE.reference})


def test_three_minutes_are_enough_for_a_job_of_several_processes(tmp_path: Path) -> None:
    machine = Launched(process_s=18.0, verify_s=8.0)
    terms: dict[str, Any] = {"compare_s": 4.0, "compare_steps": 40}
    decided = tuned(machine, tmp_path, 180.0, space=LAUNCHED, **terms)
    assert machine.time <= 198.0
    tried = [t.config["compile"] for t in decided.trials if t.stage == "compute"]
    assert tried.count("none") >= 6
    # A variant of it would take the time in which it is compared.
    assert tried.count("reduce-overhead") == 1
    won_by = won(decided)["pilot", False]
    assert (won_by["compile"], won_by["precision"]) == ("reduce-overhead", "bf16")
    assert outcomes(decided)[won_by.knobs] == "ok"


def test_without_time_for_a_race_the_default_is_advised(tmp_path: Path) -> None:
    machine = Machine(first_s=6.0)
    said = Notices()
    decided = tuned(machine, tmp_path, 5.0, said=said)
    assert set(won(decided).values()) == {DEFAULT}
    assert any("no time was left for the race" in text for text in said.said)
    assert math.isfinite(decided.baseline.speedup_high)


def test_noise_is_not_served(tmp_path: Path) -> None:
    """Nothing is faster here; turns that differ by half say so and advise nothing."""

    class Equal(Machine):
        def rate(self, config: Config) -> float:
            return 6400.0

    for seed in range(2):
        said = Notices()
        decided = tuned(Equal(noise=0.4, seed=seed), tmp_path, 60.0, said)
        assert set(won(decided).values()) == {DEFAULT}


def test_a_race_that_cannot_tell_says_so(tmp_path: Path) -> None:
    said = Notices()
    tuned(Machine(noise=0.4), tmp_path, 30.0, said)
    assert any("could not tell" in text for text in said.said)
    said = Notices()
    tuned(Machine(noise=0.001), tmp_path, 300.0, said)
    assert not any("could not tell" in text for text in said.said)


def test_a_race_of_a_turn_each_is_not_said_to_be_one_that_cannot_tell(tmp_path: Path) -> None:
    """Where nothing was raced for long enough to be kept the result says so, and it alone."""
    said = Notices()
    decided = tuned(Machine(first_s=1.0, noise=0.2), tmp_path, 8.0, said)
    assert {one.config for one in decided.raced} == {decided.baseline.config}
    assert not any("could not tell" in text for text in said.said)


def test_a_race_that_cannot_tell_goes_on_where_nothing_else_has_a_use_for_the_time(
    tmp_path: Path,
) -> None:
    """Of 45 s it had used 35, and asked for a larger budget."""
    few = Space(
        {"precision": ("default", "tf32"), "compile": ("none",), "step_graph": (False,)}
        | {"batch_size": (64,)}
    )
    for noise, least in ((0.5, 0.9), (0.001, 0.0)):
        machine = Machine(noise=noise)
        decided = tuned(machine, tmp_path, 45.0, space=few, tolerance=0.0)
        assert least * 45.0 <= machine.time <= (50.0 if least else 20.0)
        assert DEFAULT in machine.started and decided.baseline.first_step_s > 0


def test_a_race_has_its_time_after_a_worker_that_had_to_be_ended(tmp_path: Path) -> None:
    """Starting the next one took what little there was, and 1.9x was not advised."""

    class Hangs(Machine):
        def first_step_s(self, config: Config) -> float:
            return 1e3 if config.get("compile", "none") != "none" else 0.1

    space = Space(
        CHOICES | {"precision": ("default", "bf16"), "step_graph": (False,), "batch_size": (64,)},
        dear=("compile",),
        reference=SPACE.reference,
    )
    machine = Hangs(process_s=5.0)
    decided = tuned(machine, tmp_path, 61.0, space=space)
    assert any(t.measurement.outcome == "timed_out" for t in decided.trials)
    assert won(decided)["loop", False] == DEFAULT.replace(precision="bf16")
    assert machine.time <= 66.0


def test_of_what_the_race_could_not_tell_no_figure_is_said(tmp_path: Path) -> None:
    """34 times the default's was what one turn gave on a busy host."""
    lines: list[str] = []
    for seed in range(4):
        said = Notices()
        tuned(Machine(noise=1.0, seed=seed), tmp_path, 30.0, said)
        lines += (text for text in said.said if "could not tell all" in text)
    assert lines and not any("(could not tell)" in line for line in lines)
    assert any(" at batch 64, " in line or " at batch 128, " in line for line in lines)


def test_a_short_job_is_not_compiled_for(tmp_path: Path) -> None:
    machine = Machine(first_s=1.5)
    decided = tuned(machine, tmp_path, length=Length(steps=100, batch=64))
    assert won(decided)["loop", False] == DEFAULT.replace(precision="bf16")
    assert DEFAULT in machine.started
    long = tuned(Machine(first_s=1.5), tmp_path, length=Length(steps=10**6, batch=64))
    assert won(long)["loop", False]["compile"] == "default"


def test_the_race_leaves_a_comparison_the_time_that_it_takes(tmp_path: Path) -> None:
    """Without being told of it there is too little; with it the winner is held against fp32."""
    needs = Machine(verify_s=33.0)
    unaware = tuned(needs, tmp_path, budget_s=100.0)
    assert "ok" not in outcomes(unaware).values()
    told = Machine(verify_s=33.0)
    terms: dict[str, Any] = {"compare_s": 33.0, "compare_steps": 40}
    assert "ok" in outcomes(tuned(told, tmp_path, budget_s=100.0, **terms)).values()


def test_a_comparison_that_cannot_fit_takes_nothing_from_the_race(tmp_path: Path) -> None:
    """It says which budget would do, more where all is compiled anew; that one does."""
    terms: dict[str, Any] = {"compare_s": 300.0, "compare_steps": 40}
    budgets = []
    for draws in (False, True):
        machine, said = Machine(first_s=1.0, verify_s=300.0), Notices()
        decided = tuned(machine, tmp_path, said=said, **terms, draws=draws)
        assert not machine.compared
        assert won(decided)["loop", False]["compile"] == "default"
        told = re.findall(r"a budget of (\d+)s would do", " ".join(said.said))
        budgets.append(max(map(float, told)))
    assert budgets[0] < budgets[1]
    again = Machine(first_s=1.0, verify_s=300.0)
    assert "ok" in outcomes(tuned(again, tmp_path, budgets[1], **terms)).values()
