"""What is said of a loader that starves its step, from numbers that are given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Record, Trial
from advisor.report import charts, feeding, tables
from advisor.report.helping import Feeding, lines
from advisor.report.html import page
from advisor.tuners import host, worker_limits
from advisor.tuners.measure.worker.wire import SampleCost, SampleCosts
from tests.cache import examples
from tests.face.test_report_page import well_made

STEP, EIGHT = 5506.0, {"num_workers": 8, "prefetch_factor": 2}
IMAGES = SampleCosts(
    samples=1_281_167,
    parts=(
        SampleCost(part="default_loader", seconds=1.5e-3, made_bytes=600_000),
        SampleCost(part="RandomResizedCrop", seconds=0.4e-3, made_bytes=150_528),
        SampleCost(part="ToDtype", seconds=0.15e-3, made_bytes=602_112),
        SampleCost(part="collate", seconds=0.05e-3, made_bytes=602_120),
    ),
)


def said(costs: SampleCosts, *, on_gpu: bool = True) -> dict[str, str]:
    """By the change; a sample costs 2.1 ms, of which 8 workers give 3,440 a second."""
    told = lines(Feeding(costs=costs, takes=STEP, gives=3440.0, on_gpu=on_gpu))
    return {how: what for how, _, what in (line.partition(": ") for line in told)}


def test_each_that_would_help_has_what_it_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_bytes", lambda: 2**36)
    found = iter(said(IMAGES).items())
    whole_s = 2.1e-3
    for starts, saved_s in (
        ("uint8 to the device", 0.15e-3 + 0.75 * 0.05e-3),
        ("decoding on the GPU", 1.5e-3),
        ("files of half", 0.75 * (1.5e-3 + 0.4e-3)),
        ("FFCV", 1.5e-3 + 0.05e-3),
        ("DALI", whole_s),
    ):
        how, gives = next(found)
        left_s = whole_s - saved_s
        expected = min(STEP, 3440.0 * whole_s / left_s) if left_s > 0 else STEP
        assert how.startswith(starts) and gives.startswith(f"{expected:,.0f} samples/s"), how
    how, why = next(found)
    assert how.startswith("WebDataset") and why.startswith("nothing to gain, no part")
    how, kept = next(found)
    assert how == "what default_loader makes, kept in memory"
    assert "in 716 GiB for 1,281,167 samples, of which 64 GiB is free here" in kept
    # A random crop is another each time, as is what is made of it.
    assert next(found, None) is None


def test_what_gains_nothing_says_why() -> None:
    text = SampleCosts(samples=0, parts=(SampleCost(part="Text.parse", seconds=1e-3),))
    found = said(text)
    for how, what in found.items():
        if how.startswith("DALI"):
            continue
        if how.startswith("what Text.parse makes"):
            assert what.endswith("its size is not known")
        else:
            assert what.startswith("nothing to gain, no part of a sample is known to"), how
    assert not any("GPU" in how or "device" in how for how in said(text, on_gpu=False))
    small = replace(text, parts=(*text.parts, SampleCost(part="read_file", seconds=1e-5)))
    assert "nothing to gain, 1.0% of a sample's cost" in said(small).values()


def fed(number: int, stage: str, rate: float, loader: Config) -> Trial:
    one = examples.trial(number, Config(examples.DEFAULT | loader))
    measured = replace(one.measurement, samples_per_s=rate, low=rate, high=rate)
    return replace(one, stage=stage, measurement=measured)


def starved() -> Record:
    """A step of 5,506 samples/s with loaders of up to eight workers."""
    told = [(Config(num_workers=0), 350.0)]
    told += [(Config(EIGHT | {"num_workers": n}), 424.0 * n) for n in (4, 8)]
    told.append((Config(EIGHT | {"prefetch_factor": 4}), 3400.0))
    trials = [fed(1, "input", STEP, Config())]
    trials += [fed(3, "input", both, loader) for loader, both in told]
    return replace(examples.record(), trials=tuple(trials), input=Config(num_workers=8))


def test_what_bounds_the_run_and_what_a_sample_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_limits, "cores", lambda: 8)
    found = list(feeding.explained(starved(), IMAGES))
    assert found[0].startswith(
        "the step can take 5,506 samples/s, together they make 3,392: input-bound; some 15 workers"
    )
    assert found[1] == (
        "a sample costs 2.1 ms of a worker: default_loader 71%, RandomResizedCrop 19%, ToDtype 7%, "
        "collate 2%"
    )
    assert found[2] == (
        "each batch is 48 MiB of float32 to hand over and copy; as uint8, normalised on the "
        "device, it is 12 MiB"
    )
    assert found[3].startswith("12 workers with a core each") and found[3].endswith("8 there are")
    assert sum(": " in line for line in found[5:]) == len(said(IMAGES)) == len(found[5:])
    assert list(feeding.explained(starved(), None))[1].startswith("Give --data")


def test_smaller_batches_are_named_where_something_converts_them() -> None:
    """Tokens are as small as they can be."""
    record = starved()
    small = replace(record.key, task=replace(record.key.task, dtype="int64"))
    text = replace(IMAGES, parts=(SampleCost(part="Text.parse", seconds=1e-3),))
    for told in (
        feeding.explained(replace(record, key=small), IMAGES),
        feeding.explained(record, text),
    ):
        assert not [line for line in told if "as uint8" in line]


def test_a_stage_of_older_records_is_not_shown() -> None:
    """They held what a loader gives without a step."""
    record = starved()
    older = replace(record, trials=(*record.trials, fed(9, "loader", 9999.0, Config(EIGHT))))
    assert feeding.pairs(older) == feeding.pairs(record)


@pytest.mark.parametrize(("pins", "together"), [(False, 3392.0), (True, 3390.0)])
def test_the_pair_that_is_told_works_as_advised(pins: bool, together: float) -> None:
    record = starved()
    pinned = fed(4, "input", 3390.0, Config(EIGHT | {"pin_memory": True}))
    advised = Config(num_workers=8) | ({"pin_memory": True} if pins else {})
    told = replace(record, trials=(pinned, *record.trials), input=advised)
    assert f"together they make {together:,.0f}:" in list(feeding.said(told))[-1]


def test_the_loaders_own_gain_is_said_and_how_it_is_followed() -> None:
    record, task = starved(), starved().key.task
    how = "that loader gives 9.69x what a DataLoader without workers does (350 samples/s)"
    assert f"with the step {how}" in feeding.said(record)
    follows = [line.strip() for line in tables.start(record, None)]
    assert "loader = DataLoader(dataset, **advice.loader)" in follows
    none = tables.start(replace(record, input=Config()), None)
    assert not any("advice.loader" in line for line in none)
    run = replace(record, key=replace(record.key, task=replace(task, command=("python", "x.py"))))
    assert not any("advice.loader" in line for line in tables.start(run, None))


@pytest.mark.parametrize(
    ("workers", "tried", "why"),
    [
        (8, True, "tried, and not clearly faster"),
        (8, False, "not tried, as time ran out or nothing waits"),
        (0, False, "not tried, as that takes two workers"),
    ],
)
def test_what_came_of_any_order_is_said(workers: int, tried: bool, why: str) -> None:
    record = starved()
    trials = [fed(9, "input", 3000.0, Config(EIGHT | {"in_order": False}))] if tried else []
    permits = replace(record.key, task=replace(record.key.task, any_order=True))
    advised = Config(num_workers=workers) if workers else Config()
    told = replace(record, key=permits, trials=(*record.trials, *trials), input=advised)
    line = f"batches in any order: {why}"
    assert line in feeding.said(told)
    assert line not in feeding.said(replace(told, key=record.key))
    taken = replace(told, input=Config(EIGHT | {"in_order": False}))
    assert not any(one.startswith("batches in any") for one in feeding.said(taken))


def test_what_loaders_give_is_drawn_over_their_workers() -> None:
    chart = charts.loaders(starved())
    assert chart and chart.level == STEP
    assert {curve.label: curve.points for curve in chart.curves} == {
        "with the step": ((0, 350.0), (4, 1696.0), (8, 3392.0)),
        "with the step, 4 batches ahead": ((8, 3400.0),),
    }
    found = well_made(page(starved()))
    assert "with the step, 4 batches ahead, 8 workers: 3,400 samples/s" in found.text
    assert charts.loaders(examples.record()) is None


def test_a_pair_is_told_by_the_race_with_most_turns() -> None:
    """As one turn of a race of how workers work tells less than the race of how many."""
    record = starved()
    turns = [
        replace(one, measurement=replace(one.measurement, blocks=(0.1, 0.1, 0.1)))
        for one in record.trials
    ]
    once = fed(9, "input", 9999.0, Config(EIGHT))
    once = replace(once, measurement=replace(once.measurement, blocks=(0.1,)))
    told = replace(record, trials=(*turns, once))
    assert "together they make 3,392:" in list(feeding.said(told))[-1]
    shown = feeding.table(told)
    assert shown and not any("9,999" in cell for row in shown.rows for cell in row.cells)


@pytest.mark.parametrize(
    ("workers", "both", "verdict"),
    [
        (8, 0.97 * STEP, "the loader keeps up"),
        (8, 0.59 * STEP, "input-bound; some 15 workers with a core each would feed it"),
        (0, 0.65 * STEP, "input-bound, as no worker loads beside the step"),
        # Loading takes 0.7 of the time of both, training 0.3.
        (0, 0.3 * STEP, "input-bound; some 3 workers with a core each would feed it"),
    ],
)
def test_the_verdict_follows_the_pair(workers: int, both: float, verdict: str) -> None:
    loader = Config(EIGHT | {"num_workers": workers}) if workers else Config(num_workers=0)
    record = replace(examples.record(), input=Config(num_workers=workers) if workers else Config())
    trials = [fed(1, "input", STEP, Config()), fed(2, "input", both, loader)]
    trials.append(fed(4, "input", 380.0, Config(EIGHT | {"num_workers": 1 if workers else 4})))
    line = list(feeding.said(replace(record, trials=tuple(trials))))[-1]
    assert line.endswith(f": {verdict}"), line


def test_no_more_workers_are_wanted_than_have_something_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_limits, "cores", lambda: 8)
    record = starved()
    small = replace(IMAGES, samples=2 * record.batch + 1)
    told = list(feeding.explained(record, small))
    assert any(one.startswith("an epoch has 2 batches, and work for no more") for one in told)
    assert not any("12 workers with" in one for one in told)
    one = Config(num_workers=1)
    trials = [fed(1, "input", STEP, Config()), fed(3, "input", 375.0, one)]
    alone = replace(record, trials=tuple(trials), input=one)
    assert list(feeding.said(alone))[-1].endswith("together they make 375: input-bound")


def test_what_is_kept_saves_what_comes_before_it_too() -> None:
    parts = (
        SampleCost(part="Dec", seconds=4e-3, made_bytes=100, place=1),
        SampleCost(part="Light", seconds=2e-3, made_bytes=50, place=2),
        SampleCost(part="spin", seconds=1e-3),  # which returns nothing
        SampleCost(part="collate", seconds=1e-3, made_bytes=50),
    )
    given = Feeding(
        costs=SampleCosts(parts=parts, samples=10), takes=1e6, gives=125.0, on_gpu=False
    )
    kept = [line for line in lines(given) if "kept in memory" in line]
    assert kept == [
        "what Dec makes, kept in memory: 250 samples/s at most, in 1000 B for 10 samples",
        "what Light makes, kept in memory: 500 samples/s at most, in 500 B for 10 samples",
    ]


@pytest.mark.parametrize(("place", "kept"), [(2, ["what Dec makes"]), (1, [])])
def test_what_comes_after_what_draws_is_not_kept(place: int, kept: list[str]) -> None:
    parts = (
        SampleCost(part="Dec", seconds=4e-3, made_bytes=100, place=3 - place),
        SampleCost(part="Aug", seconds=2e-3, made_bytes=50, place=place),
    )
    given = Feeding(
        costs=SampleCosts(parts=parts, samples=10), takes=1e6, gives=125.0, on_gpu=False
    )
    told = [line for line in lines(given) if "kept in memory" in line]
    assert [line.partition(",")[0] for line in told] == (
        kept or ["samples kept in memory: nothing to gain"]
    )


def test_costs_are_told_where_no_loader_was_tuned() -> None:
    costs = SampleCosts(parts=(SampleCost(part="Dec", seconds=4e-3),), samples=10)
    assert list(feeding.explained(examples.record(), costs, "data.py")) == [
        "a sample costs 4 ms of a worker: Dec 100%",
        "what would help is told once the loader is tuned: advisor tune with --data data.py",
    ]
