"""The process of an attempt: it has tuned what a server asks for, and tells the server.

`python -m advisor.jobs.worker [PLACE]`, with $ADVISOR_SERVER and $ADVISOR_START_TOKEN, which it
exchanges at once for a token that is in its memory alone: others may read how it was started, as on
Ray. It works in a new folder below the system's temporary one: below longer paths no socket
has a name. In a folder PLACE it leaves its number, `pid`, and a link to that folder, `work`.

What runs the code that somebody submitted is a child of it, under a guard and without the token:
when either is gone, nothing of what was started is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import quote

from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.seal import KeyRing
from advisor.cache.shown import speedup
from advisor.cache.stores.dir import DirStore
from advisor.cache.stores.filesystem import beside, make_folder, read_regular, remove_folder
from advisor.cache.stores.http import HttpStore
from advisor.cache.stores.http_client import BYTES, JSON, MAP, HttpClient
from advisor.errors import AdvisorError, RecordDamaged, StoreError, UsageError, printable
from advisor.jobs import parcel, token
from advisor.jobs.bounds import MOST_STUDY, MOST_TRIALS
from advisor.jobs.spec import JobSpec
from advisor.tuners import host
from advisor.tuners.measure.run.guarded_process import GuardedProcess, exit_text

if TYPE_CHECKING:
    from advisor.tuners.environment import Gpu

BEAT_S = 2.0
AWAY_S = 900.0
"""A server that does not answer for so long is not coming back for this attempt."""
STARTS_S = 1800.0
"""Beyond twice its budget, for a tuning to start what it measures."""
PATIENCE_S = 10.0
"""For one answer."""
SAVE_S = 10.0
"""Between two savings of a search that is larger than SMALL."""
SMALL = 2**18
MOST_SENT = 2**16
"""Bytes of output that go along with one beat."""
MOST_REASON = 500
UNFINISHED = 3
"""The exit code of `advisor tune --for` where its budget left nothing but the baseline."""
_LOOK_S = 0.1
_SECRET = ("ADVISOR_", "RAY_AUTH_", "RAY_JOB_CONFIG_JSON_ENV_VAR")
"""Variables that submitted code does not get; in the last one Ray repeats them."""
_OVER, _REFUSALS = (401, 403, 404, 409), (400, 413, 422)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of an attempt: `reason` for people, on one line; `record`: the id of what was
    found."""

    state: Literal["done", "failed", "preempted"]
    reason: str = ""
    record: str = ""


class Dismissed(AdvisorError):
    """The server wants nothing more of this attempt."""


class Refused(AdvisorError):
    """The server does not take what it was sent."""


class Stuck(AdvisorError):
    """This machine cannot do what is asked for."""


class AttemptClient:
    """What an attempt says to its server, `begin` first.

    Raises, with every word:
        StoreError: the server is away. Dismissed, Refused: what it said.
    """

    def __init__(self, url: str, start_token: str) -> None:
        self._own = token.made()
        self._start = HttpClient(url, token=start_token)
        self.store = HttpStore(url, token=self._own)
        self.store.patience_s = max(PATIENCE_S, self.store.patience_s)

    def begin(self) -> None:
        """Exchange the start token for this worker's own. Again it makes no difference."""
        sent = json.dumps({"digest": token.digest(self._own).hex()}).encode()
        self._said("POST", "/api/attempt/begin", sent, JSON, self._start)

    def attempt(self) -> dict[str, Any]:
        return self._told("GET", "/api/attempt")

    def archive(self, digest: str) -> bytes:
        return self._said("GET", f"/api/archives/{digest}")

    def study(self, name: str) -> bytes:
        return self._said("GET", f"/api/attempt/studies/{quote(name, '')}")

    def save(self, name: str, data: bytes) -> None:
        self._said("PUT", f"/api/attempt/studies/{quote(name, '')}", data, BYTES)

    def beat(self, news: Mapping[str, Any]) -> bool:
        """Whether to go on."""
        return bool(self._told("POST", "/api/attempt/beat", news).get("go_on"))

    def end(self, outcome: Outcome) -> None:
        self._told("POST", "/api/attempt/end", dataclasses.asdict(outcome))

    def _told(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        sent = None if body is None else json.dumps(body).encode()
        return self.store.client.decoded(self._said(method, path, sent, JSON if sent else ""), MAP)

    def _said(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        kind: str = "",
        by: HttpClient | None = None,
    ) -> bytes:
        status, _headers, data = (by or self.store.client).request(
            method,
            path,
            patience_s=self.store.patience_s,
            body=body,
            kind=kind,
            # On one that broke it would be said again.
            headers={"Connection": "close"},
            accepts=(*_OVER, *_REFUSALS),
        )
        if status in _OVER:
            raise Dismissed(self.store.client.detail(data))
        if status in _REFUSALS:
            raise Refused(self.store.client.detail(data))
        return data


@dataclass(slots=True)
class Tail:
    """What is written to a file, as it comes."""

    path: Path
    at: int = 0

    def trials(self, most: int) -> list[dict[str, Any]]:
        """What the next whole lines hold, so many at most; those that hold none are passed over."""
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
        """The next text; of what is longer than `most` bytes the beginning and the end."""
        with self.path.open("rb") as file:
            left = file.seek(0, os.SEEK_END) - self.at
            file.seek(self.at)
            data = file.read(min(left, most))
            if left > most:
                cut = left - most
                end = self.at + left
                file.seek(end - most // 2)
                told = f"\n[advisor: {cut} bytes of output are left out]\n".encode()
                data = data[: most - most // 2] + told + file.read(most // 2)
                self.at = end
            else:
                self.at += len(data)
        return data.decode(errors="replace")


@dataclass(slots=True)
class Scratch:
    """An attempt's folder; `saved`: of each study, which state of it and when."""

    path: Path
    saved: dict[str, tuple[float, float]] = field(default_factory=dict)

    def make(self) -> None:
        for folder in (self.path, self.code, self.studies, self.path / "tmp"):
            make_folder(folder)
        for file in (self.output, self.events):
            file.touch(0o600)

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    @property
    def studies(self) -> Path:
        return self.cache / "studies"

    @property
    def output(self) -> Path:
        return self.path / "output"

    @property
    def events(self) -> Path:
        return self.path / "events"

    def grown(self, last: bool) -> Iterator[tuple[str, bytes]]:
        """The studies that changed since they were last taken, in whole lines. One counts as taken
        when the next is asked for.

        Args:
            last: large ones too, however short a time ago that was.
        """
        for path in sorted(self.studies.glob("*.journal")):
            changed, at = self.saved.get(path.name, (0.0, -SAVE_S))
            now = time.monotonic()
            try:
                about = path.lstat()
                early = about.st_size > SMALL and now - at < SAVE_S and not last
                if about.st_mtime == changed or early:
                    continue
                data = read_regular(path, MOST_STUDY)
            except OSError:  # gone, no plain file, or too large: it is not resumed
                continue
            yield path.name, data[: data.rfind(b"\n") + 1]
            self.saved[path.name] = about.st_mtime, now

    def record(self) -> Record | None:
        """What was found; None for nothing."""
        found = Records(DirStore(self.cache)).all()
        return max(found, key=lambda one: one.provenance.created, default=None)


class Working:
    """An attempt, from its first word to its last.

    Args:
        away_s, starts_s: see AWAY_S and STARTS_S.
    """

    def __init__(
        self,
        server: AttemptClient,
        folder: Path,
        *,
        away_s: float = AWAY_S,
        starts_s: float = STARTS_S,
    ) -> None:
        self._server, self._scratch = server, Scratch(folder)
        self._away_s, self._starts_s = away_s, starts_s
        self._output, self._events = Tail(self._scratch.output), Tail(self._scratch.events)
        self._gpus: Callable[[], Sequence[Gpu]] = list
        self._others: set[str] = set()
        self._device = ""
        self._unsent: dict[str, Any] = {}
        self._heard, self._beaten = time.monotonic(), 0.0
        self.preempted = threading.Event()

    def run(self) -> None:
        """Tune what is asked for, and say what came of it.

        Raises:
            Dismissed: nothing more is wanted of it. StoreError: the server is away.
        """
        self._patiently(self._server.begin)
        try:
            with _here(self._scratch.path):
                self._scratch.make()
            outcome = self._outcome()
        except (Stuck, Refused, UsageError, RecordDamaged) as exc:
            outcome = Outcome(state="failed", reason=printable(" ".join(str(exc).split())))
        self._patiently(lambda: self._server.end(outcome))

    def _outcome(self) -> Outcome:
        asked = self._prepared()
        self._device = f"{socket.gethostname()}: CPU"
        if asked.gpus:
            from advisor.tuners.environment import gpus  # seconds to import

            self._gpus = gpus
            self._device = f"{socket.gethostname()}: {', '.join(gpu.name for gpu in gpus())}"
            if used := "; ".join(f"{gpu.uuid}: {gpu.used_by}" for gpu in gpus() if gpu.users):
                return Outcome(state="preempted", reason=f"other processes use the GPU ({used})")
        return self._tuned(asked)

    def _prepared(self) -> JobSpec:
        """What is asked for, with its code and what was searched before in the folder."""
        told = self._patiently(self._server.attempt)
        asked = JobSpec.of(told["asked"])
        code = b""
        if asked.archive:
            code = self._patiently(lambda: self._server.archive(asked.archive))
        studies = {
            name: self._patiently(functools.partial(self._server.study, name))
            for name in told["studies"]
        }
        with _here(self._scratch.path):
            if code:
                parcel.unpack(code, self._scratch.code)
            for name, data in studies.items():
                beside(self._scratch.studies, name).write_bytes(data)
        return asked

    def _tuned(self, asked: JobSpec) -> Outcome:
        limit_s = 2 * asked.plan.seconds + self._starts_s
        until = time.monotonic() + limit_s
        with _here(self._scratch.path):
            child = GuardedProcess(
                self._words(asked),
                log=self._scratch.output,
                environment=self._environment(),
                folder=self._scratch.code / asked.folder,
            )
        try:
            while not child.ended and time.monotonic() < until and not self.preempted.is_set():
                self._beat()
                self.preempted.wait(_LOOK_S)
            code, words = child.exit_report() if child.ended else (None, "")
        finally:
            child.end()
        self._log_all()
        if code is not None:
            return _failed(code, words) if code not in (0, UNFINISHED) else self._found(code == 0)
        if self.preempted.is_set():
            return Outcome(state="preempted", reason="its worker was told to end")
        return Outcome(
            state="failed",
            reason=f"ended after {limit_s:.0f} s: twice its budget, and "
            f"{self._starts_s:.0f} s to start; its log may say where it hangs",
        )

    def _found(self, finished: bool) -> Outcome:
        with _here(self._scratch.path):
            record = self._scratch.record()
        if record is None:
            return Outcome(state="failed", reason="advisor tune ended, and left no record")
        records = Records(self._server.store, keyring=KeyRing.from_environment())
        self._patiently(lambda: records.put(record))
        if not finished:
            raced = "its budget left no time but for the baseline; give a larger --budget"
            return Outcome(state="failed", reason=f"record {record.id}: {raced}")
        told = [_said(record)]
        told += [f"beside it others used the GPU: {one}" for one in sorted(self._others)]
        return Outcome(state="done", reason="; ".join(told)[:MOST_REASON], record=record.id)

    def _words(self, asked: JobSpec) -> list[str]:
        tune = [sys.executable, "-P", "-m", "advisor", "tune", *asked.words()]
        tune += ["--cache", f"dir:{self._scratch.cache}", "--events", str(self._scratch.events)]
        tune += ["--for", self._server.store.url]
        return [
            *tune,
            *(["--show-output", "--", *asked.command] if asked.command else [asked.target]),
        ]

    def _environment(self) -> dict[str, str]:
        """Of what runs submitted code: nothing that is advisor's own business."""
        given = {k: v for k, v in os.environ.items() if not k.startswith(_SECRET)}
        beside_this = str(Path(sys.executable).parent)
        return given | {
            # 'python' is the one that has advisor.
            "PATH": os.pathsep.join([beside_this, *filter(None, [given.get("PATH")])]),
            "TMPDIR": str(self._scratch.path / "tmp"),
            # Nobody signs what submitted code has compiled.
            "ADVISOR_MAX_ARTIFACTS": "0",
        }

    def _beat(self) -> None:
        """Say what is new and save the search, where it is time for that; a server that is away is
        told later.

        Raises:
            Dismissed: nothing more is wanted. StoreError: the server is away for too long.
        """
        now = time.monotonic()
        if now - self._beaten < BEAT_S:
            return
        self._beaten = now
        self._look_for_others()
        try:
            self._tell()
            self._save()
        except StoreError:
            if now - self._heard > self._away_s:
                raise
        else:
            self._heard = now

    def _look_for_others(self) -> None:
        """Note who uses the GPUs beside this attempt, as far as their numbers mean something here:
        in a container they may be the host's."""
        for gpu in self._gpus():
            if gpu.users:
                own = host.family(os.getpid())
                others = [n for n in gpu.users if n not in own and Path(f"/proc/{n}").exists()]
                if others:
                    self._others.add(dataclasses.replace(gpu, users=tuple(others)).used_by)

    def _tell(self) -> bool:
        """Say what is new; whether there was anything."""
        if not self._unsent:
            self._unsent = {
                "trials": self._events.trials(MOST_TRIALS),
                "log": self._output.text(MOST_SENT),
                "device": self._device,
            }
        if not self._server.beat(self._unsent):
            raise Dismissed("nothing more is wanted of this attempt")
        new = bool(self._unsent["trials"] or self._unsent["log"])
        self._unsent = {}
        return new

    def _save(self, last: bool = False) -> None:
        for name, data in self._scratch.grown(last):
            # One that is too large is not resumed.
            with contextlib.suppress(Refused):
                self._server.save(name, data)

    def _log_all(self) -> None:
        self._patiently(lambda: self._save(last=True))
        while self._patiently(self._tell):
            pass

    def _patiently(self, say: Callable[[], T]) -> T:
        """Say something until the server has heard it; once where this worker is told to end.

        Raises:
            Dismissed, Refused: what it said. StoreError: it is away for too long. RecordDamaged: of
            what was sent.
        """
        while True:
            try:
                said = say()
            except RecordDamaged:
                raise
            except StoreError:
                if self.preempted.is_set() or time.monotonic() - self._heard > self._away_s:
                    raise
                self.preempted.wait(BEAT_S)
            else:
                self._heard = time.monotonic()
                return said


def _said(record: Record) -> str:
    """What was found, for people."""
    advised, baseline = record.winner(record.use), record.key.task.baseline
    if not record.compares:
        what = f"there is nothing to race beside {baseline}"
    elif advised == record.baseline:
        what = f"nothing is clearly faster than {baseline}"
    else:
        times = speedup(advised.speedup, advised.speedup_low, advised.speedup_high)
        what = f"{times} over {baseline}"
    return f"record {record.id}: {what}"


def _failed(code: int, words: str) -> Outcome:
    said = words.removeprefix("advisor: ") or "it said nothing"
    reason = said if code in (1, 2) else f"{exit_text(code)}: {said}"
    return Outcome(state="failed", reason=printable(reason))


@contextlib.contextmanager
def _here(folder: Path) -> Iterator[None]:
    """What fails in a folder of this machine is no fault of the server's.

    Raises:
        Stuck: with what failed, and where.
    """
    try:
        yield
    except (OSError, StoreError) as exc:
        why = getattr(exc, "strerror", "") or exc
        raise Stuck(f"{socket.gethostname()}: {folder}: {why}") from exc


def main(place: str = "") -> None:
    """Work on what $ADVISOR_SERVER has for $ADVISOR_START_TOKEN.

    Raises:
        SystemExit: with a line that says why it could not.
    """
    host.keep_private()
    scratch = Path(tempfile.mkdtemp(prefix="advisor-"))
    try:
        server = AttemptClient(os.environ["ADVISOR_SERVER"], os.environ["ADVISOR_START_TOKEN"])
        working = Working(server, scratch)
        signal.signal(signal.SIGTERM, lambda *_: working.preempted.set())
        if place:
            Path(place, "work").symlink_to(scratch)
            Path(place, "pid.new").write_text(str(os.getpid()))
            Path(place, "pid.new").rename(Path(place, "pid"))
        working.run()
        if place:  # what became of it the server knows
            remove_folder(Path(place))
    except (AdvisorError, OSError) as exc:
        sys.exit(f"advisor: {exc}")
    finally:
        remove_folder(scratch)


if __name__ == "__main__":
    main(*sys.argv[1:])
