"""A real Ray cluster on this machine, of nodes whose GPUs are made up."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from advisor.service.executors.ray import LABEL
from advisor.tuners.measure.run.guarded import Guarded
from tests.cache.servers import answers, free_port

ROOT = Path(__file__).parents[2]
TOKEN = "made-up-token-of-a-cluster-that-asks-for-one"
_LIMIT_S = 200.0
_MARK = "NODE_OF_TEST"
"""In the environment of all that a node starts."""


def until(found: Callable[[], Any], limit_s: float = _LIMIT_S) -> Any:
    """What is found, as soon as it is something."""
    limit = time.monotonic() + limit_s
    while not (value := found()):
        assert time.monotonic() < limit, f"not within {limit_s} s"
        time.sleep(0.1)
    return value


class Node:
    """A node as processes, of which nothing is left when it is killed: words of `ray start`."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = str(folder)
        self._guarded = Guarded(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *words),
                *("--temp-dir", str(folder), "--object-store-memory", "80000000"),
                *("--dashboard-agent-listen-port", "0", "--include-log-monitor", "false"),
            ],
            log=folder.with_suffix(".log"),
            environment=_environment() | {_MARK: str(folder)},
        )

    def attempts(self) -> list[int]:
        """The processes of attempts on it, and all that these started."""
        return [pid for pid, line in self._processes() if " -m advisor." in line]

    def kill_raylet(self) -> None:
        """Nobody answers for the node any more, and what it started is left behind."""
        [raylet] = [pid for pid, line in self._processes() if "/raylet/raylet " in line]
        os.kill(raylet, signal.SIGKILL)

    def kill(self) -> None:
        self._guarded.end()

    def _processes(self) -> Iterator[tuple[int, str]]:
        mark = f"{_MARK}={self.folder}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it is over
                if mark in _words(folder / "environ"):
                    yield int(folder.name), b" ".join(_words(folder / "cmdline")).decode()


class Cluster:
    """A head without GPUs, and nodes with one each."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: of a socket's path 107 bytes
        self._port, self._client, self.port = free_port(), free_port(), free_port()
        self.head: Node | None = None
        self.nodes: dict[str, Node] = {}
        self._begun = 0

    @property
    def address(self) -> str:
        return f"ray-jobs:http://127.0.0.1:{self.port}"

    def start(self, *gpus: str) -> None:
        """The head, then a node for each name, which are waited for."""
        words = ["--head", "--port", str(self._port), "--num-cpus", "0", "--num-gpus", "0"]
        words += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(self.port)]
        self.head = Node(self._new(), *words, "--ray-client-server-port", str(self._client))
        until(lambda: answers(self._port))  # long before its dashboard does
        for gpu in gpus:
            self.add(gpu)
        until(lambda: {None, *gpus} <= self.alive())

    def add(self, gpu: str) -> Node:
        words = ["--address", f"127.0.0.1:{self._port}", "--num-cpus", "1", "--num-gpus", "1"]
        self.nodes[gpu] = Node(self._new(), *words, "--labels", f"{LABEL}={gpu}")
        return self.nodes[gpu]

    def kill(self) -> None:
        for node in filter(None, (self.head, *self.nodes.values())):
            node.kill()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def alive(self) -> set[str | None]:
        """The labels of the nodes that the head knows as alive; None for its own."""
        try:
            said = json.loads(self.ask("GET", "/api/v0/nodes"))
            found = said["data"]["result"]["result"]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return set()
        return {one["labels"].get(LABEL) for one in found if one["state"] == "ALIVE"}

    def ask(self, method: str, path: str, body: object = None) -> bytes:
        """What the head answers; also an error of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            connection.request(method, path, json.dumps(body), headers)
            return connection.getresponse().read()
        finally:
            connection.close()

    def _new(self) -> Path:
        self._begun += 1
        return self._folder / str(self._begun)


def _environment() -> dict[str, str]:
    beside = str(Path(sys.executable).parent)
    return os.environ | {
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", "")]),
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        # A node that is gone is missed after some seconds, not after half a minute.
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
    }


def _words(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\0")


@contextlib.contextmanager
def cluster(*gpus: str) -> Iterator[Cluster]:
    found = Cluster()
    try:
        found.start(*gpus)
        yield found
    finally:
        found.close()
