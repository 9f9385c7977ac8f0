"""The worker process: whatever the user's code does costs one config; where in it an exception came
from; and folders for what is written for now, gone with their process, never while it lives."""

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

MEAN = """
import os, signal, sys, threading, time
import torch
from torch import nn
from advisor.tuners import compiling

compiling._by_inductor = lambda _mode: {"backend": "eager"}  # Inductor takes half a minute
print("noise on stdout while it is imported")
for _ in range(200):
    os.write(1, b"x" * 100_000 + b"\\n")

class Sour(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, grad):
        raise ValueError("sour in the backward pass")

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
            return Sour.apply(y)
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
        if n == 4 and torch.get_num_threads() == 3:
            os._exit(8)
        if n == 16 and torch.get_num_threads() != 2:
            raise ValueError("another config set the threads")
        return y
"""


def job(path: Path | str, **changes: Any) -> WorkerJob:
    """A job of a batch of 4 vectors of 3 on the CPU, but for these fields of its task."""
    batch, shape = changes.pop("batch", 4), changes.pop("shape", (3,))
    shapes = changes.pop("mix", [(batch, *shape)])
    device, seed = changes.pop("device", "cpu"), changes.pop("seed", 0)
    task = Task.of(str(path), {"shape": shapes, "vocab": 10, **changes})
    return WorkerJob(task=task, device=device, seed=seed)


def config(batch: int) -> Config:
    return Config(precision="default", cudnn_deterministic=False, batch_size=batch, threads=2)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    (path := tmp_path_factory.mktemp("mean") / "mean.py").write_text(MEAN)
    before = resource.getrlimit(resource.RLIMIT_AS)
    # Children inherit it: the target that hoards meets a wall instead of this machine's memory.
    resource.setrlimit(resource.RLIMIT_AS, (32 * 2**30, before[1]))
    try:
        with Worker(job(path), deadline_s=60) as made:
            made.describe()
            yield made
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
        (11, "failed", "ValueError: sour in the backward pass"),
        (12, "crashed", "signal SIGSEGV"),
        (15, "out_of_memory", "allocate memory"),
    ],
)
def test_a_mean_config_costs_itself(worker: Worker, batch: int, outcome: str, reason: str) -> None:
    found = failed(worker, batch, deadline_s=1 if outcome == "timed_out" else 60)
    assert found.outcome == outcome and reason in str(found)
    assert "\n" not in str(found) and len(str(found)) < 400, "what it printed is capped"
    assert "nanobind" not in str(found), "what is said as an interpreter ends"
    good = block(worker, 4)
    assert good.samples == 8 and good.seconds > 0


def test_neither_noise_nor_flags_reach_the_next_config(worker: Worker) -> None:
    for batch in (13, 4, 14, 16):
        assert block(worker, batch).steps == 2


@pytest.mark.parametrize("mode", ["none", "default"])
def test_a_config_is_compared_with_fp32_in_the_process_that_timed_it(
    worker: Worker, mode: str
) -> None:
    worker.baseline = eager = config(4)
    made = eager.replace(compile=mode)
    blocks = [worker.block(one, 3, deadline_s=200) for one in (eager, made, eager, made)]
    assert [one.compiled for one in blocks] == [0] * 4, "all before they are timed"
    process = worker._process
    for one in (made, made.at(8)):  # at the user's batch
        compared = worker.compare(one, deadline_s=200)
        assert compared.ok and not compared.blames, compared
    assert worker.block(made, 3, deadline_s=200).compiled == 0 and worker._process is process
    crashed = worker.compare(made.replace(threads=3), deadline_s=60)
    assert crashed.outcome == "crashed" and "exit code 8" in crashed.reason


def test_a_search_for_algorithms_has_a_fresh_process(worker: Worker) -> None:
    plain = config(18).replace(cudnn_benchmark=False)
    searching = plain.replace(cudnn_benchmark=True)
    other = searching.replace(precision="fp32")

    def process_of(one: Config) -> int:
        worker.block(one, 1, deadline_s=60)
        return worker._process.pid

    first, *rest = [process_of(one) for one in (plain, other, plain, searching, other)]
    assert rest[:2] == [first] * 2 and rest[2] == rest[3] != first


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    (path := tmp_path / "dead.py").write_text("import os\nprint('last words')\nos._exit(9)\n")
    with Worker(job(path), deadline_s=60) as dead, pytest.raises(WorkerError) as caught:
        dead.describe()
    assert "exit code 9" in str(caught.value)


LEAVES = """
import ctypes, os, subprocess, sys, tempfile, time
import torch
from torch import nn

def leave(name):
    with open(os.path.join(os.path.dirname(__file__), name), "w") as file:
        file.write(str(os.getpid()))

if os.fork() == 0:  # a daemon: another session, and its parent gone
    os.setsid()
    if os.fork() == 0:
        leave("daemon")
        time.sleep(1000)
    os._exit(0)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
tempfile.mkstemp(prefix="cc", suffix=".s")  # as a compiler that is killed

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 4)

    def forward(self, x):
        if len(x) == 6:
            leave("spins")
            ctypes.PyDLL(None).sleep(1000)  # in C, the interpreter's lock held
        return super().forward(x)
"""


def written(path: Path) -> int:
    """A process that leaves its number there."""
    return int(until(lambda: path.exists() and path.read_text()))


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl")


@linux
@pytest.mark.parametrize("which", [0, 1], ids=["its guard", "the worker"])
def test_a_worker_killed_between_blocks_is_replaced(worker: Worker, which: int) -> None:
    """As where another process took the memory: no config is charged for it."""
    block(worker, 4)
    guard, child, *_ = host.family(worker._process.pid)
    os.kill((guard, child)[which], signal.SIGKILL)
    until(lambda: not alive(child))
    # The last thread of its process is gone, too, which holds the pipe.
    assert worker._pipe is not None and worker._pipe.poll(20)
    block(worker, 4)
    assert worker._process.pid != guard


@linux
def test_what_a_target_starts_ends_with_its_worker(tmp_path: Path) -> None:
    (path := tmp_path / "leaves.py").write_text(LEAVES)
    with Worker(job(path), deadline_s=60) as made:
        made.describe()
        started = host.family(made._process.pid)
        scratch = made._scratch.path
        assert list(scratch.glob("cc*.s"))
        assert len(started) >= 4 and written(tmp_path / "daemon") in started
        assert os.getsid(started[0]) == started[0], "Ctrl-C in the terminal would reach it"
    assert not any(map(alive, started))
    assert not scratch.exists()


def tune_for_ever(path: Path, temporary: Path) -> None:
    """In a process of its own."""
    tempfile.tempdir = str(temporary)
    worker = Worker(job(path), deadline_s=100)
    worker.describe()
    worker.block(config(6), 1, deadline_s=100)


@linux
def test_nothing_outlives_a_tuning_process_that_was_killed(tmp_path: Path) -> None:
    (path := tmp_path / "leaves.py").write_text(LEAVES)
    (temporary := tmp_path / "temporary").mkdir()
    tuner = call(tune_for_ever, path, temporary)
    written(tmp_path / "spins")
    started = host.family(tuner.pid)[1:]
    assert len(started) >= 4
    (scratch,) = temporary.glob("advisor.*")
    assert list(scratch.glob("cc*.s"))
    tuner.kill()
    tuner.wait(60)
    until(lambda: not any(map(alive, started)))
    assert list(temporary.glob("advisor.*")) == []


RAN = """
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
def test_only_the_target_that_is_known_is_run(tmp_path: Path, other: str) -> None:
    (path := tmp_path / "known.py").write_text(RAN)
    loaded = target.load(target.parse(str(path)), Config())
    model = fingerprint.of_model(target.build(loaded))
    hooks = fingerprint.of_hooks(loaded.make_batch, loaded.loss)
    known = ("0" * 64 if other == "model" else model, "0" * 64 if "loss" in other else hooks)
    bench = Bench(dataclasses.replace(job(path), known=known))
    said = f"the {other} of known.py:Net {CHANGED}"
    with pytest.raises(TargetError, match=said) if other else nullcontext():
        assert describe(bench).model == model
    assert (tmp_path / "ran").exists() == (not other)


@linux
@pytest.mark.parametrize("batch", [4, 17])
def test_a_limit_of_memory_holds_on_a_cpu(tmp_path: Path, batch: int) -> None:
    (path := tmp_path / "mean.py").write_text(MEAN)
    with Worker(job(path, max_memory=2**30, batch=batch), deadline_s=60) as made:
        if batch == 4:
            tried = failed(made, 17)
            assert tried.outcome == "out_of_memory" and "of the 1 GiB permitted" in str(tried)
            return
        with pytest.raises(TargetFailed, match=r"batch 17 does not fit on cpu.*of the 1 GiB"):
            made.describe()


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
def test_on_a_gpu_memory_and_lost_contexts_cost_one_trial(tmp_path: Path) -> None:
    (path := tmp_path / "model.py").write_text(GPU_MODEL)
    with Worker(job(path, device="cuda:0", dtype="int64", shape=(8,)), deadline_s=60) as worker:
        facts = worker.describe()
        assert facts.memory_bytes > 0 and facts.device_uuid

        def tried(batch: int, outcome: str = "ok") -> tuple[Block | None, int]:
            found = None
            with nullcontext() if outcome == "ok" else pytest.raises(ConfigFailed) as raised:
                found = worker.block(config(batch).without("threads"), 2, deadline_s=60)
            assert outcome == "ok" or raised.value.outcome == outcome
            return found, 0 if worker._process is None else worker._process.pid

        first, process = tried(4)
        assert first is not None and first.gpu_s > 0 and first.peak_bytes > 0
        assert tried(7, "out_of_memory")[1] == tried(4)[1] == process
        tried(6, "failed")
        assert tried(4)[1] != process, "a lost CUDA context was used again"


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
def test_on_a_gpu_kept_code_is_timed_and_compared(tmp_path: Path, optimizer: str) -> None:
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
            assert again.compiled == 0, "what is compared is what was timed"
        assert worker._process.pid == process


SOURCES = {
    "raised here": ("def step():\n    raise ValueError('bad')\nstep()\n", "train.py:2"),
    "in a library": ("import torch\n\ntorch.ones(2) @ torch.ones(3)\n", "train.py:3"),
    "in Python": ("import json\njson.loads('[')\n", "train.py:2"),
    "of wrong syntax": ("x = 1\ndef train(:\n", "train.py:2"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_innermost_line_of_the_users_own(tmp_path: Path, name: str) -> None:
    source, at = SOURCES[name]
    file = tmp_path / "train.py"
    file.write_text(source)
    with pytest.raises(Exception) as caught:
        exec(compile(source, str(file), "exec"), {})
    assert where(caught.value) == at
    assert where(ValueError("never raised")) == ""


@pytest.mark.parametrize(
    ("exc", "is_it", "may_be"),
    [
        (torch._dynamo.exc.InternalTorchDynamoError("in the compiler"), True, True),
        (torch.OutOfMemoryError("no memory left"), True, True),
        (RuntimeError("view size"), False, True),
        (NotImplementedError("on this device"), False, True),
        (ValueError("bad batch"), False, False),
        (RecursionError("a RuntimeError too"), False, False),
    ],
)
def test_what_a_config_may_be_the_cause_of(exc: Exception, is_it: bool, may_be: bool) -> None:
    assert (is_config_error(exc), may_be_config_error(exc)) == (is_it, may_be)


ABANDONED = """
import os
from advisor.tuners.scratch import ScratchFolder
made = ScratchFolder()
(made.path / "deep").mkdir()
(made.path / "deep" / "file").touch()
(made.path / "link").symlink_to("..")
print(made.path, flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_is_swept_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    (root / "leave.py").write_text(ABANDONED)
    done = forks.run(root / "leave.py", env=os.environ | {"TMPDIR": str(root)})
    (root / "leave.py").unlink()
    gone = Path(done.stdout.strip())
    assert gone.parent == root and (gone / "deep" / "file").exists()
    (mine := root / "advisor-work").mkdir()
    (mine / "notes").touch()
    (root / f"{scratch.FOLDER_PREFIX}link").symlink_to(mine)
    with ScratchFolder() as living:
        (living / "file").touch()
        scratch.sweep(root)
        left_there = {one.name for one in root.iterdir()}
        assert left_there == {mine.name, f"{scratch.FOLDER_PREFIX}link", living.name}
        assert (living / "file").exists() and (mine / "notes").exists()
    assert not living.exists()
    made = ScratchFolder()
    made.remove()
    made.remove()
    assert not made.path.exists()


def test_what_is_compiled_lies_where_the_users_runs_find_it() -> None:
    """A worker's temporary folder is its own, in which Inductor would keep it."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert inductor_folder() == default_cache_dir()
