"""The worker process: whatever the user's code does costs one trial."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.errors import TargetFailed, WorkerError
from advisor.tuners.measure.worker.parent import Worker
from advisor.tuners.measure.worker.wire import Job

MEAN = """
import os, signal, sys, threading, time
import torch
from torch import nn

print("noise on stdout while it is imported")
os.write(1, b"and on the descriptor")

class Sour(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, grad):
        raise ValueError("sour in the backward pass")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x):
        y, n = self.linear(x), len(x)
        if n == 3:
            os._exit(7)
        if n == 5:
            os.kill(os.getpid(), signal.SIGSEGV)
        if n == 6:
            time.sleep(1000)
        if n == 7:
            raise MemoryError
        if n == 9:
            torch.empty(2**50)
        if n == 10:
            return y * float("nan")
        if n == 11:
            return Sour.apply(y)
        if n == 12:
            sys.exit(3)
        if n == 13:
            print("more noise " * 1000)
            os.write(1, b"x" * 100_000)
            sys.stdin.read()
        if n == 14:
            torch.set_num_threads(1)
            torch.backends.cudnn.benchmark = True
            threading.Thread(target=time.sleep, args=(1000,)).start()
        if n == 15:
            hoard = [torch.empty(2**28) for _ in range(64)]
        return y
"""


def job(path: Path, **changes: object) -> Job:
    plain = Job(
        target=str(path),
        arguments={},
        shape=(3,),
        dtype="float32",
        vocab=10,
        batch=4,
        mode="train",
        optimizer="sgd",
        deterministic=False,
        device="cpu",
        max_memory=0,
        seed=0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def config(batch: int) -> Config:
    return Config(precision="default", cudnn_deterministic=False, batch_size=batch, threads=2)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    path = tmp_path_factory.mktemp("mean") / "mean.py"
    path.write_text(MEAN)
    before = resource.getrlimit(resource.RLIMIT_AS)
    # Children inherit it: the target that hoards meets a wall instead of this machine's memory.
    resource.setrlimit(resource.RLIMIT_AS, (32 * 2**30, before[1]))
    try:
        with Worker(job(path), deadline_s=60) as made:
            made.describe()
            yield made
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def measure(worker: Worker, batch: int) -> Measurement:
    return worker.measure(config(batch), seconds=0.05)


@pytest.mark.parametrize(
    ("batch", "outcome", "reason"),
    [
        (3, "crashed", "exit code 7"),
        (5, "crashed", "signal SIGSEGV"),
        (7, "out_of_memory", "MemoryError"),
        (9, "out_of_memory", "allocate memory"),
        (10, "wrong", "the loss is nan"),
        (11, "failed", "ValueError: sour in the backward pass"),
        (12, "crashed", "exit code 3"),
        (15, "out_of_memory", "allocate memory"),
    ],
)
def test_a_mean_config_costs_one_trial(
    worker: Worker, batch: int, outcome: str, reason: str
) -> None:
    measured = measure(worker, batch)
    assert measured.outcome == outcome
    assert reason in measured.reason
    assert "\n" not in measured.reason
    good = measure(worker, 4)
    assert good.ok and good.samples_per_s > 0


def test_a_hanging_config_meets_its_deadline(worker: Worker) -> None:
    worker.deadline_s = 3
    try:
        measured = measure(worker, 6)
    finally:
        worker.deadline_s = 60
    assert (measured.outcome, measured.reason) == ("timed_out", "no answer within 3 s")
    assert measure(worker, 4).ok


def test_a_config_has_a_deadline_of_its_own(worker: Worker) -> None:
    worker.limit = lambda c: 2.0 if c["batch_size"] == 6 else None
    try:
        measured = measure(worker, 6)
        assert (measured.outcome, measured.reason) == ("timed_out", "no answer within 2 s")
        assert measure(worker, 4).ok
    finally:
        worker.limit = lambda _config: None


def test_first_steps_are_those_of_a_fresh_process(tmp_path: Path) -> None:
    """What the process has loaded, searched or compiled before does not count."""
    path = tmp_path / "model.py"
    path.write_text(
        MEAN.replace(
            "        return y\n",
            "        if self.training and torch.is_grad_enabled() and not PAID:\n"
            "            PAID.append(time.sleep(0.5))\n"
            "        return y\n",
        ).replace("class Net", "PAID = []\n\nclass Net")
    )
    with Worker(job(path), deadline_s=60) as worker:
        worker.describe()
        assert measure(worker, 4).first_step_s < 0.4
        started = worker.start(config(4), deadline_s=60)
        assert started.ok and started.first_step_s >= 0.5 > started.step_s
        assert worker.start(config(6), deadline_s=1).outcome == "timed_out"
        assert measure(worker, 4).ok


def test_noise_is_no_answer(worker: Worker) -> None:
    assert measure(worker, 13).ok
    assert measure(worker, 4).ok


def test_flags_do_not_leak_into_the_next_trial(tmp_path: Path) -> None:
    path = tmp_path / "spy.py"
    path.write_text(
        MEAN.replace(
            "        return y\n",
            "        if n == 4 and torch.get_num_threads() != 2:\n"
            "            raise ValueError('another trial set the threads')\n"
            "        return y\n",
        )
    )
    with Worker(job(path, batch=1), deadline_s=60) as spied:
        spied.describe()
        assert measure(spied, 14).ok
        assert measure(spied, 4).ok


def test_a_race_keeps_configs_and_survives_a_death(worker: Worker) -> None:
    kept = [worker.measure(config(b), seconds=0.05, keep=True).ok for b in (4, 8, 4, 8)]
    assert kept == [True] * 4
    assert worker.measure(config(3), seconds=0.05, keep=True).outcome == "crashed"
    assert worker.measure(config(4), seconds=0.05, keep=True).ok
    worker.release()
    assert measure(worker, 4).ok


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    path = tmp_path / "dead.py"
    path.write_text("import os\nprint('last words')\nos._exit(9)\n")
    with Worker(job(path), deadline_s=60) as dead, pytest.raises(WorkerError) as caught:
        dead.describe()
    assert "exit code 9" in str(caught.value)


def test_the_default_must_fit(tmp_path: Path) -> None:
    path = tmp_path / "mean.py"
    path.write_text(MEAN)
    with (
        Worker(job(path, batch=9), deadline_s=60) as big,
        pytest.raises(TargetFailed, match="batch 9 does not fit on cpu"),
    ):
        big.describe()


def test_nothing_outlives_the_tuning_process(worker: Worker) -> None:
    assert measure(worker, 4).ok
    assert worker._process is not None
    pid = worker._process.pid
    assert os.getsid(pid) == pid, "Ctrl-C in the terminal would reach it"
    worker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling on a CPU needs g++")
def test_a_compiled_config_between_eager_ones(tmp_path: Path) -> None:
    path = tmp_path / "mean.py"
    path.write_text(
        "from torch import nn\nmodel = lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU())\n"
    )
    with Worker(job(path), deadline_s=200) as worker:
        worker.describe()
        eager, compiled = (config(4).replace(compile=how) for how in ("none", "default"))
        measured = [worker.measure(c, seconds=0.05) for c in (eager, compiled, eager)]
    assert [m.outcome for m in measured] == ["ok"] * 3
    # Compilation is in the first step and nowhere else.
    assert measured[1].first_step_s > 20 * measured[1].step_s
    assert measured[1].first_step_s > 3 * measured[2].first_step_s


GPU_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        if len(x) == 6:
            x = x + 100  # a device-side assertion: the CUDA context is lost
        y = self.head(self.embed(x))
        if len(x) == 7:
            y = y + torch.empty(2**45, device=x.device).sum()
        return y
"""


@pytest.mark.gpu
def test_on_a_gpu_memory_and_lost_contexts_cost_one_trial(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(GPU_MODEL)
    with Worker(job(path, device="cuda:0", dtype="int64", shape=(8,)), deadline_s=60) as worker:
        facts = worker.describe()
        assert facts.memory_bytes > 0 and facts.device_uuid

        def tried(batch: int) -> Measurement:
            return worker.measure(Config(config(batch)).without("threads"), seconds=0.05)

        first = tried(4)
        assert first.ok and first.gpu_s > 0 and first.peak_bytes > 0
        assert worker._process is not None
        pid = worker._process.pid
        assert tried(7).outcome == "out_of_memory"
        assert worker._process.pid == pid and tried(4).ok
        lost = tried(6)
        assert lost.outcome == "failed" and "assert" in lost.reason
        again = tried(4)
        assert again.ok
        assert worker._process.pid != pid, "a lost CUDA context was used again"
