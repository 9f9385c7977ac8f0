"""The local executor: placement, the worker's environment, restarts and cleanup."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor.errors import UsageError
from advisor.service.executors import Capacity, ExecutorAway, Unplaceable, open_executors
from advisor.service.executors.local import GRACE_S, Local, environment
from advisor.tuners.environment import Gpu
from tests.forks import until
from tests.service.serving import make_start

H100, L4 = "NVIDIA H100", "NVIDIA L4"
DATABASE = "sqlite:////somewhere"
TERM = 1 << signal.SIGTERM - 1  # SIGTERM's bit in a signal mask


def gpu(number: int, name: str = H100, *users: int) -> Gpu:
    return Gpu(uuid=f"GPU-{number}", name=name, users=users)


def states(local: Local, *external: str) -> list[str]:
    return [one.state for one in local.status(external).values()]


@pytest.fixture
def gpus() -> list[Gpu]:
    return []


@pytest.fixture
def local(tmp_path: Path, gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = Local(DATABASE, tmp_path / "devices", lambda: gpus)
    yield found
    found.close()
    assert [*tmp_path.glob("advisor-*")] == []


def worker_pid(local: Local, external: str = "advisor-1-1") -> int:
    """Process id of an attempt's worker, once it has installed its SIGTERM handler."""
    assert local._workers is not None
    pid = local._workers[external].pid
    status = Path(f"/proc/{pid}/status")
    until(lambda: int(status.read_text().split("SigCgt:")[1].split()[0], 16) & TERM)
    return pid


def test_the_cpu_runs_one_attempt_at_a_time(local: Local, tmp_path: Path) -> None:
    assert local.capacity() == [Capacity(gpu="", gpus=0)]
    local.start(make_start())
    assert local.capacity() == []
    for other in (make_start("advisor-2-1"), make_start("advisor-3-1", gpus=1)):
        with pytest.raises(Unplaceable, match="another job measures on the CPU"):
            local.start(other)
    assert states(local, "advisor-1-1", "advisor-2-1") == ["running", "unknown"]
    worker_pid(local)
    local.stop("advisor-1-1")
    until(lambda: states(local, "advisor-1-1") == ["ended"])
    assert local.capacity() == [Capacity(gpu="", gpus=0)]
    local.stop("advisor-1-1")
    assert [*tmp_path.glob("advisor-*")] == [] and states(local, "advisor-1-1") == ["unknown"]


def test_a_gpu_runs_one_attempt_at_a_time(local: Local, gpus: list[Gpu], tmp_path: Path) -> None:
    gpus += [gpu(0), gpu(1, H100, os.getpid()), gpu(2), gpu(3, L4)]
    used = f"GPU 1 is used by other processes: {os.getpid()} ("
    h100, l4, cpu = local.capacity()
    assert (h100.gpu, h100.gpus, h100.total, h100.why[: len(used)]) == (H100, 2, 3, used)
    assert (l4, cpu) == (Capacity(gpu=L4, gpus=1, total=1), Capacity(gpu="", gpus=0))
    with pytest.raises(Unplaceable, match=r"GPU 1 is used by other processes: \d+ \("):
        local.start(make_start(gpus=3, gpu=H100))
    with pytest.raises(Unplaceable, match="no such GPU"):
        local.start(make_start(gpus=1, gpu="B200"))
    local.start(make_start(gpus=2, gpu=H100))
    h100, l4 = local.capacity()  # no CPU capacity: GPU jobs need it
    assert (h100.gpus, l4.gpus) == (0, 1)
    assert "GPU 0 is used by another job" in h100.why and "GPU 2 is used by another job" in h100.why
    environ = Path(f"/proc/{worker_pid(local)}/environ").read_text().split("\0")
    assert "CUDA_VISIBLE_DEVICES=GPU-0,GPU-2" in environ
    with pytest.raises(Unplaceable, match="another job runs on this machine"):
        local.start(make_start("advisor-2-1"))


def test_the_worker_environment_has_no_server_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin")
    for name in ("ADVISOR_DATABASE", "ADVISOR_SECRET", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "s3cret")
    given = environment(make_start(), "")
    own = {name for name in given if name.startswith("ADVISOR_")}
    assert own == {"ADVISOR_SERVER", "ADVISOR_START_TOKEN"} and "s3cret" not in given.values()
    assert (given["PATH"], given["CUDA_VISIBLE_DEVICES"]) == ("/bin", "")


def test_a_restarted_server_finds_its_workers(local: Local, tmp_path: Path) -> None:
    local.start(make_start())
    pid = worker_pid(local)
    again = Local(DATABASE, tmp_path / "devices", list)
    with pytest.raises(ExecutorAway, match="another server of this database"):
        again.capacity()
    local._owning.close()  # as the kernel does when the server dies
    stale = Path(tempfile.mkdtemp(prefix=local._prefix))  # the folder of a killed worker
    assert again.capacity() == [] and states(again, "advisor-1-1") == ["running"]
    assert not stale.exists()
    os.kill(pid, signal.SIGKILL)
    until(lambda: states(again, "advisor-1-1") == ["ended"])
    assert again.status(["advisor-1-1"])["advisor-1-1"].reason == "its worker is gone"
    again.close()


def test_a_hanging_worker_is_killed(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    local.start(make_start())
    os.kill(worker_pid(local), signal.SIGSTOP)
    local.stop("advisor-1-1")
    assert states(local, "advisor-1-1") == ["running"]
    monkeypatch.setattr(local, "_now", lambda: time.monotonic() + GRACE_S)
    local.stop("advisor-1-1")
    until(lambda: states(local, "advisor-1-1") == ["ended"])
    assert "SIGKILL" in local.status(["advisor-1-1"])["advisor-1-1"].reason


def test_valid_and_invalid_executor_addresses() -> None:
    assert open_executors(["none"], DATABASE) == []
    (here,) = open_executors(["local"], DATABASE)
    assert here.name.startswith("local:") and "sqlite" not in here.name
    for address, name in (
        ("ray-jobs:http://head.example", "ray:http://head.example:8265"),
        ("ray-jobs:https://head.example:443/", "ray:https://head.example:443"),
        ("ray-jobs:http://[::1]:8265", "ray:http://[::1]:8265"),
        ("ray://head.example:10001", "ray:http://head.example:8265"),
    ):
        (executor,) = open_executors([address], DATABASE)
        assert executor.name == name
    no_ray = ["ray:8265", "ray://", "ray-jobs:ray://head", "ray-jobs:ftp://head"]
    heads = ("user:secret@head", "head:99999", "head/path")
    no_ray += [f"ray-jobs:http://{one}" for one in heads]
    for texts, says in (
        (["slurm:x"], "expected one of local"),
        (["local"] * 2, "given twice"),
        (["none", "local"], "none: starts no jobs; give it alone"),
        (["none", "none"], "none: starts no jobs; give it alone"),
        *(([one], r"expected ray-jobs:http\[s\]://HOST") for one in no_ray),
    ):
        with pytest.raises(UsageError, match=says):
            open_executors(texts, DATABASE)
