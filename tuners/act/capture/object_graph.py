"""What a training step's Python holds, one level deep: in a replay all of it stands still.

Looked at are the closures and globals of the step and of the user's functions that it names, the
attributes of its object that their code names, and what these hold.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

WIDE = 1000
"""Entries of a container from which only their number is watched: data, not settings."""
SCALARS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_SCALER = ("_scale", "_growth_tracker", "_growth_factor", "_backoff_factor", "_growth_interval")
_MODULE = frozenset(vars(nn.Module())) - {"training"}
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")})

_TORCH = (
    *(nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    torch.amp.GradScaler,
)
"""Objects whose own state is looked at wherever they are met."""

Held = list[dict[Any, Any]]
"""What each place holds, by name."""


@dataclass(frozen=True, slots=True)
class Place:
    """What holds values: a dictionary, a sequence, a class, a closure's cell."""

    label: str
    held: Any
    names: Collection[str] | None = None
    """Only these; None: all. A tuple: they are there and stay."""
    inside: bool = False
    """Compared before and after a step only: scripts may change it between steps."""

    def read(self) -> dict[Any, Any]:
        held = self.held
        if isinstance(held, CellType):
            try:
                return {"": held.cell_contents}
            except ValueError:  # not assigned yet
                return {}
        if self.names is not None:
            found = vars(held) if isinstance(held, type) else held
            return {name: found[name] for name in self.names if name in found}
        if len(held) > WIDE:
            return {"len()": len(held)}
        return dict(held) if isinstance(held, dict) else dict(enumerate(held))

    def write(self, name: Any, value: Any) -> None:
        if isinstance(self.held, CellType):
            self.held.cell_contents = value
        elif isinstance(self.held, type):
            setattr(self.held, name, value)
        else:
            self.held[name] = value

    def restore(self, before: dict[Any, Any]) -> None:
        """Each value that was there; what has been added to a list goes."""
        now = self.read()
        if "len()" in before:
            return
        if isinstance(self.held, list | deque) and len(now) != len(before):
            self.held.clear()
            self.held.extend(before.values())
        for name, value in before.items():
            if name not in now or now[name] is not value:
                self.write(name, value)

    def called(self, name: Any) -> str:
        """As a person knows it: 'self.weight', 'schedule.last_epoch'."""
        return ".".join(part for part in (self.label, str(name)) if part)


class _Look:
    """The values of a place, to be compared with what they are later."""

    def __init__(self, place: Place, skipped: set[Any]) -> None:
        self._place, self._skipped = place, skipped
        self._before = self._read()
        self.fixed: tuple[dict[Any, Any], int, Callable[[Any], Any], Any] | None = None
        if isinstance(place.names, tuple) and self._before:
            # A model has hundreds of modules: these are read without Python.
            get = operator.itemgetter(*self._before, next(iter(self._before)))
            self.fixed = place.held, len(place.held), get, get(place.held)

    def _read(self) -> dict[Any, Any]:
        return {n: value for n, value in self._place.read().items() if n not in self._skipped}

    def changed(self) -> str:
        """The name of a value that is another now; '' where none is."""
        if self.fixed is not None and len(self._place.held) != self.fixed[1]:
            return self._place.called(next(reversed(self._place.held), ""))
        now, before = self._read(), self._before
        for name in before.keys() | now.keys():
            if name not in now or name not in before or not _same(now[name], before[name]):
                return self._place.called(name)
        return ""


class ObjectGraph:
    """The objects of `train_step`, as they are when this is made.

    Attributes:
        tensors: those met, each once, by id.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        modules: Iterable[nn.Module],
        also: Iterable[torch.optim.Optimizer | torch.amp.GradScaler],
    ) -> None:
        self._places: list[Place] = []
        self._scalers: list[torch.amp.GradScaler] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._looks: list[_Look] = []
        self._names: set[str] = set()  # in the code of the step
        self._met: dict[int, Any] = {}  # an id is something's own only while it lives
        self._called(train_step)
        size = 0
        while size < len(self._met):  # a method that is found names others
            size = len(self._met)
            for value in [v for place in self._places for v in place.read().values()]:
                self._function(getattr(value, "fget", getattr(value, "__func__", value)))
        for place in [*self._places]:
            for name, value in place.read().items():
                self._meet(value, place.called(name))
        for one in (*modules, *also):
            self._meet(one, type(one).__name__)
        held = (value for place in self._places for value in place.read().values())
        self.tensors = {id(value): value for value in held if isinstance(value, Tensor)}

    def _called(self, step: Any) -> None:
        """The step, as a function, a method or an object that is called."""
        owner = getattr(step, "__self__", None if isinstance(step, FunctionType) else step)
        if owner is not None:
            self._object(owner, "self")
        method = type(step).__call__ if owner is step else step
        self._function(getattr(method, "__func__", method))

    def _object(self, value: Any, label: str) -> None:
        self._met[id(value)] = value
        if isinstance(value, nn.Module):
            self._module(value, label)
        if isinstance(getattr(value, "__dict__", None), dict):
            self._places.append(Place(label, vars(value), self._names))
        kinds = (kind for kind in type(value).__mro__ if not is_library(kind.__module__))
        self._places += [Place(label, kind, self._names) for kind in kinds]

    def _function(self, function: Any) -> None:
        if not isinstance(function, FunctionType) or id(function) in self._met:
            return
        self._met[id(function)] = function
        if is_library(function.__module__):
            return
        read: set[str] = set()
        for code in _codes(function.__code__):
            self._names |= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
            loads = (one for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")
            read |= {str(one.argval) for one in loads}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._places += [Place(name, cell) for name, cell in cells]
        world = function.__globals__
        self._places.append(Place("", world, frozenset(read)))
        for name in read & world.keys():
            if isinstance(world[name], ModuleType) and not is_library(world[name].__name__):
                self._places.append(Place(name, vars(world[name]), self._names))

    def _meet(self, value: Any, label: str) -> None:
        """Look at what an object of the step's own holds."""
        if isinstance(value, SCALARS) or id(value) in self._met:
            return
        self._met[id(value)] = value
        if isinstance(value, nn.Module):
            self._module(value, label)
        elif isinstance(value, torch.amp.GradScaler):
            self._scalers.append(value)
            self._places.append(Place(label, vars(value), _SCALER))
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizers.append(value)
            states = [state for state in value.state.values() if isinstance(state, dict)]
            groups = [(group, group.keys() - {"params"}) for group in value.param_groups]
            self._places += [Place(f"{label}.state", one, inside=True) for one in states]
            self._places += [Place(label, one, names, inside=True) for one, names in groups]
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            self._places.append(Place(label, vars(value), inside=True))
        elif isinstance(value, dict | list | deque):
            self._places.append(Place(label, value))
            self._parts(Place(label, value))
        elif isinstance(value, tuple):
            for part in value[:WIDE]:
                self._meet(part, label)
        elif not isinstance(value, type | ModuleType) and not is_library(type(value).__module__):
            self._object(value, label)
            self._parts(Place(label, getattr(value, "__dict__", {}), self._names))

    def _parts(self, place: Place) -> None:
        for name, part in place.read().items():
            if isinstance(part, _TORCH):
                self._meet(part, place.called(name))

    def _module(self, whole: nn.Module, label: str) -> None:
        for name, module in whole.named_modules(prefix=label):
            self._met[id(module)] = module
            kinds = bool | float if is_library(type(module).__module__) else object
            own = {n: v for n, v in vars(module).items() if n not in _MODULE}
            names = tuple(n for n, value in own.items() if isinstance(value, kinds))
            self._places.append(Place(name, vars(module), names))
            for held in (module._parameters, module._buffers, module._modules):
                if held:
                    self._places.append(Place(name, held, tuple(held)))

    def read(self) -> Held:
        """What every place holds now: for `moved`, `replaced`, `settle` and `put_back`."""
        return [place.read() for place in self._places]

    def moved(self, before: Held) -> str:
        """What a step has changed in Python, as 'schedule.last_epoch'; '' where nothing.

        An object in the place of another, as an output that is kept, is no change.
        """
        for place, old in zip(self._places, before, strict=True):
            new = place.read()
            for name in old.keys() | new.keys():
                if name not in old or name not in new or not _alike(old[name], new[name]):
                    return place.called(name)
        return ""

    def put_back(self, before: Held) -> None:
        """Each value that was there; a scaler's notes on a step that did not end are dropped."""
        for place, old in zip(self._places, before, strict=True):
            place.restore(old)
        for scaler in self._scalers:
            scaler._per_optimizer_states.clear()
        for optimizer in self._optimizers:
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)

    @property
    def between_steps(self) -> bool:
        """Whether no GradScaler holds notes on a step, which it does until it is updated."""
        return not any(scaler._per_optimizer_states for scaler in self._scalers)

    def replaced(self, before: Held) -> list[tuple[Place, Any, Any]]:
        """Where another object stands than before: place, name, the object now."""
        return [
            (place, name, new)
            for place, old in zip(self._places, before, strict=True)
            for name, new in place.read().items()
            if name in old and old[name] is not new and not _scalar(new)
        ]

    def settle(self, before: Held) -> None:
        """From now on `differs` compares with what there is; not what the step itself replaces."""
        own: dict[int, set[Any]] = {}
        for place, name, _new in self.replaced(before):
            own.setdefault(id(place), set()).add(name)
        watched = [place for place in self._places if not place.inside]
        self._looks = [_Look(place, own.get(id(place), set())) for place in watched]

    def differs(self) -> str:
        """What the script has changed since `settle`, between two steps; '' where nothing."""
        for look in self._looks:
            if look.fixed is not None:
                held, size, get, values = look.fixed
                try:
                    if len(held) == size and all(map(operator.is_, get(held), values)):
                        continue
                except KeyError:
                    pass  # deleted
            if changed := look.changed():
                return changed
        return ""


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _scalar(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_scalar, value))
    return isinstance(value, SCALARS)


def _same(a: Any, b: Any) -> bool:
    return a is b or (_scalar(a) and _scalar(b) and _alike(a, b))


def _alike(a: Any, b: Any) -> bool:
    """Equal in value as far as Python can tell: of what it cannot, the same type is enough."""
    if a is b or type(a) is not type(b):
        return a is b
    if _scalar(a) and _scalar(b):
        return bool(a == b or (a != a and b != b))
    return len(a) == len(b) if isinstance(a, list | tuple | dict | set | frozenset) else True


@functools.cache
def is_library(module: str | None) -> bool:
    """Whether it is installed, or Python's own, or ours: not what a user writes beside a script."""
    if module is None or module.partition(".")[0] in ("advisor", "torch", "builtins"):
        return True
    if module == "__main__":
        return False
    found = getattr(sys.modules.get(module), "__file__", None)
    return found is not None and found.startswith(_LIBRARIES)
