"""The tuning process's side: starts workers, gives them deadlines, replaces them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from advisor.cache.codec import from_plain
from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.errors import (
    RecordDamaged,
    TargetError,
    TargetFailed,
    WorkerError,
)
from advisor.tuners.measure.runner import Runner
from advisor.tuners.measure.worker.wire import Facts, Job, receive, send

START_S = 300.0
"""For importing torch alone: a cold network file system takes minutes."""

_log = logging.getLogger("advisor.worker")


class _Gone(Exception):
    """The worker died, hung or spoke rubbish."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class Worker:
    """A Runner over a child process that lives across trials and is replaced when it fails.

    Args:
        job: what to measure.
        deadline_s: seconds until a trial is given up and its worker killed.

    Attributes:
        limit: a config's own deadline in seconds, where it has one; None for `deadline_s`.
    """

    def __init__(self, job: Job, *, deadline_s: float) -> None:
        self._job = job
        self.deadline_s = deadline_s
        self.limit: Callable[[Config], float | None] = lambda _config: None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lifeline: int | None = None
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()

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
            raise WorkerError(f"target {self._job.target!r}: {exc}") from exc

    def measure(
        self,
        config: Config,
        *,
        seconds: float,
        stage: str = "compute",
        keep: bool = False,
        floor: float = 0.0,
    ) -> Measurement:
        """As `Runner.measure`.

        Raises:
            WorkerError: no worker can be started any more.
        """
        request = {
            "config": dict(config),
            "seconds": seconds,
            "stage": stage,
            "keep": keep,
            "floor": floor,
        }
        limit = self.limit(config)
        return self._measured(request, seconds + (self.deadline_s if limit is None else limit))

    def verify(
        self, config: Config, *, against: Config, steps: int, tolerance: float
    ) -> Measurement:
        """Whether a config trains like another, strict fp32: outcome 'ok' or 'wrong', and how near.

        Raises:
            WorkerError: no worker can be started any more.
        """
        request = {
            "config": dict(config),
            "against": dict(against),
            "steps": steps,
            "tolerance": tolerance,
        }
        return self._measured(request, 2 * self.deadline_s)

    def start(self, config: Config, *, deadline_s: float) -> Measurement:
        """The first steps of a config in a process of its own, as a training script has them.

        `first_step_s` is what they take once: kernels are loaded, algorithms searched, code
        compiled with empty caches on disk. The worker is ended for it; the next one to measure
        starts anew.
        """
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
            caches = {
                f"{name}_CACHE_DIR": f"{empty}/{name}" for name in ("TORCHINDUCTOR", "TRITON")
            }
            try:
                self._launch(caches)
                request = {"job": dataclasses.asdict(self._job), "start": dict(config)}
                reply = self._ask(request, deadline_s)
                return from_plain(Measurement, reply["measurement"])
            except _Gone as exc:
                return Measurement(outcome=exc.outcome, reason=str(exc))
            except (KeyError, RecordDamaged) as exc:
                return Measurement(outcome="crashed", reason=f"its answer made no sense: {exc}")
            finally:
                self._kill()

    def _measured(self, request: dict[str, Any], deadline_s: float) -> Measurement:
        if self._process is None or self._process.poll() is not None:
            self.describe()
        try:
            reply = self._ask(request, deadline_s)
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

    def release(self) -> None:
        """As `Runner.release`."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                send(self._pipe, {"release": True})

    def stop(self) -> None:
        """End the worker and everything it started."""
        self._kill()
        self._output.close()

    def _start(self) -> Facts:
        self._launch({})
        reply = self._ask({"job": dataclasses.asdict(self._job)}, max(60.0, self.deadline_s))
        if "error" in reply:
            self._kill()
            errors: dict[str, type[TargetError | TargetFailed]] = {
                "TargetError": TargetError,
                "TargetFailed": TargetFailed,
            }
            raise errors[reply["error"]](reply["message"], reply["details"])
        return Facts(**reply["facts"])

    def _launch(self, environment: dict[str, str]) -> None:
        self._kill()
        ours, theirs = Pipe()
        lifeline_theirs, lifeline_ours = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    # -P: a user's own queue.py or types.py must not shadow a library's import.
                    *(sys.executable, "-P", "-m", "advisor.tuners.measure.worker.child"),
                    *(str(theirs.fileno()), str(lifeline_theirs)),
                ],
                pass_fds=(theirs.fileno(), lifeline_theirs),
                env=os.environ | environment,
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
        self._receive(START_S)

    def _ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        assert self._pipe is not None
        try:
            send(self._pipe, request)
        except OSError as exc:
            raise _Gone("crashed", self._obituary()) from exc
        return self._receive(deadline_s)

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        assert self._pipe is not None
        try:
            if not self._pipe.poll(deadline_s):
                raise _Gone("timed_out", f"no answer within {deadline_s:.0f} s")
            return receive(self._pipe)
        except (EOFError, OSError) as exc:
            raise _Gone("crashed", self._obituary()) from exc
        except ValueError as exc:
            raise _Gone("crashed", f"the worker's answer made no sense: {exc}") from exc

    def _obituary(self) -> str:
        """How the worker died, with the last line that it printed."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "the worker closed its pipe"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            how += ", as the kernel does where memory runs out: try a smaller batch"
        said = self._last_words()
        return f"the worker process died ({how})" + (f": {said}" if said else "")

    def _last_words(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - 4000))
        text = self._output.read().decode(errors="replace")
        self._output.seek(0, os.SEEK_END)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""

    def _kill(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._process is not None:
            # Its whole session, so that no loader process of the user's is left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


_: type[Runner] = Worker
