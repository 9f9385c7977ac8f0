"""Attempts on this machine: each a worker, on GPUs that nobody else uses or on the CPU.

Workers outlive a server that is killed. The next one with the same database finds them by their
command line. A worker inherits locks on its devices: what is locked is in use, however anything
ended.
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
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import platformdirs

from advisor.cache.stores.filesystem import make_folder, remove_folder
from advisor.errors import printable
from advisor.jobs.spec import JobSpec, gpu_matches
from advisor.service.executors import (
    Capacity,
    Executor,
    ExecutorAway,
    Start,
    Status,
    Unplaceable,
)
from advisor.tuners.environment import Gpu, gpus
from advisor.tuners.measure.run.guarded_process import exit_text

STOPS_S = 15.0
"""For a worker that was told to end, to save its search and report. Then it is killed."""
KEPT_S = 60.0
"""A worker that is over is forgotten after so long if nobody asks for it."""
_LOOK_S = 0.05
_MAX_PRINTED = 4096
_MODULE = "advisor.jobs.worker"
_CPU_BUSY = "the CPU of this machine is measured on"
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TERM|TMPDIR|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|CC|CXX|CUDA_\w+|NVIDIA_\w+|NCCL_\w+|OMP_\w+|MKL_\w+|KMP_\w+"
    r"|TORCH\w*|PYTORCH_\w+|TRITON_\w+|XDG_\w+|SSL_CERT_\w+"
    r"|HF_HOME|HF_DATASETS_CACHE|HF_HUB_OFFLINE|TRANSFORMERS_\w+|(?i:https?_proxy|no_proxy)"
)
"""Of the server's environment: what programs need to run, and nothing that may be a secret."""


@dataclass(slots=True)
class _Worker:
    """A process that works in a folder.

    Attributes:
        process, printed: of one that this server started; else an earlier one did.
        killed_at: when it is killed, if it was told to end; `over_at`: when it was seen to be over.
    """

    pid: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    printed: BinaryIO | None = None
    killed_at: float = math.inf
    over_at: float = math.inf

    @property
    def alive(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        return str(self.folder) in _words(self.pid)

    def send(self, number: signal.Signals) -> None:
        if self.alive:  # else its number may be another's by now
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    @property
    def last_words(self) -> str:
        """How it ended, as far as that is known."""
        if self.process is None or self.printed is None:
            return "its worker is gone"
        self.printed.seek(-min(_MAX_PRINTED, self.printed.seek(0, os.SEEK_END)), os.SEEK_END)
        lines = self.printed.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return printable(last)[:300] or f"its worker ended ({exit_text(self.process.poll() or 0)})"

    def close(self) -> None:
        remove_folder(self.folder)
        if self.printed is not None:
            self.printed.close()


class Local:
    """Runs jobs as processes on this machine.

    Args:
        database: the server's, for people: its attempts are kept apart from another server's.
        devices: a folder of locks; by default in the user's cache folder.
        gpus: what there is.
        now: a clock in seconds.
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
        self._lock = threading.RLock()

    def capacity(self) -> Sequence[Capacity]:
        with self._here() as workers, contextlib.ExitStack() as held:
            gpus = self._gpus()
            totals = Counter(gpu.name for gpu in gpus)
            cpu = self._taken("cpu", held)
            free, why = self._free(gpus, held) if cpu is not None else ({}, {})
            counts = Counter(gpu.name for gpu in free)
            found = [
                Capacity(
                    gpu=name,
                    gpus=counts[name],
                    total=total,
                    why="; ".join(why.get(name, [])) if cpu is not None else _CPU_BUSY,
                )
                for name, total in totals.items()
            ]
            # What measures on a GPU needs the CPU, too, and would be measured with it.
            busy = cpu is None or any(one.alive for one in workers.values())
            return found if busy else [*found, Capacity(gpu="", gpus=0)]

    def start(self, start: Start) -> None:
        with self._here() as workers, contextlib.ExitStack() as held:
            if start.asked.env:
                raise Unplaceable("this machine has no environment but its own; ask for none")
            busy = any(one.alive for one in workers.values())
            given, locks = self._given(start.asked, busy, held)
            folder = tempfile.mkdtemp(prefix=self._prefix)
            printed = tempfile.TemporaryFile()  # noqa: SIM115 # closed when the worker is forgotten
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE, folder, start.external],
                    pass_fds=locks,
                    cwd=folder,
                    env=environment(start, ",".join(gpu.uuid for gpu in given)),
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as exc:
                raise Unplaceable(f"{folder}: {exc.strerror or exc}") from exc
            workers[start.external] = _Worker(process.pid, Path(folder), process, printed)

    def status(self, external: Sequence[str]) -> Mapping[str, Status]:
        with self._here() as workers:
            return {one: _status(workers.get(one)) for one in external}

    def stop(self, external: str) -> None:
        with self._here() as workers:
            one = workers.get(external)
            if one is None:
                return
            if one.alive:
                one.killed_at = min(one.killed_at, self._now() + STOPS_S)
                one.send(signal.SIGTERM)
            else:
                workers.pop(external).close()

    def close(self) -> None:
        """End what runs here."""
        with contextlib.suppress(ExecutorAway), self._here() as workers:
            for one in workers.values():
                one.send(signal.SIGTERM)
            until = time.monotonic() + STOPS_S
            while any(one.alive for one in workers.values()) and time.monotonic() < until:
                time.sleep(_LOOK_S)
            for one in workers.values():
                one.send(signal.SIGKILL)
                if one.process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck in a driver
                        one.process.wait(STOPS_S)
                one.close()
        with self._lock:
            self._workers = None
            self._owning.close()

    @contextlib.contextmanager
    def _here(self) -> Iterator[dict[str, _Worker]]:
        """The workers, while no other server here looks after them.

        Raises:
            ExecutorAway: one does, or a folder cannot be used.
        """
        with self._lock:
            try:
                if self._workers is None:
                    make_folder(self._devices)
                    if self._taken(self._mark, self._owning) is None:
                        self._owning.close()
                        raise ExecutorAway("another server here starts what runs on this machine")
                    self._workers = self._found()
                self._sweep(self._workers)
                yield self._workers
            except OSError as exc:
                raise ExecutorAway(f"{self.name}: {exc.filename}: {exc.strerror or exc}") from exc

    def _sweep(self, workers: dict[str, _Worker]) -> None:
        """Kill workers that do not end when told to; forget those that are over."""
        now = self._now()
        for external, one in list(workers.items()):
            if not one.alive:
                one.over_at = min(one.over_at, now)
                if now - one.over_at > KEPT_S:
                    workers.pop(external).close()
            elif now > one.killed_at:
                one.send(signal.SIGKILL)

    def _found(self) -> dict[str, _Worker]:
        """The workers of an earlier server; the folders of those that are gone are removed."""
        found = {}
        left = {str(one): one for one in Path(tempfile.gettempdir()).glob(f"{self._prefix}*")}
        for entry in Path("/proc").glob("[0-9]*"):
            module, folder, external = ["", "", "", *_words(int(entry.name))][-3:]
            if module == _MODULE and folder in left:
                found[external] = _Worker(int(entry.name), left.pop(folder))
        for stale in left.values():
            if not stale.is_symlink() and stale.stat().st_uid == os.getuid():
                remove_folder(stale)
        return found

    def _taken(self, device: str, held: contextlib.ExitStack) -> int | None:
        """The lock on a device until `held` ends; None if it is in use."""
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
    ) -> tuple[dict[Gpu, int], Mapping[str, list[str]]]:
        """The GPUs that nobody uses, with their locks; and by name why others are in use."""
        free: dict[Gpu, int] = {}
        why: dict[str, list[str]] = defaultdict(list)
        for number, gpu in enumerate(gpus):
            if gpu.users:
                why[gpu.name].append(f"GPU {number} is used by other processes: {gpu.used_by}")
            elif (lock := self._taken(gpu.uuid, held)) is None:
                why[gpu.name].append(f"GPU {number} is measured on")
            else:
                free[gpu] = lock
        return free, why

    def _given(
        self, asked: JobSpec, busy: bool, held: contextlib.ExitStack
    ) -> tuple[list[Gpu], list[int]]:
        """GPUs for a job, none for one on the CPU, and the locks that its worker inherits."""
        cpu = self._taken("cpu", held)
        if cpu is None:
            raise Unplaceable(_CPU_BUSY)
        if not asked.gpus:
            if busy:
                raise Unplaceable("something is measured on this machine")
            return [], [cpu]
        free, why = self._free(self._gpus(), held)
        for name, count in Counter(gpu.name for gpu in free).items():
            if count >= asked.gpus and gpu_matches(asked.gpu, name):
                chosen = [gpu for gpu in free if gpu.name == name][: asked.gpus]
                return chosen, [free[gpu] for gpu in chosen]
        reasons = [one for every in why.values() for one in every]
        raise Unplaceable("; ".join(reasons) or "no such GPU")


def _status(one: _Worker | None) -> Status:
    if one is None:
        return Status(state="unknown")
    return Status(state="running") if one.alive else Status(state="ended", reason=one.last_words)


def _words(pid: int) -> list[str]:
    """The command line of a process; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def environment(start: Start, shown: str) -> dict[str, str]:
    """A worker's; `shown`: CUDA_VISIBLE_DEVICES."""
    return {
        **{name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)},
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": shown,
        "ADVISOR_SERVER": start.server_url,
        "ADVISOR_START_TOKEN": start.token,
    }


def _proof(executor: Local) -> Executor:
    return executor
