"""The pages of jobs: all of them, and one as it goes on. Without scripts, as it was when it was
loaded."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from advisor.cache.shown import times
from advisor.jobs.spec import where
from advisor.jobs.states import LIVE, STATES
from advisor.report.data import Table, Timeline, Tried
from advisor.report.text import cut, rate
from advisor.service import jobs, tokens
from advisor.service.access import COOKIE, Here, Service, forbidding
from advisor.service.limits import HEADERS
from advisor.service.live import EVERY_S, LASTS_S, streaming
from advisor.service.pages import (
    ON_A_PAGE,
    OVER,
    OwnForm,
    Reader,
    Submitter,
    day,
    rendered,
    shown,
    url_of,
)
from advisor.service.schema import Job
from advisor.service.tokens import Caller

MOST_SHOWN = 200
"""Trials in a table; a chart has all of them."""
MOST_LOG = 2**16
"""Characters of the end of a log, on a page that is loaded."""
_ENDED = "event: ended\ndata:\n\n"
_SCRIPTED = HEADERS["Content-Security-Policy"] + "; script-src 'self'; connect-src 'self'"

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
        where=where,
        cut=cut,
        more=more,
        state=state,
        states=STATES,
        before=before,
        url=url_of(request),
    )


@job_pages.get("/jobs/{number}")
def one(request: Request, here: Here, caller: Reader, number: Number) -> HTMLResponse:
    with here.database.reading() as session:
        job = _job(session, number)
        what = _now(session, job, caller)
        log = jobs.tail(session, number, MOST_LOG)
        asked = list(_asked(json.loads(job.asked)))
    live, cut = not what["ended"], job.logged > len(log.text)
    page = shown(request, "job.html", caller, **what, log=log, cut=cut, asked=asked, live=live)
    page.headers["Content-Security-Policy"] = _SCRIPTED
    return page


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
        "ended": ended,
        "may_cancel": not ended and caller.may("submit") and (own or caller.may("admin")),
        "facts": list(_facts(told)),
        "attempts": told["attempts"][::-1],
        "chart": throughput(told),
        "table": _trials(told["trials"]),
    }


def _facts(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "asked for by", told["by"]
    yield "asked for", f"{day(told['created'])} UTC"
    yield f"{told['state']} since", f"{day(told['changed'])} UTC"
    yield "where", where(told["gpu"], told["gpus"])
    if told["attempts"] and told["attempts"][-1]["device"]:
        yield "on", told["attempts"][-1]["device"]


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
    return Timeline(title="Samples/s of each trial since the start", points=tuple(points))


def _at(batch: int | None) -> str:
    return f", batch {batch}" if batch else ""


def _trials(trials: Sequence[Mapping[str, Any]]) -> Table:
    last = trials[-MOST_SHOWN:][::-1]
    which = "The last first" if len(last) == len(trials) else f"The last {len(last)}"
    table = Table(
        f"{which}; x is over the baseline, once that is known",
        ("#", "what", "batch", "samples/s", "x", "how"),
        right=("#", "batch", "samples/s", "x"),
    )
    for trial in last:
        failed = trial["outcome"]
        table.row(
            str(trial["number"]),
            trial["what"],
            str(trial["batch"] or ""),
            "" if failed else rate(trial["samples_per_s"]),
            times(trial["ratio"]) if trial["ratio"] and not failed else "",
            failed or trial["origin"],
            warns=bool(failed),
        )
    return table


def _asked(asked: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of what was asked for."""
    if asked["command"]:
        yield "command", shlex.join(asked["command"])
    else:
        yield "target", asked["target"]
    for name, value in asked["options"].items():
        parts = value if isinstance(value, list) else [value]
        yield name, ", ".join(one if isinstance(one, str) else json.dumps(one) for one in parts)
    for name, value in asked["env"].items():
        yield name, value
    if asked["archive"]:
        yield "code", f"archive {asked['archive'][:12]}"
    if asked["folder"]:
        yield "folder", asked["folder"]
    if asked["force"]:
        yield "force", "measured again although it was tuned"


@job_pages.post("/jobs/{number}/cancel")
def cancel(here: Here, caller: Submitter, _form: OwnForm, number: Number) -> Response:
    with here.database.writing() as session, forbidding():
        state = jobs.cancel(session, number, caller)
    if state is None:
        raise HTTPException(404, f"there is no job {number}")
    return RedirectResponse(f"/jobs/{number}", 303)


@job_pages.get("/jobs/{number}/live")
def live(
    request: Request,
    here: Here,
    _caller: Reader,
    number: Number,
    after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
) -> StreamingResponse:
    """Parts of a job's page as they change, as server-sent events; `after`: the place in the log
    that the page has come to."""
    told = request.headers.get("last-event-id", "")
    if told.isascii() and told.isdecimal() and len(told) < 19:
        after = int(told)
    with here.database.reading() as session:
        _job(session, number)
    return streaming(here, _parts(request, here, number, after))


@job_pages.get(OVER)
def over(request: Request) -> Response:
    """Says so in the page, which without a session is told nothing else."""
    text = rendered(request, "session_over.html")
    return Response(_event(text, 0) + _ENDED, media_type="text/event-stream")


@dataclass(frozen=True, slots=True)
class _Seen:
    """How far a page has come: the job's mark, the log's place."""

    mark: object
    after: int


async def _parts(request: Request, here: Service, number: int, after: int) -> AsyncIterator[str]:
    """Until the job is over, the server stops or it lasted long enough."""
    seen, goes_on, until = _Seen(None, after), True, time.monotonic() + LASTS_S
    while goes_on and not here.stopping.is_set() and time.monotonic() < until:
        text, seen, goes_on = await run_in_threadpool(_news, request, here, number, seen)
        yield _event(text, seen.after) if text else ": \n\n"  # whoever hung up is noticed
        await asyncio.sleep(EVERY_S if goes_on else 0)
    if not goes_on:
        yield _ENDED


def _news(request: Request, here: Service, number: int, seen: _Seen) -> tuple[str, _Seen, bool]:
    """What changed since, as HTML, '' for nothing; what is seen then; whether more may come."""
    with here.database.reading() as session:
        cookie = request.cookies.get(COOKIE, "")
        caller = tokens.logged_in(session, cookie, here.address(request))
        if caller is None:
            return rendered(request, "session_over.html"), seen, False
        mark, log = jobs.mark(session, number), jobs.log(session, number, seen.after)
        changed = mark != seen.mark
        what = _now(session, _job(session, number), caller) if changed else {}
    assert log is not None
    if not changed and not log.text:
        return "", seen, not log.ended
    text = rendered(request, "job_news.html", caller, **what, changed=changed, log=log.text)
    return text, _Seen(mark, log.next), not log.ended


def _event(text: str, id: int) -> str:
    lines = "".join(f"data: {line}\n" for line in text.split("\n"))
    return f"id: {id}\n{lines}\n"
