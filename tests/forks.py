"""Starts Python processes as forks of a server that has imported torch, which saves start-up time.

A fork behaves like a new process: it has its own arguments, environment, folder, output, sys.path
and main module, and torch appears in sys.modules only once something imports it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import pickle
import random
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import context, process, reduction, resource_tracker, spawn
from pathlib import Path
from typing import Any
from unittest import mock

READ_AT_START = ("OMP_", "MKL_", "ONEDNN_", "LD_", "PYTHONHASHSEED", "PYTHONOPTIMIZE")
"""Variables that are read at start. If one of them differs, a real Python is started instead."""
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["preloaded"])  # conftest.py adds tests/started to PYTHONPATH
_STARTING = threading.Lock()


def run(
    script: Path, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python SCRIPT WORD ...` and returns its output and exit code."""
    command = [sys.executable, str(script), *words]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        env = os.environ if env is None else env
        forked = Fork(command, env=env, cwd=cwd, stdout=out.fileno(), stderr=err.fileno())
        code = forked.wait()
        outputs = []
        for one in (out, err):
            one.seek(0)
            outputs.append(one.read())
        return subprocess.CompletedProcess(command, code, *outputs)


def call(target: Callable[..., None], *args: object) -> Fork:
    """Starts a process that calls a function and prints to the output of this process."""
    code = CALL.format(sys.path, pickle.dumps((target, args)))
    return Fork([sys.executable, "-c", code], env=os.environ, stdout=1)


CALL = "import pickle, sys; sys.path[:] = {}; target, args = pickle.loads({}); target(*args)"


def until(holds: Callable[[], Any], within_s: float = 200.0) -> Any:
    """Waits until `holds` returns something true, and returns it."""
    end = time.monotonic() + within_s
    while not (value := holds()):
        assert time.monotonic() < end, f"it did not come about within {within_s:.0f} s"
        time.sleep(0.02)
    return value


def alive(process: int) -> bool:
    """Whether a process runs. A zombie does not count."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def started_with(text: object) -> list[int]:
    """Returns the ids of the processes whose command line contains a text."""
    processes = []
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(text).encode() in (one / "cmdline").read_bytes():
                processes.append(int(one.name))
    return processes


class Fork:
    """Like `subprocess.Popen`, for commands that start this Python.

    Args:
        pass_fds: descriptors to inherit. Their numbers change in the fork, and in the words of its
            command.
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
        **_how: object,
    ) -> None:
        self.stdout = None
        if piped := stdout == subprocess.PIPE:
            ours, stdout = os.pipe()
            self.stdout = os.fdopen(ours, "rb")
        passed = {str(fd): _Descriptor(fd) for fd in pass_fds}
        given = [_Descriptor(stdout), _Descriptor(stderr), passed]
        memory = resource.getrlimit(resource.RLIMIT_AS)
        args = [[*words], dict(env), str(cwd or Path.cwd()), memory, *given]
        self._process = _SERVER.Process(target=_become_process, args=args, daemon=True)
        with _STARTING, mock.patch.object(spawn, "get_preparation_data", _same_path):
            self._process.start()
        if piped:
            os.close(stdout)
        self.pid: int = self._process.pid
        self.kill = self._process.kill

    def poll(self) -> int | None:
        self._process.join(0)
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return code


class _Descriptor:
    """A file descriptor to send to a fork, where it arrives as its new number."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._fd),)


def _received(sent: Any) -> int:
    number: int = sent.detach()
    return number


def _same_path(_name: str) -> dict[str, Any]:
    """Lets a fork find this module. Does not send the main module of this process."""
    return {"sys_path": [*sys.path]}


def popen(words: Sequence[str], **how: Any) -> Any:
    """Replaces `subprocess.Popen` for guards. If the command starts this Python, the guard and the
    command are forks."""
    ours, theirs = (
        {name: value for name, value in env.items() if name.startswith(READ_AT_START)}
        for env in (os.environ, how["env"])
    )
    return (Fork if ours == theirs and _can_fork(words[9:]) else subprocess.Popen)(words, **how)


FORKING = types.SimpleNamespace(
    **{name: getattr(subprocess, name) for name in subprocess.__all__} | {"Popen": popen}
)
"""Replaces the module subprocess."""


def _can_fork(words: Sequence[str]) -> bool:
    """Whether a command starts this Python, with options that `_become` supports."""
    if not words or Path(words[0]).resolve() != Path(sys.executable).resolve():
        return False
    rest = list(words[1:])
    while rest and rest[0] in ("-P", "-u"):
        rest.pop(0)
    return bool(rest) and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))


def _become_process(
    words: list[str],
    env: dict[str, str],
    cwd: str,
    memory: tuple[int, int],
    out: int,
    err: int,
    passed: dict[str, int],
) -> None:
    """Becomes the requested process. Does not return."""
    code = 1
    try:
        os.setsid()
        # A test run in the background ignores SIGINT, which its children would inherit.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None
        resource.setrlimit(resource.RLIMIT_AS, memory)
        _detach_from_server()
        words = [str(passed.get(word, word)) for word in words]
        _close_all_but([*passed.values()])
        code = _guard(words[3], words[4:]) if "-I" in words[:2] else _become(words)
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _detach_from_server() -> None:
    """Makes a fork a main process, which can start processes itself."""
    preloaded = sys.modules.pop("preloaded")
    process._current_process = preloaded.PROCESS  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    context._default_context._actual_context = None  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    sys.path[:] = preloaded.PATH
    for name in ("tests", "tests.forks"):
        del sys.modules[name]
    sys.stdin = os.fdopen(0, closefd=False)


def _close_all_but(kept: list[int]) -> None:
    """Closes all descriptors other than these and the standard streams."""
    for one in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if one > 2 and one not in kept:
            with contextlib.suppress(OSError):
                os.close(one)


def _guard(guard: str, words: list[str]) -> int:
    """Runs the guard, which forks. Its fork becomes the command instead of executing a program."""
    before, path = set(sys.modules), list(sys.path)

    def execv(_program: str, command: list[str]) -> None:
        os.execv = plain
        for name in set(sys.modules) - before:
            del sys.modules[name]
        sys.path[:] = path
        _close_all_but([int(words[1])])
        os._exit(_become(command))

    plain, os.execv = os.execv, execv  # type: ignore[assignment]
    sys.argv[:] = [guard, *words]
    runpy.run_path(guard, run_name="__main__")
    return 0


def _become(command: list[str]) -> int:
    """Runs a script, a module or code as if this Python had been started with it."""
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
