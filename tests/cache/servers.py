"""Real servers on loopback, for the stores at the other end of a network."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

BUCKET = "records"
AWS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""What an S3 client wants to have; moto takes any."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2):
        return True
    return False


class Server:
    """A process that listens on a port; it can be stopped and started again."""

    def __init__(self, command: list[str], port: int, **env: str) -> None:
        self.port = port
        self._command = command
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            env=os.environ | self._env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        limit = time.monotonic() + 60
        while not answers(self.port):
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{self._command[0]} does not start")
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def redis_server(folder: Path) -> Server | None:
    """None where Redis is not installed. What was put survives a kill: each write is flushed."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        return None
    port = free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    return Server([*command, "--appendonly", "yes", "--appendfsync", "always", "--save", ""], port)


def s3_server() -> Server:
    """moto's, which keeps everything in memory: what was put does not survive a kill."""
    port = free_port()
    return Server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)


def make_bucket(port: int) -> None:
    import s3fs

    with contextlib.suppress(FileExistsError):
        s3fs.S3FileSystem(endpoint_url=f"http://127.0.0.1:{port}", skip_instance_cache=True).mkdir(
            BUCKET
        )


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    server.start()
    try:
        yield server
    finally:
        server.kill()
