"""What user code raised, as one line: also in a loader's worker, and where."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path

from advisor.tuners.fingerprint import is_library

CAUGHT = re.compile(r"Caught \w+ in DataLoader worker process \d+")
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)
_DEAD = re.compile(
    r"DataLoader worker \(pid.+?\) "
    r"(is killed by signal: [\w ]+|exited unexpectedly(?: with exit code \d+)?)"
)
_HINTS = {
    "Bus error": "as where /dev/shm is full",
    "unable to allocate shared memory": "as where /dev/shm is full",
    "re-initialize CUDA in forked": 'DataLoader(multiprocessing_context="spawn") starts workers '
    "that may use CUDA",
    "t pickle": 'DataLoader(multiprocessing_context="fork") needs no pickling',
    "Pickling": 'DataLoader(multiprocessing_context="fork") needs no pickling',
}
MOST = 300
"""Characters."""


def told(exc: BaseException) -> str:
    """One line: 'in a worker: ValueError: no such image (data.py:12)'."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()] or [""]
    at = f" ({found})" if (found := where(exc)) else ""
    if CAUGHT.search(lines[0]):
        said = f"in a worker: {lines[-1]}{at}"
    elif dead := _DEAD.findall(_chain(exc)):
        said = f"a worker {dead[-1].strip()}"
    elif _ended_early(exc):
        said = "a worker ended before its batch was taken"
    else:
        said = f"{type(exc).__name__}: {lines[0]}{at}"
    hint = next((f"; {hint}" for part, hint in _HINTS.items() if part in said), "")
    return (said + hint)[:MOST]


def where(exc: BaseException) -> str:
    """'train.py:41': the innermost line of the user's own code that an exception came through, in
    a worker too, or that it is about, as of wrong syntax; '' where it came through none."""
    frames = _FRAME.findall("".join(traceback.format_exception(exc, chain=False)))
    # Path.is_file() raises of a name that is too long, as one in a message may be.
    own = [at for at in frames if os.path.isfile(at[0]) and not is_library(at[0])]  # noqa: PTH113
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def _chain(exc: BaseException | None) -> str:
    """The messages of an exception and of its causes: the last one may not name the signal."""
    return f"{exc}\n{_chain(exc.__cause__ or exc.__context__)}" if exc is not None else ""


def _ended_early(exc: BaseException) -> bool:
    frames = traceback.extract_tb(exc.__traceback__)
    handing = (one.filename.endswith("torch/multiprocessing/reductions.py") for one in frames)
    return isinstance(exc, EOFError | ConnectionError) and any(handing)
