"""A server process that tests can kill, and a real Ray cluster whose nodes have fake GPUs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from advisor.client import Client, Job
from advisor.service.executors.ray import ACCELERATOR
from advisor.tuners.measure.run.guarded_process import GuardedProcess
from tests.cache.servers import answers, free_port
from tests.forks import until
from tests.service.serving import ask
from tests.service.test_serve import Process

ROOT = Path(__file__).parents[2]
TOKEN = "made-up-token-of-a-cluster-that-asks-for-one"
SERVE = """
from advisor.cli import main
from advisor.service import attempts, reconcile

attempts.LEASE_S = reconcile.LEASE_S = {lease_s}  # tests wait for the end of one
reconcile.EVERY_S = 0.2  # and for what it sees
main()
"""
FEW: Mapping[str, Any] = {
    **{"shape": ["8x4"], "budget": "1m", "effort": "quick"},
    **{"batches": [], "compile": False, "trials": 2},
}
"""Options of a tuning with a fixed number of trials, however slow the host is."""
_MARK = "NODE_OF_TEST"  # environment variable of every process that a node starts


class Stack:
    """A server process that can be killed and restarted, and a client that submits jobs."""

    def __init__(self, folder: Path, *words: str, lease_s: float = 60.0) -> None:
        self.folder, self.port, self.token = folder, free_port(), ""
        self.database = f"sqlite:///{folder}/service.db"
        self._words = ("--database", self.database, "--port", str(self.port), *words)
        self._program = ("-c", SERVE.format(lease_s=lease_s))
        self.start()

    def start(self) -> None:
        self.server = Process(*self._words, program=self._program)
        self.token = self.token or self.server.token
        self.client = Client(f"http://127.0.0.1:{self.port}?timeout=20s", self.token)

    def submit(self, files: Mapping[str, str], **asked: Any) -> int:
        code = Path(tempfile.mkdtemp(dir=self.folder))
        for name, text in files.items():
            (code / name).write_text(text)
        return self.client.submit(folder=code, **asked).id

    def log(self, number: int) -> str:
        return "".join(self.client.log(number))

    def until(self, number: int, fulfilled: Callable[[Job], bool]) -> Job:
        """Wait until the job fulfils the condition, and return it."""

        def poll() -> Job | None:
            job = self.client.job(number)
            assert fulfilled(job) or not job.over, (job, self.log(number)[-2000:])
            return job if fulfilled(job) else None

        job: Job = until(poll)
        return job


class Node:
    """The processes of `ray start` with these arguments; `kill` ends all of them."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = str(folder)
        self._guarded = GuardedProcess(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *words),
                *("--temp-dir", str(folder), "--object-store-memory", "80000000"),
                *("--dashboard-agent-listen-port", "0", "--include-log-monitor", "false"),
            ],
            log=folder.with_suffix(".log"),
            environment=_environment() | {_MARK: str(folder)},
        )

    def attempts(self) -> list[int]:
        """Process ids of the attempts on this node, and of their descendants."""
        return [pid for pid, line in self._processes() if " -m advisor." in line]

    def kill_raylet(self) -> None:
        """Make the node unresponsive; the processes that it started keep running."""
        [raylet] = [pid for pid, line in self._processes() if "/raylet/raylet " in line]
        os.kill(raylet, signal.SIGKILL)

    def kill(self) -> None:
        self._guarded.end()

    def _processes(self) -> Iterator[tuple[int, str]]:
        mark = f"{_MARK}={self.folder}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended
                if mark in _words(folder / "environ"):
                    yield int(folder.name), b" ".join(_words(folder / "cmdline")).decode()


class Cluster:
    """Nodes with one fake GPU each; `start` makes the first one the head."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: sockets allow 107 bytes
        self._port, self._client, self.port = free_port(), free_port(), free_port()
        self.nodes: dict[str, Node] = {}

    @property
    def address(self) -> str:
        return f"ray-jobs:http://127.0.0.1:{self.port}"

    def start(self, head: str, *gpus: str) -> None:
        """Start one node per GPU name, and wait until all are alive."""
        words = ["--head", "--port", str(self._port)]
        words += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(self.port)]
        self.add(head, *words, "--ray-client-server-port", str(self._client))
        until(lambda: answers(self._port))  # its dashboard takes much longer
        for gpu in gpus:
            self.add(gpu)
        until(lambda: {head, *gpus} <= self.alive())

    def add(self, gpu: str, *words: str) -> Node:
        """Add a node; without `words` it joins as a worker node."""
        has = ["--num-cpus", "1", "--num-gpus", "1", "--labels", f"{ACCELERATOR}={gpu}"]
        words = words or ("--address", f"127.0.0.1:{self._port}")
        self.nodes[gpu] = Node(self._folder / uuid.uuid4().hex[:4], *words, *has)
        return self.nodes[gpu]

    def kill(self) -> None:
        for node in self.nodes.values():
            node.kill()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def alive(self) -> set[str]:
        """GPU labels of the nodes that the head lists as alive."""
        try:
            found = json.loads(self.ask("GET", "/api/v0/nodes"))["data"]["result"]["result"]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return set()
        return {one["labels"][ACCELERATOR] for one in found if one["state"] == "ALIVE"}

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Returns the body of the head's response, of error responses too."""
        return ask(self.port, method, path, TOKEN, body).data


def _environment() -> dict[str, str]:
    beside = str(Path(sys.executable).parent)
    return os.environ | {
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", "")]),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Detect a dead node after a few seconds, not after half a minute.
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
    }


def _words(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\0")
