"""The worker process: an error in user code fails one config only. Also: the user's line in a
traceback, and scratch folders."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from advisor.cache.config import Config
from advisor.cache.task import Task
from advisor.errors import TargetError, TargetFailed, WorkerError
from advisor.tuners import fingerprint, host, scratch, target
from advisor.tuners.faults import is_config_error, may_be_config_error, where
from advisor.tuners.measure.run.guarded_process import inductor_folder
from advisor.tuners.measure.runner import Block, ConfigFailed
from advisor.tuners.measure.worker.bench import Bench
from advisor.tuners.measure.worker.child import describe
from advisor.tuners.measure.worker.parent import Worker
from advisor.tuners.measure.worker.wire import CHANGED, WorkerJob
from advisor.tuners.scratch import ScratchFolder
from tests import forks
from tests.forks import alive, call, until

FAILING_NET = """
import os, signal, sys, threading, time
import torch
from torch import nn
from advisor.tuners import compiling

compiling._by_inductor = lambda _mode: {"backend": "eager"}  # Inductor takes half a minute
print("noise on stdout while it is imported")
for _ in range(200):
    os.write(1, b"x" * 100_000 + b"\\n")

class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, grad):
        raise ValueError("error in the backward pass")

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 4)

    def forward(self, x):
        y, n = super().forward(x), len(x)
        if n == 3:
            print("the last of it")
            sys.exit(7)
        if n == 6:
            time.sleep(1000)
        if n == 7:
            raise MemoryError
        if n == 9:
            torch.empty(2**50)
        if n == 10:
            return y * float("nan")
        if n == 11:
            return FailingBackward.apply(y)
        if n == 12:
            os.kill(os.getpid(), signal.SIGSEGV)
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
        if n == 17:
            hoard = torch.ones(2**28)
            time.sleep(1)  # ten times as long as between two looks at the memory
        if n == 4 and torch.get_num_threads() == 3:
            os._exit(8)
        if n == 16 and torch.get_num_threads() != 2:
            raise ValueError("another config set the threads")
        return y
"""


def job(path: Path | str, **changes: Any) -> WorkerJob:
    """A job on the CPU with batches of 4x3, except for the given task fields."""
    batch, shape = changes.pop("batch", 4), changes.pop("shape", (3,))
    shapes = changes.pop("mix", [(batch, *shape)])
    device, seed = changes.pop("device", "cpu"), changes.pop("seed", 0)
    task = Task.of(str(path), {"shape": shapes, "vocab": 10, **changes})
    return WorkerJob(task=task, device=device, seed=seed)


def config(batch: int) -> Config:
    return Config(precision="default", cudnn_deterministic=False, batch_size=batch, threads=2)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    (path := tmp_path_factory.mktemp("failing") / "failing.py").write_text(FAILING_NET)
    before = resource.getrlimit(resource.RLIMIT_AS)
    # Children inherit the limit, so the target cannot exhaust the memory of this machine.
    resource.setrlimit(resource.RLIMIT_AS, (32 * 2**30, before[1]))
    try:
        with Worker(job(path), deadline_s=60) as started:
            started.describe()
            yield started
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def block(worker: Worker, batch: int, deadline_s: float = 60.0) -> Block:
    return worker.block(config(batch), 2, deadline_s=deadline_s)


def failed(worker: Worker, batch: int, deadline_s: float = 60.0) -> ConfigFailed:
    with pytest.raises(ConfigFailed) as raised:
        block(worker, batch, deadline_s)
    return raised.value


@pytest.mark.parametrize(
    ("batch", "outcome", "reason"),
    [
        (6, "timed_out", "no answer within 1 s"),
        (3, "crashed", "exit code 7): the last of it"),
        (7, "out_of_memory", "MemoryError"),
        (9, "out_of_memory", "allocate memory"),
        (10, "wrong", "the loss is nan"),
        (11, "failed", "ValueError: error in the backward pass"),
        (12, "crashed", "signal SIGSEGV"),
        (15, "out_of_memory", "allocate memory"),
    ],
)
def test_failing_config_fails_alone(worker: Worker, batch: int, outcome: str, reason: str) -> None:
    failure = failed(worker, batch, deadline_s=1 if outcome == "timed_out" else 60)
    assert failure.outcome == outcome and reason in str(failure)
    assert "\n" not in str(failure) and len(str(failure)) < 400, "its output is shortened"
    assert "nanobind" not in str(failure), "printed at interpreter exit"
    good = block(worker, 4)
    assert good.samples == 8 and good.seconds > 0


def test_output_and_flags_of_a_config_do_not_affect_the_next(worker: Worker) -> None:
    for batch in (13, 4, 14, 16):
        assert block(worker, batch).steps == 2


@pytest.mark.parametrize("mode", ["none", "default"])
def test_config_is_compared_in_the_process_that_timed_it(worker: Worker, mode: str) -> None:
    worker.baseline = eager = config(4)
    compiled = eager.replace(compile=mode)
    blocks = [worker.block(one, 3, deadline_s=200) for one in (eager, compiled) * 2]
    assert [one.compiled for one in blocks] == [0] * 4, "compiled while timed"
    process = worker._process
    for one in (compiled, compiled.at(8)):  # compared at the user's batch size
        compared = worker.compare(one, deadline_s=200)
        assert compared.ok and not compared.blames, compared
    block = worker.block(compiled, 3, deadline_s=200)
    assert block.compiled == 0 and worker._process is process
    crashed = worker.compare(compiled.replace(threads=3), deadline_s=60)
    assert crashed.outcome == "crashed" and "exit code 8" in crashed.reason


def test_cudnn_benchmark_runs_in_a_fresh_process(worker: Worker) -> None:
    plain = config(18).replace(cudnn_benchmark=False)
    searching = plain.replace(cudnn_benchmark=True)
    other = searching.replace(precision="fp32")

    def process_of(one: Config) -> int:
        worker.block(one, 1, deadline_s=60)
        return worker._process.pid

    first, *rest = [process_of(one) for one in (plain, other, plain, searching, other)]
    assert rest[:2] == [first] * 2 and rest[2] == rest[3] != first


def test_worker_that_cannot_start_names_its_exit_code(tmp_path: Path) -> None:
    (path := tmp_path / "dead.py").write_text("import os\nprint('last words')\nos._exit(9)\n")
    with Worker(job(path), deadline_s=60) as dead, pytest.raises(WorkerError) as caught:
        dead.describe()
    assert "exit code 9" in str(caught.value)


PROCESS_STARTER = """
import ctypes, os, subprocess, sys, tempfile, time
import torch
from torch import nn

def write_pid(name):
    with open(os.path.join(os.path.dirname(__file__), name), "w") as file:
        file.write(str(os.getpid()))

if os.fork() == 0:  # a daemon: another session, no parent
    os.setsid()
    if os.fork() == 0:
        write_pid("daemon")
        time.sleep(1000)
    os._exit(0)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
tempfile.mkstemp(prefix="cc", suffix=".s")  # like a killed compiler

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 4)

    def forward(self, x):
        if len(x) == 6:
            write_pid("spins")
            ctypes.PyDLL(None).sleep(1000)  # in C, holding the GIL
        return super().forward(x)
"""


def pid_in(path: Path) -> int:
    """Wait for the file and return the process id in it."""
    return int(until(lambda: path.exists() and path.read_text()))


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl")


@linux
@pytest.mark.parametrize("victim", [0, 1], ids=["its guard", "the worker"])
def test_worker_killed_between_blocks_is_replaced(worker: Worker, victim: int) -> None:
    """No config counts as failed, as the OOM killer may have acted for another process."""
    block(worker, 4)
    guard, child, *_ = host.family(worker._process.pid)
    os.kill((guard, child)[victim], signal.SIGKILL)
    until(lambda: not alive(child))
    # The pipe closes with the last thread of the process.
    assert worker._pipe is not None and worker._pipe.poll(20)
    block(worker, 4)
    assert worker._process.pid != guard


@linux
def test_processes_of_a_target_end_with_its_worker(tmp_path: Path) -> None:
    (path := tmp_path / "starter.py").write_text(PROCESS_STARTER)
    with Worker(job(path), deadline_s=60) as worker:
        worker.describe()
        started = host.family(worker._process.pid)
        scratch = worker._scratch.path
        assert list(scratch.glob("cc*.s"))
        assert len(started) >= 4 and pid_in(tmp_path / "daemon") in started
        assert os.getsid(started[0]) == started[0], "Ctrl-C in the terminal would reach it"
    assert not any(map(alive, started))
    assert not scratch.exists()


def tune_forever(path: Path, temporary: Path) -> None:
    tempfile.tempdir = str(temporary)
    worker = Worker(job(path), deadline_s=100)
    worker.describe()
    worker.block(config(6), 1, deadline_s=100)


@linux
def test_killed_tuning_process_leaves_no_processes_or_files(tmp_path: Path) -> None:
    (path := tmp_path / "starter.py").write_text(PROCESS_STARTER)
    (temporary := tmp_path / "temporary").mkdir()
    tuner = call(tune_forever, path, temporary)
    pid_in(tmp_path / "spins")
    started = host.family(tuner.pid)[1:]
    assert len(started) >= 4
    (scratch,) = temporary.glob("advisor.*")
    assert list(scratch.glob("cc*.s"))
    tuner.kill()
    tuner.wait(60)
    until(lambda: not any(map(alive, started)))
    assert list(temporary.glob("advisor.*")) == []


RUN_MARKER = """
from pathlib import Path
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 4)

    def forward(self, x):
        Path(__file__).with_name("ran").touch()
        return super().forward(x)

def loss(output, target):
    return output.square().mean()
"""


@pytest.mark.parametrize("other", ["", "model", "make_batch or loss"])
def test_changed_target_is_not_run(tmp_path: Path, other: str) -> None:
    (path := tmp_path / "known.py").write_text(RUN_MARKER)
    loaded = target.load(target.parse(str(path)), Config())
    model = fingerprint.of_model(target.build(loaded))
    hooks = fingerprint.of_hooks(loaded.make_batch, loaded.loss)
    known = ("0" * 64 if other == "model" else model, "0" * 64 if "loss" in other else hooks)
    bench = Bench(dataclasses.replace(job(path), known=known))
    message = f"the {other} of known.py:Net {CHANGED}"
    with pytest.raises(TargetError, match=message) if other else nullcontext():
        assert describe(bench).model == model
    assert (tmp_path / "ran").exists() == (not other)


@linux
@pytest.mark.parametrize("batch", [4, 17])
def test_max_memory_limits_a_cpu_target(tmp_path: Path, batch: int) -> None:
    (path := tmp_path / "failing.py").write_text(FAILING_NET)
    with Worker(job(path, max_memory=2**30, batch=batch), deadline_s=60) as worker:
        if batch == 4:
            failure = failed(worker, 17)
            assert failure.outcome == "out_of_memory" and "of the 1 GiB permitted" in str(failure)
            return
        with pytest.raises(TargetFailed, match=r"batch 17 does not fit on cpu.*of the 1 GiB"):
            worker.describe()


GPU_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 64), nn.Linear(64, 4)

    def forward(self, x):
        if len(x) == 6:
            x = x + 100  # a device-side assertion: the CUDA context is lost
        more = torch.empty(2**45, device=x.device).sum() if len(x) == 7 else 0
        return self.head(self.embed(x)) + more
"""


@pytest.mark.gpu
def test_out_of_memory_and_lost_cuda_contexts_fail_one_config(tmp_path: Path) -> None:
    (path := tmp_path / "model.py").write_text(GPU_MODEL)
    with Worker(job(path, device="cuda:0", dtype="int64", shape=(8,)), deadline_s=60) as worker:
        facts = worker.describe()
        assert facts.memory_bytes > 0 and facts.device_uuid

        def try_batch(batch: int, outcome: str = "ok") -> tuple[Block | None, int]:
            block = None
            with nullcontext() if outcome == "ok" else pytest.raises(ConfigFailed) as raised:
                block = worker.block(config(batch).without("threads"), 2, deadline_s=60)
            assert outcome == "ok" or raised.value.outcome == outcome
            return block, 0 if worker._process is None else worker._process.pid

        first, process = try_batch(4)
        assert first is not None and first.gpu_s > 0 and first.peak_bytes > 0
        assert try_batch(7, "out_of_memory")[1] == try_batch(4)[1] == process
        try_batch(6, "failed")
        assert try_batch(4)[1] != process, "a lost CUDA context was used again"


GPU_NET = """
import torch
from torch import nn

def Net():
    first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
    mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(first, nn.BatchNorm2d(32), nn.ReLU(), second, nn.ReLU(), mean)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_compiled_code_is_kept_between_timing_and_comparison(
    tmp_path: Path, optimizer: str
) -> None:
    (path := tmp_path / "net.py").write_text(GPU_NET)
    task = {"device": "cuda:0", "shape": (3, 32, 32), "batch": 64, "optimizer": optimizer}
    with Worker(job(f"{path}:Net", **task), deadline_s=120) as worker:
        worker.describe()
        plain = worker.baseline = Config(worker.baseline | {"compile": "none"})
        half = plain.replace(precision="bf16", channels_last=True)
        scaled, compiled = plain.replace(precision="fp16"), half.replace(compile="default")
        configs = [half, scaled, plain.replace(fused_optimizer=True)]
        configs += [one.replace(step_graph=True) for one in (half, scaled, compiled)]
        configs += [half.replace(compile=mode) for mode in ("cudagraphs", "reduce-overhead")]
        process = worker._process.pid
        for config in configs:
            for one in (plain, config, plain, config):
                block = worker.block(one, 20, deadline_s=300)
                assert block.compiled == 0 and block.gpu_s > 0 and block.peak_bytes > 0
            compared = worker.compare(config, deadline_s=120)
            assert compared.ok, (config, compared)
            again = worker.block(config, 20, deadline_s=300)
            assert again.compiled == 0, "the compared code is not the timed code"
        assert worker._process.pid == process


SOURCES = {
    "own code": ("def step():\n    raise ValueError('bad')\nstep()\n", "train.py:2"),
    "library": ("import torch\n\ntorch.ones(2) @ torch.ones(3)\n", "train.py:3"),
    "standard library": ("import json\njson.loads('[')\n", "train.py:2"),
    "syntax error": ("x = 1\ndef train(:\n", "train.py:2"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_where_names_the_innermost_line_of_the_users_code(tmp_path: Path, name: str) -> None:
    source, line = SOURCES[name]
    file = tmp_path / "train.py"
    file.write_text(source)
    with pytest.raises(Exception) as caught:
        exec(compile(source, str(file), "exec"), {})
    assert where(caught.value) == line
    assert where(ValueError("never raised")) == ""


@pytest.mark.parametrize(
    ("error", "certain", "possible"),
    [
        (torch._dynamo.exc.InternalTorchDynamoError("in the compiler"), True, True),
        (torch.OutOfMemoryError("no memory left"), True, True),
        (RuntimeError("view size"), False, True),
        (NotImplementedError("on this device"), False, True),
        (ValueError("bad batch"), False, False),
        (RecursionError("a RuntimeError too"), False, False),
    ],
)
def test_config_errors_are_recognized(error: Exception, certain: bool, possible: bool) -> None:
    assert (is_config_error(error), may_be_config_error(error)) == (certain, possible)


def test_error_that_a_script_raises_itself_is_not_caused_by_a_config() -> None:
    with pytest.raises(RuntimeError) as by_script:
        raise RuntimeError("disk full")
    with pytest.raises(RuntimeError) as by_torch:
        torch.ones(2) @ torch.ones(3)
    assert not may_be_config_error(by_script.value)
    assert may_be_config_error(by_torch.value)


KILLED_PROCESS = """
import os
from advisor.tuners.scratch import ScratchFolder
made = ScratchFolder()
(made.path / "deep").mkdir()
(made.path / "deep" / "file").touch()
(made.path / "link").symlink_to("..")
print(made.path, flush=True)
os.kill(os.getpid(), 9)
"""


def test_sweep_removes_only_the_scratch_folders_of_dead_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    (root / "leave.py").write_text(KILLED_PROCESS)
    done = forks.run(root / "leave.py", env=os.environ | {"TMPDIR": str(root)})
    (root / "leave.py").unlink()
    abandoned = Path(done.stdout.strip())
    assert abandoned.parent == root and (abandoned / "deep" / "file").exists()
    (mine := root / "advisor-work").mkdir()
    (mine / "notes").touch()
    (root / f"{scratch.FOLDER_PREFIX}link").symlink_to(mine)
    with ScratchFolder() as living:
        (living / "file").touch()
        scratch.sweep(root)
        remaining = {one.name for one in root.iterdir()}
        assert remaining == {mine.name, f"{scratch.FOLDER_PREFIX}link", living.name}
        assert (living / "file").exists() and (mine / "notes").exists()
    assert not living.exists()
    made = ScratchFolder()
    made.remove()
    made.remove()
    assert not made.path.exists()


def test_compiled_code_goes_to_the_users_inductor_cache() -> None:
    """By default it would go to the worker's own temporary folder."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert inductor_folder() == default_cache_dir()
