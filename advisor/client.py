"""Submit jobs to a team's server from Python, watch them, read their logs, and cancel them.

    client = Client("https://advisor.example")
    job = client.submit("model.py", shape="64x3x256x256", gpu="H100")
    for text in client.log(job.id, follow=True):
        print(text, end="")
    print(client.job(job.id).record)

Records are looked up with `advisor.lookup(..., store=url)`, and listed by `advisor show`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import structs

from advisor.cache.stores.http_client import MAP, HttpClient
from advisor.errors import (
    RecordDamaged,
    StoreError,
    TargetError,
    Unauthorized,
    UsageError,
    printable,
)
from advisor.jobs.code_archive import NEEDS_CODE, CodeArchive, pack
from advisor.jobs.spec import LIVE, STATES, JobSpec, where
from advisor.tuners.measure.run.guarded_process import check_open, program

T = TypeVar("T")

REQUEST_TIMEOUT_S, UPLOAD_TIMEOUT_S = 10.0, 300.0
"""Seconds for one answer, and for the upload of an archive."""
POLL_S = 2.0
AWAY_S = 120.0  # seconds for which `Client.log` retries an unreachable server


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A tuning that was submitted to a server.

    Attributes:
        state, reason: one of `advisor.jobs.spec.STATES`; why the job has this state, or ''.
        what: the command or the target, as a line.
        gpu, gpus: a part of the GPU's name, '' for any; how many GPUs, 0 for the CPU.
        by: the name of the token that submitted the job.
        created, changed: Unix times on the server's clock.
        record: the id of the job's record, '' before the job is done.
        attempt: the number of the last attempt, 0 before the first.
        new: whether `submit` created this job; False from other methods.
        attempts, trials: each start, and each measured config; empty except from `Client.job`.
    """

    id: int
    state: str
    what: str
    reason: str = ""
    gpu: str = ""
    gpus: int = 1
    by: str = ""
    created: float = 0.0
    changed: float = 0.0
    record: str = ""
    attempt: int = 0
    new: bool = False
    attempts: tuple[Mapping[str, Any], ...] = ()
    trials: tuple[Mapping[str, Any], ...] = ()

    @property
    def over(self) -> bool:
        return self.state not in LIVE

    @property
    def where(self) -> str:
        """'4 x H100', 'any GPU', 'the CPU'."""
        return where(self.gpu, self.gpus)


class _Log(msgspec.Struct):
    text: str
    next: int
    ended: bool = False


# Created at import: two threads must not create decoders at the same time; see `cache.codec`.
_LOG = msgspec.json.Decoder(_Log)
msgspec.json.Decoder(list[Job])


class Client:
    """The jobs of a server. Threads may share a Client.

    Args:
        url: http[s]://HOST[:PORT][/PATH]; plain HTTP to another machine needs ?insecure=1.
        token: default: $ADVISOR_TOKEN, else this server's token in your token file.

    Raises:
        UsageError: the URL or the token is malformed.
        StoreError: from any method: the server is unreachable, has no jobs, or rejects the token.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"server {url[:80]!r}: expected http[s]://HOST[:PORT]")
        self._http = HttpClient(url, token=token or "", label="server")
        self._timeout_s = max(self._http.given.seconds("timeout", 0.0), REQUEST_TIMEOUT_S)
        self.url = self._http.url

    def page(self, id: int) -> str:
        return f"{self.url.partition('?')[0].rstrip('/')}/jobs/{id}"

    def submit(
        self,
        target: str = "",
        *,
        command: Sequence[str] = (),
        folder: str | Path = ".",
        gpu: str = "",
        gpus: int | None = None,
        env: Mapping[str, str] | None = None,
        force: bool = False,
        **options: Any,
    ) -> Job:
        """Submit a tuning of a target, or of a command as typed in `folder`. The code in `folder`
        is sent along. Returns the existing job if the same request was submitted before.

        Args:
            gpu, gpus: a part of the GPU's name; how many GPUs, 0 for the CPU. Default: 1 GPU, or
                the CPU with device='cpu'.
            env: 'pip' and 'container' of Ray's runtime environment; default: the worker's own.
            force: measure even if a record exists.
            options: options of `advisor tune` by keyword; for a command, those that it accepts.

        Raises:
            UsageError: an argument is wrong, or the code is too large to send.
        """
        given: dict[str, Any] = {"command": command, "target": target, "options": options}
        asked = JobSpec.given(**given, gpu=gpu, gpus=gpus, env=env or {}, force=force)
        return self.send(*prepare(asked, Path(folder)))

    def send(self, asked: JobSpec, code: CodeArchive | None) -> Job:
        """Submit a prepared job. The code is sent only if the server does not have it."""
        request = functools.partial(self._asked, "POST", "/api/jobs", body=asked.plain)
        status, data = request(accepts=(NEEDS_CODE,))
        if status == NEEDS_CODE and code is not None:
            path = f"/api/archives/{code.digest}"
            self._asked("PUT", path, body=code.archive, timeout_s=UPLOAD_TIMEOUT_S)
            data = request()[1]
        return self._read(self._http.decoded(data, MAP), Job)

    def jobs(self, states: Sequence[str] = (), most: int = 50) -> list[Job]:
        """The newest `most` jobs, in one of `states` if any are given."""
        asked = urlencode({"state": states, "most": most}, doseq=True)
        page = self._said(MAP, "GET", f"/api/jobs?{asked}")
        return self._read(page.get("jobs"), list[Job])

    def job(self, id: int) -> Job:
        """A job with its attempts and trials. Raises UsageError if no job has this id."""
        return self._read(self._said(MAP, "GET", f"/api/jobs/{id:d}"), Job)

    def log(self, id: int, *, follow: bool = False, poll_s: float = POLL_S) -> Iterator[str]:
        """Generator: yields a job's output in pieces, with `follow` until the job is over (retrying
        an unreachable server for two minutes). Raises UsageError if no job has this id."""
        after, seen, ended = 0, 0.0, False
        while not ended:
            try:
                said = self._said(_LOG, "GET", f"/api/jobs/{id:d}/log?after={after}")
            except StoreError as exc:
                waits = follow and seen and not isinstance(exc, Unauthorized)
                if not waits or time.monotonic() - seen > AWAY_S:
                    raise
                time.sleep(poll_s)
                continue
            if said.next < after:
                raise self._http.unexpected("the position in the log went back")
            after, seen = said.next, time.monotonic()
            ended = said.ended or not (follow or said.text)
            if said.text:
                yield printable(said.text, keep="\n\t")
            elif not ended:
                time.sleep(poll_s)

    def cancel(self, id: int) -> str:
        """End a job. Returns its new state, which is not 'cancelled' if the job was over before.
        Raises UsageError if no job has this id."""
        state = self._said(MAP, "POST", f"/api/jobs/{id:d}/cancel").get("state")
        if state not in STATES:
            raise self._http.unexpected("no known state of a job")
        return str(state)

    def _said(self, decoder: msgspec.json.Decoder[T], method: str, path: str) -> T:
        return self._http.decoded(self._asked(method, path)[1], decoder)

    def _asked(
        self, method: str, path: str, accepts: Collection[int] = (), **how: Any
    ) -> tuple[int, bytes]:
        """Send a request. Returns the answer's status and body."""
        how.setdefault("timeout_s", self._timeout_s)
        try:
            status, data = self._http.request(method, path, accepts=(404, *accepts), **how)
        except RecordDamaged as exc:  # the request was rejected; no record is involved
            raise UsageError(str(exc)) from exc
        if status != 404:
            return status, data
        why = self._http.detail(data)
        if why in ("", "Not Found"):
            raise StoreError(
                f"server {self.url}: has no jobs; its advisor is too old, or the URL's path is "
                "wrong; ask the server's administrator"
            )
        raise UsageError(f"server {self.url}: {why}; to list the jobs: advisor jobs")

    def _read(self, plain: Any, cls: type[T]) -> T:
        """A part of an answer as `cls`, its texts made harmless."""
        try:
            return msgspec.convert(_harmless(plain), cls)
        except msgspec.ValidationError as exc:
            raise self._http.unexpected(f"not a job: {exc}") from exc


def _harmless(value: Any) -> Any:
    """JSON, with '?' in texts for each character that could control a terminal."""
    if isinstance(value, dict):
        return {_harmless(name): _harmless(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_harmless(one) for one in value]
    return printable(value) if isinstance(value, str) else value


def prepare(asked: JobSpec, folder: Path) -> tuple[JobSpec, CodeArchive | None]:
    """Check a job that was typed in this folder. Returns (the job as another machine can run it,
    its code; None if it needs none from this machine).

    Raises:
        UsageError: the job's program or file is missing or would not be sent, or the code is too
            large.
    """
    if asked.target.startswith("torchvision:"):
        return asked, None
    file = _file(asked)
    if file and not (folder / file).is_file():
        what = asked.target or " ".join(asked.command[:2])
        raise TargetError(f"{what!r}: there is no file {file} in {folder}")
    check_open(asked.command)
    # Refuse a misspelt program. The worker may have launchers, absolute paths, and those of `env`.
    word = next(iter(asked.command), "/")
    known = asked.env or word.startswith(("/", "python", "torchrun", "accelerate", "deepspeed"))
    if not known and not ("/" in word and (folder / word).is_file()):
        program(asked.command)
    code = pack(folder)
    folder = folder.resolve()
    if file and not (folder / file).resolve().is_relative_to(code.root):
        raise UsageError(f"{file}: lies outside {code.root}, and only that folder is sent")

    def portable(word: str) -> str:
        """A path below the root as seen from the folder; any other word unchanged."""
        inside = word.startswith("/") and Path(word).is_relative_to(code.root)
        return os.path.relpath(word, folder) if inside else word

    started, *words = asked.command or ("",)
    # Only the name of a virtual environment's program: the worker has its own.
    beside = (folder / started).parent
    if "/" in started and any((beside / name).exists() for name in ("python", "python3")):
        started = Path(started).name
    place = folder.relative_to(code.root).as_posix()
    target, command = portable(asked.target), (started, *map(portable, words)) if started else ()
    place = "" if place == "." else place
    sent = structs.replace(asked, target=target, command=command, archive=code.digest, folder=place)
    return sent, code


def _file(asked: JobSpec) -> str:
    """The Python file that the job starts or tunes, as typed; '' for a module or a program."""
    started, *words = asked.command or ("python", asked.target)
    named = words[0] if words and Path(started).name.startswith("python") else ""
    place = named if named.endswith(".py") else named.rpartition(":")[0]
    return place if place.endswith(".py") else ""
