"""The pages: rendered here, without scripts, nothing from elsewhere. What they show is escaped."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from advisor.cache.domain import LONGEST, is_line
from advisor.cache.kinds import Shapes
from advisor.cache.name import target_part
from advisor.cache.reader import Sought, once
from advisor.cache.shown import times
from advisor.errors import UsageError
from advisor.printed import line_anywhere
from advisor.report.data import Comparison, Estimate, Table
from advisor.report.html import pages as rendering
from advisor.report.html import template
from advisor.report.sections import report
from advisor.service import coverage, jobs, records, tokens
from advisor.service.access import COOKIE, Here, Service, service_of
from advisor.service.coverage import Covered
from advisor.service.database import DAY_S
from advisor.service.records import Fleet, Kept, Question
from advisor.service.roles import ROLES
from advisor.service.routes.admin import EVENTS
from advisor.service.tokens import Caller

ON_A_PAGE = 50
"""Records in a list."""
OVER = "/session-over"
"""Where a page that follows a job is sent without a session."""
_PACKAGE = "advisor.service"
_STATIC = {
    "icon.svg": "image/svg+xml",
    "htmx-4.0.1.min.js": "text/javascript",
    "hx-sse-4.0.1.min.js": "text/javascript",
}
_MOST_STALE = 10
_MOST_FIELDS = 20
_PATH = re.compile(r"/(?!/)[A-Za-z0-9._~@/?&=%+,:-]{0,500}")
_ID = r"^[0-9a-f]{12}@[1-9][0-9]{0,9}$"

site = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


def visits(role: str) -> Callable[..., Caller]:
    """A dependency: whose browser it is, logged in with a token that may do what this role may."""

    def caller(request: Request, here: Here) -> Caller:
        with here.database.reading() as session:
            cookie = request.cookies.get(COOKIE, "")
            found = tokens.logged_in(session, cookie, here.address(request))
        if found is None:
            follows = "text/event-stream" in request.headers.get("accept", "")
            raise HTTPException(303, headers={"Location": OVER if follows else _login(request)})
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
    return HTMLResponse(rendered(request, name, caller, **what))


def rendered(request: Request, name: str, caller: Caller | None = None, **what: Any) -> str:
    """The text of a page, or of a part of one."""
    key = tokens.form_key(request.cookies.get(COOKIE, "")) if caller else ""
    page = rendering(_PACKAGE).get_template(name)
    return page.render(caller=caller, form_key=key, path=request.url.path, day=day, **what)


def day(seconds: float | None) -> str:
    """A time as a page has it, '-' for none."""
    if seconds is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(min(max(seconds, 0.0), 1e11)))


@site.get("/style.css")
def style() -> Response:
    texts = [template(name, _PACKAGE) for name in ("style.css", "service.css")]
    headers = {"Cache-Control": "public, max-age=300"}
    return Response("\n".join(filter(None, texts)), media_type="text/css", headers=headers)


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


@site.get("/")
def fleet(
    request: Request,
    here: Here,
    caller: Reader,
    page: Annotated[int, Query(ge=0, le=10**5)] = 0,
    hours: Annotated[float, Query(gt=0, le=1e5)] = 1.0,
) -> HTMLResponse:
    with here.database.reading() as session:
        devices = records.fleet(session)
        covered = coverage.covered(session)
        what = {
            "devices": _devices(devices, covered),
            "chart": _gains(devices),
            "asked": _asked_for(covered),
            "saved": coverage.saved(session),
            "spent": coverage.spent(session),
            "missed": coverage.missed(session),
            "outdated": coverage.outdated(session, _MOST_STALE),
        }
        found = records.newest(session, ON_A_PAGE + 1, page * ON_A_PAGE)
    return shown(
        request,
        "fleet.html",
        caller,
        **what,
        days=coverage.DAYS,
        hours=hours,
        lines=found[:ON_A_PAGE],
        page=page,
        more=len(found) > ON_A_PAGE,
        url=url_of(request),
    )


def _devices(devices: list[Fleet], covered: list[Covered]) -> Table:
    """Each kind that has records or was asked for."""
    table = Table(
        f"GPU types; coverage is of the lookups of the last {coverage.DAYS} days",
        ("device", "records", "mean speed-up", "last measured (UTC)", "lookups", "coverage"),
        right=("records", "mean speed-up", "lookups", "coverage"),
        whole=("last measured (UTC)",),
    )
    asked = {one.device: one for one in covered}
    for one in devices:
        speedup = times(one.mean)
        table.row(one.device, f"{one.records:,}", speedup, day(one.newest), *_use(asked, one))
    known = {one.device for one in devices}
    for other in covered:
        if other.device not in known:
            table.row(other.device, "0", "-", "-", *_use(asked, other))
    return table


def _use(asked: Mapping[str, Covered], one: Fleet | Covered) -> tuple[str, str]:
    found = asked.get(one.device)
    return (f"{found.lookups:,}", f"{found.share:.0%}") if found else ("0", "-")


def _asked_for(covered: list[Covered]) -> Covered:
    """Of all devices together."""
    total = {
        name: sum(getattr(one, name) for one in covered)
        for name in ("exact", "stale", "nearest", "miss")
    }
    return Covered(device="", **total)


def url_of(request: Request) -> str:
    """As who trains names this server."""
    proto = "https" if service_of(request).encrypted(request) else "http"
    return f"{proto}://{request.headers.get('host', '')}"


def _gains(devices: list[Fleet]) -> Comparison | None:
    rows = tuple(Estimate(one.device, one.mean, one.least, one.most) for one in devices)
    if not rows:
        return None
    return Comparison(
        title="Speed-up of what is advised, by device",
        axis="over what was there before: mean of all records, from the least to the largest",
        rows=rows,
        text=times,
        reference=1.0,
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
        report=replace(shows, sections=tuple(sections)),
        start=start,
        job=job,
        command=found.key.task.command,
        url=url,
    )


@site.get("/why")
def why(
    request: Request,
    here: Here,
    caller: Reader,
    target: Annotated[str, Query(max_length=LONGEST)] = "",
    device: Annotated[str, Query(max_length=LONGEST)] = "",
    shape: Annotated[str, Query(max_length=100)] = "",
    mode: Annotated[str, Query(pattern="^(train|infer|)$")] = "",
) -> HTMLResponse:
    asked = {"target": target, "device": device, "shape": shape, "mode": mode}
    wrong, question = "", None
    try:
        question = _asked(asked) if target else None
    except UsageError as exc:
        wrong = str(exc)
    with here.database.reading() as session:
        devices = [one.device for one in records.fleet(session)]
        found = records.near(session, question) if question else []
    return shown(
        request,
        "why.html",
        caller,
        asked=asked,
        devices=devices,
        near=found,
        wrong=wrong,
        done=question is not None,
    )


def _asked(form: Mapping[str, str]) -> Question:
    if not all(map(is_line, form.values())):
        raise UsageError("expected lines of printable text")
    wanted: dict[str, Any] = {}
    if form["device"]:
        wanted["device.name"] = form["device"]
    if form["mode"]:
        wanted["mode"] = form["mode"]
    if form["shape"]:
        wanted["shapes"] = Shapes().checked("shape", form["shape"])[0][1:]
    file, colon, _attribute = form["target"].partition(":")
    target = target_part(form["target"]) if colon else ""
    return Question(file=file, target=target, wanted=wanted)


@site.get("/tokens")
def tokens_page(request: Request, here: Here, caller: Admin) -> HTMLResponse:
    return _tokens(request, here, caller)


def _tokens(
    request: Request, here: Service, caller: Caller, made: str = "", wrong: str = ""
) -> HTMLResponse:
    with here.database.reading() as session:
        page = {"tokens": tokens.listed(session), "roles": ROLES, "now": time.time()}
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


@site.get("/audit")
def audit(
    request: Request,
    here: Here,
    caller: Admin,
    before: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
) -> HTMLResponse:
    with here.database.reading() as session:
        found = tokens.events(session, before, EVENTS)
        return shown(request, "audit.html", caller, events=found, more=len(found) == EVENTS)


@site.get("/docs")
def docs(request: Request) -> HTMLResponse:
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    listed = [
        (method.upper(), path, what)
        for path, methods in paths.items()
        for method, what in methods.items()
    ]
    return shown(request, "docs.html", listed=listed)
