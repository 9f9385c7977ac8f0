"""--data: the loader of a model's own data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.face.commands import advisor

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
    assert "The loader is not tuned: --data data.py:make_dataset" in plain.stdout
