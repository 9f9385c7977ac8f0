"""The order in which configs are visited."""

from __future__ import annotations

from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.tuners.knobs import compiles
from advisor.tuners.search.plan import Progress
from advisor.tuners.search.race import SearchResult
from advisor.tuners.search.space import Space
from tests.builders import GAINS, Heard, MadeUp, advised, space, speedup, tuned


def visits(machine: MadeUp, knobs: Space, budget_s: float = 200, modules: int = 150) -> list[str]:
    """Return how each visited config differs from the baseline, like 'bf16 channels_last'."""
    heard = Heard()
    tuned(machine, knobs, budget_s, heard=heard, modules=modules)
    return [changes(trial.config, knobs) for trial in heard.trials if trial.origin != "sampler"][1:]


def changes(config: Config, knobs: Space) -> str:
    changed = config.changed(knobs.default)
    return " ".join(
        name if value is True else f"{name}={value}" if isinstance(value, int) else str(value)
        for name, value in changed.items()
    )


EAGER_BF16, COMPILED = "channels_last bf16", "channels_last default"
FUSED_CHANNELS_LAST = "channels_last fused_optimizer"
GRAPHS = "channels_last reduce-overhead"
GRAPHS_BF16 = f"{GRAPHS} bf16"
ON_A_GPU = space()
ON_A_CPU = space("cpu", cpu_bf16=True, convolves=False)
CONVOLVING_ON_A_CPU = space("cpu", cpu_bf16=True, cores=2, threads=2)
WITHOUT_BF16 = space("cpu", cpu_bf16=False, cores=2, threads=2)
WORKLOAD = space(use="capture", batches=(64, 128, 256))
KEPT = ("fused_optimizer",)
VOLUMES = space(dimensions=5)
SHARDED = space(convolves=False, repeats=True, sharded=True)
WITH_LOADER = space(workers=8, own=Config(num_workers=2))


@pytest.mark.parametrize(
    ("knobs", "first"),
    [
        (ON_A_GPU, [EAGER_BF16, GRAPHS_BF16, f"{GRAPHS} fused_optimizer bf16", "cudagraphs"]),
        (SHARDED, ["bf16", "blocks bf16", "blocks fused_optimizer bf16"]),
        (CONVOLVING_ON_A_CPU, [EAGER_BF16, "channels_last", "bf16", "threads=1"]),
        (WITHOUT_BF16, ["channels_last", "threads=1", FUSED_CHANNELS_LAST, COMPILED]),
        (
            WORKLOAD,
            [
                *(EAGER_BF16, f"{EAGER_BF16} step_graph", GRAPHS_BF16),
                *(f"{COMPILED} bf16 step_graph", f"{COMPILED} fused_optimizer bf16"),
            ],
        ),
    ],
    ids=["GPU", "FSDP2", "CPU, convolving", "CPU without bf16", "workload"],
)
def test_largest_gain_per_time_comes_first(knobs: Space, first: list[str]) -> None:
    assert visits(MadeUp(knobs.default), knobs)[: len(first)] == first


def test_mode_that_fails_in_one_format_is_tried_in_another() -> None:
    class FailsWithTf32(MadeUp):
        def _switch(self, config: Config, deadline_s: float) -> float:
            fails = config["compile"] == "reduce-overhead" and config["precision"] == "tf32"
            self.fails = {("precision", "tf32"): "failed"} if fails else {}
            return super()._switch(config, deadline_s)

    machine, heard = FailsWithTf32(ON_A_GPU.default), Heard()
    tuned(machine, ON_A_GPU, 300.0, heard=heard)
    assert any(trial.measurement.outcome == "failed" for trial in heard.trials)
    assert heard.best[-1]["compile"] == "reduce-overhead"


@pytest.mark.parametrize(
    ("gain", "first"), [(1.1, f"{GRAPHS} bf16"), (0.7, "reduce-overhead bf16")]
)
def test_volumes_are_compiled_in_the_faster_layout(gain: float, first: str) -> None:
    machine = MadeUp(VOLUMES.default, gains={**GAINS, ("channels_last", True): gain})
    assert visits(machine, VOLUMES)[:3] == ["bf16", EAGER_BF16, first]


@pytest.mark.parametrize(
    ("knobs", "bf16", "first"),
    [
        (space(), 0.8, [EAGER_BF16, GRAPHS_BF16]),
        (space(compiles=False), 0.8, [EAGER_BF16, "channels_last tf32"]),
        (ON_A_CPU, 0.15, ["bf16", "fused_optimizer", "default"]),
    ],
)
def test_slower_format_is_tried_compiled(knobs: Space, bf16: float, first: list[str]) -> None:
    """The host limits the steps, so autocast costs more than it saves."""
    machine = MadeUp(knobs.default, gains={**GAINS, ("precision", "bf16"): bf16})
    assert visits(machine, knobs)[: len(first)] == first


@pytest.mark.parametrize(("step_s", "graphs_first"), [(0.002, True), (0.03, False)])
def test_small_fast_model_tries_cudagraphs_first(step_s: float, graphs_first: bool) -> None:
    order = visits(MadeUp(ON_A_GPU.default, step_s=step_s), ON_A_GPU, 150.0, modules=12)
    graphs, compiled = order.index("cudagraphs"), order.index(GRAPHS_BF16)
    assert (graphs < compiled) is graphs_first


def test_loader_comes_first_if_steps_wait_for_data() -> None:
    def search(batches_per_s: float) -> tuple[SearchResult, Heard]:
        """Search with workers that deliver this many batches each."""

        def waits_s(config: Config) -> float:
            return 1 / (batches_per_s * int(config["num_workers"] or 1))

        heard, machine = Heard(), MadeUp(WITH_LOADER.default, waits_s=waits_s)
        return tuned(machine, WITH_LOADER, 200.0, heard=heard), heard

    found, heard = search(6)
    assert [trial.origin for trial in heard.trials[1:3]] == ["loader"] * 2
    assert [config["num_workers"] for config in heard.configs[:3]] == [2, 4, 8]
    recipe = [trial.config for trial in heard.trials if trial.origin == "recipe"]
    assert {config["num_workers"] for config in recipe[:3]} == {8}
    assert advised(found)["num_workers"] == 8
    # Eight workers deliver 48 batches per second; the step alone could take 86.
    assert speedup(found) == pytest.approx(48 / 12, rel=0.15)
    assert any("the loader limits " in line for line in found.remarks)
    assert "loader" not in {trial.origin for trial in search(1000)[1].trials}


class Interrupting(Progress):
    def visited(self, *_any: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("compiles", [False, True])
def test_search_is_exhausted_if_no_untried_value_can_gain(compiles: bool) -> None:
    """More workers cannot gain because no step waits. There is no time for compiling."""
    knobs = space("cpu", workers=2, kept=KEPT, threads_set=True, convolves=False, compiles=compiles)
    assert knobs.is_choice
    assert tuned(MadeUp(knobs.default), knobs, 5.0).exhausted is not compiles
    interrupted = tuned(MadeUp(knobs.default), knobs, 90.0, heard=Interrupting())
    assert interrupted.interrupted and not interrupted.exhausted


def test_no_remark_if_only_the_unmodified_script_waits_for_data() -> None:
    knobs = space("cpu", kept=KEPT, threads_set=True, convolves=False, compiles=False)
    assert tuned(MadeUp(knobs.default, waits_s=lambda _config: 0.5), knobs).remarks == ()


def test_workers_are_advised_if_they_deliver_more_than_they_slow_the_steps() -> None:
    """On two cores, workers slow the steps. Without them, steps wait for 97% of their time."""
    knobs = space("cpu", workers=2, cores=2, threads=2)

    def waits_s(config: Config) -> float:
        return 0.064 if config["num_workers"] else 0.16

    machine = MadeUp(
        knobs.default,
        step_s=0.005,
        gains={("num_workers", 2): 0.3, ("threads", 1): 1.2},
        waits_s=waits_s,
    )
    found = tuned(machine, knobs, 40.0)
    assert advised(found)["num_workers"] == 2 and speedup(found) == pytest.approx(2.5, rel=0.1)


def test_batches_are_tried_from_the_largest_down_then_other_knobs() -> None:
    heard = Heard()
    found = tuned(MadeUp(WORKLOAD.default), WORKLOAD, 300.0, heard=heard)
    assert len(found.raced) == 7, "the best per batch and per use, except for the first use"
    batches = [trial.config for trial in heard.trials if trial.origin == "batch"]
    assert [config.batch for config in batches[:2]] == [256, 128] and not compiles(batches[0])
    assert any(compiles(config) and config.batch == 256 for config in batches)
