"""What a training step can reach in Python, and by which names its code gets there.

A step's function leads to its closure, to the globals that its code names, to the object that it is
a method of, and from there to modules, optimizers, schedules, containers and the user's objects.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

REACH = 50_000
"""Objects looked at; a step that reaches more is not understood."""
WIDE = 1000
"""Entries of a container from which only their number is watched: data, not settings."""

SCALARS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_SCALER = ("_scale", "_growth_tracker", "_growth_factor", "_backoff_factor", "_growth_interval")
"""What a GradScaler changes on the device, and what it does so by."""
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")})
_BY_NAME = ("__dict__", "vars", "eval", "exec")
"""Code that names these may read what it does not name."""
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_MAKING = ("__init__", "__new__", "__post_init__", "__init_subclass__", "__repr__", "__del__")
"""Methods that Python calls unnamed, but not in a step."""

Way = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """What holds values: the dictionary of an object, a container, a closure's cell, a class."""

    label: str
    held: Any
    names: tuple[str, ...] | None = None
    """Only these, as the globals that a function names; None: all there are."""
    settings: bool = False
    """All its values count, whether or not the step's code names them."""
    library: bool = False
    """A module's that is not the user's: its flags and fractions may be changed, no more."""
    inside: bool = False
    """Held against itself before and after a step only: what a script does with it is its own."""
    module: bool = False
    """A module's, which may be reached by other names than those of attributes."""
    kind: type | None = None
    """Of the object whose dictionary this is."""
    ways: list[Way] = field(default_factory=lambda: [()])
    """The attributes that lead here, each way."""

    def read(self) -> dict[Any, Any]:
        held = self.held
        if isinstance(held, CellType):
            try:
                return {"": held.cell_contents}
            except ValueError:  # not assigned yet
                return {}
        if isinstance(held, dict | list | deque) and len(held) > WIDE and self.names is None:
            return {"len()": len(held)}
        if isinstance(held, list | deque):
            return dict(enumerate(held))
        found = vars(held) if isinstance(held, type) else held
        if self.names is not None:
            return {name: found[name] for name in self.names if name in found}
        return {name: value for name, value in found.items() if name not in _INTERNAL}

    def write(self, name: Any, value: Any) -> None:
        if isinstance(self.held, CellType):
            self.held.cell_contents = value
        elif isinstance(self.held, type):
            setattr(self.held, name, value)
        elif isinstance(self.held, list | deque) and name == len(self.held):
            self.held.append(value)
        elif name != "len()":
            self.held[name] = value

    def called(self, name: Any) -> str:
        """As a person knows it: 'self.weight', 'schedule.last_epoch'."""
        return ".".join(part for part in (self.label, str(name)) if part)


class Reach:
    """All that `train_step` reaches, as it is when this is made.

    Attributes:
        places: what holds values.
        tensors: those in places and modules, each once, by id.
        modules, optimizers, scalers: those met.
        complete: False where there was too much to look at.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        modules: Iterable[nn.Module],
        also: Iterable[torch.optim.Optimizer | torch.amp.GradScaler],
    ) -> None:
        self.places: list[Place] = []
        self.tensors: dict[int, Tensor] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self.modules: list[nn.Module] = []
        self.complete = True
        self._names: set[str] = set()
        self._direct: set[str] = set()  # x.name
        self._chained: set[tuple[str, str]] = set()  # x.first.second
        self._met: dict[int, Any] = {}  # an id is something's own only while it lives
        self._ways: dict[int, list[Way]] = {}
        self._uncalled: list[tuple[str, FunctionType, list[Way] | None]] = []
        self._later: list[tuple[Any, str, Way]] = [
            (one, type(one).__name__, ()) for one in (*modules, *also)
        ]
        owner = getattr(train_step, "__self__", None)
        if owner is not None and self._first(owner, ()):
            self._object(owner, "self", ())
        function = getattr(train_step, "__func__", train_step)
        if isinstance(function, FunctionType) and self._first(function, ()):
            self._function(function)
        self._later.append((train_step, "", ()))
        while self._later or self._called():
            self._meet(*self._later.pop())

    def _first(self, value: Any, way: Way) -> bool:
        if id(value) in self._met:
            self._ways[id(value)].append(way)
            return False
        self.complete = self.complete and len(self._met) < REACH
        self._met[id(value)] = value
        self._ways[id(value)] = [way]
        return self.complete

    def _called(self) -> bool:
        """Whether code that has been met names methods that have not."""
        waiting, self._uncalled = self._uncalled, []
        for name, function, ways in waiting:
            special = name == "forward" or (name.startswith("__") and name not in _MAKING)
            if special or self.reads(name, ways):
                self._later.append((function, name, ()))
            else:
                self._uncalled.append((name, function, ways))
        return bool(self._later)

    def reads(self, name: str, ways: list[Way] | None) -> bool:
        """Whether the step's code reads an attribute of what is reached so; None: in any way."""
        if name in self._direct or not self._names.isdisjoint(_BY_NAME):
            return True
        if ways is None:
            return any(second == name for _, second in self._chained)
        return any((way[-1], name) in self._chained for way in ways if way)

    def _meet(self, value: Any, label: str, way: Way) -> None:
        if isinstance(value, SCALARS) or not self._first(value, way):
            return
        ways = self._ways[id(value)]
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(value)
            self._optimizer(value, label)
        elif isinstance(value, torch.amp.GradScaler):
            self.scalers.append(value)
            self._place(Place(label, vars(value), names=_SCALER, settings=True, ways=[()]), way)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            self._place(Place(label, vars(value), inside=True), way)
        elif isinstance(value, FunctionType):
            if not library(value.__module__):
                self._function(value)
        elif isinstance(value, MethodType):
            self._later += [(value.__func__, label, way), (value.__self__, label, way)]
        elif isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            self._later += [(part, label, way) for part in parts]
        elif isinstance(value, dict | list | deque):
            self._place(Place(label, value, settings=True, ways=ways), way)
        elif isinstance(value, tuple | set | frozenset):
            self._later += [(part, label, way) for part in value if len(value) <= WIDE]
        elif isinstance(value, nn.Module) or not (
            isinstance(value, type | ModuleType) or library(type(value).__module__)
        ):
            self._object(value, label, way)

    def _place(self, place: Place, way: Way) -> None:
        self.places.append(place)
        for name, value in place.read().items():
            further = way if place.settings else (*way, name)
            self._later.append((value, place.called(name), further))

    def _object(self, value: Any, label: str, way: Way) -> None:
        ways = self._ways[id(value)]
        if isinstance(value, nn.Module):
            self._module(value, label, way, ways)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._place(Place(label, vars(value), ways=ways, kind=type(value)), way)
            self._class(type(value), label, ways)

    def _class(self, kind: type, label: str, ways: list[Way] | None) -> None:
        """What the user's classes hold, and the functions that the step's code may call."""
        for one in kind.__mro__:
            if library(one.__module__) or not self._first(one, ()):
                continue
            plain = []
            for name, value in vars(one).items():
                inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if isinstance(inner, FunctionType):
                    self._uncalled.append((name, inner, ways))
                elif isinstance(value, SCALARS) and not name.startswith("__"):
                    plain.append(name)
            if plain:
                self.places.append(Place(label, one, names=tuple(plain), ways=ways or [()]))

    def _module(self, module: nn.Module, label: str, way: Way, ways: list[Way]) -> None:
        self.modules.append(module)
        if library(type(module).__module__):
            self.places.append(Place(label, vars(module), settings=True, library=True, ways=ways))
        else:
            self._place(Place(label, vars(module), ways=ways, module=True, kind=type(module)), way)
            self._class(type(module), label, None)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            self._later.append((tensor, label, way))
        if module._modules:
            self._place(Place(label, module._modules, settings=True, ways=ways), way)

    def _optimizer(self, optimizer: torch.optim.Optimizer, label: str) -> None:
        for group in optimizer.param_groups:
            names = tuple(name for name in group if name != "params")
            self.places.append(Place(label, group, names=names, inside=True))
        for state in optimizer.state.values():
            if isinstance(state, dict):
                self._place(Place(f"{label}.state", state, inside=True), ())

    def _function(self, function: FunctionType) -> None:
        names = set(_names(function.__code__))
        self._names |= names
        self._attributes(function.__code__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if self._first(cell, ()):
                self._place(Place(name, cell, settings=True), ())
        world = function.__globals__
        self._globals("", world, names)
        for name in names & world.keys():
            module = world[name]
            if isinstance(module, ModuleType) and not library(module.__name__):
                self._globals(name, vars(module), names)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._later.append((default, function.__name__, ()))

    def _attributes(self, code: CodeType) -> None:
        before = None
        for one in dis.get_instructions(code):
            loads = one.opname in _LOADS
            if loads and before is not None:
                self._chained.add((before, str(one.argval)))
            elif loads:
                self._direct.add(str(one.argval))
            before = str(one.argval) if loads else None
        words = {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}
        if "getattr" in code.co_names:
            self._direct |= words
            if not words:  # built from something else
                self._names.add(_BY_NAME[0])
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._attributes(constant)

    def _globals(self, label: str, world: dict[str, Any], names: set[str]) -> None:
        named = tuple(sorted(name for name in names & world.keys() if name[:2] != "__"))
        if named:
            self._place(Place(label, world, names=named, settings=True), ())

    def looked_at(self, place: Place) -> bool:
        """Whether the step's code gets to a place, so that a change there may change the step."""
        if place.inside:
            return False
        named = self._names.isdisjoint(_BY_NAME)
        return not named or any(map(self._names.issuperset, place.ways))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):  # getattr(self, "weight")
            yield constant


@functools.cache
def library(module: str | None) -> bool:
    """Whether it is installed, or Python's own, or ours: not what a user writes beside a script."""
    if module is None or module.partition(".")[0] in ("advisor", "torch", "builtins"):
        return True
    if module == "__main__":
        return False
    found = getattr(sys.modules.get(module), "__file__", None)
    return found is not None and found.startswith(_LIBRARIES)
