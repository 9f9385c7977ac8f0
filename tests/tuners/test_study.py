"""The search, on tables that take the place of a device."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest

from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.cache.task import PRECISIONS
from advisor.errors import WorkerError
from advisor.tuners import knobs
from advisor.tuners.measure.runner import TOO_SOON
from advisor.tuners.measure.runner import Built as Done
from advisor.tuners.search.journal import open_study
from advisor.tuners.search.memory import needed
from advisor.tuners.search.plan import SEARCH, Clock, Progress
from advisor.tuners.search.space import Space, ladder
from advisor.tuners.search.study import Scope, Search
from advisor.tuners.search.times import RACED

SPACE = Space(
    {
        "precision": ("default", "tf32", "bf16", "fp16"),
        "channels_last": (False, True),
        "cudnn_benchmark": (False, True),
        "batch_size": (64, 128, 256, 512),
    }
)


class Simulated:
    """Speeds by formula; more than `memory` samples do not fit; every trial takes a second."""

    def __init__(self, memory: int = 10**6) -> None:
        self.measured: list[Config] = []
        self.memory = memory
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def measure(self, config: Config, **_how: object) -> Measurement:
        self.measured.append(config)
        self.time += 1.0
        batch = int(config["batch_size"] or 0)
        if batch > self.memory:
            return Measurement(outcome="out_of_memory", reason="simulated")
        speed = {"default": 1.0, "tf32": 1.2, "bf16": 1.5, "fp16": 1.45}[str(config["precision"])]
        speed *= 1.3 if config["channels_last"] else 1.0
        speed *= 1.1 if config["cudnn_benchmark"] else 1.0
        rate = 1000 * speed * batch / (batch + 64)
        return Measurement(
            outcome="ok", samples_per_s=rate, low=rate, high=rate, step_s=0.001, peak_bytes=batch
        )

    def release(self) -> None:
        pass


class Seen(Progress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.notices: list[str] = []

    def tried(self, trial: Trial, spent_s: float) -> None:
        self.trials.append(trial)

    def notice(self, text: str) -> None:
        self.notices.append(text)


def search(
    runner: Simulated,
    folder: Path,
    name: str = "s",
    *,
    space: Space = SPACE,
    search_s: float = 1e6,
    seen: Seen | None = None,
    **scope: Any,
) -> Search:
    """`search_s`: of a budget of which the search has its share."""
    study, notice = open_study(folder, name)
    seen = seen or Seen()
    if notice:
        seen.notice(notice)
    clock = Clock(search_s / SEARCH, now=runner.now)
    return Search(runner, space, study, Scope(clock=clock, **scope), seen)


def test_finds_the_best_and_measures_nothing_twice(tmp_path: Path) -> None:
    runner = Simulated()
    found = search(runner, tmp_path)
    trials = found.run()
    assert len(runner.measured) == len(set(runner.measured)) == len(trials)
    best = found.best(64).config
    assert best == Config(precision="bf16", channels_last=True, cudnn_benchmark=True, batch_size=64)
    assert found.best().config["batch_size"] == 512


class Recomputing(Simulated):
    """Compiled is faster; what keeps less for its backward pass is slower, and fits."""

    def __init__(self, memory: int, *, full_at: float = 64) -> None:
        super().__init__()
        self.bytes, self.full_at = memory, full_at

    def measure(self, config: Config, **how: object) -> Measurement:
        found = super().measure(config, **how)
        share = float(config["activation_memory"] or 0)
        peak = int(config.batch * share)
        if peak > self.bytes:
            return Measurement(outcome="out_of_memory", reason="simulated")
        rate = 1000 * config.batch / (config.batch + self.full_at)
        rate *= (2 if config["compile"] == "default" else 1) * (0.9 + share / 10)
        return dataclasses.replace(
            found, samples_per_s=rate, low=rate, high=rate, peak_bytes=peak, first_step_s=10.0
        )


FREE = Space(
    {
        "precision": ("default",),
        "channels_last": (False,),
        "cudnn_benchmark": (False, True),
        "compile": ("none", "default"),
        "activation_memory": (1.0, 0.7, 0.5),
        "batch_size": (64, 128, 256),
    },
    conflicts={"activation_memory": {"compile": ("none",)}},
    dear=("compile",),
    frugal=("activation_memory",),
)


@pytest.mark.parametrize(
    ("runner", "tried"),
    [
        (Recomputing(memory=150), [0.7, 0.5]),  # 0.7 of 256 does not fit either
        (Recomputing(memory=200), [0.7]),
        (Recomputing(memory=300), []),  # all of it fits
        (Recomputing(memory=150, full_at=0.1), []),  # a larger batch is no faster
    ],
)
def test_less_is_kept_where_a_larger_batch_does_not_fit(
    runner: Recomputing, tried: list[float], tmp_path: Path
) -> None:
    found = search(runner, tmp_path, space=FREE, memory=runner.bytes)
    found.run()
    frugal = [one for one in runner.measured if one["activation_memory"] != 1.0]
    assert [one["activation_memory"] for one in frugal] == tried
    assert all(one.batch == 256 and one["compile"] == "default" for one in frugal)
    if tried:
        assert found.best().config == frugal[-1]


def test_the_default_comes_first(tmp_path: Path) -> None:
    runner = Simulated()
    search(runner, tmp_path, trials=3).run()
    assert runner.measured[0] == SPACE.default
    assert len(runner.measured) == 3


def test_the_budget_ends_the_search(tmp_path: Path) -> None:
    runner = Simulated()
    search(runner, tmp_path, search_s=5.0).run()
    assert len(runner.measured) <= 6


def test_no_larger_batch_after_out_of_memory(tmp_path: Path) -> None:
    runner = Simulated(memory=100)
    search(runner, tmp_path).run()
    failed: dict[Config, int] = {}
    for config in runner.measured:
        same, batch = config.without("batch_size"), int(config["batch_size"] or 0)
        assert batch < failed.get(same, 10**9)
        if batch > 100:
            failed[same] = batch


def test_an_interrupted_study_goes_on(tmp_path: Path) -> None:
    class Interrupted(Simulated):
        def measure(self, config: Config, **_how: object) -> Measurement:
            if len(self.measured) == 5:
                raise KeyboardInterrupt
            return super().measure(config, seconds=0.1)

    first = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        search(first, tmp_path).run()
    second = Simulated()
    resumed = search(second, tmp_path)
    assert [trial.config for trial in resumed.trials] == first.measured
    trials = resumed.run()
    assert not set(first.measured) & set(second.measured)
    assert len({trial.config for trial in trials}) == len(trials)


@pytest.mark.parametrize(("settled", "more"), [(False, 0), (True, 2)])
def test_the_time_of_a_run_that_ended_is_its_own(tmp_path: Path, settled: bool, more: int) -> None:
    """Each has time for two trials; those of one that was cut off count for the next."""
    first = search(Simulated(), tmp_path, search_s=1.5)
    first.run()
    if settled:
        first.settle()
    runner = Simulated()
    search(runner, tmp_path, search_s=1.5).run()
    assert len(runner.measured) == more


def test_a_command_that_ends_too_soon_says_nothing_of_a_config(tmp_path: Path) -> None:
    class TooSoon(Simulated):
        def measure(self, config: Config, **how: Any) -> Measurement:
            measured = super().measure(config, seconds=0.1)
            short = config["precision"] == "bf16"
            return Measurement(outcome="failed", reason=TOO_SOON) if short else measured

    first, second, third = TooSoon(), TooSoon(), Simulated()
    for runner in (first, second):
        found = search(runner, tmp_path)
        assert all(trial.measurement.ok for trial in found.run())
        assert len(runner.measured) == len(set(runner.measured))
    search(third, tmp_path).run()
    left = {config for config in first.measured if config["precision"] == "bf16"}
    assert left & set(second.measured)
    assert any(config["precision"] == "bf16" for config in third.measured)


def test_it_is_an_ordinary_optuna_study(tmp_path: Path) -> None:
    runner = Simulated()
    search(runner, tmp_path, name="abc", trials=8).run()
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "abc.journal"))
    )
    study = optuna.load_study(study_name="abc", storage=storage)
    assert len(study.trials) == 8
    assert study.best_value == max(
        t.measurement.samples_per_s for t in search(Simulated(), tmp_path, name="abc").trials
    )


def test_the_same_seed_gives_the_same_search(tmp_path: Path) -> None:
    one, two = Simulated(), Simulated()
    search(one, tmp_path, "one", seed=3).run()
    search(two, tmp_path, "two", seed=3).run()
    assert one.measured == two.measured


def test_a_default_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="simulated"):
        search(Simulated(memory=1), tmp_path).run()


def test_a_default_that_takes_longer_than_the_budget_is_told_one_that_is_enough(
    tmp_path: Path,
) -> None:
    class Slow(Simulated):
        def measure(self, config: Config, *, deadline_s: float, **_how: object) -> Measurement:
            self.time += min(deadline_s, 20.0)
            ok = deadline_s >= 20.0
            rate = 1.0 if ok else 0.0
            outcome, why = ("ok", "") if ok else ("timed_out", f"no answer within {deadline_s:g} s")
            return Measurement(outcome=outcome, reason=why, samples_per_s=rate, step_s=0.1)

    with pytest.raises(WorkerError, match=r"; give a budget of (\d+)s$") as raised:
        search(Slow(), tmp_path, search_s=SEARCH * 5.0).run()
    budget_s = float(re.findall(r"(\d+)s$", str(raised.value))[0])
    assert search(Slow(), tmp_path, "more", search_s=SEARCH * budget_s, trials=1).run()


def test_trials_are_reported_one_by_one(tmp_path: Path) -> None:
    seen = Seen()
    found = search(Simulated(), tmp_path, trials=4, seen=seen)
    assert found.run() == seen.trials


def test_ladder() -> None:
    assert ladder(64, fits=300) == (64, 128, 256)
    assert ladder(64, fits=10) == (64,)
    assert ladder(1, fits=10**9)[-1] == 256


def test_what_needs_a_scaler_is_not_compiled_first(tmp_path: Path) -> None:
    """On MobileNet fp16 led at a large batch, and the budget went into compiling that."""
    space = Space(
        SPACE.choices
        | {"precision": ("default", "bf16", "fp16"), "step_graph": (False, True)}
        | {"compile": ("none", "cudagraphs", "reduce-overhead", "default")},
        conflicts={"step_graph": {"compile": ("cudagraphs", "reduce-overhead")}},
        dear=("compile",),
    )

    class Fp16Leads(Simulated):
        def measure(self, config: Config, **how: object) -> Measurement:
            found = super().measure(config, **how)
            faster = 1.2 if config["precision"] == "fp16" else 1.0
            return dataclasses.replace(found, samples_per_s=faster * found.samples_per_s)

    trials = search(Fp16Leads(), tmp_path, space=space).run()
    dear = [t.config for t in trials if t.config["compile"] != "none" and t.origin == "leader"]
    assert [c["precision"] for c in dear[:4]] == ["bf16"] * 4
    recipes = [(c["compile"], c["step_graph"]) for c in dear[:4]]
    assert recipes == [
        ("cudagraphs", False),
        ("reduce-overhead", False),
        ("default", True),
        ("default", False),
    ]


def test_dear_knobs_are_tried_on_leaders_only(tmp_path: Path) -> None:
    space = Space(
        SPACE.choices | {"compile": ("none", "cudagraphs", "default")}, dear=("compile", "absent")
    )
    runner = Simulated()
    found = search(runner, tmp_path, space=space)
    trials = found.run()
    dear = [t for t in trials if t.config["compile"] != "none" and t.origin != "sampler"]
    at_user = [t.config["compile"] for t in dear if t.config.batch == 64]
    assert at_user in (
        ["cudagraphs", "default"],
        ["cudagraphs", "default"] * 2,
    )  # one leader or two
    # Once more at the batch that leads, the last of all.
    assert [t.config.batch for t in dear].index(512) == len(dear) - 1
    assert {t.origin for t in dear} == {"leader"}
    # Guesses leave the cheapest its time, where there is little.
    tight = search(Simulated(), tmp_path, "tight", space=space, search_s=SEARCH * 60).run()
    assert {t.config["compile"] for t in tight} == {"none", "cudagraphs"}
    short = search(Simulated(), tmp_path, "short", space=space, search_s=20)
    assert all(t.config["compile"] == "none" for t in short.run())


COMPILED = Space(
    SPACE.choices
    | {"precision": ("default", "bf16"), "step_graph": (False, True)}
    | {"compile": ("none", "cudagraphs", "reduce-overhead", "default")},
    conflicts={"step_graph": {"compile": ("cudagraphs", "reduce-overhead")}},
    dear=("compile",),
)
FIRST_S, AGAIN_S = {"cudagraphs": 4.0, "reduce-overhead": 30.0, "default": 20.0}, 3.0


class Built(Simulated):
    """Compiles as long as on an H200, and in AGAIN_S what was built before; a step waits for the
    host unless a graph replays it."""

    def __init__(self, room: int = 4, fails: str = "", *, silent: bool = False) -> None:
        super().__init__()
        self.most, self.fails, self.silent = room, fails, silent
        self.asked = 0
        self.groups: list[list[Config]] = []
        self.codes: set[Config] = set()

    def room(self, peak_bytes: int) -> int:
        assert peak_bytes > 0
        self.asked += 1
        return self.most

    def build(
        self, configs: Sequence[Config], *, room: int, deadline_s: float
    ) -> dict[Config, Done]:
        assert len(configs) <= room <= self.most
        self.groups.append(list(configs))
        built: dict[Config, Done] = {}
        if self.silent:
            return built
        for config in configs:
            took = FIRST_S[str(config["compile"])]
            outcome = "ok"
            if config["compile"] == self.fails:
                outcome, took = "timed_out", min(deadline_s, 90.0)
            else:
                self.codes.add(knobs.code(config))
            measured = Measurement(outcome=outcome, first_step_s=took)
            built[config] = Done(measurement=measured, seconds=took)
        self.time += max(one.seconds for one in built.values())
        return built

    def measure(self, config: Config, **how: Any) -> Measurement:
        found = super().measure(config)
        compile_ = str(config["compile"])
        first_s = FIRST_S.get(compile_, 0.1)
        if knobs.compiles(config) and knobs.code(config) in self.codes:
            first_s = AGAIN_S
        self.codes |= {knobs.code(config)} if knobs.compiles(config) else set()
        self.time += first_s
        graphed = config["step_graph"] or compile_ in ("cudagraphs", "reduce-overhead")
        rate = found.samples_per_s * (2 if graphed else 1) * (1.3 if "ul" in compile_ else 1)
        return dataclasses.replace(
            found, samples_per_s=rate, first_step_s=first_s, step_s=config.batch / rate
        )


def test_what_compiles_is_built_at_once_and_then_measured(tmp_path: Path) -> None:
    device = Built()
    seen = Seen()
    found = search(device, tmp_path, space=COMPILED, search_s=110.0, seen=seen, builder=device)
    trials = [t for t in found.run() if t.config["compile"] != "none"]
    first = device.groups[0]
    assert len(first) > 1 and "cudagraphs" not in {config["compile"] for config in first}
    assert len({knobs.code(config) for config in first}) == len(first)
    # What the host limits is tried as one graph over the compiled step before all else.
    assert (trials[0].config["compile"], trials[0].config["step_graph"]) == ("default", True)
    assert trials[0].measurement.first_step_s == FIRST_S["default"], "as with nothing compiled"
    assert found.again[trials[0].config] == AGAIN_S
    alone = search(Built(), tmp_path, "alone", space=COMPILED, search_s=110.0)
    fewer = [t for t in alone.run() if t.config["compile"] != "none"]
    assert len(trials) > len(fewer) > 0
    # What building took is borne by the trials.
    assert sum(trial.seconds for trial in seen.trials) == pytest.approx(device.time)


def test_what_has_no_time_to_be_built_at_once_is_compiled_one_after_the_other(
    tmp_path: Path,
) -> None:
    """On an H200 four builds were given up after 52 s, in which a script compiles one."""
    device = Built()
    found = search(device, tmp_path, space=COMPILED, search_s=55.0, builder=device)
    compiled = [t for t in found.run() if knobs.compiles(t.config)]
    assert not device.groups
    assert compiled and all(trial.measurement.ok for trial in compiled)


@pytest.mark.parametrize(("search_s", "first"), [(120.0, "reduce-overhead"), (400.0, "default")])
def test_of_a_large_model_the_one_compilation_there_is_time_for_is_what_more_scripts_can_follow(
    search_s: float, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EfficientNetV2-S takes 105 s; two thirds of the time left were 74 s."""
    monkeypatch.setitem(FIRST_S, "reduce-overhead", 105.0)
    monkeypatch.setitem(FIRST_S, "default", 105.0)
    space = Space(
        COMPILED.choices | {"compile": ("none", "reduce-overhead", "default")},
        conflicts={"step_graph": {"compile": ("reduce-overhead",)}},
        dear=("compile",),
        modules=714,
    )
    found = search(Built(), tmp_path, space=space, search_s=search_s)
    compiled = [t for t in found.run() if knobs.compiles(t.config)]
    assert compiled[0].measurement.ok
    assert (compiled[0].config["compile"], compiled[0].config.batch) == (first, 64)
    assert compiled[0].config["step_graph"] is (first == "default")
    # It is compiled once more for its comparison: no variant of it takes the time of that.
    assert first == "default" or len(compiled) == 1


def test_where_there_is_time_for_one_nobody_asks_how_many_have_room(tmp_path: Path) -> None:
    """A run hands over the calls of a step for that."""
    space = Space(
        COMPILED.choices | {"batch_size": (64,)},
        conflicts={"step_graph": {"compile": ("cudagraphs", "reduce-overhead")}},
        dear=("compile",),
    )
    short, long = Built(), Built()
    search(short, tmp_path, "short", space=space, search_s=55.0, builder=short).run()
    search(long, tmp_path, "long", space=space, search_s=165.0, builder=long).run()
    assert (short.asked, short.groups) == (1, []), "how long to go on before what compiles"
    assert long.asked > 1 and long.groups


def test_what_a_builder_says_nothing_of_is_tried_as_if_there_was_none(tmp_path: Path) -> None:
    device = Built(silent=True)
    search(device, tmp_path, space=COMPILED, search_s=1e4, builder=device).run()
    assert device.groups and {c for group in device.groups for c in group} <= set(device.measured)
    study, _notice = open_study(tmp_path, "s")
    assert not study.get_trials(states=(optuna.trial.TrialState.RUNNING,)), (
        "none is taken for interrupted"
    )


def test_a_build_that_fails_is_its_only_trial(tmp_path: Path) -> None:
    device = Built(fails="reduce-overhead")
    trials = search(device, tmp_path, space=COMPILED, search_s=1e4, builder=device).run()
    failed = [t for t in trials if not t.measurement.ok]
    assert failed and {t.config["compile"] for t in failed} == {"reduce-overhead"}
    assert {t.config for t in failed} <= {c for group in device.groups for c in group}
    assert not {t.config for t in failed} & set(device.measured)
    assert {"default", "cudagraphs"} <= {str(t.config["compile"]) for t in trials}


def test_where_one_compiles_at_a_time_none_is_built_before(tmp_path: Path) -> None:
    one, none = Built(room=1), Built()
    search(one, tmp_path, "one", space=COMPILED, search_s=165.0, builder=one).run()
    search(none, tmp_path, "none", space=COMPILED, search_s=165.0).run()
    assert one.groups == [] and one.measured == none.measured


@pytest.mark.parametrize("search_s", [30.0, 60.0, 165.0, 600.0])
def test_builds_keep_the_budget(tmp_path: Path, search_s: float) -> None:
    device = Built(fails="default")
    found = search(
        device, tmp_path, f"{search_s}", space=COMPILED, search_s=search_s, builder=device
    )
    found.run()
    budget_s = search_s / SEARCH
    assert device.time <= search_s + (budget_s - search_s) / 4 + found.clock.slack_s / 2


def test_the_number_of_trials_holds_for_what_is_built(tmp_path: Path) -> None:
    device = Built()
    trials = search(device, tmp_path, space=COMPILED, builder=device, trials=20).run()
    assert len(trials) == 20 and device.groups


def test_what_was_built_when_a_search_was_cut_off_is_tried_by_the_next(tmp_path: Path) -> None:
    class Interrupted(Built):
        def build(self, configs: Sequence[Config], **how: Any) -> dict[Config, Done]:
            raise KeyboardInterrupt

    first, second = Interrupted(), Built()
    with pytest.raises(KeyboardInterrupt):
        search(first, tmp_path, space=COMPILED, builder=first).run()
    search(second, tmp_path, space=COMPILED, builder=second).run()
    assert second.groups and not set(first.measured) & set(second.measured)


def test_compiling_takes_the_place_of_what_conflicts_with_it(tmp_path: Path) -> None:
    space = Space(
        SPACE.choices | {"step_graph": (False, True), "compile": ("none", "cudagraphs", "default")},
        conflicts={"step_graph": {"compile": ("cudagraphs",), "precision": ("fp16",)}},
        dear=("compile",),
    )
    graphed = space.default.replace(step_graph=True)
    assert space.combined(graphed, "compile", "default")["step_graph"] is True
    assert space.combined(graphed, "compile", "cudagraphs")["step_graph"] is False
    assert space.combined(graphed, "precision", "fp16") == space.default.replace(precision="fp16")
    assert all(
        space.holds(trial.config) for trial in search(Simulated(), tmp_path, space=space).run()
    )


def test_what_hangs_is_not_tried_on_the_next_leader(tmp_path: Path) -> None:
    class Hangs(Simulated):
        def measure(self, config: Config, **_how: object) -> Measurement:
            found = super().measure(config)
            if config["compile"] == "cudagraphs":
                return Measurement(outcome="timed_out", reason="simulated")
            # At a large batch another precision leads: two leaders.
            large = config["precision"] == "fp16" and int(config["batch_size"] or 0) > 64
            rate = found.samples_per_s * (2 if large else 1)
            return Measurement(
                outcome="ok", samples_per_s=rate, low=rate, high=rate, step_s=0.001, peak_bytes=1
            )

    space = Space(SPACE.choices | {"compile": ("none", "cudagraphs", "default")}, dear=("compile",))
    trials = search(Hangs(), tmp_path, space=space).run()
    tried = [t.config["compile"] for t in trials if t.config["compile"] != "none"]
    assert tried[:3] == ["cudagraphs", "default", "default"]
    assert "cudagraphs" not in tried[3:]


CUDA = Space(
    {
        "precision": ("default", "tf32", "bf16"),
        "cudnn_benchmark": (False, True),
        "step_graph": (False, True),
        "compile": ("none", "default"),
        "batch_size": (64, 128),
    },
    conflicts={"step_graph": {"compile": ("cudagraphs",)}},
    dear=("compile",),
)


def test_a_space_knows_its_uses_and_its_reference() -> None:
    here = knobs.Situation(device="cuda", capability=(9, 0), compiles=True)
    space = Space.of(here)
    assert space.uses == ("capture", "loop", "pilot", "flags")
    assert space.reference == space.default.replace(precision="fp32")
    plain = dataclasses.replace(here, step_graph=False, precisions=PRECISIONS)
    assert Space.of(plain).uses == ("loop", "pilot", "flags") and Space.of(plain).reference is None
    assert Space.of(knobs.Situation(device="cpu", cores=2, threads=2)).reference is None
    assert space.is_dear(space.default.replace(compile="default"))


class Graphed(Simulated):
    """One launch a step is worth twice any other knob."""

    def measure(self, config: Config, **how: object) -> Measurement:
        self.measured.append(config)
        self.time += 1.0
        rate = {"default": 100.0, "tf32": 120.0, "bf16": 150.0}[str(config["precision"])]
        rate *= 4.0 if config["step_graph"] else 1.0
        rate *= 1.3 if config["cudnn_benchmark"] else 1.0
        rate *= 1.2 if config["compile"] == "default" else 1.0
        return Measurement(
            outcome="ok", samples_per_s=rate, low=rate, high=rate, step_s=0.01, peak_bytes=1
        )


def test_each_use_finds_its_best_although_a_graph_leads(tmp_path: Path) -> None:
    found = search(Graphed(), tmp_path, space=CUDA)
    found.run()
    flags = CUDA.default.replace(precision="tf32", cudnn_benchmark=True)
    loop = flags.replace(precision="bf16", compile="default")
    assert found.best(64, "flags").config == flags
    assert found.best(64, "loop").config == loop
    assert found.best(64, "capture").config == loop.replace(step_graph=True)
    assert found.best(None, "flags").config.knobs == flags.knobs


def test_each_use_is_tried_at_the_batch_that_leads(tmp_path: Path) -> None:
    class Larger(Graphed):
        def measure(self, config: Config, **how: object) -> Measurement:
            found = super().measure(config)
            rate = found.samples_per_s * config.batch / 64
            return dataclasses.replace(found, samples_per_s=rate, low=rate, high=rate)

    found = search(Larger(), tmp_path, space=CUDA)
    early = [t for t in found.run() if t.origin in ("large", "climb") and t.config.batch == 128]
    tried = {knobs.use_of(trial.config, CUDA.default) for trial in early}
    assert tried >= {"flags", "pilot"}


def test_only_what_is_far_behind_is_measured_in_less_time(tmp_path: Path) -> None:
    class Floored(Graphed):
        fastest = 0.0

        def measure(self, config: Config, *, floor: float, **_how: object) -> Measurement:
            assert floor <= 0.6 * self.fastest
            found = super().measure(config)
            if not config["step_graph"]:
                assert floor <= 0.6 * 300.0  # of what needs no graph, that leads by far
            self.fastest = max(self.fastest, found.samples_per_s)
            return found

    runner = Floored()
    search(runner, tmp_path, space=CUDA).run()
    assert runner.fastest > 800.0


def test_a_knob_of_numbers_that_include_0_is_tried_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 is a value, not False; and torch's own may be another one."""
    knob = knobs.Knob(
        name="level",
        summary="made up",
        domain=knobs.Domain(most=4, least=0),
        default=2,
        values=lambda _here: (2, 0, 1, 4),
        needs=lambda _value: "flags",
        memory=True,
    )
    monkeypatch.setattr(knobs, "KNOBS", (*knobs.KNOBS, knob))
    monkeypatch.setattr(knobs, "BY_NAME", knobs.BY_NAME | {"level": knob})
    here = knobs.Situation(device="cpu", convolves=False, batches=(64, 128), cores=1)
    space = Space.of(here)
    assert space.default["level"] == 2 and space.uses == ("flags",)
    assert space.holds(space.default.replace(level=0))
    assert not space.holds(space.default.replace(level=False))
    assert not space.holds(space.default.replace(level=True))

    class Leveled(Simulated):
        def measure(self, config: Config, **_how: object) -> Measurement:
            self.measured.append(config)
            self.time += 1.0
            rate = {0: 300.0, 1: 120.0, 2: 100.0, 4: 110.0}[config["level"]]  # type: ignore[index]
            return Measurement(
                outcome="ok", samples_per_s=rate, low=rate, high=rate, step_s=0.01, peak_bytes=1
            )

    found = search(Leveled(), tmp_path, space=space)
    trials = found.run()
    assert found.best(64).config["level"] == 0
    assert {"guess"} == {t.origin for t in trials if t.config.batch == 64 and t.number > 0}
    assert all(type(trial.config["level"]) is int for trial in trials)
    assert search(Leveled(), tmp_path, space=space).trials == trials
    graph = found.best(64).config.changed(space.default)
    assert graph == Config(level=0) and knobs.described(graph) == "level=0"


def test_a_default_that_failed_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    class Crashes(Simulated):
        def measure(self, config: Config, **_how: object) -> Measurement:
            return Measurement(outcome="crashed", reason="the worker process died")

    class Interrupted(Simulated):
        def measure(self, config: Config, **_how: object) -> Measurement:
            raise KeyboardInterrupt

    for runner, error in ((Crashes(), WorkerError), *[(Interrupted(), KeyboardInterrupt)] * 3):
        with pytest.raises(error):
            search(runner, tmp_path).run()
    trials = search(Simulated(), tmp_path, trials=3).run()
    assert trials[0].config == SPACE.default and trials[0].measurement.ok


def test_another_config_is_not_tried_after_two_interruptions(tmp_path: Path) -> None:
    class Interrupted(Simulated):
        def measure(self, config: Config, **_how: object) -> Measurement:
            if config != SPACE.default:
                raise KeyboardInterrupt
            return super().measure(config)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            search(Interrupted(), tmp_path).run()
    runner = Simulated()
    search(runner, tmp_path).run()
    bad = Config(precision="tf32", channels_last=True, cudnn_benchmark=False, batch_size=64)
    assert bad not in runner.measured and len(runner.measured) > 5


def test_nothing_is_tried_that_cannot_fit_and_what_fits_is(tmp_path: Path) -> None:
    """Simulated takes as many bytes as samples: by 64 and 128 it is known that 256 does not fit."""
    trials = search(Simulated(), tmp_path, memory=200).run()
    expected = [needed(trials[:number], t.config) for number, t in enumerate(trials)]
    assert max(expected) <= 200
    assert any(0 < most <= 200 for most in expected)
    # With room for all, what is ruled out above is tried.
    trials = search(Simulated(), tmp_path, "roomy", memory=2000).run()
    expected = [needed(trials[:number], t.config) for number, t in enumerate(trials)]
    assert max(expected) > 200


def test_a_doubling_that_gains_little_ends_the_climb(tmp_path: Path) -> None:
    class Flat(Simulated):
        gain = 1.0

        def measure(self, config: Config, **_how: object) -> Measurement:
            self.measured.append(config)
            self.time += 1.0
            rate = 100.0 * self.gain ** [64, 128, 256, 512].index(config.batch)
            return Measurement(
                outcome="ok", samples_per_s=rate, low=rate, high=rate, step_s=0.01, peak_bytes=80
            )

    for gain, climbed in ((1.02, {128}), (1.05, {128, 256, 512})):
        runner = Flat()
        runner.gain = gain
        trials = search(runner, tmp_path, f"{gain}", memory=100).run()
        assert {t.config.batch for t in trials if t.origin == "climb"} == climbed


def test_every_trial_has_a_deadline_that_keeps_the_budget(tmp_path: Path) -> None:
    class Hangs(Simulated):
        """All but torch's default hang until they are given up."""

        def measure(self, config: Config, *, deadline_s: float, **_how: object) -> Measurement:
            if config == CUDA.default:
                return super().measure(config.replace(channels_last=False))
            self.time += deadline_s
            return Measurement(outcome="timed_out", reason="simulated")

    for budget in (3.0, 60.0, 300.0, 3600.0):
        runner = Hangs()
        search(runner, tmp_path, f"{budget:.0f}", space=CUDA, search_s=SEARCH * budget).run()
        # A quarter of what the search left is the race's, whatever is tried once more.
        assert runner.time <= budget * (1 - RACED * (1 - SEARCH)) + 2.0


def test_what_ran_out_of_time_is_tried_again_with_more(tmp_path: Path) -> None:
    class Slow(Simulated):
        def measure(self, config: Config, *, deadline_s: float, **_how: object) -> Measurement:
            if config["compile"] == "none":
                return super().measure(config.replace(channels_last=False))
            self.measured.append(config)
            self.time += min(deadline_s, 200.0)
            if deadline_s < 200.0:
                return Measurement(outcome="timed_out", reason="simulated")
            return Measurement(outcome="ok", samples_per_s=9e3, low=9e3, high=9e3, step_s=0.01)

    def compiled(budget: float) -> set[str]:
        found = search(Slow(), tmp_path, space=CUDA, search_s=budget)
        return {t.measurement.outcome for t in found.run() if t.config["compile"] != "none"}

    assert compiled(150.0) == {"timed_out"}
    assert "ok" in compiled(3600.0)


class Compiling(Simulated):
    """What compiles takes so long, however often it was begun."""

    def __init__(self, takes_s: float) -> None:
        super().__init__()
        self.takes_s = takes_s
        self.had: list[float] = []

    def measure(self, config: Config, *, deadline_s: float, **_how: object) -> Measurement:
        if config["compile"] == "none":
            return super().measure(config.replace(channels_last=False))
        self.measured.append(config)
        self.had.append(deadline_s)
        self.time += min(deadline_s, self.takes_s)
        if deadline_s < self.takes_s:
            return Measurement(outcome="timed_out", reason=f"no answer within {deadline_s:.0f} s")
        return Measurement(outcome="ok", samples_per_s=9e3, low=9e3, high=9e3, step_s=0.01)


WHOLE = Space(
    {"precision": ("default",), "cudnn_benchmark": (False,), "batch_size": (64,)}
    | {"compile": ("none", "default")},
    dear=("compile",),
)


def test_the_only_one_that_compiles_is_tried_once_more_with_what_a_search_left(
    tmp_path: Path,
) -> None:
    """Of 120 s a model had 45 to be compiled in, and 49 were left at the end."""
    runner = Compiling(50.5)
    found = search(runner, tmp_path, space=WHOLE, search_s=SEARCH * 120.0)
    found.run()
    first, again = runner.had
    assert first < 50.5 < again <= 120.0 - first
    assert [t.measurement.outcome for t in found.trials if t.config["compile"] != "none"] == ["ok"]
    assert found.left_out == []
    # Who goes on finds it measured.
    known = search(Compiling(50.5), tmp_path, space=WHOLE, search_s=SEARCH * 120.0)
    assert [t.measurement.outcome for t in known.trials if t.config["compile"] != "none"] == ["ok"]


def test_what_is_tried_once_more_leaves_the_race_its_time_where_there_is_one(
    tmp_path: Path,
) -> None:
    """A compiler that hung for 50 s and then for 50 more left 1.9x unraced."""
    space = Space(WHOLE.choices | {"precision": ("default", "bf16")}, dear=("compile",))
    for budget_s in (120.0, 300.0):
        runner = Compiling(1e3)
        search(runner, tmp_path, f"{budget_s}", space=space, search_s=SEARCH * budget_s).run()
        assert len(runner.had) == (1 if budget_s < 300 else 2)
        assert runner.time <= budget_s * (1 - 0.45 / 2) + 1.0


def test_what_ran_out_of_time_is_not_tried_again_in_as_long(tmp_path: Path) -> None:
    """It is told, with a budget that gives it longer."""
    runner = Compiling(1e3)
    found = search(runner, tmp_path, space=WHOLE, search_s=SEARCH * 80.0)
    found.run()
    (had,) = runner.had
    (line,) = found.left_out
    assert line.startswith(f"compile=default was not measured: no answer within {had:.0f} s")
    budget_s = float(re.findall(r"a budget of (\d+)s gives it longer", line)[0])
    larger = Compiling(1e3)
    search(larger, tmp_path, "larger", space=WHOLE, search_s=SEARCH * budget_s).run()
    assert max(larger.had) > had


@pytest.mark.parametrize("kept_s", [0.0, 15.0])
def test_where_nothing_was_compiled_the_budget_that_would_do_is_told(
    kept_s: float, tmp_path: Path
) -> None:
    def searched(name: str, whole_s: float) -> Search:
        study, _notice = open_study(tmp_path, name)
        runner = Compiling(38.0)
        share = kept_s / 50.0
        clock = Clock(whole_s, kept_s=share * whole_s, now=runner.now)
        found = Search(runner, WHOLE, study, Scope(clock=clock), Seen())
        found.run()
        return found

    short = searched("short", 50.0)
    assert not any(WHOLE.is_dear(trial.config) for trial in short.trials)
    (line,) = short.left_out
    assert line.startswith("nothing was compiled: that needs 40 s")
    budget_s = float(re.findall(r"a budget of (\d+)s would do", line)[0])
    assert budget_s > 50.0
    enough = searched("enough", budget_s)
    assert any(WHOLE.is_dear(t.config) and t.measurement.ok for t in enough.trials)
    assert enough.left_out == []


def test_the_number_of_trials_is_no_want_of_time(tmp_path: Path) -> None:
    found = search(Compiling(38.0), tmp_path, space=WHOLE, search_s=SEARCH * 60.0, trials=2)
    found.run()
    assert found.left_out == []


def test_the_number_of_trials_and_the_search_share_hold(tmp_path: Path) -> None:
    for count in (1, 2, 7):
        runner = Simulated()
        search(runner, tmp_path, f"{count}", trials=count).run()
        assert len(runner.measured) == count


def test_any_sampler_of_optuna_can_take_the_last_stage(tmp_path: Path) -> None:
    runner = Simulated()
    sampler = optuna.samplers.TPESampler(seed=1)
    found = search(runner, tmp_path, sampler=sampler, trials=24)
    found.run()
    assert len(runner.measured) == len(set(runner.measured))
    assert "sampler" in {trial.origin for trial in found.trials}


FED = Space(
    {
        "precision": ("default", "tf32", "bf16"),
        "cudnn_benchmark": (False, True),
        "num_workers": (0, 2, 4, 8),
        "pin_memory": (False, True),
        "batch_size": (64,),
    },
    conflicts={"pin_memory": {"num_workers": (0,)}},
)


class Loaded(Simulated):
    """A run whose batches take so many milliseconds to load, in one process or several; `crowd`:
    how much slower each worker makes the others, and `waiting` bf16, where it waits.
    """

    def __init__(self, load_ms: float, *, crowd: float = 0.0, waiting: float = 1.0) -> None:
        super().__init__()
        self.load_ms, self.crowd, self.waiting = load_ms, crowd, waiting

    def measure(self, config: Config, **_how: object) -> Measurement:
        self.measured.append(config)
        compiled = config.get("compile", "none") != "none"
        self.time += 20.0 if compiled and knobs.code(config) not in self._compiled() else 1.0
        step_ms = {"default": 100.0, "tf32": 50.0, "bf16": 10.0}[str(config["precision"])]
        step_ms /= 4.0 if compiled else 1.0
        workers = int(config["num_workers"] or 0)
        load_ms = self.load_ms * (1 + self.crowd * max(0, workers - 1)) / max(1, workers)
        waited_ms = max(0.0, load_ms - step_ms) if workers else load_ms
        if waited_ms and config["precision"] == "bf16":
            step_ms, waited_ms = step_ms * self.waiting, waited_ms * self.waiting
        whole_s = (step_ms + waited_ms) / 1000
        return Measurement(
            outcome="ok",
            samples_per_s=64 / whole_s,
            step_s=whole_s,
            waited=waited_ms / 1000 / whole_s,
        )

    def _compiled(self) -> set[Config]:
        return {knobs.code(config) for config in self.measured[:-1]}


def fed(trials: Sequence[Trial]) -> list[tuple[str, object, object]]:
    return [(t.origin, t.config["num_workers"], t.config["precision"]) for t in trials]


def test_what_waits_for_its_data_is_given_workers_first(tmp_path: Path) -> None:
    found = search(Loaded(300.0), tmp_path, space=FED)
    # Four workers hide all of it. What computes faster waits again, and is given more at once.
    trials = found.run()
    assert fed(trials)[:7] == [
        ("default", 0, "default"),
        ("loading", 2, "default"),
        ("loading", 4, "default"),
        ("guess", 4, "bf16"),
        ("loading", 8, "bf16"),
        ("loading", 8, "bf16"),
        ("guess", 8, "tf32"),
    ]
    # What workers load is pinned from the first, where that is offered; without that comes last.
    pinned = [t.config["pin_memory"] for t in trials[1:7]]
    assert pinned == [True, True, True, True, False, True]
    assert {workers for origin, workers, _ in fed(trials) if origin == "sampler"} == {8}


def test_what_does_not_wait_is_fed_as_it_is(tmp_path: Path) -> None:
    runner = Loaded(0.1)
    search(runner, tmp_path, space=FED).run()
    assert {config["num_workers"] for config in runner.measured} == {0}


def test_what_waits_once_it_computes_faster_is_given_workers_then(tmp_path: Path) -> None:
    runner = Loaded(2.0)
    found = search(runner, tmp_path, space=FED)
    assert fed(found.run())[:3] == [
        ("default", 0, "default"),
        ("guess", 0, "bf16"),
        ("loading", 2, "bf16"),
    ]
    assert found.best().config["num_workers"] == 2


def test_what_would_lead_if_it_were_fed_is_fed(tmp_path: Path) -> None:
    """Of ResNet-50 on four workers' JPEG files TF32, which they fed, measured faster than bf16,
    which waited a fifth of its time; no config had more workers, at half the speed there was."""
    space = Space(FED.choices | {"channels_last": (False, True)})  # TF32 is guessed first
    found = search(Loaded(200.0, waiting=1.1), tmp_path, space=space)
    trials = found.run()
    rates = {
        t.config["precision"]: t.measurement.samples_per_s
        for t in trials
        if t.config["num_workers"] == 4 and t.config["pin_memory"]
    }
    assert rates["tf32"] > rates["bf16"]
    best = found.best().config
    assert (best["precision"], best["num_workers"]) == ("bf16", 8)


def test_workers_that_gain_nothing_are_tried_once(tmp_path: Path) -> None:
    """Two of them load as much as any: what computes faster waits, and is not given more again."""
    runner = Loaded(300.0, crowd=1.0)
    trials = search(runner, tmp_path, space=FED).run()
    loading = [t.config.only("num_workers", "pin_memory") for t in trials if t.origin == "loading"]
    assert [tuple(one.values()) for one in loading] == [(2, True), (4, True), (2, False)]


def test_what_compiled_is_fed_although_the_search_is_over(tmp_path: Path) -> None:
    space = Space(FED.choices | {"compile": ("none", "default")}, dear=["compile"])
    runner = Loaded(60.0)
    found = search(runner, tmp_path, space=space, search_s=60.0)
    trials = found.run()
    compiled = [t for t in trials if t.config["compile"] != "none"]
    spent_s = found.clock.spent_s
    assert [t.config["num_workers"] for t in compiled][-1] == 8, fed(trials)
    assert spent_s < found.clock.budget_s


def test_what_is_dear_is_tried_on_what_waits_no_more(tmp_path: Path) -> None:
    runner = Loaded(2.0)
    space = Space(FED.choices | {"compile": ("none", "default")}, dear=["compile"])
    search(runner, tmp_path, space=space).run()
    compiled = [config for config in runner.measured if config["compile"] != "none"]
    assert compiled and {config["num_workers"] for config in compiled} == {2}
