"""The loader of a workload's own data: invalid data, batches, worker limits and clean-up."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from advisor.cache.config import Config
from advisor.cache.task import Task
from advisor.errors import TargetError, TargetFailed, WorkerError
from advisor.tuners import host
from advisor.tuners.faults import failure
from advisor.tuners.measure.loading import LoaderFeed, costs, described, load
from advisor.tuners.measure.runner import ConfigFailed
from advisor.tuners.measure.worker.parent import Worker
from advisor.tuners.measure.worker.wire import DataFacts, WorkerJob
from advisor.workload import loader_limits
from tests.forks import alive, until

HEAD = """
import os, pickle, sqlite3, time
from contextlib import contextmanager
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, SequentialSampler
from torch.utils.data import get_worker_info

class Samples(Dataset):
    def __init__(self, n=64, **_): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return torch.ones(3), i % 4

class Stream(IterableDataset):
    def __iter__(self): return iter([(torch.ones(3), 0)] * 32)

class Empty(IterableDataset):
    def __iter__(self): return iter([])

def fail(message): raise OSError(message)
"""
MODEL = "from torch import nn\nmodel = lambda: nn.Linear(3, 4)\n"


@pytest.fixture(autouse=True)
def fresh_data_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unload each test's data.py, and detect dead loader workers within 0.2 s."""
    batches = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(batches._try_get_data, "__defaults__", (0.2,))
    yield
    sys.modules.pop("data", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def task_for(folder: Path, source: str, **given: Any) -> Task:
    (folder / "data.py").write_text(HEAD + textwrap.dedent(source))
    (folder / "model.py").write_text(MODEL)
    how = {"shape": "8x3", "data": str(folder / "data.py"), "device": "cpu"}
    return Task.of(str(folder / "model.py"), how | given)


def facts(folder: Path, source: str, **given: Any) -> DataFacts:
    return described(task_for(folder, source, **given), made_batches=False)[1]


SHARDED_STREAM = """
class Sharded(Stream):
    def __iter__(self):
        worker = get_worker_info()
        items = range(32) if worker is None else range(worker.id, 32, worker.num_workers)
        return ((torch.ones(3), i) for i in items)
    {length}
make_dataset = Sharded
"""
OPEN_DATABASE = """
class Opened(Samples):
    def __init__(self, file):
        super().__init__()
        self.base = sqlite3.connect(file)
        self.base.execute("create table if not exists t (x)")
        self.base.commit()
    def __del__(self):  # else Python 3.13 warns
        self.base.close()
make_dataset = Opened
"""
FACTS = DataFacts(
    name="data.py", batch_bytes=8 * 3 * 4 + 8 * 8, tensors=2, shared_out=True, held_open=()
)


@pytest.mark.parametrize(
    ("source", "given", "changes"),
    [
        ("make_dataset = Samples", {"n": 100}, {"batches": 12}),
        ("make_dataset = Stream", {}, {"shared_out": False}),
        (SHARDED_STREAM.format(length=""), {}, {}),
        (SHARDED_STREAM.format(length="def __len__(self): return 32"), {}, {"batches": 4}),
        (OPEN_DATABASE, {}, {}),
    ],
    ids=["samples", "stream", "shared out", "of known length", "database"],
)
def test_data_is_described(
    tmp_path: Path, source: str, given: dict[str, Any], changes: dict[str, Any]
) -> None:
    if source == OPEN_DATABASE:
        given = {"file": str(tmp_path / "samples.db")}
        changes = {"batches": 8, "held_open": (given["file"],)}
    assert facts(tmp_path, source, data_args=given) == dataclasses.replace(FACTS, **changes)
    assert torch.utils.data.get_worker_info() is None


def test_make_collate_and_make_sampler_are_used(tmp_path: Path) -> None:
    task = task_for(
        tmp_path,
        """
        make_dataset = Samples
        def make_collate(dataset):
            return lambda samples: (torch.zeros(len(samples), 3), torch.tensor(len(dataset)))
        def make_sampler(dataset):
            return BatchSampler(SequentialSampler(dataset), 8, False)
        """,
    )
    data = load(task)
    first = next(iter(data.loader(batch_size=8, num_workers=0)))
    assert first[0].shape == (8, 3) and int(first[1]) == 64
    assert described(task, made_batches=False)[1].tensors == 2


def test_torchvision_datasets_get_default_transforms(tmp_path: Path) -> None:
    task = task_for(
        tmp_path, "", data="torchvision:FakeData", data_args={"size": 20}, shape="4x3x16x16"
    )
    data, known, ((images, labels), *_) = described(task, made_batches=False)
    assert (known.batches, images.shape, images.dtype) == (5, (4, 3, 16, 16), torch.float32)
    assert labels.shape == (4,) and data.spec.name == "torchvision:FakeData"


def source_of(sample: str) -> str:
    """Return the source of a dataset whose samples are this expression."""
    return (
        f"class Made(Samples):\n    def __getitem__(self, i): return {sample}\nmake_dataset = Made"
    )


FLOATS = (
    "gives batches of 8x5 float32, and --shape says 8x3 float32; give --shape 8x5, or change the "
    "data to match --shape; where lengths vary tune your run: advisor tune --"
)
BYTES = "give --shape 8x1x4x4 --dtype uint8, or change the data to match --shape$"


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("", TargetError, r"has no function or class 'make_dataset'; define make_dataset\(\)"),
        ("make_dataset = lambda: 5", TargetError, "it made int, which is no dataset"),
        ("make_dataset = lambda: fail('none')", TargetFailed, r"OSError: none \(data\.py:"),
        (source_of("torch.ones(3 + i), 0"), TargetFailed, r"not alike, .*; define make_collate"),
        ("make_dataset = lambda: Samples(5)", TargetError, "5 samples, and a batch .* has 8"),
        ("make_dataset = Empty", TargetError, "it gave no batch, and a batch of --shape has 8"),
        (source_of("fail('gone')"), TargetFailed, r"a batch raised OSError: gone \(data\.py:"),
        (source_of("torch.ones(5), 0"), TargetError, FLOATS),
        (source_of("torch.ones(1, 4, 4, dtype=torch.uint8), 0"), TargetError, BYTES),
        ("make_dataset = lambda: Samples(0)", TargetError, "it holds 0 samples, and a batch .* 8$"),
        (source_of("torch.ones(3)"), TargetError, r"must be \(inputs, target\), .* is Tensor;"),
    ],
)
def test_invalid_data_is_refused(
    tmp_path: Path, source: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=r"^data 'data\.py[^']*': .*" + message):
        facts(tmp_path, source)


DATABASE = {"held_open": ("/data/samples.db",)}


@pytest.mark.parametrize(
    ("changes", "workers", "by_name", "line"),
    [
        ({}, 16, False, ""),
        ({"shared_out": False}, 1, False, "get_worker_info()"),
        ({"batches": 1}, 1, False, "its epoch has 1 batch: 1 worker at most"),
        (DATABASE, 0, False, "it holds /data/samples.db open"),
        (DATABASE, 0, False, "Open it in __getitem__"),
        ({"batch_bytes": 9 * 2**20}, 2, False, "2 workers at most: 7 batches of 9 MiB do not fit"),
        ({"tensors": 20}, 16, False, ""),
        ({"tensors": 30}, 16, True, "30 tensors of a batch would each be an open file"),
    ],
)
def test_data_limits_the_loader_workers(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], workers: int, by_name: bool, line: str
) -> None:
    """On 16 cores, with 64 MiB of free shared memory and 1,000 free file descriptors."""
    monkeypatch.setattr(host, "cores", lambda: 16)
    monkeypatch.setattr(host, "shared_bytes", lambda: (2**30, 64 * 2**20))
    monkeypatch.setattr(host, "files_left", lambda: 1000)
    *limits, lines = loader_limits(dataclasses.replace(FACTS, **changes))
    assert limits == [workers, by_name]
    assert len(lines) == bool(line) and all(line in one for one in lines)


class Slow(Dataset[Any]):
    """Each sample takes 0.5 ms without using a core; from index `at` on it calls `action`."""

    def __init__(
        self, length: int = 10_000, action: Callable[[], object] = bool, at: int = 10_000
    ) -> None:
        self.length, self.action, self.at = length, action, at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.at:
            self.action()
        time.sleep(0.0005)
        return torch.ones(3), index


def loader(data: Dataset[Any], **given: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=4, drop_last=True, **given)


def take(given: DataLoader[Any], batches: int = 20) -> int:
    """Return the number of batches taken from the loader."""
    feed = LoaderFeed(given)
    try:
        return len([next(feed) for _ in range(batches)])
    finally:
        feed.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_feed_starts_new_epochs_and_counts_waits(workers: int) -> None:
    feed = LoaderFeed(loader(Slow(length=8), num_workers=workers))
    assert len([next(feed) for _ in range(5)]) == 5 and feed.waited_s > 0
    feed.close()
    assert multiprocessing.active_children() == []
    with pytest.raises(RuntimeError, match="gave no batch"):  # instead of looping forever
        take(loader(Slow(length=2)))


def raiser(exc: Exception) -> Callable[[], object]:
    def fails() -> None:
        raise exc

    return fails


BUS_ERROR = "a worker is killed by signal: Bus error; perhaps /dev/shm is full"
KILLED = "DataLoader worker (pid 12) is killed by signal: Bus error. "
FORKED_CUDA = RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA ...")
DIED = "a worker (exited unexpectedly( with exit code 3)?|ended before its batch was taken)"
LINE = r"\(test_loading\.py:\d+\)"


# torch reports a killed worker from a signal handler, possibly inside a destructor.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("fails", "at", "workers", "message"),
    [
        (raiser(ValueError("none")), 21, 2, f"in a worker: ValueError: none {LINE}"),
        (raiser(OSError("none")), 0, 0, f"OSError: none {LINE}"),
        (raiser(FORKED_CUDA), 0, 1, '.*multiprocessing_context="spawn".*'),
        # The pipe may close before torch receives the signal.
        (lambda: os.kill(os.getpid(), signal.SIGBUS), 21, 1, f"{BUS_ERROR}|{DIED}"),
        (raiser(RuntimeError(KILLED)), 0, 0, BUS_ERROR),
        (lambda: os._exit(0), 0, 1, DIED),
        (lambda: os._exit(0), 300, 1, DIED),
        (lambda: os._exit(3), 0, 1, DIED),
    ],
)
def test_loader_failures_are_explained(
    fails: Callable[[], object], at: int, workers: int, message: str
) -> None:
    with pytest.raises(Exception) as raised:
        take(loader(Slow(action=fails, at=at), num_workers=workers), 2_000)
    assert re.fullmatch(message, failure(raised.value)[1])
    del raised
    gc.collect()  # while warnings about the open socket are ignored
    assert multiprocessing.active_children() == []


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_pickle_error_names_the_remedy() -> None:
    class Local(Slow):
        pass

    spawned = loader(Local(), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises((AttributeError, TypeError)) as raised:
        take(spawned)
    assert failure(raised.value)[1].endswith('multiprocessing_context="fork") needs no pickling')
    assert take(loader(Local(), num_workers=1)) == 20  # forked workers need no pickling


@pytest.fixture(scope="module")
def hang_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a path. While a file exists there, the dataset's workers hang."""
    return tmp_path_factory.mktemp("hang") / "hang"


@pytest.fixture(scope="module")
def worker(hang_file: Path) -> Iterator[Worker]:
    task = task_for(
        hang_file.parent,
        f"""
        class Hanging(Samples):
            def __getitem__(self, i):
                time.sleep(1000 if os.path.exists({str(hang_file)!r}) else 0.001)
                return super().__getitem__(i)
        make_dataset = lambda: Hanging(100_000)
        """,
    )
    with Worker(WorkerJob(task=task, device="cpu", seed=0), deadline_s=30.0) as started:
        yield started


STEP = Config(batch_size=8, precision="default", cudnn_deterministic=False)
"""A config without loader knobs."""
TWO_WORKERS = STEP | {"num_workers": 2, "prefetch_factor": 2}


def test_worker_times_steps_with_and_without_the_loader(worker: Worker, hang_file: Path) -> None:
    assert worker.describe_data().batches == 12_500
    step = worker.block(STEP, 5, deadline_s=30.0)
    assert (step.steps, step.samples, step.waited_s) == (5, 40, 0.0) and step.first_s > 0
    both = worker.block(TWO_WORKERS, 5, deadline_s=30.0)
    assert both.steps == 6, "whole rounds of two workers"
    assert both.first_s > 0 and 0 < both.waited_s <= both.seconds
    more = worker.block(TWO_WORKERS, 6, deadline_s=30.0)
    assert more.first_s == 0.0 and more.waited_s > 0
    other = TWO_WORKERS | {"in_order": False, "sharing": "file_system"}
    assert worker.block(other, 2, deadline_s=30.0).waited_s > 0
    assert worker.block(STEP, 5, deadline_s=30.0).waited_s == 0.0

    # A hanging loader fails one config and leaves no process behind; the next config works.
    hang_file.touch()
    guard = worker._process.pid
    with pytest.raises(ConfigFailed) as failed:
        worker.block(TWO_WORKERS, 2, deadline_s=1.0)
    assert failed.value.outcome == "timed_out"
    with pytest.raises(ProcessLookupError):
        os.kill(guard, 0)
    hang_file.unlink()
    assert worker.block(TWO_WORKERS, 2, deadline_s=30.0).waited_s > 0


def test_loader_workers_end_when_the_worker_is_killed(worker: Worker, hang_file: Path) -> None:
    worker.describe_data()
    worker.block(STEP, 2, deadline_s=30.0)
    hang_file.touch()
    guard = worker._process.pid
    pids: list[int] = []

    def kill() -> None:
        # The guard, the worker and its two loader workers.
        pids.extend(until(lambda: len(family := host.family(guard)) >= 4 and family))
        os.kill(pids[1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ConfigFailed) as failed:
        worker.block(TWO_WORKERS, 2, deadline_s=30.0)
    killer.join()
    assert failed.value.outcome in ("crashed", "out_of_memory") and len(pids) >= 4
    assert not any(map(alive, pids))


def test_data_that_exits_or_hangs_is_an_error(tmp_path: Path) -> None:
    task = task_for(
        tmp_path,
        """
        def make_dataset():
            if os.path.exists(__file__ + ".hangs"): time.sleep(300)
            os._exit(3)
        """,
    )
    with Worker(WorkerJob(task=task, device="cpu", seed=0), deadline_s=30.0) as worker:
        with pytest.raises(WorkerError, match=r"^data '.*data\.py': the worker process died"):
            worker.describe_data()
        (tmp_path / "data.py.hangs").touch()
        with pytest.raises(WorkerError, match=r"no batch within 1 s.*larger --budget allows"):
            worker.describe_data(1.0)


COSTLY = """
class Resize:
    def __call__(self, x):
        time.sleep(0.008)
        return x

class Costly(Samples):
    transform = Resize()
    def __getitem__(self, i):
        time.sleep(0.002)
        return self.transform(self.read()), 0
    def read(self):
        time.sleep(0.004)
        return torch.zeros(3)

make_dataset = Costly

def make_collate(dataset):
    def collate(samples):
        time.sleep(0.02)
        return torch.stack([x for x, _ in samples]), torch.zeros(len(samples))
    return collate
"""


def test_costs_list_the_parts_of_a_sample(tmp_path: Path) -> None:
    """Sorted by time. The test fixes no order: a busy host may change it."""
    cost = costs(load(task_for(tmp_path, COSTLY)), 8, 1.0)
    locations = {one.part: one.where for one in cost.parts}
    assert list(cost.parts) == sorted(cost.parts, key=lambda one: -one.seconds)
    assert locations.keys() == {"Resize", "Costly.read", "collate", "Costly.__getitem__ itself"}
    assert (locations["Resize"], locations["collate"]) == ("data.py:Resize", "collate")
    assert cost.seconds > 0.8 * (0.008 + 0.004 + 0.02 / 8)
