"""The pages. The server renders them; they need no scripts and load nothing from elsewhere."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, get_args
from urllib.parse import parse_qsl, urlencode

import jinja2
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from advisor.cache.reader import RecordFilter, once
from advisor.command_snippets import line_anywhere
from advisor.errors import StoreError, UsageError
from advisor.report.data import Section
from advisor.report.html import pages as rendering
from advisor.report.sections import report
from advisor.report.text import age, cut, duration
from advisor.service import catalog, jobs, lookups, machines, tokens
from advisor.service.access import COOKIE, Here, Service
from advisor.service.catalog import View
from advisor.service.database import DAY_S
from advisor.service.limits import MAX_UNTRUSTED
from advisor.service.records import Question, StoredAnswer, Trust, trust_of
from advisor.service.roles import MAY, Role
from advisor.service.routes.parsing import Number, RecordId
from advisor.service.tokens import Caller

STATIC = StaticFiles(packages=[("advisor.service", "static")])
_PACKAGE = "advisor.service"
_MOST_FIELDS = 20
_PATH = re.compile(r"/(?!/)[A-Za-z0-9._~@/?&=%+,:-]{0,500}")

site = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, max_body_size=MAX_UNTRUSTED
)


def visitor(request: Request) -> Caller | None:
    """Who is logged in, in the browser that asks."""
    here: Service = request.app.state.service
    with here.database.reading() as session:
        return tokens.logged_in(session, request.cookies.get(COOKIE, ""), here.address(request))


def visits(role: Role) -> Callable[..., Caller]:
    """A dependency: who is logged in, with a token of this role or a higher one."""

    def caller(request: Request) -> Caller:
        found = visitor(request)
        if found is None and "hx-request" in request.headers:
            raise HTTPException(401, "this session is over", {"HX-Refresh": "true"})
        if found is None:
            raise HTTPException(303, headers={"Location": _login(request)})
        found.check(role)
        return found

    return caller


def _login(request: Request) -> str:
    """Where one logs in, and goes on to the page that was asked for."""
    if request.method != "GET" or request.url.path == "/":
        return "/login"
    asked = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return f"/login?{urlencode({'to': asked})}"


def _local_path(path: str) -> str:
    """A path of this server; '/' for one that may lead elsewhere."""
    return path if _PATH.fullmatch(path) else "/"


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form; raises HTTPException if another site sent it, or it is no form."""
    if not _is_own(request):
        raise HTTPException(403, "another site sent this form")
    try:
        text = (await request.body()).decode("ascii")
        return dict(parse_qsl(text, strict_parsing=bool(text), max_num_fields=_MOST_FIELDS))
    except ValueError as exc:
        raise HTTPException(422, "no form") from exc


def _is_own(request: Request) -> bool:
    """Whether a page of this server sent a form. Browsers say it in one of two headers, over plain
    HTTP only in the second. What sends neither is no browser, so it has no cookie of a victim."""
    site = request.headers.get("sec-fetch-site", "")
    if not site and (origin := request.headers.get("origin", "")):
        return origin.partition("://")[2] == request.headers.get("host", "")
    return site in ("same-origin", "none", "")


Reader = Annotated[Caller, Depends(visits("read"))]
Submitter = Annotated[Caller, Depends(visits("submit"))]
Admin = Annotated[Caller, Depends(visits("admin"))]
Form = Annotated[dict[str, str], Depends(_form)]


def render(
    request: Request, name: str, caller: Caller | None = None, status: int = 200, **what: Any
) -> HTMLResponse:
    """A page; `caller` decides what its menu has."""
    what |= {"caller": caller, "path": request.url.path, "url": _url(request), "now": time.time()}
    return HTMLResponse(_templates().get_template(name).render(status=status, **what), status)


def _url(request: Request) -> str:
    """This server, as users name it."""
    proto = "https" if request.app.state.service.encrypted(request) else "http"
    return f"{proto}://{request.headers.get('host', '')}"


@functools.cache
def _templates() -> jinja2.Environment:
    found = rendering(_PACKAGE)
    found.globals |= {"day": day, "ago": ago, "cut": cut}
    found.filters["span"] = span
    return found


def error_page(request: Request, status: int, detail: str) -> HTMLResponse:
    """The page of an error, with the menu of whoever is logged in."""
    try:
        caller = visitor(request)
    except StoreError:
        caller = None
    return render(request, "error.html", caller, status, detail=detail)


def day(seconds: float | None) -> str:
    """'2026-07-01 12:30', in UTC; '-' for no time."""
    if seconds is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(min(max(seconds, 0.0), 1e11)))


def ago(seconds: float | None) -> str:
    """'5 h ago'; 'never' for no time."""
    if seconds is None:
        return "never"
    text = age(seconds)
    return "just now" if text == "now" else f"{text} ago"


def span(seconds: float) -> str:
    """'3m 20s', '2h 05m': a duration to the second."""
    if seconds < 3600:
        return duration(round(seconds))
    return f"{int(seconds // 3600)}h {int(seconds % 3600 // 60):02d}m"


@site.get("/style.css")
def style() -> Response:
    texts = [_templates().get_template(name).render() for name in ("charts.css", "service.css")]
    headers = {"Cache-Control": "public, max-age=300"}
    return Response("\n".join(texts), media_type="text/css", headers=headers)


@site.get("/login")
def login(request: Request, to: str = "/") -> HTMLResponse:
    return render(request, "login.html", wrong="", to=_local_path(to))


@site.post("/login")
def log_in(request: Request, here: Here, form: Form) -> Response:
    to = _local_path(form.get("to", "/"))
    try:
        caller = here.admit(request, form.get("token", "").strip())
    except HTTPException as exc:
        return render(request, "login.html", None, exc.status_code, wrong=exc.detail, to=to)
    with here.database.writing() as session:
        cookie = tokens.log_in(session, caller)
    answer = RedirectResponse(to, 303)
    answer.set_cookie(
        COOKIE,
        cookie,
        max_age=int(tokens.SESSION_S),
        httponly=True,
        samesite="strict",
        secure=here.encrypted(request),
    )
    return answer


@site.post("/logout")
def log_out(request: Request, here: Here, _caller: Reader, _form: Form) -> Response:
    with here.database.writing() as session:
        tokens.log_out(session, request.cookies.get(COOKIE, ""))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


@site.get("/")
def listed(
    request: Request, here: Here, caller: Reader, view: Annotated[View, Query()]
) -> HTMLResponse:
    with here.database.reading() as session:
        lines, number = catalog.listed(session, view)
        return render(
            request,
            "records.html",
            caller,
            view=view,
            lines=lines,
            number=number,
            more=number > (view.page + 1) * catalog.ON_A_PAGE,
            choices=catalog.choices(session) | {"trust": get_args(Trust)},
            median=catalog.median(session),
            covered=lookups.covered(session),
            missed=lookups.missed(session),
            days=lookups.DAYS,
        )


@site.get("/records/{record}")
def record(request: Request, here: Here, caller: Reader, record: RecordId) -> HTMLResponse:
    id, _, batch = record.partition("@")
    with here.database.reading() as session:
        kept = StoredAnswer(session, Question(id=id, batch=int(batch)))
        job = jobs.last_for(session, record)
    held = here.reader.look_into(kept, RecordFilter(id=id, batch=int(batch))).held
    if not held:
        raise HTTPException(404, f"there is no record {record} that can be read")
    found = next(iter(once(held).values())).record
    shows = report(found, _url(request), line_anywhere(found))
    *sections, start = shows.sections
    return render(
        request,
        "record.html",
        caller,
        report=replace(shows, sections=tuple(filter(_says_something, sections))),
        start=start,
        record=found,
        advised=found.winner(found.use),
        trust=trust_of(found),
        job=job,
    )


def _says_something(section: Section) -> bool:
    """Whether a section has more than a reason why it is empty."""
    return section.name in ("chosen", "numerics") or bool(section.chart or section.table)


@site.post("/records/{record}/measure")
def measure_again(here: Here, caller: Submitter, _form: Form, record: RecordId) -> Response:
    """Queue the job that found a record once more, and go to its page."""
    with here.database.writing() as session:
        job = jobs.measure_again(session, record, caller)[0].id
    return RedirectResponse(f"/jobs/{job}", 303)


@site.get("/tokens")
def tokens_page(request: Request, here: Here, caller: Admin) -> HTMLResponse:
    return _tokens(request, here, caller)


def _tokens(
    request: Request, here: Service, caller: Caller, made: str = "", wrong: str = ""
) -> HTMLResponse:
    with here.database.reading() as session:
        found = tokens.listed(session)
    page: dict[str, Any] = {"tokens": found, "roles": MAY, "made": made, "wrong": wrong}
    return render(request, "tokens.html", caller, **page)


@site.post("/tokens")
def make(request: Request, here: Here, caller: Admin, form: Form) -> HTMLResponse:
    name, role, days = (form.get(field, "") for field in ("name", "role", "days"))
    try:
        if not re.fullmatch(r"[0-9]{0,5}", days):
            raise UsageError("days: expected a number, or nothing for ever")
        expires = time.time() + int(days) * DAY_S if days else None
        with here.database.writing() as session:
            made = tokens.make(session, name, role, expires, caller)[1]
    except UsageError as exc:
        return _tokens(request, here, caller, wrong=str(exc))
    return _tokens(request, here, caller, made)


@site.post("/tokens/{number}/revoke")
def revoke(here: Here, caller: Admin, _form: Form, number: Number) -> Response:
    with here.database.writing() as session:
        jobs.revoke_token(session, number, caller)
    return RedirectResponse("/tokens", 303)


@site.get("/machines")
def machines_page(request: Request, here: Here, caller: Reader) -> HTMLResponse:
    seen = list(here.machines.values())
    with here.database.reading() as session:
        running = machines.running(session)
    return render(
        request,
        "machines.html",
        caller,
        machines=seen,
        troubles=here.troubles + machines.troubles(seen),
        running=running,
        elsewhere=sorted({one["executor"] for one in running} - {one.name for one in seen}),
    )
