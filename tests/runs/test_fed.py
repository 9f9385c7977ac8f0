"""Tests advised loader workers in forked scripts that read a store on disk."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import advisor
from advisor.cache.config import Config
from advisor.command_snippets import script_line
from advisor.open_store import open_records
from advisor.resolve.record_guide import RecordGuide
from advisor.resolve.request import Request
from advisor.tuners import host
from advisor.tuners.act.pilot.pilot import ActivePilot
from tests import forks
from tests.runs.forked import Looks
from tests.runs.test_apply import record_of

SCRIPT = """
import sys
from pathlib import Path

if __name__ == "__main__":
    import advisor
    advisor.apply()

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        if number == 40 and get_worker_info() is not None and "raises" in sys.argv:
            raise ValueError(f"no sample {number}")
        return torch.full((6,), float(number)), int(get_worker_info() is not None)

def train(epochs):
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    by_workers, opens_at = [], {"opens": 0, "later": 12}.get(sys.argv[-1])
    for _ in range(epochs):
        for x, workers in DataLoader(Samples(), batch_size=4):
            net(x).square().mean().backward()
            optimizer.step()
            if len(by_workers) == opens_at:
                file = Path(__file__).open("rb")
            by_workers.append(int(workers.sum()))
    return sum(by_workers)

if __name__ == "__main__":
    print(train(2) + ("twice" in sys.argv and train(1)))
"""
UNUSED = "1 loader worker: advised, and not in force; the loader: "
OPEN = "train.py is open, and workers would share its file position"


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Stores a record that advises one worker. Returns a guide with the facts of the script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADVISOR_CACHE", f"disk:{tmp_path / 'store'}")
    Path("train.py").write_text(SCRIPT)
    guide, pilot = Looks(), ActivePilot()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "files_read", list)  # without pytest's open files
        patch.setattr(host, "cores", lambda: 2)
        patch.syspath_prepend(tmp_path)
        pilot.attach(guide)
        patch.delitem(sys.modules, "train", raising=False)  # another test's
        __import__("train").train(1)
        pilot.release()
        del sys.modules["train"]
    assert guide.seen.workers
    open_records(None).put(record_of(guide.seen, Config(num_workers=1)))
    return guide


def run_script(*words: str, **env: str) -> tuple[int, str]:
    """Runs the script with advice in a fork. Returns the count of worker samples, and the log."""
    environment = os.environ | {"ADVISOR_LOG": "info"} | env
    done = forks.run(Path("train.py"), *words, env=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout), done.stderr


@pytest.mark.usefixtures("tuned")
def test_advised_workers_load_the_samples() -> None:
    by_workers, log = run_script()
    assert by_workers >= 100, log
    assert "in force: 1 loader worker; 1.50x" in log
    assert "Warning" not in log


@pytest.mark.usefixtures("tuned")
def test_a_second_training_of_a_single_epoch_gets_workers_too() -> None:
    by_workers, log = run_script("twice")
    assert by_workers >= 110, log
    assert log.count("in force: 1 loader worker; 1.50x") == 2
    assert "Warning" not in log


SUMMARY = "in force: your unmodified script; 1 loader worker: all that is advised, and not in force"
RAISED = "; the loader goes on by itself"


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("how", "by_workers", "before", "end"),
    [
        # The script opens a file in its first step, or later in its first epoch. In the second
        # case, workers load the rest of that epoch.
        ("opens", (0, 1), False, OPEN),
        ("later", (1, 65), True, OPEN),
        # An exception in a worker ends the workers. The script still trains on all 128 samples.
        ("raises", (1, 64), True, RAISED),
    ],
)
def test_an_unmodified_loader_is_reported_with_the_reason(
    how: str, by_workers: tuple[int, int], before: bool, end: str
) -> None:
    made, log = run_script(how)
    assert made in range(*by_workers)
    (warned,) = [line for line in log.splitlines() if "not in force; " in line]
    assert warned.endswith(end) and "AdvisorWarning: advisor: " in warned
    assert (UNUSED if end == OPEN else "in a worker: ValueError: no sample 40 (train.py:") in warned
    lines = [line for line in log.splitlines() if " in force: " in line]
    assert lines[-1].endswith(SUMMARY)
    assert (len(lines) > 1) == before


@pytest.mark.usefixtures("tuned")
def test_a_user_who_keeps_the_loader_is_not_warned() -> None:
    by_workers, log = run_script(ADVISOR_KEEP_LOADER="1")
    assert by_workers == 0
    assert f"INFO {UNUSED}ADVISOR_KEEP_LOADER is set" in log
    assert "Warning" not in log


def test_advised_workers_are_limited_to_the_room_on_this_host(tuned: Looks) -> None:
    seen = replace(tuned.seen, workers=2)
    newer = record_of(tuned.seen, Config(num_workers=6))
    open_records(None).put(replace(newer, provenance=replace(newer.provenance, created=1.75e9)))
    with pytest.warns(
        advisor.AdvisorWarning, match="6 loader workers: .*; there is room for only 2 now"
    ):
        request = RecordGuide(["python", "train.py"], Request()).advice_for(seen)
    assert request is not None and request.config["num_workers"] == 2


def test_run_line_says_if_the_scripts_own_workers_are_replaced(
    tuned: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, command = record_of(tuned.seen, Config(num_workers=1)), ["python", "train.py"]
    assert "--loader" not in script_line(record, command=command)
    two = replace(record.baseline, config=record.baseline.config.replace(num_workers=2))
    line = script_line(replace(record, baseline=two), command=command)
    assert line == "advisor run --loader override -- python train.py"
    monkeypatch.setenv("ADVISOR_OVERRIDE_LOADER", "1")  # as `tune --loader override` sets it
    assert script_line(record, command=command) == line
