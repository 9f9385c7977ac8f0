"""Describes exceptions of configs and user code: the kind, and one line with cause and place."""

from __future__ import annotations

import dis
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
# Messages of cuDNN, cuBLAS, the driver, the CPU and captured steps; PyTorch raises its own type.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|(cudnn|cublas|cusolver)_status_alloc_failed|can(not|'t) allocate memory"
    r"|not enough memory|there is no memory|std::bad_alloc"
)
# Messages of gloo, NCCL and the store of a process group.
_RANK_LOST = re.compile(
    r"connection (?:was likely )?closed|connection reset by peer|broken pipe|remote process exit",
    re.IGNORECASE,
)
_FULL = "perhaps /dev/shm is full"
_FORK = 'DataLoader(multiprocessing_context="fork") needs no pickling'
_SPAWN = 'DataLoader(multiprocessing_context="spawn") starts workers that may use CUDA'
_HINTS = {
    "Bus error": _FULL,
    "unable to allocate shared memory": _FULL,
    "re-initialize CUDA in forked": _SPAWN,
    "t pickle": _FORK,
    "t get local object": _FORK,  # Python 3.13
    "Pickling": _FORK,
}
_LENGTH = 300  # characters of a reason
UNSTEPPED = "a model was called with gradients, and no optimizer of torch.optim made a step"
NEEDS_OPTIMIZER = "advisor tunes scripts that train with such an optimizer"


class Stopped(Exception):
    """The pilot leaves the script alone, or a loader gets no workers; the message says why.

    Args:
        why: 'unclear': advisor cannot tell what trains, or where a step ends; 'over': the model no
            longer trains; 'brief', 'untrained': the process ends after few or no optimizer steps
            (another may train); 'unfed': the loader gets no workers; 'broken': a fault in advisor.
    """

    def __init__(
        self, why: Literal["unclear", "over", "brief", "untrained", "unfed", "broken"], said: str
    ) -> None:
        super().__init__(said)
        self.why = why


class NotRecomputable(RuntimeError):
    """Saving memory would change the training: a block would compute something else in its second
    call, or what backward needs was changed before it ran."""


def stopped(exc: BaseException) -> str:
    return exc.why if isinstance(exc, Stopped) else ""


def failure(exc: BaseException) -> tuple[str, str]:
    """Return outcome and reason: ('failed', 'in a worker: ValueError: no image (data.py:12)')."""
    first, *more = [line.strip() for line in str(exc).splitlines() if line.strip()] or [""]
    at = f" ({found})" if (found := where(exc)) else ""
    if isinstance(exc, AdvisorError | Stopped):
        said = first
    elif _CAUGHT.search(first):
        said = f"in a worker: {[first, *more][-1]}{at}"
    elif dead := _DEAD.findall(_chain(exc)):
        said = f"a worker {dead[-1].strip()}"
    elif lost := lost_rank(exc):
        said = f"another rank is gone ({lost})"
    elif _ended_early(exc):
        said = "a worker ended before its batch was taken"
    else:
        # If the message ends with the traceback of another exception, its last line is the cause.
        cause = f" ... {more[-1]}" if more and first.endswith(":") else ""
        said = f"{type(exc).__name__}: {first}{cause}{at}"
    hint = next((f"; {hint}" for part, hint in _HINTS.items() if part in said), "")
    return "out_of_memory" if is_out_of_memory(exc) else "failed", (said + hint)[:_LENGTH]


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether an exception means that memory ran out."""
    if isinstance(exc, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and says_out_of_memory(str(exc))


def says_out_of_memory(text: str) -> bool:
    return bool(_OUT_OF_MEMORY.search(text.lower()))


def lost_rank(exc: BaseException) -> str:
    """How an exception says that another rank is gone: 'Connection closed'; '' if it does not."""
    found = _RANK_LOST.search(str(exc)) if isinstance(exc, RuntimeError) else None
    return found[0] if found else ""


def is_config_error(exc: BaseException) -> bool:
    """Whether an exception comes from a config and hardly ever from a script."""
    compiling = ("torch._dynamo", "torch._inductor")
    compiled = any(kind.__module__.startswith(compiling) for kind in type(exc).__mro__)
    return compiled or isinstance(exc, torch.OutOfMemoryError | NotRecomputable)


def may_be_config_error(exc: BaseException) -> bool:
    """Whether a config may be the cause: PyTorch raises the types below, TypeError of a number
    format. A script that raises one by a statement of its own, as if a disk is full, is itself the
    cause."""
    of_format = type(exc) is TypeError and "ScalarType" in str(exc)
    known = type(exc) in (RuntimeError, NotImplementedError) or of_format
    if not known or lost_rank(exc):
        return is_config_error(exc)
    last = exc.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or is_library(last.tb_frame.f_code.co_filename):
        return True
    return last.tb_frame.f_code.co_code[last.tb_lasti] != dis.opmap["RAISE_VARARGS"]


def where(exc: BaseException) -> str:
    """The innermost line of the user's own code in an exception's traceback, also in a worker, or
    the line with wrong syntax, as 'train.py:41'; '' if there is none."""
    frames = _FRAME.findall("".join(traceback.format_exception(exc, chain=False)))
    # Path.is_file() raises for a name that is too long, and a message may hold such a name.
    own = [at for at in frames if os.path.isfile(at[0]) and not is_library(at[0])]  # noqa: PTH113
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def _chain(exc: BaseException | None) -> str:
    """The messages of an exception and its causes, because only a cause may name the signal."""
    return f"{exc}\n{_chain(exc.__cause__ or exc.__context__)}" if exc is not None else ""


def _ended_early(exc: BaseException) -> bool:
    frames = traceback.extract_tb(exc.__traceback__)
    handing = (one.filename.endswith("torch/multiprocessing/reductions.py") for one in frames)
    return isinstance(exc, EOFError | ConnectionError) and any(handing)
