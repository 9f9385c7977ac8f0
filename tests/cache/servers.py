"""Real servers on loopback, for tests of network stores and services."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

BUCKET = "records"
AWS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Environment of an S3 client; moto accepts any values."""


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


def certificate(folder: Path) -> tuple[Path, Path]:
    """Create a key and a certificate for 127.0.0.1; skips the test without OpenSSL."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is needed")
    key, cert = folder / "key.pem", folder / "certificate.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [openssl, "req", "-x509", *curve, "-nodes", "-days", "2", *names]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return key, cert


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2):
        return True
    return False


class Server:
    """A server process that can be killed and restarted. It runs as user `who` if given; `start`
    waits until `ready(port)` is true."""

    def __init__(
        self, command: list[str], port: int, who: str = "", ready: Callable[[int], bool] = answers
    ) -> None:
        self.port = port
        self._command, self._ready = command, ready
        self._who = {"user": who, "group": who} if who else {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(self._command, cwd="/", **self._who, **silent)
        limit = time.monotonic() + 60
        while not self._ready(self.port):
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{self._command[0]} does not start")
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


def redis_server(folder: Path) -> Server | None:
    """A Redis that flushes each write, so data survives a kill. None if Redis is not installed."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        return None
    port = free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    return Server([*command, "--appendonly", "yes", "--appendfsync", "always", "--save", ""], port)


def s3_server() -> Server:
    """A moto server. It keeps data in memory, so a kill loses all of it."""
    port = free_port()
    return Server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)


def make_bucket(port: int) -> None:
    import s3fs

    s3 = s3fs.S3FileSystem(endpoint_url=f"http://127.0.0.1:{port}", skip_instance_cache=True)
    with contextlib.suppress(FileExistsError):
        s3.mkdir(BUCKET)


@contextlib.contextmanager
def postgresql(durable: bool = False) -> Iterator[Server]:
    """A running PostgreSQL; skips the test if not installed. Root must not run it, so then it runs
    as user `postgres`. `durable`: commits survive a crash of the machine."""
    binaries = [Path(found).resolve().parent for found in [shutil.which("postgres")] if found]
    binaries += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    binary = next((one for one in binaries if (one / "initdb").exists()), None)
    if binary is None:
        pytest.skip("PostgreSQL is not installed")
    who = "postgres" if os.geteuid() == 0 else ""
    folder, port = Path(tempfile.mkdtemp(prefix="advisor-postgresql-")), free_port()
    try:
        if who:
            shutil.chown(folder, who, who)
        made = [binary / "initdb", "-D", folder / "data", "-U", "advisor", "-A", "trust"]
        as_user = {"user": who, "group": who} if who else {}
        command = [*made, "--no-sync", "--locale=C.UTF-8"]
        subprocess.run(command, check=True, capture_output=True, cwd="/", **as_user)
        # A killed server leaves its shared memory behind; mmap keeps it in the folder.
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": folder,
            "dynamic_shared_memory_type": "mmap",
            "fsync": "on" if durable else "off",
        }
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        command = [str(binary / "postgres"), "-D", str(folder / "data"), "-p", str(port), *words]
        with running(Server(command, port, who, accepts)) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def accepts(port: int) -> bool:
    """Whether PostgreSQL accepts connections; it opens its port earlier than that."""
    import psycopg

    with contextlib.suppress(psycopg.OperationalError):
        psycopg.connect(f"postgresql://advisor@127.0.0.1:{port}/postgres").close()
        return True
    return False
