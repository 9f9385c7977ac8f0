"""A tuning run that is cut off loses at most the trial in flight; two do not run at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from advisor.cache.records import Records
from advisor.cache.stores import open_store
from tests.face.commands import COMMAND, MODEL, SHAPE, advisor, script

TUNE = ("tune", "model.py", "--shape", SHAPE, "--batches", "8,16", "--device", "cpu")
TUNE += ("--no-compile", "--no-verify", "--precisions", "default", "--effort", "quick")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


@contextlib.contextmanager
def tuning(folder: Path, *, until_said: str) -> Iterator[subprocess.Popen[bytes]]:
    """`advisor tune` in a session of its own, once it has said something."""
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(COMMAND), *TUNE, "--budget", "60s"],
            cwd=folder,
            stdout=out,
            stderr=out,
            start_new_session=True,
            # A runner started in the background ignores it, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        until(lambda: until_said in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    started = (one.read_text().split() for one in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(n) for of_thread in started for n in of_thread]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def tried(text: str) -> int:
    """Trials that were told."""
    return text.count("\ntrial ")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
def test_two_at_once_and_kill_9_and_ctrl_c_and_go_on(folder: Path) -> None:
    log = folder / "log"
    with tuning(folder, until_said="trial 1:") as process:
        workers = children(process.pid)
        assert workers
        os.killpg(process.pid, signal.SIGSTOP)  # however long the second one takes
        second = advisor(folder, *TUNE)
        assert second.returncode == 1
        (line,) = second.stderr.splitlines()
        assert line.startswith(f"advisor: another advisor (process {process.pid}) measures on")
        process.kill()
        process.wait()
        until(lambda: not any(map(alive, workers)))
    assert Records(open_store(None)).all() == []
    before = tried(log.read_text())

    with tuning(folder, until_said="trial ") as process:
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
        until(lambda: not any(map(alive, workers)))
    said = log.read_text()
    assert "Traceback" not in said and f"continues after {before} visits" in said
    assert "\nInterrupted: the best so far is kept; the same command continues.\n" in said
    (kept,) = Records(open_store(None)).all()
    numbers = {trial.number for trial in kept.trials}
    # What the first run measured is in the record.
    assert len(numbers) == len(kept.trials) == before + tried(said)


@pytest.mark.gpu
def test_apply_makes_no_cuda_context(tmp_path: Path) -> None:
    """The driver lists a process that has a context: that is asked, not PyTorch alone."""
    ran = script(
        tmp_path,
        "import os, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "import advisor, pynvml\n"
        "advice = advisor.apply('torchvision:resnet18', shape=(8, 3, 64, 64))\n"
        "import torch\n"
        "pynvml.nvmlInit()\n"
        "from advisor.tuners.environment import gpus\n"
        "gpu = pynvml.nvmlDeviceGetHandleByUUID(gpus()[0].uuid)\n"
        "mine = lambda: [p for p in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)]\n"
        "before = len(mine())\n"
        "print(advice.device, torch.cuda.is_initialized())\n"
        "torch.ones(1, device='cuda')\n"
        "print(len(mine()) - before)\n",
        process=True,
    )
    assert ran.stdout.splitlines() == ["cuda:0 False", "1"], ran.stderr
