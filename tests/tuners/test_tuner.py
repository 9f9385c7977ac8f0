"""The search on simulated machines: visited configs, advice, failures and interruptions."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.errors import TargetFailed, WorkerError
from advisor.tuners import knobs
from advisor.tuners.length import Length
from advisor.tuners.measure.runner import UNVERIFIED, Block, Compared
from advisor.tuners.search.journal import open_study
from advisor.tuners.search.plan import Clock, Progress
from advisor.tuners.search.recipe import Recipe
from advisor.tuners.search.tuner import NUMERICS, tuned_loader
from tests.builders import GAINS, Heard, MadeUp, advised, space, speedup, tuned

SPACE = space()
BASE = SPACE.default
HALF = BASE.replace(precision="bf16", channels_last=True)
LEADER = HALF.replace(compile="reduce-overhead")
WRONG_CODE = {("compile", "reduce-overhead"): Compared("wrong", "a gradient is 10% off", "code")}
UNVERIFIED_CODE = {("compile", "reduce-overhead"): Compared(UNVERIFIED, "not verified: draws")}
RACED = {("compile", "reduce-overhead"): "crashed", ("precision", "tf32"): "crashed"}
WRONG_FORMAT = {("precision", "bf16"): Compared("wrong", "the loss is off", "format")}
WRONG_LAYOUT = {("channels_last", True): Compared("wrong", "a gradient is 10% off", "code")}
WRONG_FUSED = {("fused_optimizer", True): Compared("wrong", "weights differ", "optimizer")}


def is_near(machine: MadeUp, config: Config, best: Config, within: float = 0.95) -> bool:
    return machine.speedup(config) >= within * machine.speedup(best)


@pytest.mark.parametrize(
    ("verdicts", "never", "best"),
    [
        ({}, None, LEADER.replace(fused_optimizer=True)),
        (WRONG_CODE, ("compile", "reduce-overhead"), HALF.replace(compile="default")),
        (UNVERIFIED_CODE, ("compile", "reduce-overhead"), HALF.replace(compile="default")),
        (WRONG_FORMAT, ("precision", "bf16"), BASE.replace(precision="tf32", channels_last=True)),
        (WRONG_LAYOUT, ("channels_last", True), LEADER.replace(channels_last=False)),
        (WRONG_FUSED, ("fused_optimizer", True), LEADER),
    ],
)
def test_only_faster_and_verified_configs_lead(
    verdicts: dict[tuple[str, object], Compared], never: tuple[str, object] | None, best: Config
) -> None:
    machine, heard = MadeUp(BASE, verdicts=verdicts), Heard()
    found = tuned(machine, SPACE, 200.0, heard=heard)
    for config in (*heard.best, advised(found)):
        assert never is None or never not in config.items()
    assert any(line.startswith("compiling: compile=") for line in heard.phases)
    assert is_near(machine, advised(found), best)
    speeds = [machine.speedup(config) for config in heard.best]
    assert all(after > 0.97 * before for before, after in pairwise(speeds))
    for pair, verdict in verdicts.items():
        compared = [c for c in machine.compared if pair in c.items()]
        # A wrong value is compared once. Each one has a remark.
        if verdict.outcome == "wrong" and verdict.blames != "format":
            assert len(compared) == 1
        why = "could not be compared" if verdict.outcome == UNVERIFIED else "not train like fp32"
        assert any(why in line for line in found.remarks), found.remarks
    assert machine.time <= 1.05 * 200


@pytest.mark.parametrize("verdicts", [{}, WRONG_CODE, UNVERIFIED_CODE, WRONG_FORMAT, WRONG_LAYOUT])
def test_in_a_real_run_a_config_makes_no_step_before_it_passed(
    verdicts: dict[tuple[str, object], Compared],
) -> None:
    class RealRun(MadeUp):
        def block(self, config: Config, steps: int, **how: Any) -> Block:
            assert config in self.compared or not knobs.needs_comparison(config, BASE)
            assert self.verdicts.keys().isdisjoint(config.items())
            return super().block(config, steps, **how)

    machine, heard = RealRun(BASE, verdicts=verdicts), Heard()
    found = tuned(machine, SPACE, 200.0, heard=heard, real=True)
    assert machine.speedup(advised(found)) > 2
    for pair, verdict in verdicts.items():
        reasons = {one.measurement.reason for one in heard.trials if pair in one.config.items()}
        assert reasons == {verdict.reason}
        assert {one for one in machine.compared if pair in one.items()} <= set(machine.forgotten)


@pytest.mark.parametrize(
    "stop",
    [KeyboardInterrupt(), WorkerError("the process is gone"), TargetFailed("step 400 raised")],
    ids=lambda stop: type(stop).__name__,
)
def test_interrupted_search_keeps_the_best_so_far(stop: BaseException) -> None:
    whole = MadeUp(BASE)
    tuned(whole, SPACE, 90.0)
    first, second = map(whole.blocks.index, list(dict.fromkeys(whole.blocks))[1:3])
    ctrl_c = isinstance(stop, KeyboardInterrupt)
    # No config has been compared with the baseline yet.
    with nullcontext() if ctrl_c else pytest.raises(type(stop)):
        assert advised(tuned(MadeUp(BASE, stops={first + 1: stop}), SPACE, 90.0)) == BASE
    for number in range(second + 1, len(whole.blocks), 29):
        machine, heard = MadeUp(BASE, stops={number: stop}), Heard()
        found = tuned(machine, SPACE, 90.0, heard=heard)
        assert found.interrupted == ctrl_c and not found.complete
        assert is_near(machine, advised(found), heard.best[-1], 0.97), number
        assert ctrl_c or any(str(stop) in line for line in heard.notices)


def test_search_without_a_measured_baseline_raises() -> None:
    with pytest.raises(KeyboardInterrupt):
        tuned(MadeUp(BASE, stops={1: KeyboardInterrupt()}), SPACE)
    with pytest.raises(WorkerError, match="could not be measured"):
        tuned(MadeUp(BASE, fails={("compile", "none"): "failed"}), SPACE)


@pytest.mark.parametrize(
    ("fails", "best"),
    [
        ({("compile", "reduce-overhead"): "failed"}, HALF.replace(compile="default")),
        ({("compile", "reduce-overhead"): "out_of_memory"}, HALF.replace(compile="default")),
        ({("compile", "reduce-overhead"): "hangs"}, HALF),
        ({("fused_optimizer", True): "failed"}, LEADER),
        ({("precision", "bf16"): "failed"}, LEADER.replace(precision="tf32")),
        ({("channels_last", True): "failed"}, LEADER.replace(channels_last=False)),
        (dict.fromkeys([("compile", v) for v in SPACE.choices["compile"][1:]], "failed"), HALF),
    ],
)
def test_failed_value_is_not_advised(fails: dict[tuple[str, object], str], best: Config) -> None:
    machine = MadeUp(BASE, fails=fails)
    found = tuned(machine, SPACE, 100.0)
    assert is_near(machine, advised(found), best)
    assert machine.time <= 1.05 * 100 + 1


@pytest.mark.parametrize(("compiling_s", "budget_s"), [(44.0, 90.0), (50.0, 100.0)])
def test_no_second_compilation_without_enough_time(compiling_s: float, budget_s: float) -> None:
    """The first compiled mode is wrong. Another one would use up the remaining budget."""
    machine, heard = MadeUp(BASE, verdicts=WRONG_CODE), Heard()
    machine.compiling_s = compiling_s
    found = tuned(machine, SPACE, budget_s, heard=heard)
    assert all(trial.measurement.ok for trial in heard.trials)
    assert machine.time <= budget_s and machine.speedup(advised(found)) > 2


@pytest.mark.parametrize("step_s", [0.001, 1 / 30, 0.4, 3.0])
def test_search_ends_within_105_percent_of_its_budget(step_s: float) -> None:
    """With short steps, a larger budget gives no worse advice (up to 3%, because of noise)."""
    speedups = []
    for budget_s in (18.0, 33.0, 61.0, 140.0):
        machine = MadeUp(BASE, step_s=step_s, noise=0.01)
        found = tuned(machine, SPACE, budget_s)
        assert machine.time <= 1.05 * budget_s + 0.2
        speedups.append(machine.speedup(advised(found)))
    if step_s <= 1 / 30:
        assert all(more >= 0.97 * less for less, more in pairwise(speedups)), speedups
        assert speedups[0] >= 1.4 and speedups[2] >= 0.95 * speedups[-1]
    assert min(speedups) >= 1.0


def test_interrupted_search_resumes_from_its_journal(tmp_path: Path) -> None:
    """The later run has less time than the first compilation took."""
    for number in (40, 80):
        name = f"s{number}"
        machine = MadeUp(BASE, stops={number: KeyboardInterrupt()})
        tuned(machine, SPACE, 90.0, study=open_study(tmp_path, name)[0])
        again, heard = MadeUp(BASE), Heard()
        again.compiling_s = 5.0  # the compiler's cache is warm
        found = tuned(again, SPACE, 60.0, study=open_study(tmp_path, name)[0], heard=heard)
        assert is_near(again, advised(found), LEADER)
        origins = {trial.config: trial.origin for trial in heard.trials}
        # It repeats only the leader, for the race, and the configs that were cut off.
        repeated = {config for config, origin in origins.items() if origin != "earlier run"}
        assert repeated & {*machine.blocks} - {BASE} <= {*machine.blocks[number - 1 :]}
        assert len(found.trials) > len(heard.trials)
    # Configs without enough time in the first run are tried again.
    machine = MadeUp(BASE)
    tuned(machine, SPACE, 26.0, study=open_study(tmp_path, "short")[0])
    again = MadeUp(BASE)
    found = tuned(again, SPACE, 90.0, study=open_study(tmp_path, "short")[0])
    assert is_near(again, advised(found), LEADER)


def test_near_record_is_visited_first_without_values_outside_the_space() -> None:
    machine, heard = MadeUp(BASE), Heard()
    record = LEADER.replace(fused_optimizer=True, threads=2)
    tuned(machine, SPACE, 90.0, heard=heard, first=[record])
    assert heard.configs[1] == LEADER.replace(fused_optimizer=True)
    assert heard.trials[1].origin == "near record"


@pytest.mark.parametrize(
    ("length", "first", "compiled"),
    [
        (Length(batch=64, steps=10**6), (), True),
        (Length(batch=64, steps=300), (LEADER,), False),
        (Length(batch=64, seconds=20.0), (), False),
    ],
)
def test_compiling_is_not_advised_for_a_short_job(
    length: Length, first: tuple[Config, ...], compiled: bool
) -> None:
    machine = MadeUp(BASE)
    found = tuned(machine, SPACE, 100.0, length=length, first=first)
    assert (advised(found)["compile"] == "reduce-overhead") is compiled
    assert advised(found)["precision"] == "bf16"
    chosen = next(one.choice for one in found.winners if one.use == "pilot")
    # The first step includes compiling, even if another config compiled the same code.
    assert (chosen.first_step_s > 20) is compiled


@pytest.mark.parametrize(
    ("verdicts", "budget_s", "config", "reason"),
    [
        (WRONG_CODE, 100.0, "compile=reduce-overhead, bf16: 2.8", "does not train like fp32"),
        (UNVERIFIED_CODE, 100.0, "compile=reduce-overhead, bf16: 2.8", "could not be compared"),
        ({}, 90.0, "compile=cudagraphs: 1.6", "another config is as fast or faster"),
        ({}, 20.0, "not measured for want of time", "--budget"),
    ],
    ids=["wrong", "unverified", "slower", "no time"],
)
def test_remarks_name_faster_configs_that_are_not_advised(
    verdicts: dict[tuple[str, object], Compared], budget_s: float, config: str, reason: str
) -> None:
    found = tuned(MadeUp(BASE, verdicts=verdicts), SPACE, budget_s)
    assert [line for line in found.remarks if config in line and reason in line], found.remarks
    names = [line.split(":")[0] for line in found.remarks]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [({"noise": 2.0}, 1.5, 9.0), ({"gains": {}}, 1.0, 1.0), ({"fails": RACED}, 1.3, 1.5)],
    ids=["noise", "slower", "fails"],
)
def test_race_decides_unless_it_is_too_noisy(changes: Any, least: float, most: float) -> None:
    """The machine changes when the race begins."""
    machine, truth = MadeUp(BASE), MadeUp(BASE)

    class ChangeAtRace(Heard):
        def phase(self, what: str) -> None:
            if what.startswith("final race"):
                vars(machine).update(changes)

    found = tuned(machine, SPACE, 150.0, heard=ChangeAtRace())
    assert (advised(found) == BASE) is (least == 1.0) and truth.speedup(advised(found)) >= least
    assert truth.speedup(advised(found)) <= most
    failed = {one.config for one in found.trials if one.origin == "final race"}
    assert bool(failed) == ("fails" in changes)
    assert failed.isdisjoint(one.config for one in found.trials if one.measurement.samples_per_s)


@pytest.mark.parametrize(("budget_s", "short"), [(10.0, True), (20.0, False), (90.0, False)])
def test_notice_of_a_short_budget_names_one_that_suffices(budget_s: float, short: bool) -> None:
    heard = Heard()
    found = tuned(MadeUp(BASE), SPACE, budget_s, heard=heard)
    assert any("a budget of 10s is too short" in line for line in heard.notices) is short
    for line in [one for one in found.remarks if "--budget" in one]:
        machine, advised_s = MadeUp(BASE), float(line.split("--budget ")[1].split("s")[0])
        assert is_near(machine, advised(tuned(machine, SPACE, advised_s)), LEADER)


def test_busy_host_does_not_change_the_advised_threads() -> None:
    """The load slows the script except with one thread."""
    knob_space = space("cpu", cores=2, threads=2, convolves=False)

    class Busy(MadeUp):
        loads: tuple[float, ...] = (1.0,)

        def _seconds(self, config: Config) -> tuple[float, float]:
            step_s, waited_s = super()._seconds(config)
            return step_s * (draw.choice(self.loads) if config["threads"] == 2 else 1.0), waited_s

    draw = random.Random(1)
    machine = Busy(knob_space.default, gains={("threads", 1): 0.8})
    assert advised(tuned(machine, knob_space, 60.0)) == knob_space.default
    machine = Busy(knob_space.default, gains={("threads", 1): 0.8})
    machine.loads = (3.0, 4.0, 8.0)
    found = tuned(machine, knob_space, 60.0)
    assert advised(found) == knob_space.default
    assert any("the host is busy" in line for line in found.remarks)


def varying_load(seed: int, mean_s: float) -> Callable[[float], float]:
    """Return a load that makes steps take 0.2 to 5 times as long, in intervals."""
    draw = random.Random(seed)
    ends, levels = [0.0], [1.0]
    while ends[-1] < 1000:
        ends.append(ends[-1] + draw.expovariate(1 / mean_s))
        levels.append(1.0 if draw.random() < 0.5 else 5.0 ** draw.uniform(-1, 1))

    def load(time: float) -> float:
        return next(level for end, level in zip(ends, levels, strict=True) if time <= end)

    return load


@pytest.mark.parametrize("gains", [GAINS, {}], ids=["gains", "nothing gains"])
@pytest.mark.parametrize("mean_s", [0.5, 2.0, 10.0])
def test_advice_survives_other_load(gains: dict[tuple[str, object], float], mean_s: float) -> None:
    speedups = []
    for seed in range(2):
        machine = MadeUp(BASE, gains=gains, seed=seed, load=varying_load(seed, mean_s))
        found = tuned(machine, SPACE, 90.0, seed=seed)
        truth = machine.speedup(advised(found))
        assert 1 / 1.3 <= speedup(found) / truth <= 1.3, (seed, speedup(found), truth)
        speedups.append(truth)
    if not gains:
        assert max(speedups) == 1.0
    elif mean_s >= 2:
        assert sum(one > 1.4 for one in speedups) >= 1


def test_compiled_code_is_saved_and_code_that_does_not_lead_is_freed(tmp_path: Path) -> None:
    machine = MadeUp(BASE)
    found = tuned(machine, SPACE, 100.0, folder=tmp_path)
    assert set(found.artifacts) == {c for c in machine.saved if c["compile"] != "none"}
    assert all(file.read_bytes() == b"compiled" for file in found.artifacts.values())
    assert advised(found) not in machine.forgotten
    assert len(set(machine.blocks) - set(machine.forgotten)) <= 5


def test_trials_and_most_s_limit_the_search() -> None:
    heard = Heard()
    machine = MadeUp(BASE)
    tuned(machine, SPACE, 150.0, heard=heard, trials=4, compares=False)
    assert len(heard.trials) == 4 and machine.compared == []
    heard = Heard()
    found = tuned(MadeUp(BASE), SPACE, 150.0, heard=heard, most_s=20.0)
    assert not any(config["compile"] in ("default", "reduce-overhead") for config in heard.configs)
    assert not any("--budget" in line for line in found.remarks)


def test_comparison_counts_for_all_loader_settings_of_the_same_code() -> None:
    """Each of these configs has a NUMERICS trial in the record."""
    knob_space = space(workers=8)
    machine = MadeUp(knob_space.default)
    machine.waits_s = lambda config: 1 / (20 * max(1, knobs.workers(config)))
    found = tuned(machine, knob_space, 120.0)
    compared = [trial.config for trial in found.trials if trial.stage == NUMERICS]
    assert len({knobs.workers(config) for config in compared}) > 1
    codes = {config.without(*knobs.INPUT_PIPELINE) for config in compared}
    visited = {trial.config for trial in found.trials if trial.stage != NUMERICS}
    assert {one for one in visited if one.without(*knobs.INPUT_PIPELINE) in codes} <= set(compared)
    assert len(machine.compared) == len(codes)


def test_sampler_continues_after_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a recipe it finds the same gains. Without gains it ends after one visit per knob."""
    no_steps: Callable[[Any], Any] = lambda _recipe: iter(())  # noqa: E731
    monkeypatch.setattr(Recipe, "__iter__", no_steps)
    wide = space(use="capture", precisions=("default", "tf32", "bf16", "fp16"), compiles=False)
    machine, heard, again = MadeUp(wide.default), Heard(), Heard()
    found = tuned(machine, wide, 60.0, heard=heard)
    tuned(MadeUp(wide.default), wide, 60.0, heard=again)
    assert again.configs == heard.configs, "the seed decides"
    no_gains = Heard()
    tuned(MadeUp(wide.default, gains={}), wide, 600.0, heard=no_gains)
    assert len(no_gains.trials) == 1 + sum(len(some) > 1 for some in wide.choices.values())
    assert {trial.origin for trial in heard.trials} == {"baseline", "sampler"}
    assert machine.speedup(advised(found, "capture")) >= 2.3
    assert len(set(heard.configs)) == len(heard.configs)


@pytest.mark.parametrize(("batches_per_s", "workers"), [(30, 4), (1000, 0), (8, 8)])
def test_loader_keeps_up_with_the_leading_step(batches_per_s: float, workers: int) -> None:
    """`batches_per_s`: of each worker. The leading step takes 86 batches per second."""
    knob_space = space(use="capture", workers=8, loaded=True, step_graph=False)
    machine = MadeUp(knob_space.default)
    found = tuned(machine, knob_space, 90.0)
    machine.waits_s = lambda config: 1 / (batches_per_s * max(1, knobs.workers(config)))
    clock = Clock(60.0, now=machine.now)
    fed = tuned_loader(machine, knob_space, advised(found, "loop"), found, clock, Progress())
    assert knobs.workers(fed.input) == workers
    assert (fed.winners, fed.complete) == (found.winners, True) and clock.spent_s <= 63
    assert {trial.stage for trial in fed.trials[len(found.trials) :]} == {knobs.INPUT}
    assert any("the loader limits " in line for line in fed.remarks) is (batches_per_s == 8)
