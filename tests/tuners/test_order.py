"""In which order configs are visited."""

from __future__ import annotations

from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.tuners.knobs import compiles
from advisor.tuners.search.plan import Progress
from advisor.tuners.search.race import SearchResult
from advisor.tuners.search.space import Space
from tests.builders import GAINS, Heard, MadeUp, advised, space, speedup, tuned


def visited(place: MadeUp, of: Space, budget_s: float = 200.0, modules: int = 150) -> list[str]:
    """What of each config differs from the baseline: 'bf16 channels_last'."""
    heard = Heard()
    tuned(place, of, budget_s, heard=heard, modules=modules)
    return [short(trial.config, of) for trial in heard.trials if trial.origin != "sampler"][1:]


def short(config: Config, of: Space) -> str:
    changed = config.changed(of.default)
    return " ".join(
        name if value is True else f"{name}={value}" if isinstance(value, int) else str(value)
        for name, value in changed.items()
    )


HALF, CODE = "channels_last bf16", "channels_last default"
GRAPHS = "channels_last reduce-overhead"
COMPILED = f"{GRAPHS} bf16"
ON_A_GPU = space()
ON_A_CPU = space("cpu", cpu_bf16=True, convolves=False)
CONVOLVING_ON_A_CPU = space("cpu", cpu_bf16=True, cores=2, threads=2)
WITHOUT_BF16 = space("cpu", cpu_bf16=False, cores=2, threads=2)
OF_A_WORKLOAD = space(use="capture", batches=(64, 128, 256))
FUSED = ("fused_optimizer",)
FROM_FILES = space(workers=8, own=Config(num_workers=2))


@pytest.mark.parametrize(
    ("of", "first"),
    [
        (ON_A_GPU, [HALF, COMPILED, f"{GRAPHS} fused_optimizer bf16", "cudagraphs"]),
        (CONVOLVING_ON_A_CPU, [HALF, "channels_last", "bf16", "threads=1"]),
        (WITHOUT_BF16, ["channels_last", "threads=1", "channels_last fused_optimizer", CODE]),
        (
            OF_A_WORKLOAD,
            [
                *(HALF, f"{HALF} step_graph", COMPILED),
                *(f"{CODE} bf16 step_graph", f"{CODE} fused_optimizer bf16"),
            ],
        ),
    ],
    ids=["GPU", "CPU, convolving", "CPU without bf16", "workload"],
)
def test_what_gains_most_for_its_time_comes_first(of: Space, first: list[str]) -> None:
    assert visited(MadeUp(of.default), of)[: len(first)] == first


def test_what_ran_elsewhere_is_not_blamed() -> None:
    """A compiled leader stays though the same mode fails in another format."""

    class OneFails(MadeUp):
        def _switch(self, config: Config, deadline_s: float) -> float:
            wrong = config["compile"] == "reduce-overhead" and config["precision"] == "tf32"
            self.fails = {("precision", "tf32"): "failed"} if wrong else {}
            return super()._switch(config, deadline_s)

    place, heard = OneFails(ON_A_GPU.default), Heard()
    tuned(place, ON_A_GPU, 300.0, heard=heard)
    assert any(trial.measurement.outcome == "failed" for trial in heard.trials)
    assert heard.best[-1]["compile"] == "reduce-overhead"


@pytest.mark.parametrize(
    ("of", "bf16", "first"),
    [
        (space(), 0.8, [HALF, COMPILED]),
        (space(compiles=False), 0.8, [HALF, "channels_last tf32"]),
        (ON_A_CPU, 0.15, ["bf16", "fused_optimizer", "default"]),
    ],
)
def test_a_slower_format_may_gain_once_compiled(of: Space, bf16: float, first: list[str]) -> None:
    """Steps that the host limits: autocast costs more than it saves."""
    place = MadeUp(of.default, gains={**GAINS, ("precision", "bf16"): bf16})
    assert visited(place, of)[: len(first)] == first


@pytest.mark.parametrize(("step_s", "graphs_first"), [(0.002, True), (0.03, False)])
def test_a_small_fast_model_has_cuda_graphs_first(step_s: float, graphs_first: bool) -> None:
    order = visited(MadeUp(ON_A_GPU.default, step_s=step_s), ON_A_GPU, 150.0, modules=12)
    graphs, compiled = order.index("cudagraphs"), order.index(COMPILED)
    assert (graphs < compiled) is graphs_first


def test_where_steps_wait_for_data_the_loader_comes_first() -> None:
    def fed(batches_per_s: float) -> tuple[SearchResult, Heard]:
        """Each worker delivers so many batches."""

        def waits_s(config: Config) -> float:
            return 1 / (batches_per_s * int(config["num_workers"] or 1))

        heard, place = Heard(), MadeUp(FROM_FILES.default, waits_s=waits_s)
        return tuned(place, FROM_FILES, 200.0, heard=heard), heard

    found, heard = fed(6)
    assert [trial.origin for trial in heard.trials[1:3]] == ["loader"] * 2
    assert [config["num_workers"] for config in heard.configs[:3]] == [2, 4, 8]
    recipe = [trial.config for trial in heard.trials if trial.origin == "recipe"]
    assert {config["num_workers"] for config in recipe[:3]} == {8}
    assert advised(found)["num_workers"] == 8
    # Eight workers deliver 48 batches a second; the step alone would make 86.
    assert speedup(found) == pytest.approx(48 / 12, rel=0.15)
    assert any("the loader limits " in line for line in found.remarks)
    assert "loader" not in {trial.origin for trial in fed(1000)[1].trials}


class Interrupting(Progress):
    def visited(self, *_told: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("compiles", [False, True])
def test_a_search_knows_that_nothing_else_can_be_tried(compiles: bool) -> None:
    """More workers cannot gain where no step waits; what compiles has no time here."""
    of = space("cpu", workers=2, kept=FUSED, threads_set=True, convolves=False, compiles=compiles)
    assert of.is_choice
    assert tuned(MadeUp(of.default), of, 5.0).exhausted is not compiles
    interrupted = tuned(MadeUp(of.default), of, 90.0, heard=Interrupting())
    assert interrupted.interrupted and not interrupted.exhausted


def test_that_the_unmodified_script_waits_is_left_to_its_record_to_say() -> None:
    of = space("cpu", kept=FUSED, threads_set=True, convolves=False, compiles=False)
    assert tuned(MadeUp(of.default, waits_s=lambda _config: 0.5), of).remarks == ()


def test_workers_that_slow_the_steps_are_advised_by_what_they_deliver() -> None:
    """On two cores, workers take time from the steps, which waited for 97% of theirs."""
    of = space("cpu", workers=2, cores=2, threads=2)

    def waits_s(config: Config) -> float:
        return 0.064 if config["num_workers"] else 0.16

    place = MadeUp(
        of.default,
        step_s=0.005,
        gains={("num_workers", 2): 0.3, ("threads", 1): 1.2},
        waits_s=waits_s,
    )
    found = tuned(place, of, 40.0)
    assert advised(found)["num_workers"] == 2 and speedup(found) == pytest.approx(2.5, rel=0.1)


def test_larger_batches_from_the_largest_on_then_what_leads_there() -> None:
    heard = Heard()
    found = tuned(MadeUp(OF_A_WORKLOAD.default), OF_A_WORKLOAD, 300.0, heard=heard)
    assert len(found.raced) == 7, "of each use but the first, and of each batch, the best alone"
    batches = [trial.config for trial in heard.trials if trial.origin == "batch"]
    assert [config.batch for config in batches[:2]] == [256, 128] and not compiles(batches[0])
    assert any(compiles(config) and config.batch == 256 for config in batches)
