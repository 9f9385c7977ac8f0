"""Sends requests to a server from many concurrent clients in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True, slots=True)
class Request:
    """A request and the HTTP status that it must get."""

    method: str
    path: str
    token: str
    body: bytes | None = None
    expected: int = 200


async def _send(http: aiohttp.ClientSession, one: Request) -> None:
    headers = {"Authorization": f"Bearer {one.token}", "Accept-Encoding": "gzip"}
    headers |= {"Content-Type": "application/json"} if one.method == "POST" else {}
    async with http.request(one.method, one.path, data=one.body, headers=headers) as response:
        text = await response.read()
        if response.status != one.expected:
            raise SystemExit(f"{one.method} {one.path}: {response.status} {text[:300]!r}")


def _session(port: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        f"http://127.0.0.1:{port}",
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(120),
        auto_decompress=False,
    )


async def run_clients(
    port: int, requests: Iterator[Request], clients: int, seconds: float
) -> list[float]:
    """Runs clients for some seconds, one request or more each. Returns the seconds per request."""
    durations: list[float] = []
    until = time.monotonic() + seconds

    async def client(http: aiohttp.ClientSession) -> None:
        while True:
            one = next(requests)
            began = time.perf_counter()
            await _send(http, one)
            durations.append(time.perf_counter() - began)
            if time.monotonic() >= until:
                return

    async with _session(port) as http, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client(http))
    return durations


async def send_at_rate(
    port: int, requests: Iterator[Request], per_second: float, seconds: float
) -> list[float]:
    async def once(after_s: float, one: Request) -> float:
        await asyncio.sleep(after_s)
        async with _session(port) as http:
            began = time.perf_counter()
            await _send(http, one)
            return time.perf_counter() - began

    count = int(per_second * seconds)
    return await asyncio.gather(*(once(n / per_second, next(requests)) for n in range(count)))
