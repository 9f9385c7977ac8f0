"""The pages of jobs: all of them, and one with its progress, log and attempts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from advisor.jobs.spec import where
from advisor.jobs.states import LIVE, State
from advisor.report.data import Timeline, Tried
from advisor.service import jobs, progress
from advisor.service.access import Here
from advisor.service.limits import MAX_UNTRUSTED
from advisor.service.machines import troubles
from advisor.service.pages import Form, Reader, Submitter, render
from advisor.service.routes.jobs import there
from advisor.service.routes.parsing import Number
from advisor.service.schema import Job

ON_A_PAGE = 50
"""Jobs in the list."""
MOST_SHOWN = 200
"""Trials in a table; a chart has all of them."""
MOST_LOG = 2**16
"""Characters of the end of a log."""

site = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, max_body_size=MAX_UNTRUSTED
)


@site.get("/jobs")
def listed(
    request: Request,
    here: Here,
    caller: Reader,
    state: State | Literal[""] = "",
    before: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
) -> HTMLResponse:
    with here.database.reading() as session:
        lines, more = jobs.listed(session, [state] if state else [], before, ON_A_PAGE)
        return render(
            request,
            "jobs.html",
            caller,
            lines=lines,
            progress=progress.of_jobs(session, [line["id"] for line in lines]),
            counts=jobs.counts(session).jobs,
            troubles=here.troubles + troubles(list(here.machines.values())),
            where=where,
            more=more,
            state=state,
            before=before,
        )


@site.get("/jobs/{number}")
def one(request: Request, here: Here, caller: Reader, number: Number) -> HTMLResponse:
    with here.database.reading() as session:
        job: Job = there(session.get(Job, number), number)
        told = there(jobs.details(session, number), number)
        log = jobs.tail(session, number, MOST_LOG)
        live, own = job.state in LIVE, job.token == caller.token
        return render(
            request,
            "job.html",
            caller,
            job=told,
            live=live,
            may_cancel=live and caller.may("submit") and (own or caller.may("admin")),
            progress=progress.of_jobs(session, [number])[number],
            where=where(job.gpu, job.gpus),
            attempts=told["attempts"][::-1],
            chart=throughput(told),
            trials=told["trials"][-MOST_SHOWN:][::-1],
            log=log.text,
            is_cut=job.logged > len(log.text),
            asked=list(_asked(json.loads(job.asked))),
        )


def throughput(told: Mapping[str, Any]) -> Timeline | None:
    """A job's trials since it was first started; None for no trials."""
    began = min((one["started"] for one in told["attempts"]), default=0.0)
    trials = told["trials"]
    # The baseline, at the user's batch, is tried first.
    own = next((trial["batch"] for trial in trials if trial["batch"]), None)
    best, points = 0.0, []
    for trial in trials:
        reached = 0.0 if trial["outcome"] else trial["samples_per_s"]
        at_batch = trial["batch"] in (None, own)
        batch = f", batch {trial['batch']}" if trial["batch"] else ""
        points.append(
            Tried(
                label=f"{trial['number']}: {trial['what']}{batch}",
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


def _asked(asked: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of what was submitted."""
    for name, value in {**asked, **asked["options"], **asked["env"]}.items():
        if value and name not in ("options", "env"):
            parts = value if isinstance(value, list) else [value]
            texts = [one if isinstance(one, str) else json.dumps(one) for one in parts]
            yield name, shlex.join(texts) if name == "command" else ", ".join(texts)


@site.post("/jobs/{number}/cancel")
def cancel(here: Here, caller: Submitter, _form: Form, number: Number) -> Response:
    with here.database.writing() as session:
        there(jobs.cancel(session, number, caller), number)
    return RedirectResponse(f"/jobs/{number}", 303)
