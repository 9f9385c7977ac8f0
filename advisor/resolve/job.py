"""Ask the team's server for a tuning on a miss: `on_miss="request"`.

A thread does it that nothing waits for, not even the script's exit. If anything prevents it, that
is a line in the log, and the script trains on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
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
from advisor.cache.task import changed
from advisor.command_snippets import task_first
from advisor.errors import AdvisorError, UsageError
from advisor.jobs.spec import JobSpec
from advisor.open_store import Cache, open_records
from advisor.resolve.target_resolver import script

if TYPE_CHECKING:
    from advisor.resolve.request import Request

DEADLINE_S = 120.0
"""To pack the code, send it and get an answer."""
EVERY_S = 6 * 3600.0
"""The same job is asked for once in this time."""
MAX_AN_HOUR = 12
"""Jobs that one user asks for on one machine."""
THREAD = "advisor: a job"
_SUFFIX = ".asked"
_log = logging.getLogger("advisor")


def request_tuning(request: Request, query: Query, near: Record | None) -> str:
    """Ask for a tuning, and say so; or say what prevents it."""
    if os.environ.get("RANK", "0") != "0":
        return "rank 0 asks for a tuning"
    try:
        spec = _spec_of(request, query, near)
        url = server_url(request.cache)
        if not url:
            raise UsageError("no server is among the stores; set ADVISOR_CACHE to one")
        if request.folder is None:
            raise UsageError("it is not known where the script was started")
        if not script().is_file():
            raise UsageError("there is no script that could be started elsewhere")
    except UsageError as exc:
        return f"no tuning is asked for: {exc}"
    sending = _Sending(url, spec, request.folder, request.cache)
    threading.Thread(target=sending.run, name=THREAD, daemon=True).start()
    return f"a tuning is asked for at {without_password(url)}"


def _spec_of(request: Request, query: Query, near: Record | None) -> JobSpec:
    """The options of `advisor tune`, for this device."""
    task = task_first(request, near)
    if task is None or task.command != request.given.get("command", ()):
        raise UsageError(
            "give apply() a target by its name and a shape, or neither, for the script's own run"
        )
    processes = task.processes
    if int(os.environ.get("LOCAL_WORLD_SIZE") or processes) < processes:
        raise UsageError("a job on several machines is not tuned on one")
    cpu = request.device == "cpu"
    options: dict[str, Any] = {  # as JSON has them
        row.keyword: row.kind.texts(value) if isinstance(value, Config) else value
        for row, value in changed(task)
        if row.keyword != "device"
    }
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


@dataclass(frozen=True, slots=True)
class _Sending:
    """One job on its way to the server."""

    url: str
    spec: JobSpec
    folder: Path
    cache: Cache

    def run(self) -> None:
        """Log the outcome."""
        try:
            _log.info("%s", run_with_timeout(DEADLINE_S, self._send, "job"))
        except AdvisorError as exc:
            _log.warning("no tuning is asked for: %s", exc)

    def _send(self) -> str:
        asked = [self.url, self.spec.key, str(self.folder)]
        records = open_records(self.cache, patient=False, fallback=True)
        # The time of this file says when the same was last asked for.
        stamp = records.study(fingerprint(asked)[:24] + _SUFFIX)
        if why := _too_soon(stamp):
            return f"no tuning is asked for: {why}"
        # Late: a script that finds its record never imports what packs and sends.
        from advisor.client import Client
        from advisor.jobs.submission import Submission

        submission = Submission.of(self.spec, self.folder)
        code = submission.code
        if code is not None and not script().resolve().is_relative_to(code.root):
            raise UsageError(f"{script()} lies outside {code.root}, which would be sent")
        job = Client(self.url).ask(submission)
        with suppress(OSError):
            make_folder(stamp.parent)
            stamp.touch()
        return f"job {job.id} at {without_password(self.url)} is {job.state}: {job.what}"


def _too_soon(stamp: Path) -> str:
    """Why nothing may be asked for now, or ''."""
    now = time.time()
    times: dict[str, float] = {}
    with suppress(OSError):
        for file in stamp.parent.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                times[file.name] = file.stat().st_mtime
    if 0 <= now - times.get(stamp.name, 0.0) < EVERY_S:
        return f"it was {(now - times[stamp.name]) / 60:.0f} min ago"
    if sum(0 <= now - at < 3600 for at in times.values()) >= MAX_AN_HOUR:
        return f"{MAX_AN_HOUR} were in the last hour"
    return ""
