"""Scripts in forks of a Python that has imported torch, which is most of what a short one takes."""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path


def run(
    script: Path, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `python SCRIPT WORD ...` prints, and how it ends.

    It is the main module, nothing of advisor is loaded before it, and Python ends as it does
    otherwise; what it gives of the environment to a library that is loaded already has no effect.
    """
    command = [sys.executable, str(script), *words]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        asked = {"command": command, "cwd": str(cwd or Path.cwd()), "env": dict(env or os.environ)}
        server = _server()
        assert server.stdin and server.stdout
        print(json.dumps(asked | {"out": str(out), "err": str(err)}), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


@functools.cache
def _server() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    words = [sys.executable, "-P", __file__]
    server = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """With the script that hangs, if one does."""
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate()


def _serve() -> None:
    """Fork for each line that is read, until one is the fork."""
    import torch  # noqa: F401

    gc.freeze()  # no collection of a fork looks through it
    for line in sys.stdin:
        if os.fork() == 0:
            _become(**json.loads(line))
            return
        _, status = os.wait()
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(command: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    """Run a script as if this Python had been started with it."""
    for number, (path, how) in enumerate(((os.devnull, "r"), (out, "w"), (err, "w"))):
        with open(path, how) as file:  # noqa: PTH123
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    _, script, *_words = sys.orig_argv[:] = command
    sys.argv[:] = command[1:]
    sys.path.insert(0, str(Path(script).parent))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


if __name__ == "__main__":
    _serve()
