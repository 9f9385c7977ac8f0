"""The application: routes, what holds for all of them, and how errors are told."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect

from advisor.errors import RecordDamaged, StoreError, UsageError, printable
from advisor.service.access import Service
from advisor.service.job_pages import job_pages
from advisor.service.limits import Bodies, Headers
from advisor.service.metrics import Measured
from advisor.service.pages import refusal, site
from advisor.service.record_forms import record_forms
from advisor.service.routes import api

_log = logging.getLogger("advisor")


def application(service: Service, version: str) -> FastAPI:
    """The server's application."""
    app = FastAPI(
        title="advisor",
        version=version,
        docs_url=None,  # FastAPI's own page loads its scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    app.include_router(api)
    app.include_router(site)
    app.include_router(job_pages)
    app.include_router(record_forms)
    app.add_exception_handler(HTTPException, _told)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(RecordDamaged, _refused)
    app.add_exception_handler(UsageError, _refused)
    app.add_exception_handler(StoreError, _away)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    # The last one added is the first to see a request.
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=3)
    app.add_middleware(Bodies, most=service.most)
    app.add_middleware(Headers)
    app.add_middleware(Measured, metrics=service.metrics)
    app.openapi()  # made once, and not in the first request
    return app


def _told(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 405 and "route" in request.scope:
        exc.headers = {"Allow": _allowed(request)}
    if exc.status_code == 303:
        return JSONResponse({"detail": exc.detail}, exc.status_code, exc.headers)
    return _refusal(request, exc.status_code, exc.detail, exc.headers)


def _refusal(
    request: Request, status: int, detail: str, headers: Mapping[str, str] | None = None
) -> Response:
    """As a page for a browser."""
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"detail": detail}, status, headers)
    page = refusal(request, status, detail)
    page.headers.update(headers or {})
    return page


def _allowed(request: Request) -> str:
    """All methods of a path: a route knows its own alone."""
    route = request.scope["route"]
    known = request.app.openapi()["paths"].get(route.path_format, route.methods)
    return ", ".join(sorted(method.upper() for method in known))


def _invalid(request: Request, exc: Exception) -> Response:
    """What is wrong, without what was sent: it may be a secret."""
    assert isinstance(exc, RequestValidationError)
    wrong = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in exc.errors()[:5]]
    return _refusal(request, 422, printable("; ".join(wrong))[:500])


def _refused(request: Request, exc: Exception) -> Response:
    return _refusal(request, 422, printable(str(exc))[:500])


def _disconnected(_request: Request, _exc: Exception) -> Response:
    return Response(status_code=400)  # which nobody reads


def _away(request: Request, exc: Exception) -> Response:
    """Where the database is and what it says is for who runs the server."""
    _log.error("%s", exc)
    return _refusal(request, 503, "the server's database does not answer", {"Retry-After": "1"})
