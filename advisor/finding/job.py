"""A tuning asked of the team's server where a script finds nothing: `on_miss="request"`.

It is asked for by a thread that nobody waits for, the script's exit neither. What keeps it from
being asked for is a line in the log; the script trains on in any case.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.cache.config import Config
from advisor.cache.key import fingerprint
from advisor.cache.match import Query
from advisor.cache.record import Record
from advisor.cache.settings import server_url
from advisor.cache.stores.filesystem import make_folder
from advisor.cache.stores.timeout import run_with_timeout
from advisor.cache.stores.url import without_password
from advisor.cache.task import Task, changed
from advisor.errors import AdvisorError, UsageError
from advisor.finding.meant import script
from advisor.jobs.spec import JobSpec
from advisor.opening import Cache, open_records
from advisor.printed import task_first

if TYPE_CHECKING:
    from advisor.finding.request import Request

DEADLINE_S = 120.0
"""For packing the code, sending it and being answered."""
EVERY_S = 6 * 3600.0
"""The same is asked for once in this time."""
MOST_AN_HOUR = 12
"""Of one user on one machine."""
THREAD = "advisor: a job"
_SUFFIX = ".asked"
_log = logging.getLogger("advisor")


def asked_for(request: Request, query: Query, near: Record | None, folder: Path | None) -> str:
    """Have a tuning asked for, and say so in words; what keeps it from that otherwise.

    Args:
        folder: where the command was started, None where that is not known.
    """
    if os.environ.get("RANK", "0") != "0":
        return "rank 0 asks for a tuning"
    try:
        asked = _asked(request, query, near)
        url = server_url(request.cache)
        if not url:
            raise UsageError("no server is among the stores; set ADVISOR_CACHE to one")
        if folder is None:
            raise UsageError("it is not known where the script was started")
        if not script().is_file():
            raise UsageError("there is no script that could be started elsewhere")
    except UsageError as exc:
        return f"no tuning is asked for: {exc}"
    sending = _Sending(url, asked, folder, request.cache)
    threading.Thread(target=sending.run, name=THREAD, daemon=True).start()
    return f"a tuning is asked for at {without_password(url)}"


def _asked(request: Request, query: Query, near: Record | None) -> JobSpec:
    """What `advisor tune` would be told, for this device."""
    task = task_first(request, near)
    if task is None or task.command != request.given.get("command", ()):
        raise UsageError(
            "give apply() a target by its name and a shape, or neither, for the script's own run"
        )
    processes = task.processes
    if int(os.environ.get("LOCAL_WORLD_SIZE") or processes) < processes:
        raise UsageError("a job on several machines is not tuned on one")
    cpu = request.device == "cpu"
    options = dict(_options(task))
    options.pop("device", None)
    if cpu and not task.command:
        options["device"] = "cpu"
    if request.steps or request.seconds:
        options |= {"steps": request.steps or None, "duration": request.seconds or None}
    return JobSpec(
        command=task.command,
        target="" if task.command else task.target,
        options=options,
        gpu="" if cpu else query.environment.device.name,
        gpus=0 if cpu else processes,
    )


def _options(task: Task) -> Iterator[tuple[str, Any]]:
    """By keyword, as JSON has them."""
    for row, held in changed(task):
        yield row.keyword, row.kind.texts(held) if isinstance(held, Config) else held


class _Sending:
    """One request for a tuning, on its way."""

    def __init__(self, url: str, asked: JobSpec, folder: Path, cache: Cache) -> None:
        self._url, self._asked, self._folder, self._cache = url, asked, folder, cache

    def run(self) -> None:
        """Say in the log what came of it."""
        try:
            _log.info("%s", run_with_timeout(DEADLINE_S, self._send, "job"))
        except AdvisorError as exc:
            _log.warning("no tuning is asked for: %s", exc)

    def _send(self) -> str:
        stamp = self._stamp()
        if why := _too_soon(stamp):
            return f"no tuning is asked for: {why}"
        # Not before: a script that finds its record never imports what packs and sends.
        from advisor.client import Client
        from advisor.jobs.submission import Submission

        submission = Submission.of(self._asked, self._folder)
        code = submission.code
        if code is not None and not script().resolve().is_relative_to(code.root):
            raise UsageError(f"{script()} lies outside {code.root}, which would be sent")
        job = Client(self._url).ask(submission)
        with suppress(OSError):
            make_folder(stamp.parent)
            stamp.touch()
        return f"job {job.id} at {without_password(self._url)} is {job.state}: {job.what}"

    def _stamp(self) -> Path:
        """The file whose time says when this was asked for."""
        asked = [self._url, self._asked.key, str(self._folder)]
        records = open_records(self._cache, patient=False, fallback=True)
        return records.study(fingerprint(asked)[:24] + _SUFFIX)


def _too_soon(stamp: Path) -> str:
    """Why nothing is to be asked for now; '' where it may be."""
    now = time.time()
    times: dict[str, float] = {}
    with suppress(OSError):
        for file in stamp.parent.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                times[file.name] = file.stat().st_mtime
    if 0 <= now - times.get(stamp.name, 0.0) < EVERY_S:
        return f"it was {(now - times[stamp.name]) / 60:.0f} min ago"
    if sum(0 <= now - at < 3600 for at in times.values()) >= MOST_AN_HOUR:
        return f"{MOST_AN_HOUR} were in the last hour"
    return ""
