"""The application: routes, what holds for all of them, and how errors are told."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.middleware.gzip import GZipMiddleware

from advisor.errors import RecordDamaged, StoreError, UsageError, printable
from advisor.service.access import Service
from advisor.service.limits import Bodies, Headers
from advisor.service.metrics import Measured
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
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(RecordDamaged, _refused)
    app.add_exception_handler(UsageError, _refused)
    app.add_exception_handler(StoreError, _away)
    # The last one added is the first to see a request.
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=3)
    app.add_middleware(Bodies)
    app.add_middleware(Headers, lasting=service.tls)
    app.add_middleware(Measured, metrics=service.metrics)
    return app


def _invalid(_request: Request, exc: Exception) -> JSONResponse:
    """What is wrong, without what was sent: it may be a secret."""
    assert isinstance(exc, RequestValidationError)
    wrong = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in exc.errors()[:5]]
    return JSONResponse({"detail": printable("; ".join(wrong))[:500]}, 422)


def _refused(_request: Request, exc: Exception) -> JSONResponse:
    return JSONResponse({"detail": printable(str(exc))[:500]}, 422)


def _away(_request: Request, exc: Exception) -> JSONResponse:
    """Where the database is and what it says is for who runs the server."""
    _log.error("%s", exc)
    return JSONResponse(
        {"detail": "the server's database does not answer"}, 503, {"Retry-After": "1"}
    )
