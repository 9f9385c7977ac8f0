"""What a config or user code raised: the kind of failure, and one line that says what and where."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path
from typing import Literal

from advisor.errors import AdvisorError
from advisor.tuners.fingerprint import is_library
from advisor.tuners.torch_facts import torch

_CAUGHT = re.compile(r"Caught \w+ in DataLoader worker process \d+")
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)
_DEAD = re.compile(
    r"DataLoader worker \(pid.+?\) "
    r"(is killed by signal: [\w ]+|exited unexpectedly(?: with exit code \d+)?)"
)
# How cuDNN, cuBLAS, the driver, the CPU and a captured step say it; PyTorch's own has a type.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|(cudnn|cublas|cusolver)_status_alloc_failed|can(not|'t) allocate memory"
    r"|not enough memory|there is no memory|std::bad_alloc"
)
_FULL = "as where /dev/shm is full"
_FORK = 'DataLoader(multiprocessing_context="fork") needs no pickling'
_SPAWN = 'DataLoader(multiprocessing_context="spawn") starts workers that may use CUDA'
_HINTS = {
    "Bus error": _FULL,
    "unable to allocate shared memory": _FULL,
    "re-initialize CUDA in forked": _SPAWN,
    "t pickle": _FORK,
    "Pickling": _FORK,
}
_LENGTH = 300  # characters of a reason


class Stopped(Exception):
    """Why a pilot goes, or a loader gets no workers, in a person's words.

    Args:
        why: 'unclear': what trains, or where a step ends; 'over': the model that was found trains
            no more; 'brief', 'untrained': the process ends after few or no steps of an optimizer,
            and another process may train; 'unfed': the loader.
    """

    def __init__(self, why: Literal["unclear", "over", "brief", "untrained", "unfed"], said: str):
        super().__init__(said)
        self.why = why


def stopped(exc: BaseException) -> str:
    return exc.why if isinstance(exc, Stopped) else ""


def failure(exc: BaseException) -> tuple[str, str]:
    """(Outcome, reason): ('failed', 'in a worker: ValueError: no such image (data.py:12)')."""
    first, *more = [line.strip() for line in str(exc).splitlines() if line.strip()] or [""]
    at = f" ({found})" if (found := where(exc)) else ""
    if isinstance(exc, AdvisorError | Stopped):
        said = first
    elif _CAUGHT.search(first):
        said = f"in a worker: {[first, *more][-1]}{at}"
    elif dead := _DEAD.findall(_chain(exc)):
        said = f"a worker {dead[-1].strip()}"
    elif _ended_early(exc):
        said = "a worker ended before its batch was taken"
    else:
        # A message that ends with another's traceback has its cause in the last line.
        cause = f" ... {more[-1]}" if more and first.endswith(":") else ""
        said = f"{type(exc).__name__}: {first}{cause}{at}"
    hint = next((f"; {hint}" for part, hint in _HINTS.items() if part in said), "")
    return "out_of_memory" if is_out_of_memory(exc) else "failed", (said + hint)[:_LENGTH]


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether memory is what was missing."""
    if isinstance(exc, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(exc).lower()))


def is_config_error(exc: BaseException) -> bool:
    """Whether an exception comes from a config and hardly ever from a script."""
    compiling = ("torch._dynamo", "torch._inductor")
    compiled = any(kind.__module__.startswith(compiling) for kind in type(exc).__mro__)
    return compiled or isinstance(exc, torch.OutOfMemoryError)


def may_be_config_error(exc: BaseException) -> bool:
    """Whether a config may be the cause: PyTorch raises these two too, scripts mostly others."""
    return is_config_error(exc) or type(exc) in (RuntimeError, NotImplementedError)


def where(exc: BaseException) -> str:
    """'train.py:41': the innermost line of the user's own code that an exception came through, in
    a worker too, or that has wrong syntax; '' if there is none."""
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
