"""What a loader raises, as a line: what the user's code raised in a worker, and where."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import traceback
from pathlib import Path

from advisor.tuners.fingerprint import is_library

CAUGHT = re.compile(r"Caught \w+ in DataLoader worker process \d+")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*[/\\])?(?P<name>[^"/\\]+)", line (?P<line>\d+)')
_KILLED = re.compile(r"DataLoader worker \(pid[^)]*\) is killed by signal: ([\w ]+)")
_ENDED = re.compile(r"DataLoader worker \(pid.+?\) exited unexpectedly(?: with exit code (\d+))?")
_OF_HANDING = "torch/multiprocessing/reductions.py"
"""Where a batch is taken over from the worker that made it."""
_FULL = ", as where /dev/shm is full"
_OF_SHARED = "unable to allocate shared memory"
"""As PyTorch says that since it asks before it writes; before, a signal ended the worker."""
_OF_CUDA = "re-initialize CUDA in forked subprocess"
_LIBRARY = ("site-packages", "dist-packages", "tuners/measure/")
"""Of no interest to who wrote the dataset."""
MOST = 300
"""Characters."""


def told(exc: BaseException) -> str:
    """One line: 'in a worker: ValueError: no such image (data.py, line 12)'."""
    lines = [line for line in str(exc).splitlines() if line.strip()]
    first = lines[0].strip() if lines else ""
    if CAUGHT.search(first):
        said = f"in a worker: {lines[-1].strip()}{_where(lines)}"
        if _OF_SHARED in said:
            said += _FULL
        elif _OF_CUDA in said:
            said += '; DataLoader(multiprocessing_context="spawn") starts workers that may use CUDA'
    elif killed := _KILLED.search(_chain(exc)):
        said = f"a worker was killed by signal: {killed[1].strip()}"
        if "Bus error" in killed[1]:
            said += _FULL
    elif ended := _ENDED.search(_chain(exc)):
        code = f", with exit code {ended[1]}" if ended[1] else ""
        said = f"a worker ended by itself{code}, as os._exit does"
    elif _of_handing(exc):
        said = "a worker ended by itself before its batch was taken, as os._exit does"
    elif _of_pickling(exc):
        how = multiprocessing.get_start_method()
        said = (
            f"workers are started by {how!r} here, and the dataset cannot be pickled for them "
            f'({first}); DataLoader(multiprocessing_context="fork") needs no pickling'
        )
    else:
        said = f"{type(exc).__name__}: {first}{_where(traceback.format_tb(exc.__traceback__))}"
    return said[:MOST]


def where(exc: BaseException) -> str:
    """'train.py:41': the innermost line of the user's own code that an exception came through, or
    that it is about, as of wrong syntax; '' where it came through none."""
    if isinstance(exc, SyntaxError) and exc.filename and exc.lineno:
        return f"{Path(exc.filename).name}:{exc.lineno}"
    frames = traceback.extract_tb(exc.__traceback__)
    own = [one for one in frames if Path(one.filename).is_file() and not is_library(one.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _chain(exc: BaseException) -> str:
    """What it and those that led to it say: of a killed worker the last one knows no signal."""
    said = []
    one: BaseException | None = exc
    while one is not None:
        said.append(str(one))
        one = one.__cause__ or one.__context__
    return "\n".join(said)


def _where(lines: list[str]) -> str:
    """The innermost line of the user's own code in a printed traceback."""
    frames = [found for line in lines if (found := _FRAME.match(line))]
    own = [one for one in frames if not any(name in (one["file"] or "") for name in _LIBRARY)]
    return f" ({own[-1]['name']}, line {own[-1]['line']})" if own else ""


def _of_handing(exc: BaseException) -> bool:
    """Whether a worker was gone when its batch was to be taken."""
    frames = traceback.extract_tb(exc.__traceback__)
    gone = isinstance(exc, EOFError | ConnectionError)
    return gone and any(one.filename.endswith(_OF_HANDING) for one in frames)


def _of_pickling(exc: BaseException) -> bool:
    said = isinstance(exc, AttributeError | TypeError) and "pickle" in str(exc)
    return said or isinstance(exc, pickle.PicklingError)
