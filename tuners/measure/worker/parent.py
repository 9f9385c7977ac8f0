"""The tuning process's side of a worker: starts it, gives it deadlines, replaces it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, TypeVar

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import BATCH, Config
from advisor.cache.shown import size
from advisor.errors import (
    RecordDamaged,
    TargetError,
    TargetFailed,
    WorkerError,
    printable,
)
from advisor.tuners import host
from advisor.tuners.knobs import FORMATS, KNOBS, compiles, plain, strict
from advisor.tuners.measure.place import Block, Compared, ConfigFailed, Place
from advisor.tuners.measure.run.guarded import how, inductor_folder
from advisor.tuners.measure.worker.wire import Costs, DataFacts, Facts, Job, receive, send
from advisor.tuners.scratch import Scratch

T = TypeVar("T")
START_S = 300.0
"""For importing torch alone: a cold network file system takes minutes."""
SAVE_S = 30.0
"""For putting what was compiled into a file."""
DATA_S = 300.0
"""For making a dataset and loading a batch: a folder of millions of files is listed for minutes."""
END_S = 30.0
"""For ending a worker: a process that a driver holds on to ends when the driver lets go."""
LATE_S = 30.0
"""A comparison looks at its time between two passes; the first one of a config builds it."""

PICKING = (BATCH, *(k.name for k in KNOBS if k.autocast is not None or k.layout is not None))
LASTING = tuple(knob.name for knob in KNOBS if knob.lasting)
"""cuDNN keeps the algorithm that a convolution's first one ran with, searched for or not (PyTorch's
Conv_v8.cpp, benchmark_cache; on an H200, torch 2.11, a first search took 60 ms, 0.25 ms after a
step without): one value of LASTING in a process for each of PICKING, which tell convolutions apart.
"""
_GUARD = str(Path(__file__).with_name("guard.py"))


class _Gone(Exception):
    """The worker died, hung or spoke rubbish."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class _Unheard(_Gone):
    """It was gone before it was asked."""


class Worker:
    """A Place in a child process; one that dies or hangs is replaced, and builds what is asked of
    it next.

    Args:
        job: what to measure.
        deadline_s: seconds for describing it, and for what its data costs.

    Attributes:
        baseline: see Place; torch's default, unless it is set.
        tolerance: part of the loss by which a config may be off fp32; the task's, unless it is set.
    """

    def __init__(self, job: Job, *, deadline_s: float) -> None:
        self._job = job
        self.deadline_s = deadline_s
        self.baseline = plain(job.task, job.device)
        self.tolerance = job.task.tolerance
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = 0
        self._permitted = 0
        self._data_s = 0.0
        self._picked: dict[Config, Config] = {}
        self._built: set[Config] = set()
        self._pipe: Connection | None = None
        self._lifeline: int | None = None
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
        self._scratch = Scratch()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def describe(self) -> Facts:
        """Start a worker and have it run its first steps, as torch does by default.

        Raises:
            TargetError, TargetFailed: the user's code or its input is wrong.
            WorkerError: it crashed or hung.
        """
        try:
            self._start()
            self._pick(plain(self._job.task, self._job.device))
            reply = self._answered({"do": "describe"}, max(60.0, self.deadline_s))
            return from_plain(Facts, reply["facts"])
        except _Gone as exc:
            self._kill()
            if exc.outcome == "out_of_memory":
                raise TargetFailed(
                    f"batch {self._job.task.batch} does not fit on {self._job.device} with torch's "
                    f"default settings: {exc}; give a smaller batch"
                ) from exc
            raise WorkerError(f"target {self._job.task.target!r}: {exc}") from exc

    def describe_data(self, most_s: float = DATA_S) -> DataFacts:
        """What the task's own data is, by batches of it, in so many seconds at most.

        Raises:
            TargetError, TargetFailed: the user's code or its data is wrong.
            WorkerError: it crashed or hung.
        """
        facts = from_plain(DataFacts, self._of_data({"do": "describe_data"}, most_s)["facts"])
        self._data_s = most_s
        return facts

    def costs(self, seconds: float) -> Costs:
        """What a sample of the data costs a worker of its loader.

        Raises:
            As `describe_data`.
        """
        most_s = max(DATA_S, self.deadline_s)
        found = self._of_data({"do": "costs", "seconds": seconds}, most_s)["costs"]
        told = from_plain(Costs, found)
        parts = (dataclasses.replace(one, part=printable(one.part)) for one in told.parts)
        return dataclasses.replace(told, parts=tuple(parts))

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        """See Place. A loader feeds a config that has its knobs, in whole rounds of its workers."""
        request = {"do": "block", "config": dict(config), "steps": steps, "warm": warm}
        return self._of_config(Block, "block", request, deadline_s)

    def loader_rate(self, config: Config, seconds: float) -> float:
        """Samples per second of a config's loader without a step.

        Raises:
            ConfigFailed, WorkerError: as `block`.
        """
        request = {"do": "loader_rate", "config": dict(config), "seconds": seconds}
        return self._of_config(float, "rate", request, seconds + self.deadline_s)

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        """See Place. A config of another batch is compared at the user's."""
        fp32 = strict(self.baseline).at(self._job.task.batch)
        config = config.at(self._job.task.batch)
        request = {
            "do": "compare",
            "config": dict(config),
            "fp32": dict(fp32),
            "plain": dict(fp32 | config.only(*FORMATS)),
            "seconds": deadline_s,
            "tolerance": self.tolerance,
        }
        try:
            return self._of_config(Compared, "compared", request, deadline_s + LATE_S)
        except ConfigFailed as failed:
            return Compared(outcome=failed.outcome, reason=str(failed))

    def forget(self, config: Config) -> None:
        """See Place."""
        self._built.discard(config)
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                send(self._pipe, {"do": "forget", "config": dict(config)})

    def save(self, config: Config, file: Path) -> None:
        """See Place: of all that was compiled in the process that has the config at work."""
        if compiles(config):
            request = {"do": "save", "config": dict(config), "file": str(file)}
            with contextlib.suppress(ConfigFailed):
                self._of_config(bool, "saved", request, SAVE_S + self.deadline_s)

    def stop(self) -> None:
        """End the worker and everything it started."""
        self._kill()
        self._output.close()
        self._scratch.remove()

    def _of_config(self, kind: type[T], name: str, request: dict[str, Any], deadline_s: float) -> T:
        """What the worker answers to a request for a config, by its name in the reply.

        Raises:
            ConfigFailed: the config failed. TargetError, TargetFailed: the user's code does, which
                it did not before. WorkerError: no worker can be started any more.
        """
        config = Config(request["config"])
        others = self._built - {config}
        self._ready(config)
        try:
            try:
                reply = self._answered(request, deadline_s)
            except _Unheard:
                # It ended between two requests: whatever that was, it is not this config's doing.
                self._kill()
                self._ready(config)
                reply = self._answered(request, deadline_s)
            if not reply["healthy"]:
                self._kill()  # it cannot promise that nothing leaks into the next config
            if "outcome" in reply:
                raise ConfigFailed(reply["outcome"], reply["reason"])
            self._built.add(config)
            return from_plain(kind, reply[name])
        except _Gone as exc:
            self._kill()
            if exc.outcome == "out_of_memory" and others:
                # What else was built held memory too: once more, alone.
                return self._of_config(kind, name, request, deadline_s)
            raise ConfigFailed(exc.outcome, str(exc)) from exc
        except (KeyError, RecordDamaged) as exc:
            self._kill()
            raise ConfigFailed("crashed", f"the worker's answer made no sense: {exc}") from exc

    def _of_data(self, request: dict[str, Any], most_s: float) -> dict[str, Any]:
        try:
            if not self._runs():
                self._start()
            return self._answered(request, most_s)
        except _Gone as exc:
            self._kill()
            why = str(exc)
            if exc.outcome == "timed_out":
                longer = f"; a larger --budget gives it up to {DATA_S:.0f} s" * (most_s < DATA_S)
                why = f"given up after {most_s:.0f} s, in which a batch of it is to be made{longer}"
            raise WorkerError(f"data {self._job.task.data!r}: {why}") from exc

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _ready(self, config: Config) -> None:
        """Have a process in which a config can be visited, with the data that is known.

        Raises:
            TargetError, TargetFailed, WorkerError: none can be started.
        """
        picking, lasting = config.only(*PICKING), config.only(*LASTING)
        if self._picked.get(picking, lasting) != lasting:
            self._kill()
        if not self._runs():
            try:
                self._start()
            except _Gone as exc:
                self._kill()
                raise WorkerError(f"target {self._job.task.target!r}: {exc}") from exc
            if self._data_s:
                self._of_data({"do": "describe_data"}, self._data_s)
        self._pick(config)

    def _pick(self, config: Config) -> None:
        self._picked.setdefault(config.only(*PICKING), config.only(*LASTING))

    def _start(self) -> None:
        """Raises: TargetError, TargetFailed: the target cannot be loaded. _Gone."""
        self._spawn()
        self._receive(START_S, START_S)
        load = {"do": "load", "job": to_plain(self._job)}
        self._answered(load, max(60.0, self.deadline_s))

    def _answered(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            TargetError, TargetFailed: it is that the user's code is at fault; the worker is ended.
            _Gone: there is none.
        """
        reply = self._ask(request, deadline_s)
        if "error" in reply:
            self._kill()
            errors: dict[str, type[TargetError | TargetFailed]] = {
                "TargetError": TargetError,
                "TargetFailed": TargetFailed,
            }
            raise errors[reply["error"]](reply["message"], reply["details"])
        return reply

    def _spawn(self) -> None:
        self._kill()
        self._permitted = self._most()
        ours, theirs = Pipe()
        lifeline_theirs, lifeline_ours = os.pipe()
        self._output.seek(0)
        self._output.truncate()
        self._killed = host.killed_for_memory()
        pipe, lifeline = str(theirs.fileno()), str(lifeline_theirs)
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", _GUARD),
                    *(lifeline, pipe, str(self._permitted), "", str(self._scratch.path.parent)),
                    # -P: a user's own queue.py or types.py must not shadow a library's import.
                    *(sys.executable, "-P", "-m", "advisor.tuners.measure.worker", pipe),
                ],
                pass_fds=(theirs.fileno(), lifeline_theirs),
                env={
                    "TORCHINDUCTOR_CACHE_DIR": inductor_folder(),
                    **os.environ,
                    "TMPDIR": str(self._scratch.path),
                },
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                # Out of the terminal's foreground group: Ctrl-C is the tuning process's to handle.
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(lifeline_theirs)
        self._pipe, self._lifeline = ours, lifeline_ours

    def _most(self) -> int:
        """Bytes of host memory for the worker and all that it starts, 0 for no limit."""
        known = [host.memory_limit()]
        if self._job.device.startswith("cpu"):
            known.append(self._job.task.max_memory)
        return min((one for one in known if one), default=0)

    def _ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        assert self._pipe is not None
        began = time.monotonic()
        try:
            send(self._pipe, request)
            if not self._pipe.poll(deadline_s):
                raise _Gone("timed_out", f"no answer within {deadline_s:.0f} s")
            receive(self._pipe)  # that it was heard
        except (EOFError, OSError) as exc:
            raise _Unheard(*self._obituary()) from exc
        return self._receive(deadline_s - (time.monotonic() - began), deadline_s)

    def _receive(self, left_s: float, deadline_s: float) -> dict[str, Any]:
        assert self._pipe is not None
        try:
            if not self._pipe.poll(max(0.0, left_s)):
                raise _Gone("timed_out", f"no answer within {deadline_s:.0f} s")
            return receive(self._pipe)
        except (EOFError, OSError) as exc:
            raise _Gone(*self._obituary()) from exc
        except ValueError as exc:
            raise _Gone("crashed", f"the worker's answer made no sense: {exc}") from exc

    def _obituary(self) -> tuple[str, str]:
        """(Outcome, reason): how the worker ended, with the last line that it printed."""
        assert self._process is not None
        try:
            self._process.wait(timeout=END_S)
            self._output.seek(0)
            report = json.loads(self._output.read())
        except (subprocess.TimeoutExpired, ValueError):
            return "crashed", "the worker closed its pipe"
        code, over = report["code"], report["over"]
        if over:
            held = f"it held {size(over)} of the {size(self._permitted)} permitted"
            return "out_of_memory", held
        ended = how(code)
        outcome = "crashed"
        if code == -signal.SIGKILL:
            ended += ", as the kernel does where memory runs out: try a smaller batch"
            if host.killed_for_memory() > self._killed:
                outcome = "out_of_memory"
        lines = [line.strip() for line in report["words"].splitlines() if line.strip()]
        said = f": {lines[-1][:300]}" if lines else ""
        return outcome, f"the worker process died ({ended}){said}"

    def _kill(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        self._picked.clear()
        self._built.clear()
        if self._process is not None:
            # Its lifeline is closed: the guard ends the worker and whatever that has started.
            try:
                self._process.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


_: Callable[..., Place] = Worker
