"""The process of one attempt: it tunes what the server asks for, and reports to the server.

`python -m advisor.jobs.worker [FOLDER ATTEMPT]`, with $ADVISOR_SERVER and $ADVISOR_START_TOKEN.
Others may read these variables, as on Ray. So the worker exchanges the start token at once for a
token that is only in its memory. It works in FOLDER, or in a new temporary folder, because the path
of a socket must be short. ATTEMPT only names the worker in the list of processes.

Submitted code runs in a guarded child process without the token. When the child or the worker ends,
everything that the code started ends too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote

from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.shown import speedup
from advisor.cache.signing import KeyRing
from advisor.cache.stores.dir import DirStore
from advisor.cache.stores.filesystem import make_folder, read_regular, remove_folder, study_file
from advisor.cache.stores.http import HttpStore
from advisor.cache.stores.http_client import MAP, HttpClient
from advisor.errors import AdvisorError, RecordDamaged, StoreError, UsageError, printable, reason
from advisor.jobs import code_archive, token
from advisor.jobs.spec import MAX_REPORTED_TRIALS, MAX_STUDY, AttemptOver, JobSpec
from advisor.tuners import host
from advisor.tuners.environment import Gpu, gpus
from advisor.tuners.measure.run.guarded_process import GuardedProcess, exit_text

HEARTBEAT_S = 2.0
SERVER_TIMEOUT_S = 900.0  # the worker gives up on a server that does not answer for this long
STARTS_S = 1800.0  # time for imports and the like: a tuning may take twice its budget and this time
STORE_TIMEOUT_S = 10.0  # timeout of one request
UPLOAD_RATE = 2**17
"""Bytes per second of uploads of a search file, on average: it grows, and is sent whole."""
MAX_OUTPUT = 2**16  # bytes of output in one heartbeat, at most
MAX_REASON = 500
ONLY_BASELINE = 3
"""The exit code of `advisor tune --for` if its budget left time for the baseline only."""
_POLL_S = 0.1
REPORTED = ("number", "what", "batch", "samples_per_s", "ratio", "outcome", "origin")  # of a trial
_SECRET = ("ADVISOR_", "RAY_AUTH_", "RAY_JOB_CONFIG_JSON_ENV_VAR")
"""Prefixes of variables that submitted code does not get. Ray copies variables into the last."""
_OVER, _REJECTIONS = (401, 403, 404, 409), (400, 413, 422)

T = TypeVar("T")


class Outcome(NamedTuple):
    """How an attempt ended. `reason`: one line for people; `record`: the id of the new record."""

    state: Literal["done", "failed", "preempted"]
    reason: str = ""
    record: str = ""


class AttemptFailed(AdvisorError):
    """The attempt cannot continue: its machine fails, or the server rejects a request."""


class AttemptClient:
    """Sends an attempt's requests; call `begin` first. Every method raises StoreError if the server
    is away, and AttemptOver or AttemptFailed if it says so."""

    def __init__(
        self, url: str, start_token: str, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._own = token.made()
        self._client = HttpClient(url, token=start_token)
        self.store = HttpStore(url, token=self._own)
        self.store.timeout_s = max(STORE_TIMEOUT_S, self.store.timeout_s)
        self.preempted = threading.Event()
        self._now, self._heard = now, now()

    def begin(self) -> dict[str, Any]:
        """Exchange the start token for this worker's own token. Returns what to do. Repeating this
        is safe."""
        sent = {"digest": token.digest(self._own).hex()}
        data = self.retry(lambda: self.ask("POST", "attempt/begin", sent))
        self._client = self.store.client
        return self.decoded(data)

    def get(self, path: str) -> bytes:
        return self.retry(lambda: self.ask("GET", path))

    def ask(self, method: str, path: str, body: bytes | Mapping[str, Any] | None = None) -> bytes:
        """Send one request, with `path` below /api/. Returns the answer's body."""
        status, data = self._client.request(
            method,
            f"/api/{path}",
            timeout_s=self.store.timeout_s,
            body=body,
            # A kept connection that breaks would send the request twice.
            headers={"Connection": "close"},
            accepts=(*_OVER, *_REJECTIONS),
        )
        if status in _OVER:
            raise AttemptOver(self._client.detail(data))
        if status in _REJECTIONS:
            raise AttemptFailed(self._client.detail(data))
        self._heard = self._now()
        return data

    def decoded(self, data: bytes) -> dict[str, Any]:
        return self._client.decoded(data, MAP)

    @property
    def is_given_up(self) -> bool:
        """Whether to stop waiting for the server."""
        return self.preempted.is_set() or self._now() - self._heard > SERVER_TIMEOUT_S

    def retry(self, act: Callable[[], T]) -> T:
        """Repeat a request until the server answers, or is away for too long. A worker that was
        told to end sends the request once."""
        while True:
            try:
                return act()
            except StoreError as exc:
                if isinstance(exc, RecordDamaged) or self.is_given_up:
                    raise
                self.preempted.wait(HEARTBEAT_S)


def new_trials(path: Path, at: int) -> tuple[list[dict[str, Any]], int]:
    """Returns (the trials in the next complete lines after byte `at`; where these lines end)."""
    found = []
    with path.open("rb") as file:
        file.seek(at)
        for line in itertools.islice(file, MAX_REPORTED_TRIALS):
            if line.endswith(b"\n"):
                at += len(line)
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if event.get("event", "trial") == "trial":
                        found.append({name: event[name] for name in REPORTED if name in event})
    return found, at


def new_output(path: Path, at: int) -> tuple[str, int]:
    """Returns (the text after byte `at`, if it is too long its beginning and its end; its end)."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(at)
        data = file.read(min(end - at, MAX_OUTPUT))
        if left_out := max(0, end - at - MAX_OUTPUT):
            cut = f"\n[advisor: {left_out} bytes of output are left out]\n".encode()
            file.seek(end - MAX_OUTPUT // 2)
            data = data[: MAX_OUTPUT // 2] + cut + file.read(MAX_OUTPUT // 2)
    return data.decode(errors="replace"), end


class JobWorker:
    """Runs one attempt, with all its files in a new `folder`. `start` starts `advisor tune`; `now`
    is a clock in seconds."""

    def __init__(
        self,
        server: AttemptClient,
        folder: Path,
        *,
        start: Callable[..., GuardedProcess] = GuardedProcess,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._folder, self._start, self._now = server, folder, start, now
        self._code, self._cache, self._tmp = (folder / one for one in ("code", "cache", "tmp"))
        self._studies = self._cache / "studies"
        self._events, self._output = folder / "events", folder / "output"
        self._sent = 0, 0  # how many bytes of these two files the server has
        self._uploaded: dict[str, tuple[float, float]] = {}
        """By search file: its time of change when it was uploaded, and when it may be again."""
        self._gpus: Callable[[], Sequence[Gpu]] = list
        self._other_processes: set[str] = set()
        self._device = f"{socket.gethostname()}: CPU"
        self._beaten = -HEARTBEAT_S

    def run(self) -> None:
        """Tune, and report the outcome. Raises AttemptOver if the server ended the attempt, and
        StoreError if it is away."""
        instructions = self._server.begin()
        try:
            outcome = self._outcome(instructions)
        except (AttemptFailed, UsageError, RecordDamaged) as exc:
            outcome = Outcome("failed", printable(" ".join(str(exc).split())))
        except OSError as exc:  # from this machine: connections raise StoreError
            why = f"{socket.gethostname()}: {self._folder}: {reason(exc)}"
            outcome = Outcome("failed", printable(why))
        self._server.retry(lambda: self._server.ask("POST", "attempt/end", outcome._asdict()))

    def _outcome(self, instructions: Mapping[str, Any]) -> Outcome:
        asked = self._prepare(instructions)
        if asked.gpus:
            self._gpus = gpus
            self._device = f"{socket.gethostname()}: {', '.join(gpu.name for gpu in gpus())}"
            if used := "; ".join(f"{gpu.uuid}: {gpu.used_by}" for gpu in gpus() if gpu.users):
                return Outcome("preempted", f"other processes use the GPU ({used})")
        limit_s = 2 * asked.plan.seconds + STARTS_S
        code, words = self._tune(asked, self._now() + limit_s)
        if code in (0, ONLY_BASELINE):
            return self._send_record(finished=code == 0)
        if code is not None:
            said = words.removeprefix("advisor: ") or "it printed nothing"
            reason = said if code in (1, 2) else f"{exit_text(code)}: {said}"
            return Outcome("failed", printable(reason))
        if self._server.preempted.is_set():
            return Outcome("preempted", "its worker was told to end")
        why = f"ended after {limit_s:.0f} s: twice its budget, and {STARTS_S:.0f} s to start"
        return Outcome("failed", f"{why}; its log may say where it hangs")

    def _prepare(self, instructions: Mapping[str, Any]) -> JobSpec:
        """Put the job's code and its search files into the folder. Returns the job."""
        for folder in (self._folder, self._studies, self._tmp):
            make_folder(folder)
        for file in (self._output, self._events):
            file.touch(0o600)
        asked = JobSpec.of(instructions["asked"])
        if asked.archive:
            code_archive.unpack(self._server.get(f"archives/{asked.archive}"), self._code)
        make_folder(self._code)
        for name in instructions["studies"]:
            study_file(self._studies, name).write_bytes(self._server.get(_study(name)))
        return asked

    def _tune(self, asked: JobSpec, until: float) -> tuple[int | None, str]:
        """Run `advisor tune`. Returns (exit code, None if the worker ended it; its last line)."""
        child = self._start(
            self._words(asked),
            log=self._output,
            environment=self._environment(),
            folder=self._code / asked.folder,
        )
        try:
            while not child.ended and self._now() < until and not self._server.preempted.is_set():
                self._beat()
                self._server.preempted.wait(_POLL_S)
            report = child.exit_report() if child.ended else (None, "")
        finally:
            child.end()
        self._server.retry(lambda: self._upload_studies(last=True))
        while self._server.retry(self._report):
            pass
        return report

    def _send_record(self, finished: bool) -> Outcome:
        try:
            found = Records(DirStore(self._cache)).all()
        except StoreError as exc:
            raise AttemptFailed(f"{socket.gethostname()}: {exc}") from exc
        record = max(found, key=lambda one: one.provenance.created, default=None)
        if record is None:
            return Outcome("failed", "advisor tune ended, and left no record")
        records = Records(self._server.store, keyring=KeyRing.from_environment())
        self._server.retry(lambda: records.put(record))
        if not finished:
            why = "its budget left time for the baseline only; give a larger --budget"
            return Outcome("failed", f"record {record.id}: {why}")
        others = [f"meanwhile others used the GPU: {one}" for one in sorted(self._other_processes)]
        return Outcome("done", "; ".join([_summary(record), *others])[:MAX_REASON], record.id)

    def _words(self, asked: JobSpec) -> list[str]:
        tune = [sys.executable, "-P", "-m", "advisor", "tune", *asked.words()]
        tune += ["--cache", f"dir:{self._cache}", "--events", str(self._events)]
        tune += ["--for", self._server.store.url]
        what = ["--show-output", "--", *asked.command] if asked.command else [asked.target]
        return [*tune, *what]

    def _environment(self) -> dict[str, str]:
        """The child's environment variables, without advisor's own."""
        given = {k: v for k, v in os.environ.items() if not k.startswith(_SECRET)}
        own_python = str(Path(sys.executable).parent)
        return given | {
            # 'python' means the Python that has advisor.
            "PATH": os.pathsep.join([own_python, *filter(None, [given.get("PATH")])]),
            "TMPDIR": str(self._tmp),
            # Keep no artifacts, because nobody would sign those of submitted code.
            "ADVISOR_MAX_ARTIFACTS": "0",
        }

    def _beat(self) -> None:
        """Send a heartbeat with news and search files, every HEARTBEAT_S. Raises as `run`."""
        if self._now() - self._beaten < HEARTBEAT_S:
            return
        self._beaten = self._now()
        self._note_other_processes()
        try:
            self._report()
            self._upload_studies()
        except StoreError:
            if self._server.is_given_up:
                raise

    def _note_other_processes(self) -> None:
        """Note other processes on the GPUs. In a container, the driver may report the host's pids,
        which are skipped."""
        for gpu in self._gpus():
            if gpu.users:
                own = host.family(os.getpid())
                others = [n for n in gpu.users if n not in own and Path(f"/proc/{n}").exists()]
                if others:
                    self._other_processes.add(dataclasses.replace(gpu, users=tuple(others)).used_by)

    def _report(self) -> bool:
        """Send new trials and output. Returns whether there were any."""
        trials, trials_end = new_trials(self._events, self._sent[0])
        log, log_end = new_output(self._output, self._sent[1])
        report = {"trials": trials, "log": log, "device": self._device}
        said = self._server.ask("POST", "attempt/beat", report)
        if not self._server.decoded(said).get("go_on"):
            raise AttemptOver("the server has ended this attempt")
        self._sent = trials_end, log_end
        return bool(trials or log)

    def _upload_studies(self, last: bool = False) -> None:
        """Upload the complete lines of search files that changed."""
        for path in sorted(self._studies.glob("*.journal")):
            uploaded, next_s = self._uploaded.get(path.name, (0.0, -math.inf))
            try:
                changed = path.lstat().st_mtime
                if changed == uploaded or (self._now() < next_s and not last):
                    continue
                data = read_regular(path, MAX_STUDY)
            except OSError:  # gone, not a plain file, or too large: not resumed
                continue
            with contextlib.suppress(AttemptFailed):  # too large for the server
                self._server.ask("PUT", _study(path.name), data[: data.rfind(b"\n") + 1])
            self._uploaded[path.name] = changed, self._now() + len(data) / UPLOAD_RATE


def _study(name: str) -> str:
    """The path of a search file at the server."""
    return f"attempt/studies/{quote(name, '')}"


def _summary(record: Record) -> str:
    """A new record in one line."""
    advised, baseline = record.winner(record.use), record.key.task.baseline
    if not record.compares:
        what = f"there is nothing to compare with {baseline}"
    elif advised == record.baseline:
        what = f"nothing is clearly faster than {baseline}"
    else:
        times = speedup(advised.speedup, advised.speedup_low, advised.speedup_high)
        what = f"{times} over {baseline}"
    return f"record {record.id}: {what}"


def main(folder: str = "", _attempt: str = "") -> None:
    """Run the attempt that has $ADVISOR_START_TOKEN on $ADVISOR_SERVER. Exits with a message if
    that fails."""
    host.keep_private()
    folder = folder or tempfile.mkdtemp(prefix="advisor-")
    try:
        server = AttemptClient(os.environ["ADVISOR_SERVER"], os.environ["ADVISOR_START_TOKEN"])
        signal.signal(signal.SIGTERM, lambda *_: server.preempted.set())
        JobWorker(server, Path(folder)).run()
    except (AdvisorError, OSError) as exc:
        sys.exit(f"advisor: {reason(exc)}")
    finally:
        remove_folder(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
