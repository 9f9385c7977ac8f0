"""The pages. The server renders them; they need no scripts and load nothing from elsewhere."""

from __future__ import annotations

import functools
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlencode

import jinja2
from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from advisor.cache.reader import Sought, once
from advisor.errors import StoreError, UsageError
from advisor.printed import line_anywhere
from advisor.report.data import Section
from advisor.report.html import pages as rendering
from advisor.report.sections import report
from advisor.report.text import age, cut, duration
from advisor.service import catalog, coverage, jobs, machines, tokens
from advisor.service.access import COOKIE, Here, Service, service_of
from advisor.service.catalog import View
from advisor.service.database import DAY_S
from advisor.service.limits import HEADERS
from advisor.service.records import TRUSTS, Kept, Question, framework_of, trust_of
from advisor.service.roles import MAY
from advisor.service.tokens import Caller

_PACKAGE = "advisor.service"
_STATIC = {
    "icon.svg": "image/svg+xml",
    "htmx-4.0.1.min.js": "text/javascript",
    "pico-2.1.1.min.css": "text/css",
}
_POLICY = (
    HEADERS["Content-Security-Policy"].replace("img-src 'self'", "img-src 'self' data:")
    + "; script-src 'self'; connect-src 'self'"
)
"""Of pages: the style sheet has its icons as data."""
_MOST_FIELDS = 20
_PATH = re.compile(r"/(?!/)[A-Za-z0-9._~@/?&=%+,:-]{0,500}")
_ID = r"^[0-9a-f]{12}@[1-9][0-9]{0,9}$"

site = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


def visitor(request: Request) -> Caller | None:
    """Who is logged in, in the browser that asks."""
    here = service_of(request)
    with here.database.reading() as session:
        cookie = request.cookies.get(COOKIE, "")
        return tokens.logged_in(session, cookie, here.address(request))


def visits(role: str) -> Callable[..., Caller]:
    """A dependency: whose browser it is, logged in with a token that may do what this role may."""

    def caller(request: Request, here: Here) -> Caller:
        found = visitor(request)
        if found is None and "hx-request" in request.headers:
            raise HTTPException(401, "this session is over", {"HX-Refresh": "true"})
        if found is None:
            raise HTTPException(303, headers={"Location": _login(request)})
        if not found.may(role):
            raise HTTPException(403, f"this token may {found.role}; this page needs {role}")
        here.limit(found.token, writes=False)
        return found

    caller.role = role  # type: ignore[attr-defined] # for who walks over the routes
    return caller


def _login(request: Request) -> str:
    """Where one logs in, and goes on to the page that was asked for."""
    if request.method != "GET" or request.url.path == "/":
        return "/login"
    asked = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return f"/login?{urlencode({'to': asked})}"


def _own_page(path: str) -> str:
    """A path of this server as a link told it; '/' where it may lead elsewhere."""
    return path if _PATH.fullmatch(path) else "/"


Reader = Annotated[Caller, Depends(visits("read"))]
Submitter = Annotated[Caller, Depends(visits("submit"))]
Admin = Annotated[Caller, Depends(visits("admin"))]


async def sent(request: Request) -> dict[str, str]:
    """The fields of a form that a page of this server sent.

    Raises:
        HTTPException: another site sent it, or it is no form.
    """
    if not _is_own(request):
        raise HTTPException(403, "another site sent this form")
    try:
        text = (await request.body()).decode("ascii")
        return dict(parse_qsl(text, strict_parsing=bool(text), max_num_fields=_MOST_FIELDS))
    except ValueError as exc:
        raise HTTPException(422, "no form") from exc


def _is_own(request: Request) -> bool:
    """Whether a page of this server sent a form. Over plain HTTP to another host browsers say no
    more than its origin, which `Referrer-Policy` lets them; what is no browser says nothing."""
    site = request.headers.get("sec-fetch-site", "")
    if not site and (origin := request.headers.get("origin", "")):
        return origin.partition("://")[2] == request.headers.get("host", "")
    return site in ("same-origin", "none", "")


Sent = Annotated[dict[str, str], Depends(sent)]


def _own(request: Request, form: Sent) -> dict[str, str]:
    """As `sent`, of a page of this very session."""
    key = tokens.form_key(request.cookies.get(COOKIE, ""))
    if not secrets.compare_digest(form.get("form_key", "").encode(), key.encode()):
        raise HTTPException(403, "this form is of another session; load the page again")
    return form


OwnForm = Annotated[dict[str, str], Depends(_own)]


def shown(request: Request, name: str, caller: Caller | None = None, **what: Any) -> HTMLResponse:
    """A page; `caller` decides what its menu has."""
    key = tokens.form_key(request.cookies.get(COOKIE, "")) if caller else ""
    what |= {"caller": caller, "form_key": key, "path": request.url.path, "now": time.time()}
    text = _templates().get_template(name).render(**what)
    return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})


@functools.cache
def _templates() -> jinja2.Environment:
    found = rendering(_PACKAGE)
    found.globals |= {"day": day, "ago": ago, "cut": cut}
    found.filters["span"] = span
    return found


def refusal(request: Request, status: int, detail: str) -> HTMLResponse:
    """The page of an error, with the menu of whoever is logged in."""
    try:
        caller = visitor(request)
    except StoreError:
        caller = None
    page = shown(request, "error.html", caller, status=status, detail=detail)
    page.status_code = status
    return page


def day(seconds: float | None) -> str:
    """A time as a page has it, '-' for none."""
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


@site.get("/static/{file}")
def static(file: str) -> Response:
    """A file that pages name; a script's name holds its version."""
    kind = _STATIC.get(file)
    if kind is None:
        raise HTTPException(404, "there is no such file")
    data = resources.files(_PACKAGE).joinpath("static", file).read_bytes()
    return Response(data, media_type=kind, headers={"Cache-Control": "public, max-age=86400"})


@site.get("/login")
def login(request: Request, to: str = "/") -> HTMLResponse:
    return shown(request, "login.html", wrong="", to=_own_page(to))


@site.post("/login")
async def log_in(request: Request, here: Here, form: Sent) -> Response:
    return await run_in_threadpool(_log_in, request, here, form)


def _log_in(request: Request, here: Service, form: Mapping[str, str]) -> Response:
    to = _own_page(form.get("to", "/"))
    try:
        caller = here.admit(form.get("token", "").strip(), here.address(request))
    except HTTPException as exc:
        refusal = shown(request, "login.html", wrong=exc.detail, to=to)
        refusal.status_code = exc.status_code
        return refusal
    with here.database.writing() as session:
        cookie = tokens.log_in(session, caller)
        tokens.note_use(session, caller)
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
def log_out(request: Request, here: Here, _caller: Reader, _form: OwnForm) -> Response:
    with here.database.writing() as session:
        tokens.log_out(session, request.cookies.get(COOKIE, ""))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def url_of(request: Request) -> str:
    """As who trains names this server."""
    proto = "https" if service_of(request).encrypted(request) else "http"
    return f"{proto}://{request.headers.get('host', '')}"


@site.get("/")
def listed(
    request: Request, here: Here, caller: Reader, view: Annotated[View, Query()]
) -> HTMLResponse:
    with here.database.reading() as session:
        lines, number = catalog.listed(session, view)
        return shown(
            request,
            "records.html",
            caller,
            view=view,
            lines=lines,
            number=number,
            more=number > (view.page + 1) * catalog.ON_A_PAGE,
            choices=catalog.choices(session) | {"trust": TRUSTS},
            median=catalog.median(session),
            covered=coverage.covered(session),
            missed=coverage.missed(session),
            days=coverage.DAYS,
            url=url_of(request),
        )


@site.get("/records/{key}")
def record(
    request: Request, here: Here, caller: Reader, key: Annotated[str, Path(pattern=_ID)]
) -> HTMLResponse:
    id, _, batch = key.partition("@")
    with here.database.reading() as session:
        kept = Kept(session, Question(id=id, batch=int(batch)))
        held = here.reader.look_into(kept, Sought(id=id, batch=int(batch))).held
        job = jobs.finder(session, key)
    if not held:
        raise HTTPException(404, f"there is no record {key} that can be read")
    found, url = next(iter(once(held).values())).record, url_of(request)
    shows = report(found, url, line_anywhere(found))
    *sections, start = shows.sections
    return shown(
        request,
        "record.html",
        caller,
        report=replace(shows, sections=tuple(filter(_says_something, sections))),
        start=start,
        record=found,
        advised=found.winner(found.use),
        trust=trust_of(found),
        framework=framework_of(found),
        job=job,
        url=url,
    )


def _says_something(section: Section) -> bool:
    """Whether a section has more than a reason why it is empty."""
    return section.name in ("chosen", "numerics") or bool(section.chart or section.table)


@site.get("/tokens")
def tokens_page(request: Request, here: Here, caller: Admin) -> HTMLResponse:
    return _tokens(request, here, caller)


def _tokens(
    request: Request, here: Service, caller: Caller, made: str = "", wrong: str = ""
) -> HTMLResponse:
    with here.database.reading() as session:
        page = {"tokens": tokens.listed(session), "roles": MAY}
        return shown(request, "tokens.html", caller, made=made, wrong=wrong, **page)


@site.post("/tokens")
def make(request: Request, here: Here, caller: Admin, form: OwnForm) -> HTMLResponse:
    made, wrong = "", ""
    try:
        days = form.get("days", "")
        if days and not (days.isdecimal() and days.isascii() and 0 < len(days) < 6):
            raise UsageError("days: expected a number, or nothing for ever")
        expires = time.time() + int(days) * DAY_S if days else None
        with here.database.writing() as session:
            _token, made = tokens.make(
                session, form.get("name", ""), form.get("role", ""), expires, caller
            )
    except UsageError as exc:
        wrong = str(exc)
    return _tokens(request, here, caller, made, wrong)


@site.post("/tokens/{number}/revoke")
def revoke(
    here: Here, caller: Admin, _form: OwnForm, number: Annotated[int, Path(ge=1, lt=2**31)]
) -> Response:
    with here.database.writing() as session:
        jobs.revoke_token(session, number, caller)
    return RedirectResponse("/tokens", 303)


@site.get("/machines")
def machines_page(request: Request, here: Here, caller: Reader) -> HTMLResponse:
    seen = here.machines.look()
    with here.database.reading() as session:
        running = machines.running(session)
    known = {one.name for one in seen}
    return shown(
        request,
        "machines.html",
        caller,
        machines=seen,
        troubles=here.troubles + machines.troubles(seen),
        running=running,
        elsewhere=sorted({one["executor"] for one in running} - known),
    )
