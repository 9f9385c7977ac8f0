"""Pythons that tests start, as forks of one that has imported torch: importing is most of them.

A fork is as a process of its own: the same words, environment, folder and output, a path and a main
module as at its start, and torch is imported only once something imports it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import os
import random
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

READ_AT_START = ("OMP_", "MKL_", "ONEDNN_", "LD_", "PYTHONHASHSEED", "PYTHONOPTIMIZE")
"""Variables that decide before a fork could: with another value a real Python is started."""
_SHARED = "TESTS_FORKS"
"""The variable with the path of the server that all processes of a session share."""


def run(
    script: Path, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `python SCRIPT WORD ...` prints, and how it ends."""
    command = [sys.executable, str(script), *words]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        there = os.environ if env is None else env
        forked = Fork(command, env=there, cwd=cwd, stdout=out.fileno(), stderr=err.fileno())
        code = forked.wait()
        said = []
        for one in (out, err):
            one.seek(0)
            said.append(one.read())
        return subprocess.CompletedProcess(command, code, *said)


def until(holds: Callable[[], Any], within_s: float = 200.0) -> Any:
    """What is found, as soon as it is something."""
    end = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < end, f"it did not come about within {within_s:.0f} s"
        time.sleep(0.02)
    return found


def alive(process: int) -> bool:
    """Whether a process runs; a zombie waits for its parent alone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def started_with(text: object) -> list[int]:
    """The processes with a text in their words."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(text).encode() in (one / "cmdline").read_bytes():
                found.append(int(one.name))
    return found


class Fork:
    """As `subprocess.Popen`, of words that begin with this Python.

    Args:
        pass_fds: descriptors that it inherits under numbers of their own, which replace theirs in
            its words.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdout: int = subprocess.PIPE,
        stderr: int = 2,
        pass_fds: Sequence[int] = (),
        line: socket.socket | None = None,
        **_how: object,
    ) -> None:
        self.stdout = None
        if stdout == subprocess.PIPE:
            ours, stdout = os.pipe()
            self.stdout = os.fdopen(ours, "rb")
            pass_out = stdout
        self._status, theirs = os.pipe()
        self._code: int | None = None
        asked = {
            "words": list(words),
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "passed": list(pass_fds),
            "memory": resource.getrlimit(resource.RLIMIT_AS),
        }
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(asked).encode())
            file.flush()
            socket.send_fds(
                line or server(), [b"?"], [file.fileno(), theirs, stdout, stderr, *pass_fds]
            )
        os.close(theirs)
        if self.stdout is not None:
            os.close(pass_out)
        self.pid = int(self._line())

    def _line(self) -> str:
        found = b""
        while not found.endswith(b"\n"):
            if not (one := os.read(self._status, 1)):
                raise RuntimeError("the server of forks is gone")
            found += one
        return found.decode().strip()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            self._code = int(self._line())
            os.close(self._status)
        return self._code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Popen:
    """In the place of `subprocess.Popen` where guards are started: a guard and its worker, or its
    command, are forks if they are this Python's."""

    def __new__(cls, words: Sequence[str], **how: Any) -> Any:
        guarded = words[9:]
        here = {n: v for n, v in os.environ.items() if n.startswith(READ_AT_START)}
        there = {n: v for n, v in how["env"].items() if n.startswith(READ_AT_START)}
        if here == there and _forks(guarded):
            return Fork(words, **how)
        return subprocess.Popen(words, **how)


def _forks(words: Sequence[str]) -> bool:
    """Whether words start a Python as this one, with options that `_become` knows."""
    if not words or Path(words[0]).resolve() != Path(sys.executable).resolve():
        return False
    rest = list(words[1:])
    while rest and rest[0] in ("-P", "-u"):
        rest.pop(0)
    return bool(rest) and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))


@contextlib.contextmanager
def instead_of_guarded_processes() -> Iterator[None]:
    """Have guards of this process start forks."""
    from advisor.tuners.measure.run import guarded_process

    plain = guarded_process.subprocess
    forking = types.SimpleNamespace(
        **{n: getattr(plain, n) for n in plain.__all__} | {"Popen": Popen}
    )
    guarded_process.subprocess = forking  # type: ignore[assignment]
    try:
        yield
    finally:
        guarded_process.subprocess = plain


@functools.cache
def server() -> socket.socket:
    """A line to the server of this process and of those that it starts from here on."""
    line = socket.socket(socket.AF_UNIX)
    if _SHARED in os.environ:
        line.connect(os.environ[_SHARED])
        return line
    folder = tempfile.mkdtemp()
    os.environ[_SHARED] = f"{folder}/forks"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.environ[_SHARED])
        listening.listen()
        line.connect(os.environ[_SHARED])
        number = listening.fileno()
        started = subprocess.Popen(
            [sys.executable, "-P", __file__, str(number)],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    atexit.register(_end, started, line, folder)
    return line


def _end(server: subprocess.Popen[bytes], line: socket.socket, folder: str) -> None:
    """With the scripts that hang, if any do."""
    line.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)


def serve(number: int) -> None:
    """Fork for each message on a line, and tell how the forks end, until the last line is cut."""
    listening = socket.socket(fileno=number)
    lines: list[socket.socket] = []
    running: dict[int, tuple[int, int]] = {}  # by a descriptor of the process
    while True:
        ready, _, _ = select.select([listening, *lines, *running], [], [])
        for one in ready:
            if one is listening:
                lines.append(listening.accept()[0])
            elif isinstance(one, socket.socket):
                said, fds, _, _ = socket.recv_fds(one, 1, 16)
                if not said:
                    one.close()
                    lines.remove(one)
                    if not lines:
                        return
                    continue
                asked = _asked(fds.pop(0))
                status, *given = fds
                if (process := os.fork()) == 0:
                    os.close(status)
                    for line in (listening, *lines):
                        line.close()
                    _begin(given, **asked)
                running[os.pidfd_open(process)] = process, status
                os.write(status, f"{process}\n".encode())
                for fd in given:
                    os.close(fd)
            else:
                process, status = running.pop(one)
                _, ended = os.waitpid(process, 0)
                os.close(one)
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, f"{os.waitstatus_to_exitcode(ended)}\n".encode())
                os.close(status)


def _asked(fd: int) -> dict[str, Any]:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        found: dict[str, Any] = json.load(file)
        return found


def _begin(
    fds: list[int],
    *,
    words: list[str],
    env: dict[str, str],
    cwd: str,
    passed: list[int],
    memory: list[int],
) -> None:
    """Be the process that was asked for; does not return."""
    code = 1
    try:
        os.setsid()
        # A runner started in the background ignores it, and so would its children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out, err, *theirs = fds
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_AS, (memory[0], memory[1]))
        numbers = dict(zip(map(str, passed), map(str, theirs), strict=True))
        words = [numbers.get(word, word) for word in words]
        _close_but(theirs)
        code = _guard(words[3], words[4:]) if "-I" in words[:2] else _become(words)
    finally:
        os._exit(code)


def _close_but(kept: list[int]) -> None:
    """Close what is open, other than the standard streams."""
    for one in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if one > 2 and one not in kept:
            with contextlib.suppress(OSError):
                os.close(one)


def _guard(guard: str, words: list[str]) -> int:
    """Run the guard, which forks; its fork becomes the command in the place of another program."""
    before, path = set(sys.modules), list(sys.path)

    def execv(_program: str, command: list[str]) -> None:
        os.execv = plain
        for name in set(sys.modules) - before:
            del sys.modules[name]
        sys.path[:] = path
        _close_but([int(words[1])])
        os._exit(_become(command))

    plain, os.execv = os.execv, execv  # type: ignore[assignment]
    sys.argv[:] = [guard, *words]
    runpy.run_path(guard, run_name="__main__")
    return 0


def _become(command: list[str]) -> int:
    """Run a script, a module or code as if this Python had been started with it."""
    random.seed()
    sys.orig_argv[:] = command
    words = command[1:]
    isolated = "-P" in words
    while words[0] in ("-P", "-u"):
        words.pop(0)
    given = os.environ.get("PYTHONPATH", "")
    sys.path[:0] = [str(Path(one).absolute()) for one in given.split(os.pathsep) if one]
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code = 0
    try:
        if words[0] in ("-m", "-c"):
            if not isolated:
                sys.path.insert(0, "" if words[0] == "-c" else str(Path.cwd()))
            sys.argv[:] = [words[0], *words[2:]]
            if words[0] == "-c":
                exec(compile(words[1], "<string>", "exec"), main.__dict__)
            else:
                runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        else:
            sys.argv[:] = words
            if not isolated:
                sys.path.insert(0, str(Path(words[0]).parent.absolute()))
            main.__file__ = words[0]
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    return code


class _Hidden:
    """Finds torch once something imports it: all that it consists of is there again."""

    def __init__(self) -> None:
        names = [name for name in sys.modules if name == "torch" or name.startswith("torch.")]
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._spec: Any = self._modules["torch"].__spec__

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name != "torch" or not self._modules:
            return None
        at = self._spec.origin
        return importlib.util.spec_from_loader(name, self, origin=at)  # type: ignore[arg-type]

    def create_module(self, _spec: Any) -> types.ModuleType:
        return self._modules["torch"]

    def exec_module(self, module: types.ModuleType) -> None:
        sys.modules.update(self._modules)
        module.__spec__, self._modules = self._spec, {}


if __name__ == "__main__":
    import torch
    import torch._dynamo  # what building an optimizer imports
    import torch.utils.data  # noqa: F401

    for one in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if one in sys.path:
            sys.path.remove(one)
    sys.meta_path.insert(0, _Hidden())
    gc.freeze()  # no collection of a fork looks through it
    serve(int(sys.argv[1]))
