"""The application: its routes, and how errors are answered."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware import Middleware
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from advisor.errors import RecordDamaged, StoreError, UsageError, printable
from advisor.service import job_pages, pages
from advisor.service.access import Service, away
from advisor.service.archives import NoCode
from advisor.service.limits import Bodies
from advisor.service.metrics import Answers
from advisor.service.pages import STATIC, error_page
from advisor.service.routes import api

STATUS: Mapping[type[Exception], int] = {
    NoCode: 428,
    PermissionError: 403,
    RecordDamaged: 422,
    UsageError: 422,
}
"""What a refusal is answered with, and its text."""
_log = logging.getLogger("advisor")


def application(service: Service, version: str) -> FastAPI:
    """The server's application."""
    app = FastAPI(
        title="advisor",
        version=version,
        docs_url=None,  # FastAPI's own page loads its scripts from elsewhere
        redoc_url=None,
        middleware=[
            Middleware(Answers, metrics=service.metrics),
            Middleware(Bodies, check=service.check_sender),
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=3),
        ],
    )
    app.state.service = service
    for router in (api, pages.site, job_pages.site):
        app.include_router(router)
    app.mount("/static", STATIC)
    for refusal, status in STATUS.items():
        app.add_exception_handler(
            refusal, lambda request, exc, status=status: _refused(request, status, str(exc))
        )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StoreError, _away)
    app.add_exception_handler(ClientDisconnect, lambda _request, _exc: Response(status_code=400))
    app.openapi()  # made once, and not in the first request
    return app


def _refused(
    request: Request, status: int, detail: str, headers: Mapping[str, str] | None = None
) -> Response:
    """A refusal as JSON, or as a page for a browser."""
    detail = printable(detail)[:500]
    if status == 303 or "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"detail": detail}, status, headers)
    page = error_page(request, status, detail)
    page.headers.update(headers or {})
    return page


def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    return _refused(request, exc.status_code, exc.detail, exc.headers)


def _invalid(request: Request, exc: Exception) -> Response:
    """What is wrong, without what was sent: it may be a secret."""
    assert isinstance(exc, RequestValidationError)
    wrong = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in exc.errors()[:5]]
    return _refused(request, 422, "; ".join(wrong))


def _away(request: Request, exc: Exception) -> Response:
    _log.error("%s", exc)
    return _http_error(request, away())
