"""A tuning that is cut off loses at most the trial in flight; a second one starts nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.errors import Busy
from advisor.persistence import HOST, lock_names, measuring
from advisor.report.progress import Shown
from tests.face.commands import MODEL, SHAPE, advisor, script
from tests.forks import Fork, alive, until

TUNE = ("tune", "model.py", "--shape", SHAPE, "--batches", "8,16", "--device", "cpu")
TUNE += ("--no-compile", "--no-verify", "--precisions", "default", "--effort", "quick")


NOISY = "import sys\nprint('the model says hello')\nprint('and goodbye', file=sys.stderr)\n"


def children(pid: int) -> list[int]:
    started = (one.read_text().split() for one in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(n) for of_thread in started for n in of_thread]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
def test_two_at_once_and_kill_9_and_ctrl_c_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is killed has a worker that was started as users' are."""
    (tmp_path / "model.py").write_text(NOISY + MODEL)
    log, words = tmp_path / "log", [sys.executable, "-m", "advisor", *TUNE, "--budget", "60s"]
    with log.open("wb") as out:
        tuner = Fork(words, cwd=tmp_path, env=os.environ, stdout=out.fileno(), stderr=out.fileno())
    try:
        until(lambda: "trial 1:" in log.read_text() or not alive(tuner.pid))
        workers = children(tuner.pid)
        assert workers, log.read_text()
        os.killpg(tuner.pid, signal.SIGSTOP)  # however long the second one takes
        second = advisor(tmp_path, *TUNE)
    finally:
        tuner.kill()
        tuner.wait()
    assert second.returncode == 1 and second.stderr.count("\n") == 1
    assert second.stderr.startswith(f"advisor: another advisor (process {tuner.pid}) measures on")
    until(lambda: not any(map(alive, workers)))
    assert Records(open_store(None)).all() == []
    before, visited = log.read_text().count("\ntrial "), Shown.visited

    def interrupted(*given: Any) -> None:
        visited(*given)
        raise KeyboardInterrupt  # a runner in the background ignores the signal

    monkeypatch.setattr(Shown, "visited", interrupted)
    done = advisor(tmp_path, *TUNE)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert f"tuning, which measured {before} config" in done.stderr
    printed = done.stdout + done.stderr
    assert "hello" not in printed and "goodbye" not in printed  # a model's stays in its worker
    assert "\nInterrupted: the best config so far is kept; the same command" in done.stdout
    (kept,) = Records(open_store(None)).all()
    numbers = {trial.number for trial in kept.trials}
    # What the first run measured is in the record.
    assert len(numbers) == len(kept.trials) == before + done.stderr.count("\ntrial ")


COMMAND = ("python", "train.py")


@pytest.fixture
def records(own_surroundings: Path) -> Records:
    return Records(open_store(str(own_surroundings)))


def test_a_second_tuning_starts_and_removes_nothing(tmp_path: Path, records: Records) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    runs = records.studies.parent / "runs"
    runs.mkdir(parents=True)
    with measuring(records, COMMAND, lock_names()):
        second = advisor(tmp_path, "tune", "--", *COMMAND)
        other = advisor(tmp_path, "tune", "--", "python", "other.py")
        target = advisor(tmp_path, "tune", "torchvision:resnet18", "--shape", "4x3x32x32")
    for refused in (second, other, target):
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"advisor: another advisor (process {os.getpid()}) ")
        assert "measures on" in refused.stderr and "wait for it" in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "started").exists() and list(runs.iterdir()) == []


def test_the_lock_of_a_process_that_was_killed_is_free(records: Records) -> None:
    code = (
        "import os, sys; from advisor.open_store import open_records; "
        "from advisor.persistence import measuring\n"
        "with measuring(open_records(None), ['a'], ['cpu']): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with measuring(records, ["a"], [HOST]):
        pass


def test_other_gpus_are_free_whatever_store_is_used(tmp_path: Path, records: Records) -> None:
    other = Records(open_store(f"dir:{tmp_path}/other"))
    with measuring(records, ["one"], ["GPU-a"]):
        with measuring(other, ["two"], ["GPU-b"]):
            pass
        said = r"on GPU GPU-a now; .*CUDA_VISIBLE_DEVICES"
        both = measuring(other, ["two"], ["GPU-b", "GPU-a"])
        with pytest.raises(Busy, match=said), both:
            pass
        same = measuring(records, ["one"], ["GPU-b"])
        with pytest.raises(Busy, match="this very command"), same:
            pass
        with measuring(other, ["two"], ["GPU-b"]):  # what was held before is free again
            pass


@pytest.mark.gpu
def test_apply_makes_no_cuda_context(tmp_path: Path) -> None:
    """The driver lists a process that has a context: that is asked, not PyTorch alone."""
    source = """
import os, warnings
warnings.simplefilter('ignore')
import advisor, pynvml
advice = advisor.apply('torchvision:resnet18', shape=(8, 3, 64, 64))
import torch
pynvml.nvmlInit()
from advisor.tuners.environment import gpus
gpu = pynvml.nvmlDeviceGetHandleByUUID(gpus()[0].uuid)
mine = lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu))
before = mine()
print(advice.device, torch.cuda.is_initialized())
torch.ones(1, device='cuda')
print(mine() - before)
"""
    ran = script(tmp_path, source, process=True)
    assert ran.stdout.splitlines() == ["cuda:0 False", "1"], ran.stderr
