"""The tuning process's side: starts workers, gives them deadlines, replaces them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.cache.shown import size
from advisor.errors import (
    RecordDamaged,
    TargetError,
    TargetFailed,
    WorkerError,
    printable,
)
from advisor.tuners import host, knobs
from advisor.tuners.environment import is_exclusive
from advisor.tuners.measure.first_step import ANEW, Compiled, empty_caches, inductor_folder
from advisor.tuners.measure.run.guarded import how
from advisor.tuners.measure.runner import Runner
from advisor.tuners.measure.worker.wire import Costs, DataFacts, Facts, Job, receive, send
from advisor.tuners.scratch import Scratch

START_S = 300.0
"""For importing torch alone: a cold network file system takes minutes."""

_GUARD = str(Path(__file__).with_name("guard.py"))
SAVE_S = 30.0
"""For putting what was compiled into a file."""
DATA_S = 300.0
"""For making a dataset and loading a batch: a folder of millions of files is listed for minutes."""
END_S = 30.0
"""For ending a worker: a process that a driver holds on to ends when the driver lets go."""


class _Gone(Exception):
    """The worker died, hung or spoke rubbish."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class _Unheard(_Gone):
    """It was gone before it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """By which Python, in which environment and folder a worker is started."""

    python: str
    environment: Mapping[str, str]
    folder: str

    @classmethod
    def here(cls) -> Place:
        """As this process was started, and where it is now."""
        return cls(python=sys.executable, environment=os.environ, folder=str(Path.cwd()))


class Worker:
    """A Runner over a child process that lives across trials and is replaced when it fails.

    Args:
        job: what to measure.
        deadline_s: seconds until a trial is given up and its worker killed.
        place: of the worker; None: this process's own.
    """

    def __init__(self, job: Job, *, deadline_s: float, place: Place | None = None) -> None:
        self._job = job
        self.deadline_s = deadline_s
        self._place = place or Place.here()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = 0
        self._permitted = 0
        self._pipe: Connection | None = None
        self._lifeline: int | None = None
        self._cutting = threading.Lock()
        self._beside: Worker | None = None
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
        self._scratch = Scratch()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def describe(self) -> Facts:
        """Start a worker and have it run one step.

        Raises:
            TargetError, TargetFailed: the user's code or its input is wrong.
            WorkerError: it crashed or hung.
        """
        try:
            return self._start()
        except _Gone as exc:
            self._kill()
            if exc.outcome == "out_of_memory":
                raise TargetFailed(
                    f"batch {self._job.task.batch} does not fit on {self._job.device} with torch's "
                    f"default settings: {exc}; give a smaller batch"
                ) from exc
            raise WorkerError(f"target {self._job.task.target!r}: {exc}") from exc

    def describe_data(self, most_s: float = DATA_S) -> DataFacts:
        """What the task's own data is, by a batch of it, in so many seconds at most.

        Raises:
            TargetError, TargetFailed: the user's code or its data is wrong.
            WorkerError: it crashed or hung.
        """
        return from_plain(DataFacts, self._of_data({"do": "describe_data"}, most_s)["facts"])

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

    def _of_data(self, request: dict[str, Any], most_s: float) -> dict[str, Any]:
        try:
            self._ensure()
            return self._answered(request, most_s)
        except _Gone as exc:
            self._kill()
            why = str(exc)
            if exc.outcome == "timed_out":
                longer = f"; a larger --budget gives it up to {DATA_S:.0f} s" * (most_s < DATA_S)
                why = f"given up after {most_s:.0f} s, in which a batch of it is to be made{longer}"
            raise WorkerError(f"data {self._job.task.data!r}: {why}") from exc

    def measure(
        self,
        config: Config,
        *,
        seconds: float,
        stage: str = "compute",
        keep: bool = False,
        floor: float = 0.0,
        deadline_s: float | None = None,
    ) -> Measurement:
        """As `Runner.measure`.

        Raises:
            WorkerError: no worker can be started any more.
        """
        if deadline_s is None:
            deadline_s = seconds + self.deadline_s
        worker = self._of(config)
        if worker is not self:
            how: dict[str, Any] = {"seconds": seconds, "stage": stage, "keep": keep, "floor": floor}
            try:
                return worker.measure(config, **how, deadline_s=deadline_s)
            except (TargetError, TargetFailed, WorkerError) as exc:  # where this one has started
                return Measurement(outcome="failed", reason=str(exc)[:300])
        request = {
            "do": "measure",
            "config": dict(config),
            "seconds": seconds,
            "stage": stage,
            "keep": keep,
            "floor": floor,
        }
        return self._measured(request, deadline_s)

    def verify(
        self,
        config: Config,
        *,
        against: Config,
        steps: int,
        tolerance: float,
        deadline_s: float | None = None,
    ) -> Measurement:
        """Whether a config trains like another, strict fp32: outcome 'ok' or 'wrong', and how near.

        Raises:
            WorkerError: no worker can be started any more.
        """
        request = {
            "do": "verify",
            "config": dict(config),
            "against": dict(against),
            "steps": steps,
            "tolerance": tolerance,
        }
        return self._measured(request, 2 * self.deadline_s if deadline_s is None else deadline_s)

    def start(self, config: Config, *, deadline_s: float, compiled: Compiled = ANEW) -> Measurement:
        """The first steps of a config in a process of its own, as a training script has them.

        `first_step_s` is what they take once: kernels are loaded, algorithms searched, code
        compiled, or loaded as artifacts. The worker is ended for it; the next one to measure starts
        anew.
        """
        files = {"loads": compiled.loads, "saves": compiled.saves}
        request: dict[str, Any] = {name: str(file) for name, file in files.items() if file}
        self._leave()
        with tempfile.TemporaryDirectory(
            dir=self._scratch.path, ignore_cleanup_errors=True
        ) as empty:
            try:
                self._launch(empty_caches(empty) if compiled.anew else {})
                reply = self._load(deadline_s)
                if "error" not in reply:
                    request |= {"do": "start", "config": dict(config)}
                    reply = self._ask(request, deadline_s)
                else:
                    return Measurement(outcome="failed", reason=reply["message"][:300])
                return from_plain(Measurement, reply["measurement"])
            except _Gone as exc:
                return Measurement(outcome=exc.outcome, reason=str(exc))
            except (KeyError, RecordDamaged) as exc:
                return Measurement(outcome="crashed", reason=f"its answer made no sense: {exc}")
            finally:
                self._kill()

    def begin(
        self,
        config: Config,
        *,
        environment: Mapping[str, str],
        memory: int,
        compared: bool = False,
    ) -> None:
        """Have a process of its own run the first steps of a config, with the caches on disk that
        are there; what becomes of it is `heard`.

        Args:
            compared: as they are run to compare them with fp32.
            environment: more of it, for that process.
            memory: bytes of the host that it and what it starts may hold, 0 for no limit.
        """
        self._spawn(environment, memory)
        assert self._pipe is not None
        build = {
            "do": "build",
            "job": to_plain(self._job),
            "config": dict(config),
            "compared": compared,
        }
        with contextlib.suppress(OSError):  # it is gone already, as will be heard
            send(self._pipe, build)

    def heard(self) -> Measurement | None:
        """What has become of the config that was begun; None for what says nothing of that."""
        try:
            reply = self._receive(0.0, 0.0)
        except _Gone as exc:
            return Measurement(outcome=exc.outcome, reason=str(exc))
        if "error" in reply:
            return Measurement(outcome="failed", reason=reply["message"][:300])
        try:
            return from_plain(Measurement, reply["measurement"]) if "measurement" in reply else None
        except RecordDamaged as exc:
            return Measurement(outcome="crashed", reason=f"its answer made no sense: {exc}")

    def fileno(self) -> int:
        """Of what it is heard by: a begun worker can be waited for."""
        assert self._pipe is not None
        return self._pipe.fileno()

    def free_bytes(self) -> int:
        """Of the device's memory now; 0 where that cannot be told.

        Raises:
            WorkerError: no worker can be started any more.
        """
        self._ensure()
        try:
            return int(self._ask({"do": "free"}, self.deadline_s)["bytes"])
        except _Gone:
            self._kill()
            return 0

    def save(self, config: Config, file: Path) -> None:
        """As `Starter.save`: whatever the process of the config has measured."""
        worker = self._of(config)
        if worker is not self:
            worker.save(config, file)
        elif self._process is not None:
            try:
                self._ask({"do": "save", "file": str(file)}, SAVE_S)
            except _Gone:
                self._kill()

    def _of(self, config: Config) -> Worker:
        """What measures a config: this, or a second one beside it for what is kept by a process. A
        GPU that lets in one process alone has no room for another."""
        device = self._job.device
        if self._job.under or not knobs.lasts(config):
            return self
        if device.startswith("cuda") and is_exclusive(device):
            return self
        if self._beside is None:
            job = dataclasses.replace(self._job, under=knobs.UNCHOSEN)
            self._beside = Worker(job, deadline_s=self.deadline_s)
        return self._beside

    def _leave(self) -> None:
        """End the one beside."""
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.stop()

    def _measured(self, request: dict[str, Any], deadline_s: float) -> Measurement:
        began = time.monotonic()
        self._ensure()
        try:
            try:
                # Starting another worker counts too.
                reply = self._ask(request, max(0.0, deadline_s - (time.monotonic() - began)))
            except _Unheard:
                # It ended between two trials: whatever that was, it is not this config's doing.
                self._kill()
                self._ensure()
                reply = self._ask(request, max(0.0, deadline_s - (time.monotonic() - began)))
            measured = from_plain(Measurement, reply["measurement"])
            if not reply["healthy"]:
                self._kill()  # it cannot promise that nothing leaks into the next trial
            return measured
        except _Gone as exc:
            self._kill()
            return Measurement(outcome=exc.outcome, reason=str(exc))
        except (KeyError, RecordDamaged) as exc:
            self._kill()
            return Measurement(
                outcome="crashed", reason=f"the worker's answer made no sense: {exc}"
            )

    def _ensure(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self.describe()

    def release(self) -> None:
        """As `Runner.release`."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                send(self._pipe, {"do": "release"})
        if self._beside is not None:
            self._beside.release()

    def interrupt(self) -> None:
        """From another thread: what it does now is over at once, as crashed."""
        with self._cutting:
            if self._lifeline is not None:
                os.close(self._lifeline)
                self._lifeline = None
        if (beside := self._beside) is not None:
            beside.interrupt()

    def stop(self) -> None:
        """End the worker and everything it started."""
        self._leave()
        self._kill()
        self._output.close()
        self._scratch.remove()

    def _start(self) -> Facts:
        self._launch({})
        deadline_s = max(60.0, self.deadline_s)
        self._raised(self._load(deadline_s))
        return from_plain(Facts, self._answered({"do": "describe"}, deadline_s)["facts"])

    def _load(self, deadline_s: float) -> dict[str, Any]:
        return self._ask({"do": "load", "job": to_plain(self._job)}, deadline_s)

    def _answered(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        return self._raised(self._ask(request, deadline_s))

    def _raised(self, reply: dict[str, Any]) -> dict[str, Any]:
        """A reply, where it tells of no fault of the user's; that is raised, the worker ended."""
        if "error" in reply:
            self._kill()
            errors: dict[str, type[TargetError | TargetFailed]] = {
                "TargetError": TargetError,
                "TargetFailed": TargetFailed,
            }
            raise errors[reply["error"]](reply["message"], reply["details"])
        return reply

    def _launch(self, environment: Mapping[str, str]) -> None:
        self._spawn(environment)
        self._receive(START_S, START_S)

    def _spawn(self, environment: Mapping[str, str], memory: int = 0) -> None:
        self._kill()
        self._permitted = min((one for one in (memory, self._most()) if one), default=0)
        ours, theirs = Pipe()
        lifeline_theirs, lifeline_ours = os.pipe()
        self._output.seek(0)
        self._output.truncate()
        self._killed = host.killed_for_memory()
        pipe, lifeline = str(theirs.fileno()), str(lifeline_theirs)
        visible = {"CUDA_VISIBLE_DEVICES": self._job.visible} if self._job.visible else {}
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", _GUARD),
                    *(lifeline, pipe, str(self._permitted), "", str(self._scratch.path.parent)),
                    # -P: a user's own queue.py or types.py must not shadow a library's import.
                    *(self._place.python, "-P", "-m", "advisor.tuners.measure.worker", pipe),
                ],
                pass_fds=(theirs.fileno(), lifeline_theirs),
                env={
                    "TORCHINDUCTOR_CACHE_DIR": inductor_folder(),
                    **self._place.environment,
                    "TMPDIR": str(self._scratch.path),
                    **environment,
                    **visible,
                },
                cwd=self._place.folder,
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
        self.interrupt()
        if self._process is not None:
            # Its lifeline is closed: the guard ends the worker and whatever that has started.
            try:
                self._process.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


_: type[Runner] = Worker
