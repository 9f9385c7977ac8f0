"""Checks a command's words, and runs it in a process that leaves no other process behind."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from advisor.errors import UsageError

GUARD = str(Path(__file__).parent.parent / "worker" / "guard.py")
END_S = 30.0
KEPT_OUT = (
    "the command sets PYTHONPATH itself, which keeps advisor out of it; add the value that is "
    "there, as in PYTHONPATH=.:$PYTHONPATH"
)
# The table that torchrun prints at its end.
_ROOT_CAUSE = re.compile(r"Root Cause .*?\n *rank +: (\d+).*?\n *exitcode +: (-?\d+)", re.DOTALL)
_ISOLATED = re.compile(r"-[A-Za-z]*[IES][A-Za-z]*")
_REPLACES = re.compile(r"^[^#\n]*\bPYTHONPATH=(?!\S*\$\{?PYTHONPATH)", re.MULTILINE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


class GuardedProcess:
    """A command in its own session; `measure/worker/guard.py` ends it and its descendants. Raises
    OSError if no process can be started.

    Args:
        words: the command; the first word is the path of its program.
        pipe: a file descriptor that the command inherits; -1: none.
        memory: bytes that the command and its descendants may hold; 0: no limit.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str],
        folder: Path | None = None,
        pipe: int = -1,
        memory: int = 0,
    ) -> None:
        # Both from `exit_report`: bytes held, if the guard ended the command for that; the rank
        # that failed first and its exit code, if torchrun said so.
        self.over, self.first_failed = 0, list[tuple[str, str]]()
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
        return self._process.poll() is not None

    def exit_report(self) -> tuple[int, str]:
        """(Exit code, the last line with words that it printed) of a command that has ended."""
        assert self._process.stdout is not None
        try:
            self._process.wait(timeout=END_S)
            report = json.loads(self._process.stdout.read())
        except (subprocess.TimeoutExpired, ValueError):
            return 1, ""
        self.over = report["over"]
        own, torchrun, _ = report["words"].partition("torch/distributed/elastic/")
        said = (own.rpartition("\n")[0] if torchrun else own).splitlines()
        self.first_failed = _ROOT_CAUSE.findall(report["words"])[-1:]
        lines = [line.strip() for line in said if any(map(str.isalnum, line))]
        return report["code"], lines[-1][:300] if lines else ""

    def end(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._lifeline)
        self._lifeline = -1  # the descriptor's number may be reused
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def exit_text(code: int) -> str:
    """'exit code 1', or 'signal SIGKILL'."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"signal {-code}"


def inductor_folder() -> str:
    """The folder of Inductor's cache for the present TMPDIR, as in
    torch._inductor.runtime.cache_dir_utils, which takes seconds to import."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    safe = re.sub(r'[\\/:*?"<>|]', "_", user)
    return f"{tempfile.gettempdir()}/torchinductor_{safe}"


def program(words: Sequence[str]) -> str:
    """The path of a command's program; raises UsageError if there is none."""
    word = words[0]
    if found := shutil.which(word):
        return found
    if _VARIABLE.fullmatch(word):
        why = "a variable is set by a shell; put env before it"
    elif not word:
        why = "it is empty"
    elif Path(word).is_dir():
        why = "a folder is no program; give the command as you would type it"
    elif not Path(word).is_file():
        why = "no such program; give the command as you would type it"
    else:
        by = "python" if word.endswith(".py") else "the program that runs it, such as bash,"
        why = f"this file is no program; put {by} before it"
    raise UsageError(f"command {word!r}: {why}")


def measurable(words: Sequence[str]) -> str:
    """As `program`; also raises UsageError as `check_open`, or if a word is not one line."""
    path = program(words)
    check_open(words)
    if odd := next((word for word in words if not word.isprintable()), None):
        raise UsageError(f"command: {odd!r:.80} is not one printable line; put it into a script")
    return path


def check_open(words: Sequence[str]) -> None:
    """Raise UsageError if a command's Python is isolated, so that it would load no pilot."""
    if option := isolated(words):
        raise UsageError(f"python {option} keeps advisor out of the command; leave {option} out")


def isolated(words: Sequence[str]) -> str:
    """The option that makes a command's Python ignore PYTHONPATH; '' if there is none."""
    for at, word in enumerate(words):
        if Path(word).name.startswith("python"):
            options = iter(words[at + 1 :])
            for option in options:
                if not option.startswith("-") or option in ("-c", "-m"):
                    break
                if option in ("-W", "-X"):
                    next(options, None)
                elif _ISOLATED.fullmatch(option):
                    return option
    return ""


def replaces_path(words: Sequence[str]) -> bool:
    """Whether a command, or a shell script in it, sets PYTHONPATH without the value that it had."""
    texts = [*words]
    for script in (Path(word) for word in words if word.endswith(".sh")):
        with contextlib.suppress(OSError):
            texts.append(script.read_text(errors="replace"))
    return any(map(_REPLACES.search, texts))
