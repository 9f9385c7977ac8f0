"""The tuning process's side of a worker: starts it, gives it deadlines, replaces it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import BATCH, Config
from advisor.cache.shown import size
from advisor.errors import RecordDamaged, TargetError, TargetFailed, WorkerError
from advisor.tuners import host
from advisor.tuners.knobs import KNOBS, compiles, plain, strict
from advisor.tuners.measure.run.guarded_process import GuardedProcess, exit_text, inductor_folder
from advisor.tuners.measure.runner import Block, Compared, ConfigFailed, Runner
from advisor.tuners.measure.worker.wire import (
    DataFacts,
    Facts,
    SampleCosts,
    WorkerJob,
    receive,
    send,
)
from advisor.tuners.scratch import ScratchFolder

T = TypeVar("T")
LOAD_S = 300.0
"""Seconds for importing torch and the target, for its first steps, and for a first batch of its
data, at least: a cold network file system takes minutes, as does listing millions of files."""
LATE_S = 30.0  # beyond a deadline: a comparison looks at its time between two passes

ALGORITHM_KEYS = (BATCH, *(k.name for k in KNOBS if k.autocast or k.layout is not None))
FRESH_PROCESS = tuple(knob.name for knob in KNOBS if knob.needs_fresh_process)
"""cuDNN keeps the algorithm that a convolution's first one ran with, searched for or not (PyTorch's
Conv_v8.cpp, benchmark_cache; on an H200 a first search took 60 ms, 0.25 ms after a step without):
one value of LASTING in a process for each of PICKING, which tell convolutions apart."""


class Worker(contextlib.AbstractContextManager["Worker"]):
    """A Runner in a child process; one that dies or hangs is replaced. `deadline_s`: for describing
    the job, and for what its data costs."""

    def __init__(self, job: WorkerJob, *, deadline_s: float) -> None:
        self._job, self.deadline_s = job, deadline_s
        self.baseline = plain(job.task, job.device)  # until it is set
        self._process: GuardedProcess | None = None
        self._pipe: Connection | None = None
        self._data_s = 0.0  # that loading took at most; 0 before `describe_data`
        self._picked: dict[Config, Config] = {}  # LASTING by PICKING
        self._built: set[Config] = set()
        self._scratch = ScratchFolder()

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def describe(self) -> Facts:
        """Have a worker run its first steps, as torch does by default. Raises TargetError or
        TargetFailed if the user's code, data or input is wrong, WorkerError if it died or hung."""
        try:
            return self._asked(Facts, "describe", max(LOAD_S, self.deadline_s))
        except ConfigFailed as failed:
            if failed.outcome != "out_of_memory":
                raise self._lost(failed) from failed
            raise TargetFailed(
                f"batch {self._job.task.batch} does not fit on {self._job.device} with torch's "
                f"default settings: {failed}; give a smaller batch"
            ) from failed

    def describe_data(self, most_s: float = LOAD_S) -> DataFacts:
        """Load batches of the task's data, in so many seconds at most; raises as `describe`."""
        facts = self._of_data(DataFacts, "describe_data", most_s)
        self._data_s = most_s
        return facts

    def costs(self, seconds: float) -> SampleCosts:
        """What a sample of the data costs a worker of its loader; raises as `describe`."""
        return self._of_data(SampleCosts, "costs", max(LOAD_S, self.deadline_s), seconds=seconds)

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        """As Runner; steps of a config with a loader are whole rounds of its workers."""
        return self._asked(Block, "block", deadline_s, config, steps=steps, warm=warm)

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        """As Runner; a config of another batch is compared at the user's."""
        batch = self._job.task.batch
        given = {"fp32": dict(strict(self.baseline).at(batch)), "seconds": deadline_s}
        try:
            most_s = deadline_s + LATE_S
            return self._asked(Compared, "compare", most_s, config.at(batch), **given)
        except ConfigFailed as failed:
            return Compared(outcome=failed.outcome, reason=str(failed))

    def forget(self, config: Config) -> None:
        self._built.discard(config)
        if self._runs():
            with contextlib.suppress(ConfigFailed):
                self._answered({"do": "forget", "config": dict(config)}, LATE_S)

    def save(self, config: Config, file: Path) -> None:
        if compiles(config):
            with contextlib.suppress(ConfigFailed):
                self._asked(bool, "save", LATE_S + self.deadline_s, config, file=str(file))

    def stop(self) -> None:
        self._kill()
        self._scratch.remove()

    def _asked(
        self,
        kind: type[T],
        what: str,
        deadline_s: float,
        config: Config | None = None,
        **given: Any,
    ) -> T:
        """What a worker answers to a request, of a config or of the job; raises as Runner.block."""
        others = self._built - {config}
        request = {"do": what, **given} | ({} if config is None else {"config": dict(config)})
        self._ready(plain(self._job.task, self._job.device) if config is None else config)
        try:
            reply = self._answered(request, deadline_s)
        except ConfigFailed as failed:
            if failed.outcome != "out_of_memory" or not others:
                raise
            # What else was built held memory too: once more, alone.
            return self._asked(kind, what, deadline_s, config, **given)
        try:
            if not reply["healthy"]:
                self._kill()  # it cannot promise that nothing leaks into the next config
            if "outcome" in reply:
                raise ConfigFailed(reply["outcome"], reply["reason"])
            if config is not None:
                self._built.add(config)
            return from_plain(kind, reply["answer"])
        except (KeyError, RecordDamaged) as exc:
            self._kill()
            raise ConfigFailed("crashed", f"the worker's answer made no sense: {exc}") from exc

    def _of_data(self, kind: type[T], what: str, most_s: float, **given: Any) -> T:
        try:
            return self._asked(kind, what, most_s, **given)
        except ConfigFailed as failed:
            why = str(failed)
            if failed.outcome == "timed_out":
                longer = f"; a larger --budget gives it up to {LOAD_S:.0f} s" * (most_s < LOAD_S)
                why = f"given up after {most_s:.0f} s, in which a batch of it is to be made{longer}"
            raise WorkerError(f"data {self._job.task.data!r}: {why}") from failed

    def _runs(self) -> bool:
        if self._pipe is None or self._process is None or self._process.ended:
            return False
        return not self._pipe.poll()  # what comes unasked is the end of the pipe

    def _ready(self, config: Config) -> None:
        """Have a process in which a config can be visited, with the data loaded."""
        picking, needs_fresh_process = config.only(*ALGORITHM_KEYS), config.only(*FRESH_PROCESS)
        if (
            self._picked.get(picking, needs_fresh_process) != needs_fresh_process
            or not self._runs()
        ):
            self._start()
            if self._data_s:
                self.describe_data(self._data_s)
        self._picked.setdefault(picking, needs_fresh_process)

    def _start(self) -> None:
        """Start a worker with the target loaded; raises as `describe`."""
        self._kill()
        self._permitted = host.memory_limit()
        if self._job.device.startswith("cpu") and self._job.task.max_memory:
            self._permitted = min(self._permitted, self._job.task.max_memory)
        self._killed = host.killed_for_memory()
        environment = {"TORCHINDUCTOR_CACHE_DIR": inductor_folder(), **os.environ}
        environment["TMPDIR"] = str(self._scratch.path)
        self._pipe, theirs = Pipe()
        pipe, memory = theirs.fileno(), self._permitted
        # -P: a user's own queue.py or types.py must not shadow a library's import.
        words = [sys.executable, "-P", "-m", "advisor.tuners.measure.worker", str(pipe)]
        try:
            with theirs:
                self._process = GuardedProcess(
                    words, environment=environment, pipe=pipe, memory=memory
                )
            load = {"do": "load", "job": to_plain(self._job)}
            self._answered(load, max(LOAD_S, self.deadline_s))
        except (ConfigFailed, OSError) as exc:
            self._kill()
            raise self._lost(exc) from exc

    def _lost(self, exc: Exception) -> WorkerError:
        return WorkerError(f"target {self._job.task.target!r}: {exc}")

    def _answered(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """The reply; without one ends the worker, and raises as `describe`, or ConfigFailed."""
        assert self._pipe is not None
        failed: Exception
        try:
            send(self._pipe, request)
            if not self._pipe.poll(deadline_s):
                failed = ConfigFailed("timed_out", f"no answer within {deadline_s:.0f} s")
            else:
                reply = receive(self._pipe)
                if "error" not in reply:
                    return reply
                kind = TargetError if reply["error"] == TargetError.__name__ else TargetFailed
                failed = kind(reply["message"], reply["details"])
        except (EOFError, OSError):
            failed = ConfigFailed(*self._exit_reason())
        except (KeyError, ValueError) as exc:
            failed = ConfigFailed("crashed", f"the worker's answer made no sense: {exc}")
        self._kill()
        raise failed

    def _exit_reason(self) -> tuple[str, str]:
        assert self._process is not None
        code, last = self._process.exit_report()
        if over := self._process.over:
            return "out_of_memory", f"it held {size(over)} of the {size(self._permitted)} permitted"
        outcome, ended = "crashed", exit_text(code)
        if code == -signal.SIGKILL:
            ended += ", as the kernel does where memory runs out: try a smaller batch"
            if host.killed_for_memory() > self._killed:
                outcome = "out_of_memory"
        return outcome, f"the worker process died ({ended})" + (f": {last}" if last else "")

    def _kill(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        self._picked.clear()
        self._built.clear()
        process, self._process = self._process, None
        if process is not None:
            process.end()


_: Callable[..., Runner] = Worker
