"""The FastAPI application: its routes, and the answers to errors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware import Middleware
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from advisor.cache.codec import MAX_BYTES
from advisor.errors import RecordDamaged, StoreError, UsageError, printable
from advisor.jobs.spec import AttemptOver
from advisor.service import job_pages, pages
from advisor.service.access import BodyMiddleware, Service, unavailable
from advisor.service.blobs import NoCode
from advisor.service.catalog import COLUMNS
from advisor.service.metrics import AnswerMiddleware
from advisor.service.pages import STATIC, error_page
from advisor.service.routes import admin, attempts, jobs, records
from advisor.service.routes.parsing import REFUSALS

STATUS: Mapping[type[Exception], int] = {
    AttemptOver: 409,
    NoCode: 428,
    PermissionError: 403,
    RecordDamaged: 422,
    UsageError: 422,
    ClientDisconnect: 400,
}
"""The HTTP status for each exception. The answer's text is the exception's."""
_RECORD = "expected a record's id, such as ae1bff61eea5@64"
EXPECTED: Mapping[str, str] = {
    "path id": _RECORD,
    "path record": _RECORD,
    "query sort": f"expected one of {', '.join(COLUMNS)}; put - before it for the largest first",
}
"""Allowed values in an address, in words: pydantic's message shows only the pattern."""
PLAIN = {
    "Input should be": "expected",
    "String should have": "expected",
    "greater than or equal to": "at least",
    "a valid integer": "a whole number",
}
"""pydantic's words, and plain ones."""
_log = logging.getLogger("advisor")


def application(service: Service, version: str) -> FastAPI:
    app = FastAPI(
        title="advisor",
        version=version,
        docs_url=None,  # FastAPI's own page loads its scripts from elsewhere
        redoc_url=None,
        middleware=[
            Middleware(AnswerMiddleware, metrics=service.metrics),
            Middleware(BodyMiddleware, check=service.check_sender),
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=3),
        ],
    )
    app.state.service = service
    for subject in (records, jobs, attempts, admin):
        app.include_router(subject.api, responses=REFUSALS, max_body_size=MAX_BYTES)
    app.include_router(pages.site)
    app.include_router(job_pages.site)
    app.mount("/static", STATIC)
    for error in (HTTPException, RequestValidationError, StoreError, *STATUS):
        app.add_exception_handler(error, _refused)
    app.openapi()  # made now, so that the first request does not wait
    return app


def _refused(request: Request, exc: Exception) -> Response:
    """A refusal as JSON, or as a page for a browser."""
    refusal = _refusal(exc)
    status, detail = refusal.status_code, printable(refusal.detail)[:500]
    if status == 303 or "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"detail": detail}, status, refusal.headers)
    page = error_page(request, status, detail)
    page.headers.update(refusal.headers or {})
    return page


def _refusal(exc: Exception) -> HTTPException:
    if isinstance(exc, HTTPException):
        return exc
    for error, status in STATUS.items():
        if isinstance(exc, error):
            return HTTPException(status, str(exc))
    if isinstance(exc, RequestValidationError):
        lines = dict(map(_wrong, exc.errors()[4::-1]))
        return HTTPException(422, "; ".join(": ".join(one) for one in lines.items()))
    _log.error("%s", exc)
    return unavailable()


def _wrong(error: Mapping[str, Any]) -> tuple[str, str]:
    """Returns (a refused value, what is allowed). Of a body, which may hold secrets, only names."""
    source, *names = error["loc"]
    if source == "body" or not names:
        return ".".join(map(str, names)), error["msg"]
    why = error["msg"].partition(", unable to parse")[0]
    for words, plain in PLAIN.items():
        why = why.replace(words, plain)
    return f"{names[0]} {str(error['input'])[:80]!r}", EXPECTED.get(f"{source} {names[0]}", why)
