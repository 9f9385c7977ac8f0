"""What is said of a loader that limits its step, from given numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Record, Trial
from advisor.report import feeding, tables
from advisor.tuners import worker_limits
from advisor.tuners.measure.worker.wire import SampleCost, SampleCosts
from tests.cache import examples

STEP, EIGHT = 5506.0, {"num_workers": 8, "prefetch_factor": 2}
IMAGES = SampleCosts(
    samples=1_281_167,
    parts=(
        SampleCost(part="default_loader", seconds=1.5e-3),
        SampleCost(part="RandomResizedCrop", seconds=0.4e-3),
        SampleCost(part="ToDtype", seconds=0.15e-3),
        SampleCost(part="collate", seconds=0.05e-3),
        SampleCost(part="flip", seconds=1e-9),
    ),
)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_limits, "cores", lambda: 8)


def fed(number: int, rate: float, loader: Config, stage: str = "input") -> Trial:
    one = examples.trial(number, Config(examples.DEFAULT | loader))
    measured = replace(one.measurement, samples_per_s=rate, low=rate, high=rate)
    return replace(one, stage=stage, measurement=measured)


def starved() -> Record:
    """A step of 5,506 samples/s with loaders of up to eight workers."""
    loaders = [(Config(num_workers=0), 350.0)]
    loaders += [(Config(EIGHT | {"num_workers": n}), 424.0 * n) for n in (4, 8)]
    loaders.append((Config(EIGHT | {"prefetch_factor": 4}), 3400.0))
    trials = [fed(1, STEP, Config())]
    trials += [fed(3, both, loader) for loader, both in loaders]
    return replace(examples.record(), trials=tuple(trials), input=Config(num_workers=8))


def test_what_limits_the_run_and_what_a_sample_costs() -> None:
    assert list(feeding.explained(starved(), IMAGES)) == [
        "the step alone takes 5,506 samples/s, with its loader 3,392: input-bound; about 15 "
        "workers with a core each would feed it, and this machine has 8",
        "a sample costs a worker 2.1 ms: default_loader 71%, RandomResizedCrop 19%, ToDtype 7%, "
        "collate 2%",
        "Without one of its parts, for example cached or on the GPU, the same loader would make:",
        "    without default_loader: at most 5,506 samples/s",
        "    without RandomResizedCrop: at most 4,190 samples/s",
        "    without ToDtype: at most 3,653 samples/s",
    ]
    assert list(feeding.explained(starved(), None))[1].startswith("With --data")


def test_costs_of_other_data_or_without_a_tuned_loader() -> None:
    record = starved()
    own = replace(record.key, task=replace(record.key.task, data="own.py"))
    lines = list(feeding.explained(replace(record, key=own), IMAGES, "data.py"))
    assert lines[1] == "That is for the data of own.py; what follows is for data.py:"
    costs = SampleCosts(parts=(SampleCost(part="Dec", seconds=4e-3),), samples=10)
    assert list(feeding.explained(examples.record(), costs, "data.py")) == [
        "a sample costs a worker 4 ms: Dec 100%",
        "To see what would help, tune the loader first: advisor tune with --data data.py",
    ]


def test_data_of_one_batch_wants_no_more_workers() -> None:
    one = Config(num_workers=1)
    trials = (fed(1, STEP, Config()), fed(3, 375.0, one))
    alone = replace(examples.record(), trials=trials, input=one)
    assert list(feeding.remarks(alone))[-1].endswith("with its loader 375: input-bound")


def test_a_stage_of_older_records_is_not_shown() -> None:
    record = starved()
    older = replace(record, trials=(*record.trials, fed(9, 9999.0, Config(EIGHT), "loader")))
    assert feeding.pairs(older) == feeding.pairs(record)


@pytest.mark.parametrize(("pins", "together"), [(False, 3392.0), (True, 3390.0)])
def test_the_pair_that_is_shown_works_as_advised(pins: bool, together: float) -> None:
    record = starved()
    pinned = fed(4, 3390.0, Config(EIGHT | {"pin_memory": True}))
    advised = Config(num_workers=8) | ({"pin_memory": True} if pins else {})
    record = replace(record, trials=(pinned, *record.trials), input=advised)
    assert f"with its loader {together:,.0f}:" in list(feeding.remarks(record))[-1]


def test_the_gain_of_the_loader_and_how_to_apply_it() -> None:
    record, task = starved(), starved().key.task
    how = "9.69x as fast as with a DataLoader without workers (350 samples/s)"
    assert f"with that loader the step is {how}" in feeding.remarks(record)
    line = "loader = DataLoader(dataset, **advice.loader)"
    run = replace(record, key=replace(record.key, task=replace(task, command=("python", "x.py"))))
    for one, applies in ((record, True), (replace(record, input=Config()), False), (run, False)):
        assert any(line in shown for shown in tables.start(one, None)) == applies


def test_a_loader_is_shown_by_the_measurement_with_most_turns() -> None:
    record = starved()
    turns = [
        replace(one, measurement=replace(one.measurement, blocks=(0.1, 0.1, 0.1)))
        for one in record.trials
    ]
    once = fed(9, 9999.0, Config(EIGHT))
    once = replace(once, measurement=replace(once.measurement, blocks=(0.1,)))
    record = replace(record, trials=(*turns, once))
    assert "with its loader 3,392:" in list(feeding.remarks(record))[-1]
    shown = feeding.table(record)
    assert shown and not any("9,999" in cell for row in shown.rows for cell in row.cells)


@pytest.mark.parametrize(
    ("workers", "both", "verdict"),
    [
        (8, 0.97 * STEP, "the loader keeps up"),
        (8, 0.59 * STEP, "input-bound; about 15 workers with a core each would feed it, and"),
        (0, 0.65 * STEP, "input-bound, because no worker loads during the step"),
        # Loading takes 0.7 of the time of both, training 0.3.
        (0, 0.3 * STEP, "input-bound; about 3 workers with a core each would feed it, and"),
    ],
)
def test_the_verdict_on_a_loader(workers: int, both: float, verdict: str) -> None:
    loader = Config(EIGHT | {"num_workers": workers}) if workers else Config(num_workers=0)
    record = replace(examples.record(), input=Config(num_workers=workers) if workers else Config())
    trials = [fed(1, STEP, Config()), fed(2, both, loader)]
    trials.append(fed(4, 380.0, Config(EIGHT | {"num_workers": 1 if workers else 4})))
    line = list(feeding.remarks(replace(record, trials=tuple(trials))))[-1]
    assert line.partition(": ")[2].startswith(verdict), line
