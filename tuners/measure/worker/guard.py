"""Stands between the tuning process and its worker: `guard.py LIFELINE PIPE MEMORY LOG ROOT WORDS`.

The guard runs no user code. The worker inherits PIPE. The guard ends the worker and all of its
descendants, daemons included, when the worker ends, when the tuning process is gone (LIFELINE
closes) or when they hold more than MEMORY bytes together. It writes their output to the file LOG.
At the end it prints how the worker ended, as one line of JSON, and removes scratch folders in ROOT
that dead tuning processes left. It imports only the standard library, so it starts in about 20 ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import host  # type: ignore[import-not-found]
import scratch  # type: ignore[import-not-found]

LOGGED = 2**26  # bytes of output that are written to the log
WORDS = 4000  # bytes of the end of the output that are reported
WATCH_S = 0.1  # seconds between two checks of the worker and the memory in use
FAMILY_S = 1.0  # seconds between two searches for descendants: each reads all of /proc
COMPILERS = ("g++", "gcc", "c++", "cc", "clang++", "clang")
STEP_LAUNCHERS = ("srun",)  # their tasks are no descendants; told to end, they end these first
STEP_LAUNCHERS_S = 10.0  # seconds for that, at most; on an idle node it takes one or two
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Guard:
    """Starts a worker, and ends its descendants. No pipe: -1; no memory limit: 0; no log: ''."""

    def __init__(self, lifeline: int, pipe: int, memory: int, log: str, command: list[str]) -> None:
        self._lifeline, self._memory = lifeline, memory
        self._words, self._over = b"", 0
        self._log = Path(log).open("ab", buffering=0) if log else None  # noqa: SIM115
        # A process that loses its parent becomes this process's child, wherever it went.
        host.control(_PR_SET_CHILD_SUBREAPER, 1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or waitpid would not report its end
        # Slurm sends a signal to every process of a job; Ctrl-C is the tuning process's to handle.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._output, theirs = os.pipe()
        os.set_blocking(self._output, False)
        self._worker = self._start(command, theirs)
        os.close(theirs)
        if pipe >= 0:
            os.close(pipe)  # or the tuning process would not notice that the worker closes it
        self._heard = [self._lifeline, self._output]
        self._status: int | None = None

    def _start(self, command: list[str], output: int) -> int:
        guard = os.getpid()
        process = os.fork()
        if process:
            return process
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.setsid()
            host.control(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(1)
            with contextlib.suppress(OSError):
                # If memory runs out, the kernel should end the worker, not the tuning process.
                Path("/proc/self/oom_score_adj").write_text("1000")
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.set_inheritable(self._lifeline, False)
            os.execv(command[0], command)
        except OSError as exc:
            os.write(2, f"{command[0]}: {exc.strerror}\n".encode())
        finally:
            os._exit(127)

    def run(self) -> None:
        family, searched = [self._worker], 0.0
        while self._status is None:
            ready, _, _ = select.select(self._heard, [], [], WATCH_S)
            if self._output in ready:
                self._drain()
            self._reap()
            if self._lifeline in ready:
                break
            if self._memory and time.monotonic() - searched >= FAMILY_S:
                family, searched = host.family(self._worker), time.monotonic()
            if self._memory and self._holds_too_much(family):
                break
        self._end()
        self._drain()
        code, words = os.waitstatus_to_exitcode(self._status or 0), self._words
        said = {"code": code, "over": self._over, "words": words.decode(errors="replace")}
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(said).encode())

    def _holds_too_much(self, family: list[int]) -> bool:
        if sum(map(host.resident_bytes, family)) > self._memory:
            # Forked processes share most of what each of them holds.
            held = sum(map(host.proportional_bytes, family))
            self._over = held if held > self._memory else 0
        return bool(self._over)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process == 0:
                    return
                if process == self._worker:
                    self._status = status

    def _end(self) -> None:
        """End all descendants; repeat until none are left, as they may fork meanwhile."""
        # torch.compile would load a half-written file later.
        written = [file for one in self._named(COMPILERS) if (file := _output(one))]
        if launchers := self._named(STEP_LAUNCHERS):
            for process in {*host.family(os.getpid())[1:]} - {*launchers}:
                _kill(process, signal.SIGKILL)  # or a script would start its next launcher
            self._warn(launchers)
        _kill(-self._worker, signal.SIGKILL)
        while True:
            self._reap()
            others = host.family(os.getpid())[1:]
            if not others and self._status is not None:
                break
            for process in others:
                _kill(process, signal.SIGKILL)
            time.sleep(0.002)
        for file in written:
            with contextlib.suppress(OSError):
                file.unlink()

    def _named(self, names: tuple[str, ...]) -> list[int]:
        return [one for one in host.family(os.getpid())[1:] if host.name(one) in names]

    def _warn(self, processes: list[int]) -> None:
        """Have step launchers end by themselves."""
        for process in processes:
            _kill(process, signal.SIGTERM)
        until = time.monotonic() + STEP_LAUNCHERS_S
        while time.monotonic() < until and any(map(host.name, processes)):
            self._reap()
            self._drain()
            time.sleep(0.01)

    def _drain(self) -> None:
        # Bounded: a worker that prints without end must not keep the guard from everything else.
        for _ in range(64):
            try:
                said = os.read(self._output, 65536)
            except BlockingIOError:
                return
            if not said:
                self._heard = [self._lifeline]
                return
            if self._log is not None and self._log.tell() < LOGGED:
                with contextlib.suppress(OSError):  # the disk is full
                    self._log.write(said)
            self._words = (self._words + said)[-WORDS:]


def _output(compiler: int) -> Path | None:
    """The file that a running compiler writes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{compiler}/cmdline").read_bytes().split(b"\0")
        folder = Path(f"/proc/{compiler}/cwd").readlink()
        return Path(folder, os.fsdecode(words[words.index(b"-o") + 1]))
    return None


def _kill(process: int, how: signal.Signals) -> None:
    """Send a signal to a process, or to a group by its negative number; it may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, how)


if __name__ == "__main__":
    _lifeline, _pipe, _memory = map(int, sys.argv[1:4])
    Guard(_lifeline, _pipe, _memory, sys.argv[4], sys.argv[6:]).run()
    scratch.sweep(Path(sys.argv[5]))
