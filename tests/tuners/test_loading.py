"""The loader of a workload's own data: what is refused of it, what it gives, and what it leaves."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
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
"""
MODEL = "from torch import nn\nmodel = lambda: nn.Linear(3, 4)\n"


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path) -> Iterator[None]:
    """A data.py of one test is none of the next."""
    yield
    sys.modules.pop("data", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def task(folder: Path, source: str, **given: Any) -> Task:
    (folder / "data.py").write_text(HEAD + textwrap.dedent(source))
    (folder / "model.py").write_text(MODEL)
    how = {"shape": "8x3", "data": str(folder / "data.py"), "device": "cpu"}
    return Task.of(str(folder / "model.py"), how | given)


def facts(folder: Path, source: str, **given: Any) -> DataFacts:
    return described(task(folder, source, **given), made_batches=False)[1]


def test_what_is_known_of_data(tmp_path: Path) -> None:
    found = facts(tmp_path, "make_dataset = Samples", data_args={"n": 100})
    batch_bytes = 8 * 3 * 4 + 8 * 8
    assert found == DataFacts(
        name="data.py",
        batch_bytes=batch_bytes,
        tensors=2,
        shared_out=True,
        held_open=(),
        batches=12,
    )


def test_data_in_the_targets_own_file_and_by_other_names(tmp_path: Path) -> None:
    found = facts(tmp_path, "", data=str(tmp_path / "data.py") + ":Samples")
    assert (found.name, found.batches) == ("data.py:Samples", 8)


def test_a_collate_function_and_a_sampler(tmp_path: Path) -> None:
    made = task(
        tmp_path,
        """
        make_dataset = Samples
        def make_collate(dataset):
            return lambda samples: (torch.zeros(len(samples), 3), torch.tensor(len(dataset)))
        def make_sampler(dataset):
            return BatchSampler(SequentialSampler(dataset), 8, False)
        """,
    )
    data = load(made)
    first = next(iter(data.loader(batch_size=8, num_workers=0)))
    assert first[0].shape == (8, 3) and int(first[1]) == 64
    assert described(made, made_batches=False)[1].tensors == 2


def test_torchvisions_have_the_usual_transforms(tmp_path: Path) -> None:
    made = task(
        tmp_path, "", data="torchvision:FakeData", data_args={"size": 20}, shape="4x3x16x16"
    )
    data, found, ((images, labels), *_) = described(made, made_batches=False)
    assert (found.batches, images.shape, images.dtype) == (5, (4, 3, 16, 16), torch.float32)
    assert labels.shape == (4,) and data.spec.name == "torchvision:FakeData"


UNEQUAL = """
class Unequal(Samples):
    def __getitem__(self, i): return torch.ones(3 + i), 0
make_dataset = Unequal
"""


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("", TargetError, r"has no function or class 'make_dataset'; define make_dataset\(\)"),
        ("make_dataset = lambda: 5", TargetError, "it made int, which is no dataset"),
        (
            "def make_dataset(): raise OSError('no disk')",
            TargetFailed,
            r"OSError: no disk \(data\.py:",
        ),
        (UNEQUAL, TargetFailed, r"not alike, .*stack expects each .*; define make_collate"),
        ("make_dataset = lambda: Samples(5)", TargetError, "5 samples, and a batch .* has 8"),
        (
            "class Ends(Stream):\n    def __iter__(self): return iter([])\nmake_dataset = Ends",
            TargetError,
            "it ends before, and a batch of --shape has 8",
        ),
        (
            "class Bad(Samples):\n    def __getitem__(self, i): raise KeyError('gone')\n"
            "make_dataset = Bad",
            TargetFailed,
            r"loading a batch raised KeyError: 'gone' \(data\.py:1\d\)",
        ),
        (
            "class Big(Samples):\n    def __getitem__(self, i): return torch.ones(5), 0\n"
            "make_dataset = Big",
            TargetError,
            "gives batches of 8x5 float32, and --shape says 8x3 float32; give --shape 8x5, or have "
            "the data give what --shape says; where lengths vary tune your run: advisor tune --",
        ),
        (
            "class Gray(Samples):\n    def __getitem__(self, i):\n"
            "        return torch.ones(1, 4, 4, dtype=torch.uint8), 0\nmake_dataset = Gray",
            TargetError,
            r"8x1x4x4 uint8, and --shape says 8x3 float32; give --shape 8x1x4x4 --dtype uint8, or "
            r"have the data give what --shape says$",
        ),
        ("make_dataset = lambda: Samples(0)", TargetError, "it holds 0 samples, and a batch .* 8$"),
        (
            "class One(Samples):\n    def __getitem__(self, i): return torch.ones(3)\n"
            "make_dataset = One",
            TargetError,
            r"a batch must be \(inputs, target\), and it gives Tensor; define make_collate",
        ),
    ],
)
def test_refused(tmp_path: Path, source: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=r"^data 'data\.py[^']*': .*" + said):
        facts(tmp_path, source)


SHARED_OUT = """
class Shared(Stream):
    def __iter__(self):
        worker = get_worker_info()
        items = range(32) if worker is None else range(worker.id, 32, worker.num_workers)
        return ((torch.ones(3), i) for i in items)
    {length}
make_dataset = Shared
"""


@pytest.mark.parametrize("length", ["", "def __len__(self): return 32"])
def test_a_stream_is_known_to_be_shared_out(tmp_path: Path, length: str) -> None:
    found = facts(tmp_path, SHARED_OUT.format(length=length))
    assert (found.shared_out, found.batches) == (True, 4 if length else 0)
    assert torch.utils.data.get_worker_info() is None


def test_a_stream_that_each_worker_would_read_whole_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "cores", lambda: 8)
    found = facts(tmp_path, "make_dataset = Stream")
    workers, _by_name, said = loader_limits(found)
    assert workers == 1 and "get_worker_info()" in said[0]


def test_a_database_that_the_dataset_opens_itself_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "cores", lambda: 8)
    found = facts(
        tmp_path,
        """
        class Opened(Samples):
            def __init__(self, file):
                super().__init__()
                self.base = sqlite3.connect(file)
                self.base.execute("create table if not exists t (x)")
                self.base.commit()
        make_dataset = Opened
        """,
        data_args={"file": str(tmp_path / "samples.db")},
    )
    workers, _by_name, said = loader_limits(found)
    assert workers == 0
    assert f"it holds {tmp_path / 'samples.db'} open" in said[0] and "__getitem__" in said[0]


def test_a_small_shared_memory_leaves_fewer_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cores", lambda: 16)
    monkeypatch.setattr(host, "shared_bytes", lambda: (2**30, 64 * 2**20))
    found = DataFacts(name="d", batch_bytes=9 * 2**20, tensors=2, shared_out=True, held_open=())
    workers, _by_name, said = loader_limits(found)
    assert workers == 2
    assert said[0].startswith("data 'd': 2 workers at most: 7 batches of 9 MiB do not fit into")


SMALL = """
import json, sys, torch
from torch.utils.data import DataLoader, Dataset
from advisor.tuners import host
from advisor.tuners.faults import failure
from advisor.tuners.measure.loading import LoaderFeed
from advisor.tuners.measure.worker.wire import DataFacts
from advisor.workload import loader_limits

class Large(Dataset):
    def __len__(self): return 1000
    def __getitem__(self, i): return torch.ones(2**20)

host.cores = lambda: 2
facts = DataFacts(
    name="d", batch_bytes=2**24, tensors=1, shared_out=True, held_open=()
)
workers, _by_name, said = loader_limits(facts)
feeding = LoaderFeed(DataLoader(Large(), batch_size=4, num_workers=workers))
given = [len(next(feeding)) for _ in range(8)]
feeding.close()
try:
    list(DataLoader(Large(), batch_size=4, num_workers=2, prefetch_factor=8))
except RuntimeError as exc:
    said.append(failure(exc)[1])
print(json.dumps([workers, given, said]))
"""


def test_a_shared_memory_of_64_mib_is_not_overfilled() -> None:
    """A real one: four batches of 16 MiB, of which a worker and a step have three."""
    inside = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -c "$1"'
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside]
    mounting = [*namespace[:5], "-c", "mount -t tmpfs none /dev/shm"]
    if not shutil.which("unshare") or subprocess.run(mounting).returncode:
        pytest.skip("no tmpfs can be mounted here, even in a namespace of this user's own")
    done = subprocess.run([*namespace, sys.executable, SMALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    workers, given, (first, overfilled) = json.loads(done.stdout)
    assert (workers, given) == (1, [4] * 8)
    assert first.startswith("data 'd': 1 worker at most: 5 batches of 16 MiB do not fit into")
    assert "64 MiB is free" in first
    assert overfilled.endswith("; as where /dev/shm is full")


def test_more_tensors_than_files_may_be_open_are_shared_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "cores", lambda: 16)
    monkeypatch.setattr(host, "files_left", lambda: 1000)
    found = DataFacts(name="d", batch_bytes=2**10, tensors=30, shared_out=True, held_open=())
    workers, by_name, said = loader_limits(found)
    assert (workers, by_name) == (16, True)
    assert said[0].startswith("data 'd': 30 tensors of a batch are files") and len(said) == 1
    assert loader_limits(dataclasses.replace(found, tensors=20))[1:] == (False, [])


class Slow(Dataset[Any]):
    """Each sample takes a while of nobody's core."""

    def __init__(self, length: int = 10_000, takes_s: float = 0.002) -> None:
        self.length, self.takes_s = length, takes_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.takes_s)
        return torch.ones(3), index


def loader(data: Dataset[Any], **given: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=4, drop_last=True, **given)


def fed(given: DataLoader[Any], batches: int = 20) -> int:
    """Take so many batches."""
    feeding = LoaderFeed(given)
    try:
        return len([next(feeding) for _ in range(batches)])
    finally:
        feeding.close()


def test_what_lies_ready_is_known_and_what_is_waited_for() -> None:
    feeding = LoaderFeed(loader(Slow(), num_workers=2, prefetch_factor=4))
    assert (feeding.settling, feeding.together) == (8, 2)
    for _ in range(8):
        next(feeding)
    before = feeding.waited_s
    for _ in range(20):
        next(feeding)
    assert feeding.waited_s - before > 0
    feeding.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_follow_one_another(workers: int) -> None:
    assert fed(loader(Slow(length=8), num_workers=workers), 5) == 5
    assert multiprocessing.active_children() == []


def test_a_loader_without_batches_is_no_endless_one() -> None:
    with pytest.raises(RuntimeError, match="gave no batch"):
        fed(loader(Slow(length=2)))


def test_what_a_worker_raises_is_told_as_a_line() -> None:
    class Raises(Slow):
        def __getitem__(self, index: int) -> Any:
            if index > 20:
                raise ValueError(f"no image {index}")
            return super().__getitem__(index)

    with pytest.raises(ValueError) as raised:
        fed(loader(Raises(), num_workers=2))
    said = failure(raised.value)[1]
    assert said.startswith("in a worker: ValueError: no image 2")
    assert said.endswith(")") and "test_loading.py:" in said and len(said) < 120
    assert multiprocessing.active_children() == []


def test_what_uses_cuda_in_a_forked_worker_is_told_with_what_to_do() -> None:
    class Raises(Slow):
        def __getitem__(self, index: int) -> Any:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA ...")

    with pytest.raises(RuntimeError) as raised:
        fed(loader(Raises(), num_workers=1))
    assert 'multiprocessing_context="spawn"' in failure(raised.value)[1]


def test_what_is_raised_without_workers_is_told_with_its_line() -> None:
    class Raises(Slow):
        def __getitem__(self, index: int) -> Any:
            raise OSError("no such image")

    with pytest.raises(OSError) as raised:
        fed(loader(Raises()))
    said = failure(raised.value)[1]
    assert said.startswith("OSError: no such image (test_loading.py:")


def test_a_worker_that_is_killed_is_told_as_a_line() -> None:
    class Dies(Slow):
        def __getitem__(self, index: int) -> Any:
            if index > 20:
                os.kill(os.getpid(), signal.SIGBUS)
            return super().__getitem__(index)

    with pytest.raises(RuntimeError) as raised:
        fed(loader(Dies(), num_workers=1))
    assert failure(raised.value)[1] == (
        "a worker is killed by signal: Bus error; as where /dev/shm is full"
    )


@pytest.mark.parametrize(("code", "at"), [(0, 0), (0, 300), (3, 0)])
def test_a_worker_that_ends_by_itself_is_told(code: int, at: int) -> None:
    """Before its first batch, or with batches that nobody has taken."""

    class Exits(Slow):
        def __getitem__(self, index: int) -> Any:
            if index == at:
                os._exit(code)
            return super().__getitem__(index)

    with pytest.raises((RuntimeError, EOFError, ConnectionError)) as raised:
        fed(loader(Exits(takes_s=0.0), num_workers=1), 2_000)
    assert re.fullmatch(
        r"a worker (exited unexpectedly( with exit code 3)?|ended before its batch was taken)",
        failure(raised.value)[1],
    )


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_what_cannot_be_pickled_is_told_with_what_to_do() -> None:
    class Local(Slow):
        pass

    spawned = loader(Local(), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises((AttributeError, TypeError)) as raised:
        fed(spawned)
    assert failure(raised.value)[1].endswith('multiprocessing_context="fork") needs no pickling')
    assert fed(loader(Local(), num_workers=1)) == 20  # forked ones pickle nothing


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file has the workers of the data sleep for good."""
    return tmp_path_factory.mktemp("stuck") / "stuck"


@pytest.fixture(scope="module")
def worker(stuck: Path) -> Iterator[Worker]:
    made = task(
        stuck.parent,
        f"""
        class Stuck(Samples):
            def __getitem__(self, i):
                time.sleep(1000 if os.path.exists({str(stuck)!r}) else 0.001)
                return super().__getitem__(i)
        make_dataset = lambda: Stuck(100_000)
        """,
    )
    with Worker(WorkerJob(task=made, device="cpu", seed=0), deadline_s=30.0) as found:
        yield found


STEP = Config(batch_size=8, precision="default", cudnn_deterministic=False)
"""No knob of a loader among them."""


def test_in_a_worker_the_step_alone_and_fed(worker: Worker, stuck: Path) -> None:
    assert worker.describe_data().batches == 12_500
    two = STEP | {"num_workers": 2, "prefetch_factor": 2}
    step = worker.block(STEP, 5, deadline_s=30.0)
    assert (step.steps, step.samples, step.waited_s) == (5, 40, 0.0) and step.first_s > 0
    both = worker.block(two, 5, deadline_s=30.0)
    assert both.steps == 6, "whole rounds of two workers"
    assert both.first_s > 0 and 0 < both.waited_s <= both.seconds
    more = worker.block(two, 6, deadline_s=30.0)
    assert more.first_s == 0.0 and more.waited_s > 0
    other = two | {"in_order": False, "sharing": "file_system"}
    assert worker.block(other, 2, deadline_s=30.0).waited_s > 0
    assert worker.block(STEP, 5, deadline_s=30.0).waited_s == 0.0

    # One that hangs costs its config, and no process is left of it; the next have their data.
    assert worker._process is not None
    stuck.touch()
    guard = worker._process.pid
    with pytest.raises(ConfigFailed) as failed:
        worker.block(two, 2, deadline_s=2.0)
    assert failed.value.outcome == "timed_out"
    with pytest.raises(ProcessLookupError):
        os.kill(guard, 0)
    stuck.unlink()
    assert worker.block(two, 2, deadline_s=30.0).waited_s > 0


def test_no_loaders_worker_outlives_the_one_who_measures(worker: Worker, stuck: Path) -> None:
    """kill -9 of the process that has them."""
    worker.describe_data()
    worker.block(STEP, 2, deadline_s=30.0)
    stuck.touch()
    assert worker._process is not None
    guard = worker._process.pid
    seen: list[int] = []

    def kill() -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            family = host.family(guard)
            if len(family) >= 4:  # the guard, the worker, and two of its own
                seen.extend(family)
                os.kill(family[1], signal.SIGKILL)
                return
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    two = STEP | {"num_workers": 2, "prefetch_factor": 2}
    with pytest.raises(ConfigFailed) as failed:
        worker.block(two, 2, deadline_s=30.0)
    killer.join()
    assert failed.value.outcome in ("crashed", "out_of_memory") and len(seen) >= 4
    assert not any(Path(f"/proc/{one}").exists() for one in seen)


def test_data_that_ends_its_process_or_hangs_is_refused(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    made = task(
        tmp_path,
        f"""
        def make_dataset():
            if os.path.exists({str(hangs)!r}): time.sleep(300)
            os._exit(3)
        """,
    )
    with Worker(WorkerJob(task=made, device="cpu", seed=0), deadline_s=30.0) as worker:
        with pytest.raises(WorkerError, match=r"^data '.*data\.py': the worker process died"):
            worker.describe_data()
        hangs.touch()
        with pytest.raises(WorkerError, match=r"given up after 1 s.*larger --budget gives it up"):
            worker.describe_data(1.0)


COSTLY = """
from io import BytesIO
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

class Compose:
    def __init__(self, *parts): self.parts = parts
    def __call__(self, x):
        for part in self.parts: x = part(x)
        return x

class Resize:
    def __call__(self, x):
        time.sleep(0.008)
        return x

class Costly(Samples):
    transform = Compose(Resize())
    def __init__(self):
        super().__init__(240)
        file = BytesIO()
        to_pil_image(torch.rand(3, 40, 40)).save(file, "jpeg")
        self.jpeg = file.getvalue()
    def __getitem__(self, i):
        time.sleep(0.002)
        return self.transform(self.decode(self.read())), 0
    def read(self):
        time.sleep(0.004)
        return self.jpeg
    def decode(self, read): return pil_to_tensor(Image.open(BytesIO(read)))

class Streamed(Costly, IterableDataset):
    def __iter__(self):
        for i in range(240): yield self[i]

make_dataset = Costly

def make_collate(dataset):
    def collate(samples):
        time.sleep(0.02)
        return torch.stack([x for x, _ in samples]), torch.zeros(len(samples))
    return collate
"""


def test_what_a_sample_costs_by_part(tmp_path: Path) -> None:
    """The order of what sleeps for so long is the same on a busy host."""
    found = costs(load(task(tmp_path, COSTLY, shape="8x3")), 8, 2.0)
    told = {one.part: one for one in found.parts}
    order = ("Resize", "Costly.read", "collate", "Costly.__getitem__ itself")
    assert [one.part for one in found.parts if one.part in order] == [
        *("Resize", "Costly.read", *sorted(order[2:], key=lambda part: -told[part].seconds))
    ]
    assert told.keys() == {*order, "Costly.decode"} and found.samples == 240
    least = {"Resize": 0.008, "Costly.read": 0.004, "collate": 0.02 / 8}
    assert found.seconds > 0.8 * sum(least.values())
    assert told["Resize"].where == "data.py:Resize" and told["collate"].where == "collate"
    assert told["Resize"].made_bytes == told["collate"].made_bytes - 4 == 3 * 40 * 40
    assert 0 < told["Costly.read"].made_bytes < 3 * 40 * 40
    assert [told[part].place for part in ("Costly.read", "Costly.decode", "Resize")] == sorted(
        told[part].place for part in ("Costly.read", "Costly.decode", "Resize")
    )
    assert told["collate"].place == 0


def test_what_a_sample_of_a_stream_costs(tmp_path: Path) -> None:
    made = task(tmp_path, COSTLY, shape="8x3", data=str(tmp_path / "data.py") + ":Streamed")
    parts = {one.part: one.seconds for one in costs(load(made), 8, 1.0).parts}
    assert parts["Costly.__getitem__"] == max(parts.values())


def test_transforms_of_torchvision_are_told_by_their_names(tmp_path: Path) -> None:
    made = task(
        tmp_path, "", data="torchvision:FakeData", data_args={"size": 40}, shape="4x3x16x16"
    )
    found = {one.part: one.file for one in costs(load(made), 4, 0.5).parts}
    assert {"RandomResizedCrop", "ToImage", "ToDtype", "Normalize", "collate"} <= found.keys()
    assert found["Normalize"] == "_misc.py"


def test_no_more_workers_than_an_epoch_has_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "cores", lambda: 8)
    workers, _by_name, said = loader_limits(facts(tmp_path, "make_dataset = lambda: Samples(9)"))
    assert workers == 1
    assert said[-1].endswith("its epoch has 1 batch: 1 worker at most, as others would have none")
