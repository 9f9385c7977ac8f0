"""The pages of jobs and machines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy import select

from advisor.jobs.spec import LIVE, State, where
from advisor.report.data import Timeline, Tried
from advisor.service import catalog, jobs
from advisor.service.access import Service
from advisor.service.database import now
from advisor.service.pages import PAGES, Form, ReadVisit, SubmitVisit
from advisor.service.routes.parsing import Before, RowNumber, found
from advisor.service.schema import Attempt, JobRow

TRIALS_SHOWN = 200  # trials in a table; a chart has all of them
LOG_SHOWN = 2**16  # characters that a page shows of the end of a log

site = APIRouter(**PAGES)


@site.get("/jobs")
def list_jobs(
    visit: ReadVisit, state: State | Literal[""] = "", before: Before = None
) -> HTMLResponse:
    with visit.service.database.reading() as session:
        lines, more = jobs.listed(session, [state] if state else [], before, catalog.ON_A_PAGE)
        at = now(session)
        return visit.render(
            "jobs.html",
            lines=lines,
            progress={line["id"]: progress(line, at) for line in lines},
            counts=jobs.counts(session).jobs,
            troubles=_troubles(visit.service),
            where=where,
            more=more,
            state=state,
            before=before,
        )


@site.get("/jobs/{number}")
def one_job(visit: ReadVisit, number: RowNumber) -> HTMLResponse:
    caller = visit.caller
    with visit.service.database.reading() as session:
        details = found(jobs.details(session, number), f"job {number}")
        job, log = session.get_one(JobRow, number), jobs.tail(session, number, LOG_SHOWN)
        live = job.state in LIVE
        return visit.render(
            "job.html",
            job=details,
            live=live,
            may_cancel=live and caller.may("submit") and caller.owns(job.token),
            progress=progress(details, now(session)),
            where=where(job.gpu, job.gpus),
            attempts=details["attempts"][::-1],
            chart=Timeline("Samples/s of each trial since the start", tuple(tried(details))),
            trials=details["trials"][-TRIALS_SHOWN:][::-1],
            log=log,
            is_cut=job.logged > len(log),
            asked=list(_asked(json.loads(job.asked))),
        )


def progress(job: Mapping[str, Any], at: float) -> dict[str, float]:
    """A job's progress at this time: seconds waited and left, and the share of the budget spent."""
    until = job["started"] or (at if job["state"] in LIVE else job["changed"])
    spent_s = max(0.0, at - job["changed"]) if job["state"] == "running" else 0.0
    return {
        "waited_s": max(0.0, until - job["created"]),
        "left_s": max(0.0, job["budget_s"] - spent_s),
        "share": min(1.0, spent_s / job["budget_s"]),
    }


def tried(details: Mapping[str, Any]) -> Iterator[Tried]:
    """Yields a job's trials, with times since the job's first start."""
    began = min((one["started"] for one in details["attempts"]), default=0.0)
    # The baseline, at the user's batch, is tried first.
    own = next((trial["batch"] for trial in details["trials"] if trial["batch"]), None)
    for trial in details["trials"]:
        batch = f", batch {trial['batch']}" if trial["batch"] else ""
        yield Tried(
            label=f"{trial['number']}: {trial['what']}{batch}",
            at_s=max(0.0, trial["at"] - began),
            samples_per_s=0.0 if trial["outcome"] else trial["samples_per_s"],
            at_batch=trial["batch"] in (None, own),
        )


def _asked(asked: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the name and value of each field of a submitted job."""
    for name, value in {**asked, **asked["options"], **asked["env"]}.items():
        if value and name not in ("options", "env"):
            parts = value if isinstance(value, list) else [value]
            texts = [one if isinstance(one, str) else json.dumps(one) for one in parts]
            yield name, shlex.join(texts) if name == "command" else ", ".join(texts)


@site.post("/jobs/{number}/cancel")
def cancel(visit: SubmitVisit, _form: Form, number: RowNumber) -> Response:
    found(visit.service.database.write(jobs.cancel, number, visit.caller), f"job {number}")
    return RedirectResponse(f"/jobs/{number}", 303)


@site.get("/machines")
def list_machines(visit: ReadVisit) -> HTMLResponse:
    machines = visit.service.machines.values()
    query = select(JobRow.id, JobRow.what, Attempt.executor, Attempt.device, Attempt.started)
    query = query.join_from(Attempt, JobRow).where(Attempt.state == "running").order_by(JobRow.id)
    with visit.service.database.reading() as session:
        running = session.execute(query).mappings().all()
    return visit.render(
        "machines.html",
        machines=machines,
        troubles=_troubles(visit.service),
        running=running,  # on all servers of the database
        elsewhere=sorted({one["executor"] for one in running} - {one.name for one in machines}),
    )


def _troubles(service: Service) -> list[str]:
    """Why no job can run now, or what is wrong with the server's threads."""
    machines = service.machines.values()
    down = [f"The executor {one.name} is down: {one.why}" for one in machines if one.why]
    if not machines:
        down = ["This server has no executor, so it starts no jobs. See --executor."]
    return service.troubles + (down if len(down) >= len(machines) else [])
