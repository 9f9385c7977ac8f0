"""Attempts on this machine: each a worker, on GPUs that nobody else uses or on the CPU.

What is known of an attempt is in a folder of its own, so that a server that was killed finds its
workers again. A worker inherits locks, on its folder and on its devices: what is locked is in use,
however anything ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
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
from pathlib import Path

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
from advisor.tuners.environment import Gpu, gpus, host_cpu
from advisor.tuners.measure.run.guarded_process import exit_text

STOPS_S = 15.0
"""For a worker that was told to end, to save its search and report. Then it is killed."""
KEPT_S = 60.0
"""The folder of a worker that is over is removed after so long if nobody asks for it."""
_LOOK_S = 0.05
_MAX_PRINTED = 4096
_CPU_BUSY = "the CPU of this machine is measured on"
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TERM|TMPDIR|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|CC|CXX|CUDA_\w+|NVIDIA_\w+|NCCL_\w+|OMP_\w+|MKL_\w+|KMP_\w+"
    r"|TORCH\w*|PYTORCH_\w+|TRITON_\w+|XDG_\w+|SSL_CERT_\w+"
    r"|HF_HOME|HF_DATASETS_CACHE|HF_HUB_OFFLINE|TRANSFORMERS_\w+|(?i:https?_proxy|no_proxy)"
)
"""Of the server's environment: what programs need to run, and nothing that may be a secret."""


class Local:
    """This machine.

    Args:
        database: the server's, for people: its attempts are kept apart from another server's.
        folder: for all of them; by default in the user's cache folder.
        gpus: what there is.
        now: a clock in seconds.
    """

    def __init__(
        self,
        database: str,
        folder: Path | None = None,
        gpus: Callable[[], Sequence[Gpu]] = gpus,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        mark = hashlib.sha256(database.encode()).hexdigest()[:8]
        self.name = f"local:{socket.gethostname()}:{mark}"
        base = folder or platformdirs.user_cache_path("advisor", appauthor=False) / "jobs"
        self._folder, self._devices = base / mark, base / "devices"
        self._gpus, self._now = gpus, now
        self._owner: int | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: dict[str, float] = {}
        self._over: dict[str, float] = {}
        self._lock = threading.RLock()

    def capacity(self) -> Sequence[Capacity]:
        with self._owning(), contextlib.ExitStack() as held:
            self._sweep()
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
            busy = cpu is None or self._is_busy()
            return found if busy else [*found, Capacity(gpu="", gpus=0)]

    def start(self, start: Start) -> str:
        with self._owning(), contextlib.ExitStack() as held:
            place = _Place(self._folder / start.external)
            if start.asked.env:
                raise Unplaceable("this machine has no environment but its own; ask for none")
            given, locks = self._given(start.asked, held)
            try:
                locks.append(place.begin(held))
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "advisor.jobs.worker", str(place.path)],
                    pass_fds=locks,
                    cwd=place.path,
                    env=environment(start, ",".join(gpu.uuid for gpu in given)),
                    stdin=subprocess.DEVNULL,
                    stdout=held.enter_context(place.printed.open("ab")),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                place.pid.write_text(str(process.pid))
            except OSError as exc:
                raise Unplaceable(f"{self._folder}: {exc.strerror or exc}") from exc
            self._processes[start.external] = process
            return ", ".join(gpu.name for gpu in given) or host_cpu()

    def status(self, external: Sequence[str]) -> Mapping[str, Status]:
        with self._owning():
            self._sweep()
            return {one: self._status(_Place(self._folder / one)) for one in external}

    def stop(self, external: str) -> None:
        with self._owning():
            place = _Place(self._folder / external)
            if place.alive:
                self._stopped.setdefault(external, self._now())
                place.send(signal.SIGTERM)
                self._sweep()
            else:
                place.remove()

    def close(self) -> None:
        """End what runs here."""
        with contextlib.suppress(ExecutorAway), self._owning():
            for place in self._places():
                place.send(signal.SIGTERM)
            until = time.monotonic() + STOPS_S
            while self._is_busy() and time.monotonic() < until:
                time.sleep(_LOOK_S)
            for place in self._places():
                place.send(signal.SIGKILL)
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck in a driver
                    process.wait(STOPS_S)
            for place in self._places():
                place.remove()
        with self._lock:
            if self._owner is not None:
                os.close(self._owner)
                self._owner = None

    @contextlib.contextmanager
    def _owning(self) -> Iterator[None]:
        """While no other server here looks after the same attempts.

        Raises:
            ExecutorAway: one does, or the folder cannot be used.
        """
        with self._lock:
            try:
                if self._owner is None:
                    make_folder(self._folder)
                    make_folder(self._devices)
                    self._owner = _locked(self._folder / "owner")
                if self._owner is None:
                    raise ExecutorAway("another server here starts what runs on this machine")
                yield
            except OSError as exc:
                raise ExecutorAway(f"{self._folder}: {exc.strerror or exc}") from exc

    def _places(self) -> list[_Place]:
        return [_Place(one) for one in self._folder.iterdir() if one.is_dir()]

    def _is_busy(self) -> bool:
        return any(place.alive for place in self._places())

    def _taken(self, device: str, held: contextlib.ExitStack) -> int | None:
        """The lock on a device until `held` ends; None if it is in use."""
        lock = _locked(self._devices / device)
        if lock is not None:
            held.callback(os.close, lock)
        return lock

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

    def _given(self, asked: JobSpec, held: contextlib.ExitStack) -> tuple[list[Gpu], list[int]]:
        """GPUs for a job, none for one on the CPU, and the locks that its worker inherits."""
        cpu = self._taken("cpu", held)
        if cpu is None:
            raise Unplaceable(_CPU_BUSY)
        if not asked.gpus:
            if self._is_busy():
                raise Unplaceable("something is measured on this machine")
            return [], [cpu]
        free, why = self._free(self._gpus(), held)
        for name, count in Counter(gpu.name for gpu in free).items():
            if count >= asked.gpus and gpu_matches(asked.gpu, name):
                chosen = [gpu for gpu in free if gpu.name == name][: asked.gpus]
                return chosen, [free[gpu] for gpu in chosen]
        raise Unplaceable(
            "; ".join(one for every in why.values() for one in every) or "no such GPU"
        )

    def _status(self, place: _Place) -> Status:
        if place.alive:
            return Status(state="running")
        if not place.path.is_dir():
            return Status(state="unknown")
        process = self._processes.get(place.path.name)
        code = None if process is None else process.poll()
        how = "is gone" if code is None else f"ended ({exit_text(code)})"
        return Status(state="ended", reason=place.last_line or f"its worker {how}")

    def _sweep(self) -> None:
        """Kill workers that do not end when told to; remove what is over, after a while."""
        now = self._now()
        places = {place.path.name: place for place in self._places()}
        for external, place in places.items():
            if not place.alive:
                if now - self._over.setdefault(external, now) > KEPT_S:
                    place.remove()
            elif now - self._stopped.get(external, now) > STOPS_S:
                place.send(signal.SIGKILL)
        for external, process in list(self._processes.items()):
            if process.poll() is not None and external not in places:
                for kept in (self._processes, self._stopped, self._over):
                    kept.pop(external, None)


class _Place:
    """An attempt's folder. `lock` is held by its worker while it lives, `pid` is its number,
    `printed` its output, `work` a link to where it works."""

    def __init__(self, path: Path) -> None:
        self.path, self.pid, self.printed = path, path / "pid", path / "printed"

    @property
    def alive(self) -> bool:
        try:
            lock = _locked(self.path / "lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        if lock is not None:
            os.close(lock)
        return lock is None

    @property
    def last_line(self) -> str:
        try:
            with self.printed.open("rb") as file:
                file.seek(-min(_MAX_PRINTED, self.printed.stat().st_size), os.SEEK_END)
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return printable(next((line for line in reversed(lines) if line.strip()), ""))[:300]

    def begin(self, held: contextlib.ExitStack) -> int:
        """Make the folder; its lock, which `held` has until the worker has it."""
        self.remove()
        make_folder(self.path)
        lock = _locked(self.path / "lock")
        assert lock is not None  # nobody else makes this folder
        held.callback(os.close, lock)
        return lock

    def send(self, number: signal.Signals) -> None:
        """Send the worker a signal if it lives: else its number may be another's by now."""
        with contextlib.suppress(OSError, ValueError):
            if self.alive:
                os.kill(int(self.pid.read_text()), number)

    def remove(self) -> None:
        work = self.path / "work"
        # Submitted code could have made another link.
        if work.is_symlink() and work.readlink().parent == Path(tempfile.gettempdir()):
            remove_folder(work.readlink())
        remove_folder(self.path)


def _locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int | None:
    """A lock on a file, held while the descriptor is open here or in a child; None if another has
    it."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


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
