"""The process of one attempt: it tunes what the server asks for, and reports to the server.

`python -m advisor.jobs.worker [FOLDER ATTEMPT]`, with $ADVISOR_SERVER and $ADVISOR_START_TOKEN.
Others may read these variables, as on Ray. So the worker exchanges the start token at once for a
token that is only in its memory. It works in FOLDER, or a new one below the system's temporary
folder: a socket's path must be short. ATTEMPT is there to be found in the list of processes.

Submitted code runs in a guarded child without the token. When the child or the worker is gone,
nothing that the code has started is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import quote

from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.shown import speedup
from advisor.cache.signing import KeyRing
from advisor.cache.stores.dir import DirStore
from advisor.cache.stores.filesystem import beside, make_folder, read_regular, remove_folder
from advisor.cache.stores.http import HttpStore
from advisor.cache.stores.http_client import BYTES, JSON, MAP, HttpClient
from advisor.errors import AdvisorError, RecordDamaged, StoreError, UsageError, printable
from advisor.jobs import code_archive, token
from advisor.jobs.bounds import MAX_STUDY, MAX_TRIALS
from advisor.jobs.spec import JobSpec
from advisor.tuners import host
from advisor.tuners.measure.run.guarded_process import GuardedProcess, exit_text

if TYPE_CHECKING:
    from advisor.tuners.environment import Gpu

BEAT_S = 2.0
AWAY_S = 900.0
"""The worker gives up a server that has not answered for so long."""
STARTS_S = 1800.0
"""For imports and the like: a tuning is ended after twice its budget and these seconds."""
PATIENCE_S = 10.0
"""For one answer."""
SAVE_S = 10.0
"""Between two uploads of a search file that is larger than SMALL."""
SMALL = 2**18
MAX_LOG = 2**16
"""Bytes of output in one heartbeat."""
MAX_REASON = 500
UNFINISHED = 3
"""The exit code of `advisor tune --for` if its budget left time for the baseline only."""
_LOOK_S = 0.1
_SECRET = ("ADVISOR_", "RAY_AUTH_", "RAY_JOB_CONFIG_JSON_ENV_VAR")
"""Variables that submitted code does not get; in the last one Ray repeats them."""
_OVER, _REJECTIONS = (401, 403, 404, 409), (400, 413, 422)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended. `reason`: one line for people; `record`: the id of the new record."""

    state: Literal["done", "failed", "preempted"]
    reason: str = ""
    record: str = ""


class AttemptOver(AdvisorError):
    """The server wants nothing more of this attempt."""


class AttemptFailed(AdvisorError):
    """The attempt cannot go on: its machine fails, or the server rejects what it sends."""


class AttemptClient:
    """The requests of an attempt; `begin` comes first.

    Raises, in every method:
        StoreError: the server is away. AttemptOver, AttemptFailed: what it answers.
    """

    def __init__(
        self, url: str, start_token: str, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._own = token.made()
        self._start = HttpClient(url, token=start_token)
        self.store = HttpStore(url, token=self._own)
        self.store.patience_s = max(PATIENCE_S, self.store.patience_s)
        self.preempted = threading.Event()
        self._now, self._heard = now, now()

    def begin(self) -> None:
        """Exchange the start token for this worker's own. It may be repeated."""
        sent = {"digest": token.digest(self._own).hex()}
        self.patiently(lambda: self.ask("POST", "attempt/begin", sent, client=self._start))

    def get(self, path: str) -> bytes:
        return self.patiently(lambda: self.ask("GET", path))

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | Mapping[str, Any] | None = None,
        *,
        client: HttpClient | None = None,
    ) -> bytes:
        """One request; `path` below /api/."""
        plain = isinstance(body, Mapping)
        status, _headers, data = (client or self.store.client).request(
            method,
            f"/api/{path}",
            patience_s=self.store.patience_s,
            body=json.dumps(body).encode() if plain else body,  # type: ignore[arg-type]
            kind="" if body is None else JSON if plain else BYTES,
            # On a connection that broke it would be sent again.
            headers={"Connection": "close"},
            accepts=(*_OVER, *_REJECTIONS),
        )
        if status in _OVER:
            raise AttemptOver(self.store.client.detail(data))
        if status in _REJECTIONS:
            raise AttemptFailed(self.store.client.detail(data))
        self._heard = self._now()
        return data

    def decoded(self, data: bytes) -> dict[str, Any]:
        return self.store.client.decoded(data, MAP)

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for the server any more."""
        return self.preempted.is_set() or self._now() - self._heard > AWAY_S

    def patiently(self, act: Callable[[], T]) -> T:
        """Repeat a request until the server answers; only once if the worker was told to end.

        Raises:
            AttemptOver, AttemptFailed, RecordDamaged: what it answers.
            StoreError: it is away for too long.
        """
        while True:
            try:
                return act()
            except RecordDamaged:
                raise
            except StoreError:
                if self.is_given_up:
                    raise
                self.preempted.wait(BEAT_S)


@dataclass(slots=True)
class FileTail:
    """Reads a file that grows."""

    path: Path
    at: int = 0

    def trials(self, most: int) -> list[dict[str, Any]]:
        """The JSON of the next complete lines; other lines are skipped."""
        found = []
        with self.path.open("rb") as file:
            file.seek(self.at)
            for line in itertools.islice(file, most):
                if not line.endswith(b"\n"):
                    break
                self.at += len(line)
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def text(self, most: int) -> str:
        """The new text; if it is longer than `most` bytes, its beginning and its end."""
        with self.path.open("rb") as file:
            left = file.seek(0, os.SEEK_END) - self.at
            file.seek(self.at)
            data = file.read(min(left, most))
            if left > most:
                file.seek(self.at + left - most // 2)
                cut = f"\n[advisor: {left - most} bytes of output are left out]\n".encode()
                data = data[: most - most // 2] + cut + file.read(most // 2)
        self.at += left
        return data.decode(errors="replace")


class Worker:
    """One attempt.

    Args:
        folder: a new one, for all of its files.
        start: starts `advisor tune`.
        now: a clock in seconds.
    """

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
        self._output, self._events = FileTail(folder / "output"), FileTail(folder / "events")
        self._saved: dict[str, tuple[float, float]] = {}
        self._gpus: Callable[[], Sequence[Gpu]] = list
        self._others: set[str] = set()
        self._device = f"{socket.gethostname()}: CPU"
        self._unsent: dict[str, Any] = {}
        self._beaten = -BEAT_S

    def run(self) -> None:
        """Tune, and report the outcome.

        Raises:
            AttemptOver: the server wants nothing more. StoreError: the server is away.
        """
        self._server.begin()
        try:
            outcome = self._outcome()
        except (AttemptFailed, UsageError, RecordDamaged) as exc:
            outcome = Outcome(state="failed", reason=printable(" ".join(str(exc).split())))
        last = dataclasses.asdict(outcome)
        self._server.patiently(lambda: self._server.ask("POST", "attempt/end", last))

    def _outcome(self) -> Outcome:
        asked = self._prepare()
        if asked.gpus:
            from advisor.tuners.environment import gpus  # seconds to import

            self._gpus = gpus
            self._device = f"{socket.gethostname()}: {', '.join(gpu.name for gpu in gpus())}"
            if used := "; ".join(f"{gpu.uuid}: {gpu.used_by}" for gpu in gpus() if gpu.users):
                return Outcome(state="preempted", reason=f"other processes use the GPU ({used})")
        return self._tune(asked)

    def _prepare(self) -> JobSpec:
        """Put the job's code and the files of its search into the folder."""
        with self._on_this_machine():
            for folder in (self._folder, self._studies, self._tmp):
                make_folder(folder)
            for tail in (self._output, self._events):
                tail.path.touch(0o600)
        attempt = self._server.decoded(self._server.get("attempt"))
        asked = JobSpec.of(attempt["asked"])
        if asked.archive:
            code = self._server.get(f"archives/{asked.archive}")
            with self._on_this_machine():
                code_archive.unpack(code, self._code)
        for name in attempt["studies"]:
            data = self._server.get(_study(name))
            with self._on_this_machine():
                beside(self._studies, name).write_bytes(data)
        return asked

    def _tune(self, asked: JobSpec) -> Outcome:
        limit_s = 2 * asked.plan.seconds + STARTS_S
        until = self._now() + limit_s
        with self._on_this_machine():
            make_folder(self._code)
            child = self._start(
                self._words(asked),
                log=self._output.path,
                environment=self._environment(),
                folder=self._code / asked.folder,
            )
        try:
            while not child.ended and self._now() < until and not self._server.preempted.is_set():
                self._beat()
                self._server.preempted.wait(_LOOK_S)
            code, words = child.exit_report() if child.ended else (None, "")
        finally:
            child.end()
        self._server.patiently(lambda: self._save(last=True))
        while self._server.patiently(self._tell):
            pass
        if code in (0, UNFINISHED):
            return self._found(finished=code == 0)
        if code is not None:
            said = words.removeprefix("advisor: ") or "it printed nothing"
            return Outcome(
                state="failed",
                reason=printable(said if code in (1, 2) else f"{exit_text(code)}: {said}"),
            )
        if self._server.preempted.is_set():
            return Outcome(state="preempted", reason="its worker was told to end")
        return Outcome(
            state="failed",
            reason=f"ended after {limit_s:.0f} s: twice its budget, and "
            f"{STARTS_S:.0f} s to start; its log may say where it hangs",
        )

    def _found(self, finished: bool) -> Outcome:
        """Send the newest record to the server."""
        with self._on_this_machine():
            found = Records(DirStore(self._cache)).all()
        record = max(found, key=lambda one: one.provenance.created, default=None)
        if record is None:
            return Outcome(state="failed", reason="advisor tune ended, and left no record")
        records = Records(self._server.store, keyring=KeyRing.from_environment())
        self._server.patiently(lambda: records.put(record))
        if not finished:
            why = "its budget left time for the baseline only; give a larger --budget"
            return Outcome(state="failed", reason=f"record {record.id}: {why}")
        others = [f"beside it others used the GPU: {one}" for one in sorted(self._others)]
        reason = "; ".join([_summary(record), *others])[:MAX_REASON]
        return Outcome(state="done", reason=reason, record=record.id)

    def _words(self, asked: JobSpec) -> list[str]:
        tune = [sys.executable, "-P", "-m", "advisor", "tune", *asked.words()]
        tune += ["--cache", f"dir:{self._cache}", "--events", str(self._events.path)]
        tune += ["--for", self._server.store.url]
        what = ["--show-output", "--", *asked.command] if asked.command else [asked.target]
        return [*tune, *what]

    def _environment(self) -> dict[str, str]:
        """The child's: without advisor's own variables."""
        given = {k: v for k, v in os.environ.items() if not k.startswith(_SECRET)}
        own_python = str(Path(sys.executable).parent)
        return given | {
            # 'python' is the one that has advisor.
            "PATH": os.pathsep.join([own_python, *filter(None, [given.get("PATH")])]),
            "TMPDIR": str(self._tmp),
            # Nobody signs what submitted code has compiled.
            "ADVISOR_MAX_ARTIFACTS": "0",
        }

    def _beat(self) -> None:
        """Send news and search files, if it is time. A server that is away is tried again later.

        Raises:
            AttemptOver: nothing more is wanted. StoreError: the server is away for too long.
        """
        if self._now() - self._beaten < BEAT_S:
            return
        self._beaten = self._now()
        self._look_for_others()
        try:
            self._tell()
            self._save()
        except StoreError:
            if self._server.is_given_up:
                raise

    def _look_for_others(self) -> None:
        """Note other processes on the GPUs. In a container the numbers may be the host's: those
        mean nothing here."""
        for gpu in self._gpus():
            if gpu.users:
                own = host.family(os.getpid())
                others = [n for n in gpu.users if n not in own and Path(f"/proc/{n}").exists()]
                if others:
                    self._others.add(dataclasses.replace(gpu, users=tuple(others)).used_by)

    def _tell(self) -> bool:
        """Send news; whether there was any. News that did not arrive is sent again."""
        if not self._unsent:
            self._unsent = {
                "trials": self._events.trials(MAX_TRIALS),
                "log": self._output.text(MAX_LOG),
                "device": self._device,
            }
        said = self._server.ask("POST", "attempt/beat", self._unsent)
        if not self._server.decoded(said).get("go_on"):
            raise AttemptOver("nothing more is wanted of this attempt")
        new = bool(self._unsent["trials"] or self._unsent["log"])
        self._unsent = {}
        return new

    def _save(self, last: bool = False) -> None:
        """Upload the whole lines of search files that changed; large ones now and then."""
        for path in sorted(self._studies.glob("*.journal")):
            changed, at = self._saved.get(path.name, (0.0, -SAVE_S))
            try:
                about = path.lstat()
                early = about.st_size > SMALL and self._now() - at < SAVE_S and not last
                if about.st_mtime == changed or early:
                    continue
                data = read_regular(path, MAX_STUDY)
            except OSError:  # gone, no plain file, or too large: it is not resumed
                continue
            with contextlib.suppress(AttemptFailed):  # too large for the server
                self._server.ask("PUT", _study(path.name), data[: data.rfind(b"\n") + 1])
            self._saved[path.name] = about.st_mtime, self._now()

    @contextlib.contextmanager
    def _on_this_machine(self) -> Iterator[None]:
        """Tell the errors of this machine from those of the server.

        Raises:
            AttemptFailed: with what failed, and where.
        """
        try:
            yield
        except (OSError, StoreError) as exc:
            why = getattr(exc, "strerror", "") or exc
            raise AttemptFailed(f"{socket.gethostname()}: {self._folder}: {why}") from exc


def _study(name: str) -> str:
    """The path of a search file at the server."""
    return f"attempt/studies/{quote(name, '')}"


def _summary(record: Record) -> str:
    """A new record in one line."""
    advised, baseline = record.winner(record.use), record.key.task.baseline
    if not record.compares:
        what = f"there is nothing to race beside {baseline}"
    elif advised == record.baseline:
        what = f"nothing is clearly faster than {baseline}"
    else:
        times = speedup(advised.speedup, advised.speedup_low, advised.speedup_high)
        what = f"{times} over {baseline}"
    return f"record {record.id}: {what}"


def main(folder: str = "", _attempt: str = "") -> None:
    """Work on the attempt of $ADVISOR_START_TOKEN on $ADVISOR_SERVER.

    Raises:
        SystemExit: with a line that says why it could not.
    """
    host.keep_private()
    folder = folder or tempfile.mkdtemp(prefix="advisor-")
    try:
        server = AttemptClient(os.environ["ADVISOR_SERVER"], os.environ["ADVISOR_START_TOKEN"])
        signal.signal(signal.SIGTERM, lambda *_: server.preempted.set())
        Worker(server, Path(folder)).run()
    except (AdvisorError, OSError) as exc:
        sys.exit(f"advisor: {exc}")
    finally:
        remove_folder(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
