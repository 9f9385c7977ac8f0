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
from advisor.tuners.act.pilot.protocol import receive, send
from advisor.tuners.knobs import KNOBS, compiles, plain, strict
from advisor.tuners.measure.run.guarded_process import GuardedProcess, exit_text, inductor_folder
from advisor.tuners.measure.runner import Block, Compared, ConfigFailed, Runner
from advisor.tuners.measure.worker.wire import DataFacts, Facts, SampleCosts, WorkerJob
from advisor.tuners.scratch import ScratchFolder

T = TypeVar("T")
LOAD_S = 300.0
"""The least seconds allowed for importing torch and the target, for first steps, and for a first
batch of data: a cold network file system takes minutes, as does listing millions of files."""
LATE_S = 30.0  # seconds beyond a deadline: a comparison checks its time between two passes

ALGORITHM_KEYS = (BATCH, *(k.name for k in KNOBS if k.autocast or k.layout is not None))
FRESH_PROCESS = tuple(knob.name for knob in KNOBS if knob.needs_fresh_process)
"""cuDNN keeps the algorithm with which a convolution first ran, searched for or not (PyTorch's
Conv_v8.cpp, benchmark_cache; on an H200 a search took 60 ms, after a step without search 0.25 ms).
So values of FRESH_PROCESS never change in a process for the same values of ALGORITHM_KEYS."""


class Worker(contextlib.AbstractContextManager["Worker"]):
    """A Runner in a child process, which is replaced if it dies or hangs. `deadline_s`: seconds for
    requests without a deadline of their own, if more than LOAD_S."""

    def __init__(self, job: WorkerJob, *, deadline_s: float) -> None:
        self._job, self.deadline_s = job, deadline_s
        self.baseline = plain(job.task, job.device)  # the caller may replace it
        self._process: GuardedProcess | None = None
        self._pipe: Connection | None = None
        self._data_s = 0.0  # allowed for loading data; 0 before `describe_data`
        self._picked: dict[Config, Config] = {}  # FRESH_PROCESS values by ALGORITHM_KEYS values
        self._built: set[Config] = set()
        self._scratch = ScratchFolder()

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def describe(self) -> Facts:
        """Have a worker run its first steps, with torch's defaults. Raises TargetError or
        TargetFailed if the user's code, data or input is wrong, WorkerError if it died or hung."""
        try:
            return self._asked(Facts, "describe", max(LOAD_S, self.deadline_s))
        except ConfigFailed as failed:
            if failed.outcome != "out_of_memory":
                raise WorkerError(f"target {self._job.task.target!r}: {failed}") from failed
            raise TargetFailed(
                f"batch {self._job.task.batch} does not fit on {self._job.device} with torch's "
                f"default settings: {failed}; give a smaller batch"
            ) from failed

    def describe_data(self, most_s: float = LOAD_S) -> DataFacts:
        """Load batches of the task's data, within `most_s` seconds; raises as `describe`."""
        facts = self._of_data(DataFacts, "describe_data", most_s)
        self._data_s = most_s
        return facts

    def costs(self, seconds: float) -> SampleCosts:
        """A loader worker's time for a sample of the data; raises as `describe`."""
        return self._of_data(SampleCosts, "costs", max(LOAD_S, self.deadline_s), seconds=seconds)

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        """As Runner; steps of a config with a loader are whole rounds of its workers."""
        return self._asked(Block, "block", deadline_s, config, steps=steps, warm=warm)

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        """As Runner; a config of another batch size is compared at the user's batch size."""
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
        """The worker's answer to a request, on a config or the job; raises as Runner.block."""
        others = self._built - {config}
        request = {"do": what, **given} | ({} if config is None else {"config": dict(config)})
        self._ready(plain(self._job.task, self._job.device) if config is None else config)
        try:
            reply = self._answered(request, deadline_s)
        except ConfigFailed as failed:
            if failed.outcome != "out_of_memory" or not others:
                raise
            # Other configs' workloads held memory too: try again in a new process.
            return self._asked(kind, what, deadline_s, config, **given)
        try:
            if not reply["healthy"]:
                self._kill()  # its state may affect the next config
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
                longer = f"; a larger --budget allows up to {LOAD_S:.0f} s" * (most_s < LOAD_S)
                why = f"gave no batch within {most_s:.0f} s{longer}"
            raise WorkerError(f"data {self._job.task.data!r}: {why}") from failed

    def _runs(self) -> bool:
        if self._pipe is None or self._process is None or self._process.ended:
            return False
        return not self._pipe.poll()  # without a request, only the pipe's end can come

    def _ready(self, config: Config) -> None:
        """Make sure of a process that fits a config, with the data loaded."""
        key, picks = config.only(*ALGORITHM_KEYS), config.only(*FRESH_PROCESS)
        if self._picked.get(key, picks) != picks or not self._runs():
            self._start()
            if self._data_s:
                self.describe_data(self._data_s)
        self._picked.setdefault(key, picks)

    def _start(self) -> None:
        """Start a worker with the target loaded; raises as `describe`."""
        self._kill()
        self._permitted = host.memory_limit()
        if self._job.device.startswith("cpu") and self._job.task.max_memory:
            self._permitted = min(self._permitted, self._job.task.max_memory)
        self._killed = host.killed_for_memory()
        given = {"TORCHINDUCTOR_CACHE_DIR": inductor_folder(), **os.environ}
        given["TMPDIR"] = str(self._scratch.path)
        self._pipe, theirs = Pipe()
        pipe, memory = theirs.fileno(), self._permitted
        # -P: a user's own queue.py or types.py must not shadow a library's import.
        words = [sys.executable, "-P", "-m", "advisor.tuners.measure.worker", str(pipe)]
        try:
            with theirs:
                self._process = GuardedProcess(words, environment=given, pipe=pipe, memory=memory)
            load = {"do": "load", "job": to_plain(self._job)}
            self._answered(load, max(LOAD_S, self.deadline_s))
        except (ConfigFailed, OSError) as exc:
            self._kill()
            raise WorkerError(f"target {self._job.task.target!r}: {exc}") from exc

    def _answered(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """The reply to a request; without a reply, ends the worker and raises as `_asked`."""
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
