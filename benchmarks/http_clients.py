"""Clients of a server, as many as are wanted, in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True, slots=True)
class Asked:
    """A request; `expected`: the status of its answer."""

    method: str
    path: str
    token: str
    body: bytes | None = None
    expected: int = 200


async def _ask(http: aiohttp.ClientSession, one: Asked) -> aiohttp.ClientResponse:
    headers = {"Authorization": f"Bearer {one.token}", "Accept-Encoding": "gzip"}
    if one.method == "POST":
        headers["Content-Type"] = "application/json"
    async with http.request(one.method, one.path, data=one.body, headers=headers) as answer:
        said = await answer.read()
        if answer.status != one.expected:
            raise SystemExit(f"{one.method} {one.path}: {answer.status} {said[:300]!r}")
        return answer


def _session(port: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        f"http://127.0.0.1:{port}",
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(120),
        auto_decompress=False,
    )


async def at_once(port: int, asked: Iterator[Asked], clients: int, seconds: float) -> list[float]:
    """Seconds of each request; each client asks at least once."""
    took: list[float] = []
    until = time.monotonic() + seconds

    async def client(http: aiohttp.ClientSession) -> None:
        while True:
            one = next(asked)
            began = time.perf_counter()
            await _ask(http, one)
            took.append(time.perf_counter() - began)
            if time.monotonic() >= until:
                return

    async with _session(port) as http, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client(http))
    return took


async def at_a_rate(
    port: int, asked: Iterator[Asked], a_second: float, seconds: float
) -> list[float]:
    async def once(after_s: float, one: Asked) -> float:
        await asyncio.sleep(after_s)
        async with _session(port) as http:
            began = time.perf_counter()
            await _ask(http, one)
            return time.perf_counter() - began

    count = int(a_second * seconds)
    return await asyncio.gather(*(once(n / a_second, next(asked)) for n in range(count)))
