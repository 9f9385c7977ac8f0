"""The pages of jobs: all of them, and one with its progress, log and attempts."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy.orm import Session

from advisor.jobs.spec import where
from advisor.jobs.states import LIVE, STATES
from advisor.report.data import Timeline, Tried
from advisor.service import jobs, progress
from advisor.service.access import Here, forbidding
from advisor.service.database import now
from advisor.service.machines import troubles
from advisor.service.pages import OwnForm, Reader, Submitter, shown, url_of
from advisor.service.schema import Job
from advisor.service.tokens import Caller

ON_A_PAGE = 50
"""Jobs in the list."""
MOST_SHOWN = 200
"""Trials in a table; a chart has all of them."""
MOST_LOG = 2**16
"""Characters of the end of a log, on a page that is loaded."""
MOVES_S = 10.0
"""A page that follows a job moves its progress at least this often."""

Number = Annotated[int, Path(ge=1, lt=2**31)]

job_pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@job_pages.get("/jobs")
def listed(
    request: Request,
    here: Here,
    caller: Reader,
    state: Annotated[str, Query(pattern=f"^({'|'.join(STATES)}|)$")] = "",
    before: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
) -> HTMLResponse:
    with here.database.reading() as session:
        lines, more = jobs.listed(session, [state] if state else [], before, ON_A_PAGE)
        return shown(
            request,
            "jobs.html",
            caller,
            lines=lines,
            progress=progress.of_jobs(session, [line["id"] for line in lines]),
            counts=jobs.counts(session).jobs,
            troubles=here.troubles + troubles(here.machines.look()),
            where=where,
            more=more,
            state=state,
            before=before,
            url=url_of(request),
        )


@job_pages.get("/jobs/{number}")
def one(request: Request, here: Here, caller: Reader, number: Number) -> HTMLResponse:
    with here.database.reading() as session:
        job = _job(session, number)
        log = jobs.tail(session, number, MOST_LOG)
        return shown(
            request,
            "job.html",
            caller,
            **_now(session, job, caller),
            log=log,
            is_cut=job.logged > len(log.text),
            asked=list(_asked(json.loads(job.asked))),
        )


@job_pages.get("/jobs/{number}/news")
def news(
    request: Request,
    here: Here,
    caller: Reader,
    number: Number,
    after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
    mark: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """The parts of a job's page that changed: 204 if none did.

    Args:
        after: the place in the log that the page has come to.
        mark: of what the page shows.
    """
    with here.database.reading() as session:
        job = _job(session, number)
        log = jobs.log(session, number, after)
        assert log is not None
        if not log.text and mark == _mark(session, job):
            return Response(status_code=204)
        return shown(request, "job_news.html", caller, **_now(session, job, caller), log=log)


def _job(session: Session, number: int) -> Job:
    found = session.get(Job, number)
    if found is None:
        raise HTTPException(404, f"there is no job {number}")
    return found


def _now(session: Session, job: Job, caller: Caller) -> dict[str, Any]:
    """What of a page changes while a job goes on."""
    told = jobs.told(session, job.id)
    assert told is not None
    ended, own = job.state not in LIVE, job.token == caller.token
    return {
        "job": told,
        "mark": _mark(session, job),
        "ended": ended,
        "may_cancel": not ended and caller.may("submit") and (own or caller.may("admin")),
        "progress": progress.of_jobs(session, [job.id])[job.id],
        "where": where(job.gpu, job.gpus),
        "attempts": told["attempts"][::-1],
        "chart": throughput(told),
        "trials": told["trials"][-MOST_SHOWN:][::-1],
    }


def _mark(session: Session, job: Job) -> str:
    """Another text whenever the page has something new."""
    turn = int(now(session) / MOVES_S) if job.state in LIVE else 0
    of = repr((jobs.mark(session, job.id), turn))
    return hashlib.sha256(of.encode()).hexdigest()[:12]


def throughput(told: Mapping[str, Any]) -> Timeline | None:
    """A job's trials since it was first started; None where there is none."""
    began = min((one["started"] for one in told["attempts"]), default=0.0)
    trials = told["trials"]
    # The baseline, at the user's batch, is tried first.
    own = next((trial["batch"] for trial in trials if trial["batch"]), None)
    best, points = 0.0, []
    for trial in trials:
        reached = 0.0 if trial["outcome"] else trial["samples_per_s"]
        at_batch = trial["batch"] in (None, own)
        points.append(
            Tried(
                label=f"{trial['number']}: {trial['what']}{_at(trial['batch'])}",
                at_s=max(0.0, trial["at"] - began),
                samples_per_s=reached,
                at_batch=at_batch,
                leads=at_batch and reached > best,
            )
        )
        best = max(best, reached) if at_batch else best
    if not points:
        return None
    return Timeline("Samples/s of each trial since the start", tuple(points))


def _at(batch: int | None) -> str:
    return f", batch {batch}" if batch else ""


def _asked(asked: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of what was submitted."""
    for name, value in {**asked, **asked["options"], **asked["env"]}.items():
        if value and name not in ("options", "env"):
            parts = value if isinstance(value, list) else [value]
            texts = [one if isinstance(one, str) else json.dumps(one) for one in parts]
            yield name, shlex.join(texts) if name == "command" else ", ".join(texts)


@job_pages.post("/jobs/{number}/cancel")
def cancel(here: Here, caller: Submitter, _form: OwnForm, number: Number) -> Response:
    with here.database.writing() as session, forbidding():
        state = jobs.cancel(session, number, caller)
    if state is None:
        raise HTTPException(404, f"there is no job {number}")
    return RedirectResponse(f"/jobs/{number}", 303)
