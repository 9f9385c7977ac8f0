"""What is said of a loader that limits its step: from given numbers, and of a real one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Record, Trial
from advisor.report import feeding, tables
from advisor.tuners.measure.worker.wire import SampleCost, SampleCosts
from tests.cache import examples
from tests.face.commands import advisor

STEP, EIGHT = 5506.0, {"num_workers": 8, "prefetch_factor": 2}
IMAGES = SampleCosts(
    parts=(
        SampleCost(part="default_loader", seconds=1.5e-3),
        SampleCost(part="RandomResizedCrop", seconds=0.4e-3),
        SampleCost(part="ToDtype", seconds=0.15e-3),
        SampleCost(part="collate", seconds=0.05e-3),
        SampleCost(part="flip", seconds=1e-9),
    ),
)


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
        "the step alone takes 5,506 samples/s, with its loader 3,392: input-bound",
        "a sample costs a worker 2.1 ms: default_loader 71%, RandomResizedCrop 19%, ToDtype 7%, "
        "collate 2%",
        "If one of its parts took no time, for example when cached, the same loader would make:",
        "    without default_loader: at most 5,506 samples/s",
        "    without RandomResizedCrop: at most 4,190 samples/s",
        "    without ToDtype: at most 3,653 samples/s",
    ]
    assert list(feeding.explained(starved(), None))[1].startswith("With --data")


def test_costs_of_other_data_or_without_a_tuned_loader() -> None:
    record = starved()
    own = replace(record.key, task=replace(record.key.task, data="own.py"))
    lines = list(feeding.explained(replace(record, key=own), IMAGES, "data.py"))
    assert lines[1] == "That is for the data of own.py; the next lines are for data.py:"
    costs = SampleCosts(parts=(SampleCost(part="Dec", seconds=4e-3),))
    assert list(feeding.explained(examples.record(), costs, "data.py")) == [
        "a sample costs a worker 4 ms: Dec 100%",
        "To see what would help, tune the loader first: advisor tune with --data data.py",
    ]


def beside(*more: Trial, pins: bool = False) -> Record:
    """A starved run with more measurements of its loaders."""
    record, pinned = starved(), {"pin_memory": True} if pins else {}
    return replace(record, trials=(*more, *record.trials), input=Config(num_workers=8) | pinned)


def turned(one: Trial, turns: int) -> Trial:
    return replace(one, measurement=replace(one.measurement, blocks=(0.1,) * turns))


PINNED = fed(4, 3390.0, Config(EIGHT | {"pin_memory": True}))
TURNED = beside(turned(fed(9, 9999.0, Config(EIGHT)), 1))
TURNED = replace(TURNED, trials=(TURNED.trials[0], *(turned(one, 3) for one in TURNED.trials[1:])))
ONE = Config(num_workers=1)
ALONE = replace(examples.record(), trials=(fed(1, STEP, Config()), fed(3, 375.0, ONE)), input=ONE)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (ALONE, "with its loader 375: input-bound"),
        (beside(fed(9, 9999.0, Config(EIGHT), "loader")), "with its loader 3,392:"),
        (beside(PINNED), "with its loader 3,392:"),
        (beside(PINNED, pins=True), "with its loader 3,390:"),
        (TURNED, "with its loader 3,392:"),  # the measurement with most turns
    ],
)
def test_the_pair_that_is_shown(record: Record, says: str) -> None:
    assert says in list(feeding.remarks(record))[-1]
    shown = feeding.table(record)
    assert not shown or not any("9,999" in cell for row in shown.rows for cell in row.cells)


def test_the_gain_of_the_loader_and_how_to_apply_it() -> None:
    record, task = starved(), starved().key.task
    how = "9.69x as fast as with a DataLoader without workers (350 samples/s)"
    assert f"with that loader the step is {how}" in feeding.remarks(record)
    line = "loader = DataLoader(dataset, **advice.loader)"
    run = replace(record, key=replace(record.key, task=replace(task, command=("python", "x.py"))))
    for one, applies in ((record, True), (replace(record, input=Config()), False), (run, False)):
        assert any(line in shown for shown in tables.start(one, None)) == applies


@pytest.mark.parametrize(
    ("workers", "both", "verdict"),
    [
        (8, 0.97 * STEP, "the loader keeps up"),
        (8, 0.59 * STEP, "input-bound"),
        (0, 0.65 * STEP, "input-bound"),
    ],
)
def test_the_verdict_on_a_loader(workers: int, both: float, verdict: str) -> None:
    loader = Config(EIGHT | {"num_workers": workers}) if workers else Config(num_workers=0)
    record = replace(examples.record(), input=Config(num_workers=workers) if workers else Config())
    trials = [fed(1, STEP, Config()), fed(2, both, loader)]
    trials.append(fed(4, 380.0, Config(EIGHT | {"num_workers": 1 if workers else 4})))
    line = list(feeding.remarks(replace(record, trials=tuple(trials))))[-1]
    assert line.endswith(f": {verdict}")


MODEL = """
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 4)
"""
DATA = """
import time
import torch
from torch.utils.data import Dataset

class Slow(Dataset):
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __getitem__(self, i): return self.read(), i % 4
    def read(self):
        time.sleep(0.005)
        return torch.ones(3)

def make_dataset(length=100_000): return Slow(length)
"""
TUNE = ("tune", "model.py", "--shape", "4x3", "--device", "cpu", "--cache", "store")
QUICK = ("--fixed-batch", "--no-compile", "--no-verify", "--precisions", "default")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "data.py").write_text(DATA)
    return tmp_path


@pytest.mark.long
def test_a_loader_is_tuned_shown_and_explained(folder: Path) -> None:
    words = (*TUNE, *QUICK, "--data", "data.py", "--data-arg", "length=1000", "--budget", "16s")
    tuned = advisor(folder, *words, "--json")
    assert tuned.returncode == 0, tuned.stderr
    record = json.loads(tuned.stdout)["record"]
    fed = [trial for trial in record["trials"] if trial["stage"] == "input"]
    alone = fed[0]
    assert (alone["origin"], alone["config"]["num_workers"]) == ("baseline", 0)
    # A sample takes five milliseconds, or more where the host is busy.
    assert 0 < alone["measurement"]["samples_per_s"] < 201
    assert alone["measurement"]["waited"] > 0.5

    again = advisor(folder, *words)
    assert "Already tuned" in again.stdout
    assert "the step alone takes" in again.stdout and "input-bound" in again.stdout
    shown = advisor(folder, "show", record["id"], "--cache", "store")
    assert "of the step" in shown.stdout and "0 loader workers" in shown.stdout

    why = ("explain", record["id"], "--cache", "store", "--budget", "20s")
    told = advisor(folder, *why, "--data", "data.py")
    assert told.returncode == 0, told.stderr
    assert "a sample costs a worker" in told.stdout and ": data.py:Slow.read 9" in told.stdout
    assert "    without data.py:Slow.read: at most" in told.stdout


@pytest.mark.usefixtures("made_up")
def test_without_data_it_is_said_that_the_loader_is_not_tuned(folder: Path) -> None:
    plain = advisor(folder, *TUNE, *QUICK)
    assert plain.returncode == 0, plain.stderr
    assert "The loader is not tuned: name its dataset with --data data.py:" in plain.stdout
