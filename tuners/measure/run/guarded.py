"""A command that leaves no process behind, even if the process that started it dies."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

GUARD = str(Path(__file__).parent.parent / "worker" / "guard.py")
END_S = 30.0


class Guarded:
    """A command in a session of its own, under the guard of `measure/worker/guard.py`.

    Args:
        words: the path of its program first.
        log: where what it prints goes, as far as the guard writes it; None for nowhere.
        folder: where it is started; None for here.
        pipe: a descriptor that it inherits, -1 for none.
        memory: bytes that it and all that it starts may hold, 0 for no limit.

    Attributes:
        over: bytes that they held when the guard ended them for it; known after `obituary`.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        log: Path | None,
        environment: Mapping[str, str],
        folder: Path | None = None,
        pipe: int = -1,
        memory: int = 0,
    ) -> None:
        self.over = 0
        theirs, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", GUARD),
                    *(str(theirs), str(pipe), str(memory)),
                    *("" if log is None else str(log), tempfile.gettempdir()),
                    *words,
                ],
                pass_fds=(theirs,) if pipe < 0 else (theirs, pipe),
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                # Out of the terminal's foreground group: Ctrl-C is the tuning process's to handle.
                start_new_session=True,
            )
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            os.close(theirs)
        self.pid = self._process.pid

    @property
    def ended(self) -> bool:
        """It has ended by itself."""
        return self._process.poll() is not None

    def obituary(self) -> tuple[int, str]:
        """(Exit code, the last line with words that it printed) of a command that is over."""
        assert self._process.stdout is not None
        try:
            self._process.wait(timeout=END_S)
            report = json.loads(self._process.stdout.read())
        except (subprocess.TimeoutExpired, ValueError):
            return 1, ""
        self.over = report["over"]
        said = report["words"].splitlines()
        lines = [line.strip() for line in said if any(map(str.isalnum, line))]
        return report["code"], lines[-1][:300] if lines else ""

    def end(self) -> None:
        """End it, and everything that it started."""
        with contextlib.suppress(OSError):
            os.close(self._lifeline)
        self._lifeline = -1  # the number may be another file's by now
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def how(code: int) -> str:
    """'exit code 1', or 'signal SIGKILL'."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # one of those for real time, which have no names
        return f"signal {-code}"


def inductor_folder() -> str:
    """Where Inductor keeps what it compiles, if TMPDIR stays: as in
    torch._inductor.runtime.cache_dir_utils, which takes seconds to import."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    safe = re.sub(r'[\\/:*?"<>|]', "_", user)
    return f"{tempfile.gettempdir()}/torchinductor_{safe}"
