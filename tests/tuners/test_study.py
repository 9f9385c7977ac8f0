"""The search, on tables that take the place of a device."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.errors import WorkerError
from advisor.tuners.search.space import Space, ladder
from advisor.tuners.search.study import Search, open_study

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


def search(runner: Simulated, folder: Path, name: str = "s", **how: object) -> Search:
    given = {"space": SPACE, "share_s": 0.1, "budget_s": 1e6, "now": runner.now} | how
    return Search(runner, study=open_study(folder, name), **given)  # type: ignore[arg-type]


def test_finds_the_best_and_measures_nothing_twice(tmp_path: Path) -> None:
    runner = Simulated()
    found = search(runner, tmp_path)
    trials = found.run()
    assert len(runner.measured) == len(set(runner.measured)) == len(trials)
    best = found.best(64).config
    assert best == Config(precision="bf16", channels_last=True, cudnn_benchmark=True, batch_size=64)
    assert found.best().config["batch_size"] == 512


def test_the_default_comes_first(tmp_path: Path) -> None:
    runner = Simulated()
    search(runner, tmp_path, limit=3).run()
    assert runner.measured[0] == SPACE.default
    assert len(runner.measured) == 3


def test_the_budget_ends_the_search(tmp_path: Path) -> None:
    runner = Simulated()
    search(runner, tmp_path, budget_s=5.0).run()
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


def test_it_is_an_ordinary_optuna_study(tmp_path: Path) -> None:
    runner = Simulated()
    search(runner, tmp_path, name="abc", limit=8).run()
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


def test_trials_are_reported_one_by_one(tmp_path: Path) -> None:
    seen: list[Trial] = []
    found = search(Simulated(), tmp_path, limit=4, on_trial=seen.append)
    assert found.run() == seen


def test_ladder() -> None:
    assert ladder(64, fits=300) == (64, 128, 256)
    assert ladder(64, fits=10) == (64,)
    assert ladder(1, fits=10**9)[-1] == 256


def test_dear_knobs_are_tried_on_leaders_only(tmp_path: Path) -> None:
    space = Space(
        SPACE.choices | {"compile": ("none", "cudagraphs", "default")}, dear=("compile", "absent")
    )
    runner = Simulated()
    found = search(runner, tmp_path, space=space)
    trials = found.run()
    dear = [t for t in trials if t.config["compile"] != "none" and t.origin != "sampler"]
    tried = [t.config["compile"] for t in dear]
    assert tried in (["cudagraphs", "default"], ["cudagraphs", "default"] * 2)  # one leader or two
    assert {t.config["batch_size"] for t in dear} == {64}
    assert {t.origin for t in dear} == {"leader"}
    short = search(Simulated(), tmp_path, "short", space=space, budget_s=20)
    assert all(t.config["compile"] == "none" for t in short.run())


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
