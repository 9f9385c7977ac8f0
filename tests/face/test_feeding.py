"""The report on a loader that limits its step, for given figures and for a real loader."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Record, Trial
from advisor.report import feeding, sections
from advisor.tuners.measure.worker.wire import SampleCost, SampleCosts
from tests import builders
from tests.cache import examples
from tests.face.commands import advisor

STEP, EIGHT = 5506.0, Config(num_workers=8, prefetch_factor=2)
COSTS_MS = {
    "default_loader": 1.5,
    "RandomResizedCrop": 0.4,
    "ToDtype": 0.15,
    "collate": 0.05,
    "flip": 1e-6,
}
IMAGES = SampleCosts(
    parts=tuple(SampleCost(part=part, seconds=ms / 1e3) for part, ms in COSTS_MS.items())
)


def fed(rate: float, loader: Config, stage: str = "input", turns: int = 0) -> Trial:
    one = builders.measured(examples.DEFAULT | loader, rate, stage=stage)
    return replace(one, measurement=replace(one.measurement, blocks=(0.1,) * turns))


def loaders(*measured: Trial, **advised: int | bool) -> Record:
    """A record whose step takes 5,506 samples/s, and fewer with the measured loaders."""
    trials = (fed(STEP, Config()), *measured)
    return replace(examples.record(), trials=trials, input=Config(advised))


SEVERAL = (
    fed(350.0, Config(num_workers=0)),
    fed(1696.0, EIGHT.replace(num_workers=4)),
    fed(3392.0, EIGHT),
    fed(3400.0, EIGHT.replace(prefetch_factor=4)),
)
STARVED = loaders(*SEVERAL, num_workers=8)


def test_explain_names_the_bottleneck_and_the_cost_of_a_sample() -> None:
    assert list(feeding.explained(STARVED, IMAGES)) == [
        "the step alone takes 5,506 samples/s, with its loader 3,392: input-bound",
        "a sample costs a worker 2.1 ms: default_loader 71%, RandomResizedCrop 19%, ToDtype 7%, "
        "collate 2%",
        "If one of its parts took no time, for example when cached, the same loader would make:",
        "    without default_loader: at most 5,506 samples/s",
        "    without RandomResizedCrop: at most 4,190 samples/s",
        "    without ToDtype: at most 3,653 samples/s",
    ]
    assert list(feeding.explained(STARVED, None))[1].startswith("With --data")
    own = replace(STARVED.key, task=replace(examples.TASK, data="own.py"))
    lines = list(feeding.explained(replace(STARVED, key=own), IMAGES, "data.py"))
    assert lines[1] == "That is for the data of own.py; the next lines are for data.py:"
    costs = SampleCosts(parts=(SampleCost(part="Dec", seconds=4e-3),))
    assert list(feeding.explained(examples.record(), costs, "data.py")) == [
        "a sample costs a worker 4 ms: Dec 100%",
        "To see what would help, tune the loader first: advisor tune with --data data.py",
    ]


PINNED = fed(3390.0, EIGHT.replace(pin_memory=True))
ONCE = (fed(9999.0, EIGHT, turns=1), fed(3392.0, EIGHT, turns=3))
ONE, NONE = Config(num_workers=1), Config(num_workers=0)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (loaders(fed(375.0, ONE), num_workers=1), "with its loader 375: input-bound"),
        (loaders(fed(9999.0, EIGHT, "loader"), *SEVERAL, num_workers=8), "with its loader 3,392:"),
        (loaders(PINNED, *SEVERAL, num_workers=8), "with its loader 3,392:"),
        (loaders(PINNED, *SEVERAL, num_workers=8, pin_memory=True), "with its loader 3,390:"),
        (loaders(*ONCE, num_workers=8), "with its loader 3,392:"),  # the one with most turns
        (loaders(fed(0.97 * STEP, EIGHT), fed(380.0, ONE), num_workers=8), ": the loader keeps up"),
        (loaders(fed(0.59 * STEP, EIGHT), fed(380.0, ONE), num_workers=8), ": input-bound"),
        (loaders(fed(0.65 * STEP, NONE), fed(380.0, EIGHT)), ": input-bound"),
    ],
)
def test_the_advised_loader_is_shown_with_its_verdict(record: Record, says: str) -> None:
    assert says in list(feeding.remarks(record))[-1]
    shown = feeding.table(record)
    assert shown and not any("9,999" in cell for row in shown.rows for cell in row.cells)


def test_the_gain_of_a_loader_and_the_code_to_apply_it_are_shown() -> None:
    how = "9.69x as fast as with a DataLoader without workers (350 samples/s)"
    assert f"with that loader the step is {how}" in feeding.remarks(STARVED)
    line = "loader = DataLoader(dataset, **advice.loader)"
    task = replace(STARVED.key.task, command=("python", "x.py"))
    run = replace(STARVED, key=replace(STARVED.key, task=task))
    for one, applies in ((STARVED, True), (replace(STARVED, input=Config()), False), (run, False)):
        assert (line in sections.use(one, None).code) == applies


FILES = {
    "model.py": """
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 4)
""",
    "data.py": """
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
""",
}
TUNE = ("tune", "model.py", "--shape", "4x3", "--device", "cpu", "--cache", "store")
QUICK = ("--fixed-batch", "--no-compile", "--no-verify", "--precisions", "default")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.long
def test_a_loader_is_tuned_shown_and_explained(folder: Path) -> None:
    words = (*TUNE, *QUICK, "--data", "data.py", "--data-arg", "length=1000", "--budget", "16s")
    tuned = advisor(folder, *words, "--json")
    assert tuned.returncode == 0, tuned.stderr
    record = json.loads(tuned.stdout)["record"]
    alone = next(trial for trial in record["trials"] if trial["stage"] == "input")
    assert (alone["origin"], alone["config"]["num_workers"]) == ("baseline", 0)
    # A sample takes at least 5 ms, more on a busy host.
    assert 0 < alone["measurement"]["samples_per_s"] < 201
    assert alone["measurement"]["waited"] > 0.5

    again = advisor(folder, *words).stdout
    assert "Already tuned" in again and "the step alone takes" in again and "input-bound" in again
    shown = advisor(folder, "show", record["id"], "--cache", "store")
    assert "of the step" in shown.stdout and "0 loader workers" in shown.stdout

    why = ("explain", record["id"], "--cache", "store", "--budget", "20s")
    done = advisor(folder, *why, "--data", "data.py")
    assert done.returncode == 0, done.stderr
    assert "a sample costs a worker" in done.stdout and ": data.py:Slow.read 9" in done.stdout
    assert "    without data.py:Slow.read: at most" in done.stdout


@pytest.mark.usefixtures("fake_workers")
def test_without_data_tune_says_that_the_loader_is_not_tuned(folder: Path) -> None:
    plain = advisor(folder, *TUNE, *QUICK)
    assert plain.returncode == 0, plain.stderr
    assert "The loader is not tuned: name its dataset with --data data.py:" in plain.stdout
