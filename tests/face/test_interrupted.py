"""An interrupted tuning loses at most the current trial. A second one does not start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from advisor.cache.records import Records
from advisor.cache.stores import open_store, open_stores
from advisor.errors import Busy
from advisor.persistence import HOST, lock_names, measuring
from advisor.report.progress import Shown
from tests.face.commands import MODEL, SHAPE, advisor, run_script
from tests.forks import Fork, alive, until

TUNE = ("tune", "model.py", "--shape", SHAPE, "--batches", "8,16", "--device", "cpu")
TUNE += ("--no-compile", "--no-verify", "--precisions", "default", "--effort", "quick")


NOISY = "import sys\nprint('the model says hello')\nprint('and goodbye', file=sys.stderr)\n"


def children(pid: int) -> list[int]:
    started = (one.read_text().split() for one in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(n) for of_thread in started for n in of_thread]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
def test_tuning_continues_after_kill_9_and_after_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed process has a real worker."""
    (tmp_path / "model.py").write_text(NOISY + MODEL)
    log, words = tmp_path / "log", [sys.executable, "-m", "advisor", *TUNE, "--budget", "60s"]
    with log.open("wb") as out:
        tuner = Fork(words, cwd=tmp_path, env=os.environ, stdout=out.fileno(), stderr=out.fileno())
    try:
        until(lambda: "trial 1:" in log.read_text() or not alive(tuner.pid))
        workers = children(tuner.pid)
        assert workers, log.read_text()
        os.killpg(tuner.pid, signal.SIGSTOP)  # until the second one has ended
        second = advisor(tmp_path, *TUNE)
    finally:
        tuner.kill()
        tuner.wait()
    assert second.returncode == 1 and second.stderr.count("\n") == 1
    assert second.stderr.startswith(f"advisor: another advisor (process {tuner.pid}) measures on")
    until(lambda: not any(map(alive, workers)))
    assert Records(open_stores()).all() == []
    before, visited = log.read_text().count("\ntrial "), Shown.visited

    def interrupted(*args: Any) -> None:
        visited(*args)
        raise KeyboardInterrupt  # pytest in the background ignores SIGINT

    monkeypatch.setattr(Shown, "visited", interrupted)
    done = advisor(tmp_path, *TUNE)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert f"tuning, which measured {before} config" in done.stderr
    output = done.stdout + done.stderr
    assert "hello" not in output and "goodbye" not in output  # the worker keeps the model's output
    assert "\nInterrupted: the best config so far is kept; the same command" in done.stdout
    (record,) = Records(open_stores()).all()
    numbers = {trial.number for trial in record.trials}
    # The record has the trials of both runs.
    assert len(numbers) == len(record.trials) == before + done.stderr.count("\ntrial ")


COMMAND = ("python", "train.py")


@pytest.fixture
def records(own_surroundings: Path) -> Records:
    return Records(open_store(str(own_surroundings)))


def test_a_second_tuning_is_refused_and_starts_nothing(tmp_path: Path, records: Records) -> None:
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


def test_the_lock_of_a_killed_process_is_released(records: Records) -> None:
    code = (
        "import os, sys; from advisor.open_store import open_records; "
        "from advisor.persistence import measuring\n"
        "with measuring(open_records(None), ['a'], ['cpu']): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with measuring(records, ["a"], [HOST]):
        pass


def test_a_gpu_lock_holds_for_all_stores_but_no_other_gpu(tmp_path: Path, records: Records) -> None:
    other = Records(open_store(f"dir:{tmp_path}/other"))
    with measuring(records, ["one"], ["GPU-a"]):
        with measuring(other, ["two"], ["GPU-b"]):
            pass
        message = r"on GPU GPU-a now; .*CUDA_VISIBLE_DEVICES"
        both = measuring(other, ["two"], ["GPU-b", "GPU-a"])
        with pytest.raises(Busy, match=message), both:
            pass
        same = measuring(records, ["one"], ["GPU-b"])
        with pytest.raises(Busy, match="this very command"), same:
            pass
        with measuring(other, ["two"], ["GPU-b"]):  # its earlier locks are released
            pass


@pytest.mark.gpu
def test_apply_makes_no_cuda_context(tmp_path: Path) -> None:
    """Checked with PyTorch and with the driver, which lists every process with a context."""
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
    ran = run_script(tmp_path, source, process=True)
    assert ran.stdout.splitlines() == ["cuda:0 False", "1"], ran.stderr
