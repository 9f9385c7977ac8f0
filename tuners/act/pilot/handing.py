"""The calls of a running script's models, handed to other processes that make them again: what is
compiled for them there the script finds in the caches on disk.

What is handed over is a pickle, and so code to whoever reads it. It lies in a folder of mode 0700,
is written and read by processes of one user within one tuning, and is gone with that. The tuning
process does not read it.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import IO, Any

import torch
from torch import Tensor, nn

from advisor.cache.config import Value
from advisor.tuners.act.pilot.crew import inputs_of
from advisor.tuners.act.pilot.orders import told
from advisor.tuners.act.pilot.switch import Call, Switch
from advisor.tuners.act.pilot.variables import ADDRESS, RUN, SECRET
from advisor.tuners.knobs import KNOBS

CALLS, PLACE = "calls", "place"
"""The files of the folder: the calls, and where they are to be made."""
MOST_CALLS = 8
"""Of one step, each unlike the others."""
MOST_BYTES = 2**30
"""Of the file: a model may hold its data."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAIN = "__main__"


class Unable(Exception):
    """Calls cannot be made in another process."""


@dataclass(frozen=True, slots=True)
class Made:
    """A call of one of the models, by its number; `autocast`: the script's own around it."""

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None


@dataclass(frozen=True, slots=True)
class Handed:
    """What a script calls in a step, and the state of its process that decides what is compiled.

    Attributes:
        models: as they are called; their parameters' values are made up.
        own: the script's config.
        flags: by knob, as `Flag.now` reads them.
        dtype: torch's default one.
    """

    models: Sequence[nn.Module]
    calls: Sequence[Made]
    own: dict[str, Value]
    flags: dict[str, Any]
    device: torch.device
    dtype: torch.dtype


class Handing:
    """A Witness: has one step's calls written into a folder."""

    def __init__(self, folder: Path, switch: Switch, device: torch.device) -> None:
        self._folder, self._switch, self._device = folder, switch, device
        self._made: dict[Any, Made] = {}
        self._outcome = "ok", ""
        for number, call in enumerate(switch.calls):
            call.act = functools.partial(self._kept, number, call)

    def stepped(self) -> None:
        """As `Witness.stepped`."""
        try:
            self._write()
        except Unable as exc:
            self._outcome = "failed", str(exc)
        except Exception as exc:  # whatever a user's objects raise where they are pickled
            self._outcome = told(exc)
        self._made.clear()

    def verdict(self) -> tuple[str, str]:
        """As `Witness.verdict`."""
        self.leave()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # room for those who make the calls
        return self._outcome

    def leave(self) -> None:
        """As `Witness.leave`."""
        self._made.clear()
        self._switch.set(self._switch.own)

    def _kept(self, number: int, call: Call, *args: Any, **kwargs: Any) -> Any:
        dtype = None
        if torch.is_autocast_enabled(self._device.type):
            dtype = torch.get_autocast_dtype(self._device.type)
        like = (number, dtype, inputs_of(args, kwargs), _wanting(args, kwargs))
        if len(self._made) < MOST_CALLS:
            self._made.setdefault(like, Made(number, args, kwargs, dtype))
        return call.plain(*args, **kwargs)

    def _write(self) -> None:
        """Write all that was kept.

        Raises:
            Unable: it could not be made again. Whatever else objects of the user's raise.
        """
        if not self._made:
            raise Unable("no model that trains was called in a step")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise Unable("what is compiled under torch.distributed is cut by its buckets")
        handed = Handed(
            models=self._switch.seats,
            calls=list(self._made.values()),
            own=dict(self._switch.own),
            flags={knob.name: knob.flag.now() for knob in KNOBS if knob.flag is not None},
            device=self._device,
            dtype=torch.get_default_dtype(),
        )
        with (self._folder / CALLS).open("wb") as file:
            pickler = _Pickler(_Bounded(file))
            pickler.dump(handed)
        place = {
            "python": sys.executable,
            "folder": str(Path.cwd()),
            "environment": _environment(),
            "prepared": _prepared(whole=pickler.of_main),
        }
        (self._folder / PLACE).write_text(json.dumps(place))


class _Bounded:
    """A file that takes so much and no more."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        if self._file.tell() + len(data) > MOST_BYTES:
            raise Unable("the model holds too much data to be handed over")
        return self._file.write(data)


class _Pickler(pickle.Pickler):
    """Leaves the values of parameters out, and of other tensors what they are views of.

    Attributes:
        of_main: whether it has met a class or function of the script itself.
    """

    of_main = False

    def reducer_override(self, one: Any) -> Any:
        if isinstance(one, type | FunctionType):
            self.of_main |= one.__module__ == _MAIN
        elif type(one) is nn.Parameter and one.dtype in _FLOATS:
            how = (tuple(one.shape), one.stride(), one.dtype, one.device)
            return _parameter, (*how, one.requires_grad)
        elif type(one) is Tensor:
            copied = one.detach().clone().requires_grad_(one.requires_grad)
            return copied.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _parameter(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> nn.Parameter:
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device).normal_(std=0.02)
    return nn.Parameter(made, requires_grad)


def _wanting(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, ...]:
    """Of each tensor that a model is called with, whether it has a gradient."""
    from advisor.tuners.act.pilot.trees import tensors

    return tuple(tensor.requires_grad for tensor in tensors((args, kwargs)))


def _environment() -> dict[str, str]:
    """Of this process, without what brings a pilot, or advice that the script asks for."""
    brought = (ADDRESS, SECRET, RUN)
    theirs = {name: value for name, value in os.environ.items() if name not in brought}
    return theirs | {"ADVISOR_DISABLE": "1"}


def _prepared(*, whole: bool) -> dict[str, Any]:
    """What `multiprocessing.spawn.prepare` takes to make a process like this one; `whole`: the
    script is imported there, too.

    Raises:
        Unable: importing it would train.
    """
    prepared: dict[str, Any] = {
        "sys_path": sys.path,
        "sys_argv": sys.argv,
        "dir": str(Path.cwd()),
    }
    if not whole:
        return prepared
    main = sys.modules[_MAIN]
    if not trains_guarded(main):
        raise Unable(
            "classes of its model are of the script itself; keep them in a module of their own, or "
            'have the script train under if __name__ == "__main__"'
        )
    if main.__spec__ is not None:
        return prepared | {"init_main_from_name": main.__spec__.name}
    return prepared | {"init_main_from_path": main.__file__}


def trains_guarded(main: ModuleType) -> bool:
    """Whether what runs now does so under the `if` of a script's that importing it leaves out."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (
        frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"
    ):
        frame = frame.f_back
    if frame is None or main.__file__ is None:
        return False
    line = frame.f_lineno
    return any(
        isinstance(one, ast.If)
        and _asks_for_main(one.test)
        and one.body[0].lineno <= line <= (one.body[-1].end_lineno or 0)
        for one in ast.parse(Path(main.__file__).read_bytes()).body
    )


def _asks_for_main(test: ast.expr) -> bool:
    """Whether it is `__name__ == "__main__"`."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return False
    said = {ast.unparse(test.left), ast.unparse(test.comparators[0])}
    return len(test.ops) == 1 and said == {"__name__", repr(_MAIN)}
