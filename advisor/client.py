"""Ask a team's server for a tuning from Python, watch it, read what it prints, cancel it.

    client = Client("https://advisor.example")
    job = client.submit("model.py", shape="64x3x256x256", gpu="H100")
    for text in client.log(job.id, follow=True):
        print(text, end="")
    print(client.job(job.id).record)

Records are looked up with `advisor.lookup(..., store=url)`, and listed by `advisor show`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from advisor.cache.stores.http_client import BYTES, JSON, MAP, HttpClient
from advisor.errors import RecordDamaged, StoreError, Unauthorized, UsageError, printable
from advisor.jobs.code_archive import NEEDS_CODE
from advisor.jobs.spec import JobSpec, where
from advisor.jobs.states import LIVE, STATES
from advisor.jobs.submission import Submission

T = TypeVar("T")

PATIENCE_S, SENDING_S = 10.0, 300.0
"""For one answer; for an archive to be sent."""
POLL_S = 2.0
AWAY_S = 120.0
"""How long `Client.log` waits for a server that is away."""
_MOST_PAGE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A tuning that was asked for.

    Attributes:
        state: one of `advisor.jobs.states.STATES`; `reason`: why, if that needs saying.
        what: the command or the target, as a line.
        gpu: a part of the device's name, '' for any; gpus: 0 for the CPU.
        by: the name of the token that asked.
        created, changed: in Unix seconds of the server.
        record: the id of what it found, once it is done.
        attempt: the number of its last attempt, 0 before the first.
        new: that it was not asked for before; of `submit` alone.
        attempts, trials: of `Client.job` alone: each start, and each config that was measured.
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


class _Jobs(msgspec.Struct):
    jobs: list[dict[str, Any]]
    more: bool = False


class _Log(msgspec.Struct):
    text: str
    next: int
    ended: bool = False


class _State(msgspec.Struct):
    state: str


# Made here, because a class must not be described by two threads at once; see `cache.codec`.
_JOBS, _LOG = msgspec.json.Decoder(_Jobs), msgspec.json.Decoder(_Log)
_STATE = msgspec.json.Decoder(_State)
msgspec.json.Decoder(Job)


class Client:
    """A server's jobs. May be shared by threads.

    Args:
        url: http[s]://HOST[:PORT][/PATH]; over plain HTTP to another machine with ?insecure=1.
        token: default: $ADVISOR_TOKEN, or this server's in your file of tokens.

    Raises:
        UsageError: the URL or the token is malformed.
        StoreError: of every method: the server is away, too old to have jobs, or refuses the token.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"server {url[:80]!r}: expected http[s]://HOST[:PORT]")
        self._http = HttpClient(url, token=token or "", called="server")
        self._patience_s = max(self._http.given.seconds("timeout", 0.0), PATIENCE_S)
        self.url = self._http.url

    def page(self, id: int) -> str:
        """The address of a job's page, for a browser."""
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
        """Ask for a tuning of a target, or of a command as one would type it in `folder`, whose
        code is sent along. The same request twice is one job.

        Args:
            gpu: a part of the GPU's name; gpus: how many, 0 for the CPU; default:
                1, or 0 with device='cpu'.
            env: 'pip' and 'container' of Ray's runtime environment; default: the worker's own.
            force: measure again although it is tuned.
            options: those of `advisor tune` by keyword; of a command the permissions and how much.

        Raises:
            UsageError: an argument is wrong, or the code is too much to travel.
        """
        place: dict[str, Any] = {"gpu": gpu, "gpus": gpus, "env": env or {}}
        asked = JobSpec.given(command=command, target=target, options=options, force=force, **place)
        return self.ask(Submission.of(asked, Path(folder)))

    def ask(self, submission: Submission) -> Job:
        """Submit what was checked and packed before. Code that the server has is not sent."""
        body = json.dumps(submission.asked.plain).encode()
        how: dict[str, Any] = {"body": body, "kind": JSON, "accepts": (NEEDS_CODE,)}
        status, data = self._asked("POST", "/api/jobs", **how)
        if status == NEEDS_CODE and (code := submission.code) is not None:
            sent: dict[str, Any] = {"body": code.archive, "kind": BYTES, "patience_s": SENDING_S}
            self._asked("PUT", f"/api/archives/{code.digest}", **sent)
            status, data = self._asked("POST", "/api/jobs", **how)
        if status == NEEDS_CODE:
            raise UsageError(f"server {self.url}: {self._http.detail(data)}")
        return self._job(self._http.decoded(data, MAP))

    def jobs(self, states: Sequence[str] = (), most: int = 50) -> list[Job]:
        """The newest jobs, only of these states if some are given."""
        if wrong := sorted(set(states) - set(STATES)):
            raise UsageError(f"state {wrong[0]!r}: expected one of {', '.join(STATES)}")
        found: list[Job] = []
        while len(found) < most:
            asked: list[tuple[str, Any]] = [("state", state) for state in states]
            asked.append(("most", min(_MOST_PAGE, most - len(found))))
            if found:
                asked.append(("before", found[-1].id))
            page = self._said(_JOBS, "GET", f"/api/jobs?{urlencode(asked)}")
            found += [self._job(one) for one in page.jobs]
            if not page.more or not page.jobs:
                break
        return found

    def job(self, id: int) -> Job:
        """A job with its attempts and trials. Raises UsageError if there is none."""
        return self._job(self._said(MAP, "GET", f"/api/jobs/{id:d}"))

    def log(self, id: int, *, follow: bool = False, poll_s: float = POLL_S) -> Iterator[str]:
        """What a job has printed, in pieces. With `follow` it continues until the job is over, also
        if the server is away for up to two minutes. Raises UsageError if there is no such job."""
        after, seen, ended = 0, 0.0, False
        while not ended:
            try:
                said = self._said(_LOG, "GET", f"/api/jobs/{id:d}/log?after={after}")
            except Unauthorized:
                raise
            except StoreError:
                if not (follow and seen) or time.monotonic() - seen > AWAY_S:
                    raise
                time.sleep(poll_s)
                continue
            if said.next < after:
                raise self._http.foreign("its log goes back")
            after, seen = said.next, time.monotonic()
            ended = said.ended or not (follow or said.text)
            if said.text:
                yield "".join(char if char in "\n\t" else printable(char) for char in said.text)
            elif not ended:
                time.sleep(poll_s)

    def cancel(self, id: int) -> str:
        """End a job, and return the state that it has now: not 'cancelled' if it was over before.
        Raises UsageError if there is no such job."""
        state = self._said(_STATE, "POST", f"/api/jobs/{id:d}/cancel").state
        if state not in STATES:
            raise self._http.foreign("it names no state of a job")
        return state

    def _said(self, decoder: msgspec.json.Decoder[T], method: str, path: str) -> T:
        return self._http.decoded(self._asked(method, path)[1], decoder)

    def _asked(
        self, method: str, path: str, accepts: Collection[int] = (), **how: Any
    ) -> tuple[int, bytes]:
        """The status and the body of an answer."""
        how.setdefault("patience_s", self._patience_s)
        try:
            status, _, data = self._http.request(method, path, accepts=(404, *accepts), **how)
        except RecordDamaged as exc:  # of what was asked, and not of a record
            raise UsageError(str(exc)) from exc
        if status != 404:
            return status, data
        why = self._http.detail(data)
        if why in ("", "Not Found"):
            raise StoreError(
                f"server {self.url}: has no jobs; it is older than this advisor, or of another "
                "path; ask who runs it"
            )
        raise UsageError(f"server {self.url}: {why}; to see them: advisor jobs")

    def _job(self, plain: dict[str, Any]) -> Job:
        given = {name: _harmless(value) for name, value in plain.items() if value is not None}
        try:
            return msgspec.convert(given, Job)
        except msgspec.ValidationError as exc:
            raise self._http.foreign(f"what it tells is no job: {exc}") from exc


def _harmless(value: Any) -> Any:
    """Plain data whose texts cannot steer a terminal."""
    if isinstance(value, dict):
        return {_harmless(name): _harmless(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_harmless(one) for one in value]
    return printable(value) if isinstance(value, str) else value
