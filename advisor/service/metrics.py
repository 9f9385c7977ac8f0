"""What Prometheus may read of a server."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.service.jobs import Counts

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """Of one server; what is in the database is told when it is asked for."""

    def __init__(self) -> None:
        self._all = CollectorRegistry()
        self._requests = Counter(
            "advisor_requests", "Requests.", ("method", "route", "status"), registry=self._all
        )
        self._seconds = Histogram(
            "advisor_request_seconds",
            "Until an answer begins.",
            ("method", "route"),
            buckets=_SECONDS,
            registry=self._all,
        )
        self._records = Gauge("advisor_records", "Records, every version.", registry=self._all)
        self._jobs = Gauge("advisor_jobs", "Jobs.", ("state",), registry=self._all)
        self._attempts = Gauge("advisor_attempts", "Attempts.", ("state",), registry=self._all)
        self._oldest = Gauge(
            "advisor_oldest_waiting_job_seconds",
            "How long a job has waited at most; 0 where none waits.",
            registry=self._all,
        )

    def saw(self, scope: Scope, status: int, seconds: float) -> None:
        # The path as it was declared: what clients ask for would be names without end.
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if route != "none" else "none"
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(method, route).observe(seconds)

    def text(self, records: int, counts: Counts) -> bytes:
        """In Prometheus' own form."""
        self._records.set(records)
        for gauge, found in ((self._jobs, counts.jobs), (self._attempts, counts.attempts)):
            for state, number in found.items():
                gauge.labels(state).set(number)
        self._oldest.set(counts.oldest_s)
        return generate_latest(self._all)


class Measured:
    """Counts and times every request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()

        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.saw(scope, message["status"], time.perf_counter() - began)
            await send(message)

        await self._app(scope, receive, say if scope["type"] == "http" else send)
