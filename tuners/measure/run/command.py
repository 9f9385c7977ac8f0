"""The user's command as a process: started with a pilot inside, ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path

from advisor.errors import UsageError
from advisor.tuners.act.pilot.line import ADDRESS, SECRET

GUARD = str(Path(__file__).parent.parent / "worker" / "guard.py")
END_S = 30.0
CONTAINED = {
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "DISABLED",
    "MLFLOW_TRACKING_URI": "",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "CLEARML_OFFLINE_MODE": "1",
}
"""Switches by which libraries report to nobody; what they print and write is the script's."""
PYTHON = ("-I", "-E")
"""Options of Python with which it looks at no environment variable."""


class Command:
    """One start of a command. `log`: where what it prints goes.

    Args:
        injected: the folder that Python looks into first, for the pilot.

    Raises:
        UsageError: there is no such program.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        injected: Path,
        log: Path,
        more: Mapping[str, str] | None = None,
    ) -> None:
        program = shutil.which(words[0])
        if program is None:
            raise UsageError(f"command {words[0]!r}: no such program; give it as you would type it")
        self._folder = tempfile.TemporaryDirectory(prefix="advisor-", ignore_cleanup_errors=True)
        self.secret = secrets.token_bytes(32)
        self.listener = Listener(
            str(Path(self._folder.name) / "pilot"), "AF_UNIX", backlog=64, authkey=self.secret
        )
        scratch = Path(self._folder.name) / "tmp"
        scratch.mkdir()
        path = [str(injected), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            **{name: value for name, value in CONTAINED.items() if value},
            # Here and not in the scratch folder: what one start compiles the next one loads.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or compiled(),
            "TMPDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join(path),
            ADDRESS: str(self.listener.address),
            SECRET: self.secret.hex(),
            **(more or {}),
        }
        theirs, self._lifeline = os.pipe()
        unused, other = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", GUARD),
                    *(str(theirs), str(unused), "0", str(log)),
                    *(program, *words[1:]),
                ],
                pass_fds=(theirs, unused),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                # Out of the terminal's foreground group: Ctrl-C is the tuning process's to handle.
                start_new_session=True,
            )
        finally:
            for end in (theirs, unused, other):
                os.close(end)

    @property
    def ended(self) -> bool:
        """Whether it is over by itself."""
        return self._process.poll() is not None

    def accepted(self, seconds: float) -> Connection | None:
        """The line to a pilot, if one comes within so long."""
        socket = self.listener._listener._socket  # type: ignore[attr-defined] # to wait for one
        return self.listener.accept() if wait([socket], seconds) else None

    def obituary(self) -> tuple[int, str]:
        """(Exit code, the last line that it printed) of a command that is over."""
        assert self._process.stdout is not None
        try:
            self._process.wait(timeout=END_S)
            report = json.loads(self._process.stdout.read())
        except (subprocess.TimeoutExpired, ValueError):
            return 1, ""
        lines = [line.strip() for line in report["words"].splitlines() if line.strip()]
        return report["code"], lines[-1][:300] if lines else ""

    def end(self) -> None:
        """End it, and all that it started."""
        with contextlib.suppress(OSError):
            os.close(self._lifeline)
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        with contextlib.suppress(OSError):
            self.listener.close()
        self._folder.cleanup()


def compiled() -> str:
    """Where Inductor keeps what it compiled, by itself."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def how(code: int) -> str:
    """'exit code 1', or 'signal SIGKILL'."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
