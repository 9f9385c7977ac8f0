"""The loader's workers in force: as many as was said, in a process that has read a real store."""

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

FED = """
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
    print(train(2))
"""
LEFT = "1 loader worker: advised, and not in force; the loader: "
OPEN = "train.py is open, and workers would share its file position"


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Looks:
    """What was seen of the script, for which one worker was found, in a store on disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADVISOR_CACHE", f"disk:{tmp_path / 'store'}")
    Path("train.py").write_text(FED)
    guide, charge = Looks(), ActivePilot()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "files_read", list)  # pytest's own
        patch.setattr(host, "cores", lambda: 2)
        patch.syspath_prepend(tmp_path)
        charge.attach(guide)
        __import__("train").train(1)
        charge.release()
        del sys.modules["train"]
    assert guide.seen.workers
    open_records(None).put(record_of(guide.seen, Config(num_workers=1)))
    return guide


def ran(*words: str, **env: str) -> tuple[int, str]:
    """The samples that workers made and what the script says, with advice, in a fork."""
    told = os.environ | {"ADVISOR_LOG": "info"} | env
    done = forks.run(Path("train.py"), *words, env=told)
    assert done.returncode == 0, done.stderr
    return int(done.stdout), done.stderr


@pytest.mark.usefixtures("tuned")
def test_the_workers_that_were_found_are_at_work() -> None:
    by_workers, said = ran()
    assert by_workers >= 100, said
    assert "in force: 1 loader worker; 1.50x" in said
    assert "Warning" not in said


ALONE = "in force: your unmodified script; 1 loader worker: all that is advised, and not in force"
RAISED = "; the loader goes on by itself"


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("how", "by_workers", "before", "end"),
    [
        # A file of the script's is open from its first steps on, or from its first epoch on, whose
        # workers stay at work.
        ("opens", (0, 1), False, OPEN),
        ("later", (1, 65), True, OPEN),
        # What a worker raises ends the workers; all 128 samples are trained on.
        ("raises", (1, 64), True, RAISED),
    ],
)
def test_a_loader_that_stays_unmodified_is_said_with_the_reason(
    how: str, by_workers: tuple[int, int], before: bool, end: str
) -> None:
    made, log = ran(how)
    assert made in range(*by_workers)
    (said,) = [line for line in log.splitlines() if "not in force; " in line]
    assert said.endswith(end) and "AdvisorWarning: advisor: " in said
    assert (LEFT if end == OPEN else "in a worker: ValueError: no sample 40 (train.py:") in said
    lines = [line for line in log.splitlines() if " in force: " in line]
    assert lines[-1].endswith(ALONE)
    assert (len(lines) > 1) == before


@pytest.mark.usefixtures("tuned")
def test_a_user_who_asked_for_the_loader_to_stay_is_not_warned() -> None:
    by_workers, said = ran(ADVISOR_KEEP_LOADER="1")
    assert by_workers == 0
    assert f"INFO {LEFT}ADVISOR_KEEP_LOADER is set" in said
    assert "Warning" not in said


def test_no_more_workers_are_said_to_be_in_force_than_there_is_room_for(tuned: Looks) -> None:
    seen = replace(tuned.seen, workers=2)
    newer = record_of(tuned.seen, Config(num_workers=6))
    open_records(None).put(replace(newer, provenance=replace(newer.provenance, created=1.75e9)))
    with pytest.warns(
        advisor.AdvisorWarning, match="6 loader workers: .*; there is room for only 2 now"
    ):
        order = RecordGuide(["python", "train.py"], Request()).advice_for(seen)
    assert order is not None and order.config["num_workers"] == 2


def test_the_line_that_starts_a_run_says_where_its_own_workers_are_replaced(
    tuned: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, command = record_of(tuned.seen, Config(num_workers=1)), ["python", "train.py"]
    assert "--loader" not in script_line(record, command=command)
    two = replace(record.baseline, config=record.baseline.config.replace(num_workers=2))
    line = script_line(replace(record, baseline=two), command=command)
    assert line == "advisor run --loader override -- python train.py"
    monkeypatch.setenv("ADVISOR_OVERRIDE_LOADER", "1")  # as `tune --loader override` sets it
    assert script_line(record, command=command) == line
