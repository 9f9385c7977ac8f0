"""The pages. The server renders them; they need no scripts and load nothing from elsewhere."""

from __future__ import annotations

import functools
import re
import time
from typing import Annotated, Any, NamedTuple, get_args
from urllib.parse import parse_qsl, urlencode

import jinja2
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from advisor.command_snippets import line_anywhere
from advisor.errors import StoreError, UsageError
from advisor.jobs.token import MAY, Role
from advisor.report.html import pages as rendering
from advisor.report.sections import report
from advisor.report.text import ago, cut, duration
from advisor.service import catalog, jobs, lookups, records, tokens
from advisor.service.access import COOKIE, MAX_UNTRUSTED, Service, ServiceDep
from advisor.service.catalog import View
from advisor.service.database import DAY_S
from advisor.service.records import Trust, trust_of
from advisor.service.routes.parsing import RecordId, RowNumber, found
from advisor.service.tokens import Caller

STATIC = StaticFiles(packages=[("advisor.service", "static")])
_MAX_FIELDS = 20
_PATH = re.compile(r"/(?!/)[A-Za-z0-9._~@/?&=%+,:-]{0,500}")

PAGES: dict[str, Any] = {
    "include_in_schema": False,
    "default_response_class": HTMLResponse,
    "max_body_size": MAX_UNTRUSTED,
}
site = APIRouter(**PAGES)


class PageRequest(NamedTuple):
    """A request from a browser with a logged-in user."""

    request: Request
    service: Service
    caller: Caller

    def render(self, name: str, **what: Any) -> HTMLResponse:
        return render(self.request, name, self.caller, **what)


def _logged_in(request: Request) -> Caller | None:
    service: Service = request.app.state.service
    cookie = request.cookies.get(COOKIE, "")
    return service.database.read(tokens.logged_in, cookie, service.address(request))


def visits(role: Role) -> Any:
    """A FastAPI dependency: the visit of a user whose token has this role or a higher one. Others
    are sent to the login page, which then leads to the requested page."""

    def visit(request: Request, service: ServiceDep) -> PageRequest:
        caller = _logged_in(request)
        if caller is None and "hx-request" in request.headers:
            raise HTTPException(401, "this session is over; log in again", {"HX-Refresh": "true"})
        if caller is None:
            page = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            to = f"?{urlencode({'to': page})}" if request.method == "GET" and page != "/" else ""
            raise HTTPException(303, headers={"Location": f"/login{to}"})
        caller.check(role)
        return PageRequest(request, service, caller)

    return Depends(visit)


def _local_path(path: str) -> str:
    """The path itself; '/' if it may lead to another server."""
    return path if _PATH.fullmatch(path) else "/"


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form. Raises HTTPException if it cannot be read, or another site sent it.

    Browsers name the sender in Sec-Fetch-Site, over plain HTTP only in Origin. A client without
    both is no browser with a victim's cookie.
    """
    site, origin = (request.headers.get(name, "") for name in ("sec-fetch-site", "origin"))
    if not site and origin:
        is_own = origin.partition("://")[2] == request.headers.get("host", "")
    else:
        is_own = site in ("same-origin", "none", "")
    if not is_own:
        raise HTTPException(403, "another site sent this form")
    try:
        text = (await request.body()).decode("ascii")
        return dict(parse_qsl(text, strict_parsing=bool(text), max_num_fields=_MAX_FIELDS))
    except ValueError as exc:
        raise HTTPException(422, "expected the fields of a form") from exc


ReadVisit = Annotated[PageRequest, visits("read")]
SubmitVisit = Annotated[PageRequest, visits("submit")]
AdminVisit = Annotated[PageRequest, visits("admin")]
Form = Annotated[dict[str, str], Depends(_form)]


def render(
    request: Request, name: str, caller: Caller | None = None, status: int = 200, **what: Any
) -> HTMLResponse:
    """Render a page; its menu has the entries that `caller` may use."""
    what |= {"caller": caller, "path": request.url.path, "now": time.time(), "status": status}
    what["url"] = request.app.state.service.url(request)
    return HTMLResponse(_templates().get_template(name).render(**what), status)


@functools.cache
def _templates() -> jinja2.Environment:
    templates = rendering("advisor.service")
    templates.globals |= {"day": day, "ago": ago, "cut": cut}
    templates.filters["span"] = span
    return templates


def error_page(request: Request, status: int, detail: str) -> HTMLResponse:
    """The page of an error, with the logged-in user's menu."""
    try:
        caller = _logged_in(request)
    except StoreError:
        caller = None
    if detail == "Not Found":
        detail = f"there is no page {request.url.path}"
    return render(request, "error.html", caller, status, detail=detail)


def day(seconds: float | None) -> str:
    """'2026-07-01 12:30', in UTC; '-' for no time."""
    if seconds is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(min(max(seconds, 0.0), 1e11)))


def span(seconds: float) -> str:
    """A duration, such as '3m 20s' or '2h 05m'."""
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
def log_in(request: Request, service: ServiceDep, form: Form) -> Response:
    to = _local_path(form.get("to", "/"))
    try:
        caller = service.admit(request, form.get("token", "").strip())
    except HTTPException as exc:
        return render(request, "login.html", None, exc.status_code, wrong=exc.detail, to=to)
    cookie = service.database.write(tokens.log_in, caller)
    answer = RedirectResponse(to, 303)
    secure = service.url(request).startswith("https:")
    kept: dict[str, Any] = {"httponly": True, "samesite": "strict", "secure": secure}
    answer.set_cookie(COOKIE, cookie, max_age=int(tokens.SESSION_S), **kept)
    return answer


@site.post("/logout")
def log_out(visit: ReadVisit, _form: Form) -> Response:
    visit.service.database.write(tokens.log_out, visit.request.cookies.get(COOKIE, ""))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


@site.get("/")
def list_records(visit: ReadVisit, view: Annotated[View, Query()]) -> HTMLResponse:
    with visit.service.database.reading() as session:
        lines, number = catalog.listed(session, view)
        return visit.render(
            "records.html",
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


@site.get("/records/{id}")
def record(visit: ReadVisit, id: RecordId) -> HTMLResponse:
    read = visit.service.database.read
    counts = read(records.counting, visit.service.reader, id)
    one = found(counts, f"record {id} that can be read")
    return visit.render(
        "record.html",
        report=report(one, visit.service.url(visit.request), line_anywhere(one)),
        record=one,
        advised=one.winner(one.use),
        trust=trust_of(one),
        job=read(jobs.last_for, id),
    )


@site.post("/records/{id}/measure")
def measure_again(visit: SubmitVisit, _form: Form, id: RecordId) -> Response:
    """Queue again the job that made a record, and redirect to the job's page."""
    with visit.service.database.writing() as session:
        job = jobs.measure_again(session, id, visit.caller)[0].id
    return RedirectResponse(f"/jobs/{job}", 303)


@site.get("/tokens")
def list_tokens(visit: AdminVisit) -> HTMLResponse:
    return _tokens(visit)


def _tokens(visit: PageRequest, made: str = "", wrong: str = "") -> HTMLResponse:
    every = visit.service.database.read(tokens.listed)
    return visit.render("tokens.html", tokens=every, roles=MAY, made=made, wrong=wrong)


@site.post("/tokens")
def make_token(visit: AdminVisit, form: Form) -> HTMLResponse:
    name, role, days = (form.get(field, "") for field in ("name", "role", "days"))
    try:
        if not re.fullmatch(r"[0-9]{0,5}", days):
            raise UsageError("days: expected a number, or nothing for a token that never expires")
        expires = time.time() + int(days) * DAY_S if days else None
        made = visit.service.database.write(tokens.make, name, role, expires, visit.caller)[1]
    except UsageError as exc:
        return _tokens(visit, wrong=str(exc))
    return _tokens(visit, made)


@site.post("/tokens/{number}/revoke")
def revoke_token(visit: AdminVisit, _form: Form, number: RowNumber) -> Response:
    visit.service.database.write(jobs.revoke_token, number, visit.caller)
    return RedirectResponse("/tokens", 303)
