"""Request a tuning from the team's server after a miss: `on_miss="request"`.

A daemon thread sends the request, and not even the script's exit waits for that thread. If the
request fails, the log has a line, and the script trains on.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
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
from advisor.cache.task import changed
from advisor.command_snippets import task_first
from advisor.errors import AdvisorError, UsageError
from advisor.jobs.spec import JobSpec
from advisor.open_store import Cache, open_records
from advisor.resolve.target_resolver import script

if TYPE_CHECKING:
    from advisor.resolve.request import Request

DEADLINE_S = 120.0
"""Timeout to pack the code, send it and get an answer, in seconds."""
EVERY_S = 6 * 3600.0
"""Seconds before the same job may be requested again."""
MAX_AN_HOUR = 12
"""The most jobs per hour that one user requests from one machine."""
THREAD = "advisor: a job"
_SUFFIX = ".asked"
_log = logging.getLogger("advisor")


def request_tuning(request: Request, query: Query, near: Record | None) -> str:
    """Request a tuning. Returns a line that says so, or that says what prevents it."""
    if os.environ.get("RANK", "0") != "0":
        return "rank 0 asks for a tuning"
    try:
        spec = _spec_of(request, query, near)
        url = server_url(request.cache)
        if not url:
            raise UsageError("no server is among the stores; set ADVISOR_CACHE to one")
        if request.folder is None:
            raise UsageError("the folder in which the script was started is unknown")
        if not script().is_file():
            raise UsageError("there is no script that the server could start")
    except UsageError as exc:
        return f"no tuning is asked for: {exc}"
    send = functools.partial(_sent, url, spec, request.folder, request.cache)

    def report() -> None:
        try:
            _log.info("%s", run_with_timeout(DEADLINE_S, send, "job"))
        except AdvisorError as exc:
            _log.warning("no tuning is asked for: %s", exc)

    threading.Thread(target=report, name=THREAD, daemon=True).start()
    return f"a tuning is asked for at {without_password(url)}"


def _spec_of(request: Request, query: Query, near: Record | None) -> JobSpec:
    """The job that tunes a request on a device like this machine's."""
    task = task_first(request, near)
    if task is None or task.command != request.given.get("command", ()):
        raise UsageError(
            "give apply() a target by its name and a shape, or neither, for the script's own run"
        )
    processes, cpu = task.processes, request.device == "cpu"
    if int(os.environ.get("LOCAL_WORLD_SIZE") or processes) < processes:
        raise UsageError("the run uses several machines, and a tuning uses one")
    options: dict[str, Any] = {  # values as in JSON
        row.keyword: row.kind.texts(value) if isinstance(value, Config) else value
        for row, value in changed(task)
    }
    options |= {"device": "cpu" if cpu else None, "steps": request.plan.steps}
    return JobSpec.given(
        task.command,
        options | {"duration": request.plan.duration_s},
        0 if cpu else processes,
        target="" if task.command else task.target,
        gpu="" if cpu else query.environment.device.name,
    )


def _sent(url: str, spec: JobSpec, folder: Path, cache: Cache) -> str:
    """Send a job, unless the same job was sent recently. Returns a line on the outcome."""
    records = open_records(cache, patient=False, fallback=True)
    # The time of this file says when the same job was last requested.
    stamp = records.study(fingerprint([url, spec.key, str(folder)])[:24] + _SUFFIX)
    if why := _too_soon(stamp):
        return f"no tuning is asked for: {why}"
    # Imported late: a script that finds its record never needs these modules.
    from advisor.client import Client
    from advisor.jobs.submission import Submission

    submission = Submission.of(spec, folder)
    code = submission.code
    if code is not None and not script().resolve().is_relative_to(code.root):
        raise UsageError(f"{script()} lies outside {code.root}, and only that folder is sent")
    job = Client(url).ask(submission)
    with suppress(OSError):
        make_folder(stamp.parent)
        stamp.touch()
    return f"job {job.id} at {without_password(url)} is {job.state}: {job.what}"


def _too_soon(stamp: Path) -> str:
    """Why no job may be requested now, or ''."""
    now = time.time()
    ages: dict[str, float] = {}
    for file in stamp.parent.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            ages[file.name] = now - file.stat().st_mtime
    if 0 <= ages.get(stamp.name, EVERY_S) < EVERY_S:
        return f"this job was requested {ages[stamp.name] / 60:.0f} min ago"
    if sum(0 <= age < 3600 for age in ages.values()) >= MAX_AN_HOUR:
        return f"{MAX_AN_HOUR} jobs were requested in the last hour"
    return ""
