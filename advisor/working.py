"""The process of an attempt: it has tuned what a server asks for, and tells the server.

`python -m advisor.working [FOLDER]`, with $ADVISOR_SERVER and, in $ADVISOR_TOKEN, the attempt's own
token. What runs the code that somebody submitted is a child of it, under a guard, without the
token: when either is gone, nothing of what was started is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from advisor import parcel
from advisor.asked import Asked
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.seal import Seal
from advisor.cache.stores.dir import DirStore
from advisor.cache.stores.filesystem import beside, make_folder, read_regular, remove_folder
from advisor.cache.stores.http import BYTES, JSON, HttpStore
from advisor.errors import AdvisorError, RecordDamaged, StoreError, UsageError
from advisor.tuners.measure.run.guarded import Guarded, how

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
MOST_STUDY = 8 * 2**20
MOST_SENT, MOST_TRIALS = 2**16, 200
"""Bytes of output and number of trials that go along with one beat."""
_LOOK_S = 0.1
_PR_SET_DUMPABLE = 4

End = Literal["done", "failed", "preempted"]
T = TypeVar("T")


class Dismissed(AdvisorError):
    """The server wants nothing more of this attempt."""


class Refused(AdvisorError):
    """The server does not take what it was sent."""


class Line:
    """What an attempt says to its server.

    Raises, with every word:
        StoreError: the server is away. Dismissed, Refused: what it said.
    """

    def __init__(self, url: str) -> None:
        self.store = HttpStore(url)
        self.store.patience_s = max(PATIENCE_S, self.store.patience_s)

    def attempt(self) -> dict[str, Any]:
        return self._json("GET", "/api/attempt")

    def archive(self, digest: str) -> bytes:
        return self._said("GET", f"/api/archives/{digest}")

    def study(self, name: str) -> bytes:
        return self._said("GET", f"/api/attempt/studies/{quote(name, '')}")

    def save(self, name: str, data: bytes) -> None:
        self._said("PUT", f"/api/attempt/studies/{quote(name, '')}", data, BYTES)

    def beat(self, news: Mapping[str, Any]) -> bool:
        """Whether to go on."""
        return bool(self._json("POST", "/api/attempt/beat", news).get("go_on"))

    def end(self, state: End, reason: str, record: str) -> None:
        self._json(
            "POST", "/api/attempt/end", {"state": state, "reason": reason, "record": record}
        )

    def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        sent = None if body is None else json.dumps(body).encode()
        try:
            found = json.loads(self._said(method, path, sent, JSON if sent else ""))
        except ValueError as exc:
            raise StoreError(f"{self.store.url}: its answer is no JSON") from exc
        if not isinstance(found, dict):
            raise StoreError(f"{self.store.url}: its answer is no map")
        return found

    def _said(self, method: str, path: str, body: bytes | None = None, kind: str = "") -> bytes:
        # On a connection of its own: one that broke is not tried again with what was said.
        status, _headers, data = self.store.ask(
            method,
            path,
            body=body,
            kind=kind,
            headers={"Connection": "close"},
            accepts=(400, 401, 403, 404, 409, 413, 422),
        )
        if status < 300:
            return data
        try:
            why = str(json.loads(data)["detail"])[:300]
        except (ValueError, KeyError, TypeError):
            why = f"HTTP {status}"
        raise (Dismissed if status in (401, 403, 404, 409) else Refused)(why)


@dataclass(slots=True)
class Tail:
    """What is written to a file, as it comes."""

    path: Path
    at: int = 0

    def lines(self, most: int) -> list[bytes]:
        """The next whole lines, so many at most."""
        with self.path.open("rb") as file:
            file.seek(self.at)
            found = []
            for line in file:
                if len(found) == most or not line.endswith(b"\n"):
                    break
                found.append(line)
                self.at += len(line)
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
    """An attempt's folder."""

    path: Path
    saved: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
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
        """The studies that changed since they were last asked for, in whole lines.

        Args:
            last: large ones too, however short a time ago that was.
        """
        for path in sorted(self.studies.glob("*.journal")):
            about = path.lstat()
            changed, at = self.saved.get(path.name, (0.0, -SAVE_S))
            now = time.monotonic()
            early = about.st_size > SMALL and now - at < SAVE_S and not last
            if about.st_mtime == changed or early:
                continue
            self.saved[path.name] = about.st_mtime, now
            with contextlib.suppress(OSError):  # no plain file, or too large: it is not resumed
                data = read_regular(path, MOST_STUDY)
                yield path.name, data[: data.rfind(b"\n") + 1]

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
        self, line: Line, scratch: Scratch, *, away_s: float = AWAY_S, starts_s: float = STARTS_S
    ) -> None:
        self._line, self._scratch = line, scratch
        self._away_s, self._starts_s = away_s, starts_s
        self._output, self._events = Tail(scratch.output), Tail(scratch.events)
        self._heard = time.monotonic()
        self._unsent: dict[str, Any] = {}
        self.preempted = threading.Event()

    def run(self) -> None:
        """Tune what is asked for, and say what came of it.

        Raises:
            Dismissed: nothing more is wanted of it. StoreError: the server is away.
        """
        state, reason, record = self._outcome()
        self._patiently(lambda: self._line.end(state, reason, record))

    def _outcome(self) -> tuple[End, str, str]:
        try:
            asked = self._prepared()
            if used := _users(asked):
                return "preempted", used, ""
            return self._tuned(asked)
        except OSError as exc:
            return "failed", f"{socket.gethostname()}:{self._scratch.path}: {exc.strerror}", ""
        except (Refused, UsageError) as exc:
            return "failed", str(exc), ""

    def _prepared(self) -> Asked:
        """What is asked for, with its code and what was searched before in the folder."""
        told = self._patiently(self._line.attempt)
        asked = Asked.of(told["asked"])
        if asked.archive:
            archive = self._patiently(lambda: self._line.archive(asked.archive))
            with _full_disk():
                parcel.unpack(archive, self._scratch.code)
        for name in told["studies"]:
            data = self._patiently(lambda name=name: self._line.study(name))  # type: ignore[misc]
            beside(self._scratch.studies, name).write_bytes(data)
        return asked

    def _tuned(self, asked: Asked) -> tuple[End, str, str]:
        limit_s = 2 * asked.plan.seconds + self._starts_s
        until = time.monotonic() + limit_s
        child = Guarded(
            self._words(asked),
            log=self._scratch.output,
            environment=self._environment(),
            folder=self._scratch.code / asked.folder,
        )
        try:
            said: tuple[End, str, str] | None = None
            while not child.ended:
                if self.preempted.wait(_LOOK_S):
                    said = "preempted", "its worker was told to end", ""
                    break
                if time.monotonic() > until:
                    said = "failed", f"took longer than {limit_s:.0f} s; see its log", ""
                    break
                self._beat()
            code, words = child.obituary() if said is None else (0, "")
        finally:
            child.end()
        self._last_words()
        return said or self._found(code, words)

    def _found(self, code: int, words: str) -> tuple[End, str, str]:
        if code:
            said = words.removeprefix("advisor: ") or "it said nothing"
            return "failed", said if code in (1, 2) else f"{how(code)}: {said}", ""
        record = self._scratch.record()
        if record is None:
            return "failed", "advisor tune ended without a record", ""
        server = Records(self._line.store, seal=Seal.from_environment())
        try:
            self._patiently(lambda: server.put(record))
        except RecordDamaged as exc:
            return "failed", str(exc), ""
        told = "" if record.compares else "its budget left no time to race anything"
        return "done", told, record.id

    def _words(self, asked: Asked) -> list[str]:
        tune = [sys.executable, "-P", "-m", "advisor", "tune", *asked.words()]
        scratch = self._scratch
        tune += ["--cache", f"dir:{scratch.cache}", "--events", str(scratch.events)]
        return [*tune, *(["--show-output", "--", *asked.command] or [asked.target])]

    def _environment(self) -> dict[str, str]:
        """Of what runs submitted code: nothing that is advisor's own business."""
        given = {k: v for k, v in os.environ.items() if not k.startswith("ADVISOR_")}
        beside_this = str(Path(sys.executable).parent)
        return given | {
            # 'python' is the one that has advisor.
            "PATH": os.pathsep.join([beside_this, *filter(None, [given.get("PATH")])]),
            "TMPDIR": str(self._scratch.path / "tmp"),
        }

    def _beat(self) -> None:
        """Say what is new, and save the search, where it is time for that.

        Raises:
            Dismissed: nothing more is wanted. StoreError: the server is away for too long.
        """
        ...
