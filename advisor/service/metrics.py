"""Metrics for Prometheus, and the headers of every answer."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.service.jobs import Counts

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self' data:; "
    "script-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    def __init__(self) -> None:
        self._registry = every = CollectorRegistry()
        labels, text = ("method", "route", "status"), "Time until an answer begins."
        self._requests = Counter("advisor_requests", "Requests.", labels, registry=every)
        self._seconds = Histogram(
            "advisor_request_seconds", text, labels[:2], buckets=_SECONDS, registry=every
        )
        self._records = Gauge("advisor_records", "Versions of records.", registry=every)
        self._jobs = Gauge("advisor_jobs", "Jobs.", ["state"], registry=every)
        self._attempts = Gauge("advisor_attempts", "Attempts.", ["state"], registry=every)
        name, text = "advisor_oldest_waiting_job_seconds", "Age of the oldest waiting job, or 0."
        self._oldest = Gauge(name, text, registry=every)

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        # The declared path: clients may request any number of others.
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if route != "none" else "none"
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(method, route).observe(seconds)

    def text(self, records: int, counts: Counts) -> bytes:
        """The metrics in Prometheus' format; the caller reads the arguments from the database."""
        self._records.set(records)
        for gauge, found in ((self._jobs, counts.jobs), (self._attempts, counts.attempts)):
            for state, number in found.items():
                gauge.labels(state).set(number)
        self._oldest.set(counts.oldest_s)
        return generate_latest(self._registry)


class AnswerMiddleware:
    """Counts and times every request, and adds HEADERS to its answer. Clients may not cache an
    answer without an ETag."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-cache" if "etag" in headers else "no-store")
                self._metrics.observe(scope, message["status"], time.perf_counter() - began)
            await send(message)

        await self._app(scope, receive, answer)
