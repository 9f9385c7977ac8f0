"""Runs attempts as worker processes on this machine, on GPUs that nobody else uses or on the CPU.

If a server is killed, its workers continue. The next server with the same database finds them by
their command line. A worker inherits the locks on its devices, so a device is locked until its
worker ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from advisor.cache.stores.filesystem import make_folder, remove_folder
from advisor.errors import reason
from advisor.service.executors import Capacity, ExecutorAway, Start, Status, Unplaceable, last_line
from advisor.tuners.environment import Gpu, gpus
from advisor.tuners.measure.run.guarded_process import exit_text

GRACE_S = 15.0  # time for a worker to save its search and report after SIGTERM; then it is killed
_POLL_S = 0.05
_MAX_PRINTED = 4096
_PRINTED = "printed"
_MODULE = "advisor.jobs.worker"
_CPU_BUSY = "another job measures on the CPU of this machine"
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TERM|TMPDIR|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|CC|CXX|CUDA_\w+|NVIDIA_\w+|NCCL_\w+|OMP_\w+|MKL_\w+|KMP_\w+"
    r"|TORCH\w*|PYTORCH_\w+|TRITON_\w+|XDG_\w+|SSL_CERT_\w+"
    r"|HF_HOME|HF_DATASETS_CACHE|HF_HUB_OFFLINE|TRANSFORMERS_\w+|(?i:https?_proxy|no_proxy)"
)
"""Variables that workers inherit: those that programs need, and none that may be a secret."""


@dataclass(slots=True)
class _Worker:
    """A worker process, with its files below `folder`. `process` is None if an earlier server
    started it; `killed_at`: when to kill it, if it was told to end."""

    pid: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    killed_at: float = math.inf

    @property
    def alive(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        return _work(self.folder) in _words(self.pid)

    def send(self, number: signal.Signals) -> None:
        if self.alive:  # else another process may have its pid by now
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    @property
    def status(self) -> Status:
        """'running', or 'ended' with the last line that the worker printed."""
        if self.alive:
            return Status(state="running")
        with (self.folder / _PRINTED).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_PRINTED))
            said = last_line(file.read().decode(errors="replace"))
        code = None if self.process is None else self.process.poll()
        how = "is gone" if code is None else f"ended ({exit_text(code)})"
        return Status(state="ended", reason=said or f"its worker {how}")


class Local:
    """Runs jobs as processes on this machine. For one thread at a time.

    Args:
        database: its URL without password; workers of other databases are left alone.
        devices: the folder of the locks; by default in the user's cache folder.
        gpus, now: return the machine's GPUs, and the time in seconds.
    """

    def __init__(
        self,
        database: str,
        devices: Path | None = None,
        gpus: Callable[[], Sequence[Gpu]] = gpus,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mark = hashlib.sha256(database.encode()).hexdigest()[:8]
        self.name = f"local:{socket.gethostname()}:{self._mark}"
        cache = platformdirs.user_cache_path("advisor", appauthor=False)
        self._devices = devices or cache / "devices"
        self._gpus, self._now = gpus, now
        self._prefix = f"advisor-{self._mark}-"
        self._workers: dict[str, _Worker] | None = None
        self._owning = contextlib.ExitStack()

    def capacity(self) -> Sequence[Capacity]:
        with self._here() as workers, contextlib.ExitStack() as held:
            gpus = self._gpus()
            cpu, free, why = self._free(gpus, held)
            counts = Counter(gpu.name for gpu in free)
            found = [
                Capacity(gpu=name, gpus=counts[name], total=total, why="; ".join(why[name]))
                for name, total in Counter(gpu.name for gpu in gpus).items()
            ]
            # A job on a GPU also uses the CPU, so it would disturb measuring on the CPU.
            busy = cpu is None or any(one.alive for one in workers.values())
            return found if busy else [*found, Capacity(gpu="", gpus=0)]

    def start(self, start: Start) -> None:
        with self._here() as workers, contextlib.ExitStack() as held:
            if start.asked.env:
                raise Unplaceable("--pip and --container need an executor on Ray")
            cpu, free, why = self._free(self._gpus() if start.asked.gpus else [], held)
            if cpu is None:
                raise Unplaceable(_CPU_BUSY)
            if not start.asked.gpus and any(one.alive for one in workers.values()):
                raise Unplaceable("another job runs on this machine")
            given = [gpu for gpu in free if gpu.name == start.gpu][: start.asked.gpus]
            if len(given) < start.asked.gpus:
                raise Unplaceable("; ".join(why[start.gpu]) or "no such GPU")
            locks = [free[gpu] for gpu in given] or [cpu]
            folder = Path(tempfile.mkdtemp(prefix=self._prefix))
            with (folder / _PRINTED).open("wb") as printed:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE, _work(folder), start.external],
                    pass_fds=locks,
                    cwd=folder,
                    env=environment(start, ",".join(gpu.uuid for gpu in given)),
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            workers[start.external] = _Worker(process.pid, folder, process)

    def status(self, external: Sequence[str]) -> Mapping[str, Status]:
        with self._here() as workers:
            for one in workers.keys() - set(external):
                self._stop(workers, one)
            unknown = Status(state="unknown", reason="its executor does not know it")
            return {one: workers[one].status if one in workers else unknown for one in external}

    def stop(self, external: str) -> None:
        with self._here() as workers:
            if external in workers:
                self._stop(workers, external)

    def _stop(self, workers: dict[str, _Worker], external: str) -> None:
        """Tell a worker to end, kill it if it was told GRACE_S ago, or forget it if it ended."""
        one, now = workers[external], self._now()
        if one.alive:
            one.send(signal.SIGTERM if now <= one.killed_at else signal.SIGKILL)
            one.killed_at = min(one.killed_at, now + GRACE_S)
        else:
            remove_folder(workers.pop(external).folder)

    def close(self) -> None:
        """End all workers of this server."""
        with contextlib.suppress(ExecutorAway), self._here() as workers:
            for number in (signal.SIGTERM, signal.SIGKILL):
                for one in workers.values():
                    one.send(number)
                until = time.monotonic() + GRACE_S
                while any(one.alive for one in workers.values()) and time.monotonic() < until:
                    time.sleep(_POLL_S)
            for one in workers.values():
                remove_folder(one.folder)
        self._workers = None
        self._owning.close()

    @contextlib.contextmanager
    def _here(self) -> Iterator[dict[str, _Worker]]:
        """Context manager: yields the workers by `external`, and keeps other servers away. Raises
        ExecutorAway if another server has them, or a folder or process cannot be used."""
        try:
            if self._workers is None:
                make_folder(self._devices)
                if self._acquired(self._mark, self._owning) is None:
                    self._owning.close()
                    raise ExecutorAway("another server of this database has this machine")
                self._workers = self._found()
            yield self._workers
        except OSError as exc:
            raise ExecutorAway(f"{exc.filename}: {reason(exc)}") from exc

    def _found(self) -> dict[str, _Worker]:
        """Find workers of an earlier server, and remove the folders of workers that are gone."""
        found = {}
        left = {_work(one): one for one in Path(tempfile.gettempdir()).glob(f"{self._prefix}*")}
        for entry in Path("/proc").glob("[0-9]*"):
            module, work, external = ["", "", "", *_words(int(entry.name))][-3:]
            if module == _MODULE and work in left:
                found[external] = _Worker(int(entry.name), left.pop(work))
        for stale in left.values():
            if not stale.is_symlink() and stale.stat().st_uid == os.getuid():
                remove_folder(stale)
        return found

    def _acquired(self, device: str, held: contextlib.ExitStack) -> int | None:
        """Lock a device until `held` closes. Returns None if the device is in use."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(self._devices / device, flags, 0o600)
        held.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return descriptor

    def _free(
        self, gpus: Sequence[Gpu], held: contextlib.ExitStack
    ) -> tuple[int | None, Mapping[Gpu, int], Mapping[str, Sequence[str]]]:
        """Lock the free devices. Returns (the CPU's lock; the GPUs' locks; by GPU name the reasons
        that others are in use). While a job is measured on the CPU, nothing is free."""
        cpu = self._acquired("cpu", held)
        free: dict[Gpu, int] = {}
        why: dict[str, list[str]] = defaultdict(list)
        for number, gpu in enumerate(gpus):
            if cpu is None:
                why[gpu.name] = [_CPU_BUSY]
            elif gpu.users:
                why[gpu.name].append(f"GPU {number} is used by other processes: {gpu.used_by}")
            elif (lock := self._acquired(gpu.uuid, held)) is None:
                why[gpu.name].append(f"GPU {number} is used by another job")
            else:
                free[gpu] = lock
        return cpu, free, why


def _work(folder: Path) -> str:
    """The folder in which a worker works. The worker removes it at its end."""
    return str(folder / "work")


def _words(pid: int) -> list[str]:
    """The command line of a process; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def environment(start: Start, shown: str) -> dict[str, str]:
    """A worker's environment variables; `shown`: the value of CUDA_VISIBLE_DEVICES."""
    return {
        **{name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)},
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": shown,
        "ADVISOR_SERVER": start.server_url,
        "ADVISOR_START_TOKEN": start.token,
    }
