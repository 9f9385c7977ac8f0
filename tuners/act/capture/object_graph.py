"""The Python values that a training step uses, which stand still in a replay: closures and globals
of the step and of the user's functions that it names, attributes of its object that their code
names, and what these hold, one level deep."""

from __future__ import annotations

import dis
import functools
import operator
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from advisor.tuners.decisions import WIDE
from advisor.tuners.fingerprint import is_library

SCALARS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_SCALER = ("_scale", "_growth_tracker", "_growth_factor", "_backoff_factor", "_growth_interval")
_MODULE = frozenset(vars(nn.Module())) - {"training"}
_SCHEDULER = torch.optim.lr_scheduler.LRScheduler
_TORCH = (nn.Module, torch.optim.Optimizer, _SCHEDULER, torch.amp.GradScaler)
"""Objects whose own state is watched wherever they are met."""

Values = list[dict[Any, Any]]
"""What each place holds, by name."""


@dataclass(frozen=True, slots=True)
class Place:
    """What holds values: a dictionary, a sequence, a class, a closure's cell.

    Attributes:
        label: what a person calls it.
        names: only these are read; None: all. A tuple: they are there and stay.
        inside: compared before and after a step only: scripts may change it between steps.
    """

    label: str
    held: Any
    names: Collection[str] | None = None
    inside: bool = False

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

    def changed(
        self, before: dict[Any, Any], now: dict[Any, Any], same: Callable[[Any, Any], bool]
    ) -> str:
        """What a value is called that is not the same as before; '' if all are."""
        for name in before.keys() | now.keys():
            if name not in before or name not in now or not same(now[name], before[name]):
                return self.called(name)
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
        self._watched: list[tuple[Place, dict[Any, Any], set[Any], Any]] = []
        self._names: set[str] = set()  # in the code of the step
        self._met: dict[int, Any] = {}  # an id is something's own only while it lives
        is_function = isinstance(train_step, FunctionType)
        owner = getattr(train_step, "__self__", None if is_function else train_step)
        if owner is not None:
            self._add_object(owner, "self")
        method: Any = type(train_step).__call__ if owner is train_step else train_step
        self._add_function(getattr(method, "__func__", method))
        size = 0
        while size < len(self._met):  # a method that is found names others
            size = len(self._met)
            for value in [v for place in self._places for v in place.read().values()]:
                self._add_function(getattr(value, "fget", getattr(value, "__func__", value)))
        for place in [*self._places]:
            for name, value in place.read().items():
                self._add(value, place.called(name))
        for one in (*modules, *also):
            self._add(one, type(one).__name__)
        held = (value for place in self._places for value in place.read().values())
        self.tensors = {id(value): value for value in held if isinstance(value, Tensor)}

    def _add_function(self, function: Any) -> None:
        if not isinstance(function, FunctionType) or id(function) in self._met:
            return
        self._met[id(function)] = function
        if _installed(function.__module__):
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
            if isinstance(world[name], ModuleType) and not _installed(world[name].__name__):
                self._places.append(Place(name, vars(world[name]), self._names))

    def _add_object(self, value: Any, label: str) -> None:
        self._met[id(value)] = value
        if isinstance(value, nn.Module):
            self._add_module(value, label)
        if isinstance(getattr(value, "__dict__", None), dict):
            self._places.append(Place(label, vars(value), self._names))
        kinds = (kind for kind in type(value).__mro__ if not _installed(kind.__module__))
        self._places += [Place(label, kind, self._names) for kind in kinds]

    def _add_module(self, whole: nn.Module, label: str) -> None:
        for name, module in whole.named_modules(prefix=label):
            self._met[id(module)] = module
            kinds = bool | float if _installed(type(module).__module__) else object
            own = {n: v for n, v in vars(module).items() if n not in _MODULE}
            names = tuple(n for n, value in own.items() if isinstance(value, kinds))
            self._places.append(Place(name, vars(module), names))
            for held in (module._parameters, module._buffers, module._modules):
                if held:
                    self._places.append(Place(name, held, tuple(held)))

    def _add(self, value: Any, label: str) -> None:
        """What an object holds that the step's own places hold."""
        if isinstance(value, SCALARS) or id(value) in self._met:
            return
        self._met[id(value)] = value
        if isinstance(value, nn.Module):
            self._add_module(value, label)
        elif isinstance(value, torch.amp.GradScaler):
            self._places.append(Place(label, vars(value), _SCALER))
        elif isinstance(value, torch.optim.Optimizer):
            states = [state for state in value.state.values() if isinstance(state, dict)]
            self._places += [Place(f"{label}.state", one, inside=True) for one in states]
            groups = [(group, group.keys() - {"params"}) for group in value.param_groups]
            self._places += [Place(label, one, names, inside=True) for one, names in groups]
        elif isinstance(value, _SCHEDULER):
            self._places.append(Place(label, vars(value), inside=True))
        elif isinstance(value, dict | list | deque):
            self._places.append(Place(label, value))
            self._add_parts(self._places[-1])
        elif isinstance(value, tuple):
            for part in value[:WIDE]:
                self._add(part, label)
        elif not isinstance(value, type | ModuleType) and not _installed(type(value).__module__):
            self._add_object(value, label)
            self._add_parts(Place(label, getattr(value, "__dict__", {}), self._names))

    def _add_parts(self, place: Place) -> None:
        for name, part in place.read().items():
            if isinstance(part, _TORCH):
                self._add(part, place.called(name))

    def read(self) -> Values:
        """What every place holds now."""
        return [place.read() for place in self._places]

    def changed_in_step(self, before: Values) -> str:
        """What a step has changed in Python, as 'schedule.last_epoch'; '' if nothing.

        An object in the place of another, as an output that is kept, is no change.
        """
        pairs = zip(self._places, before, strict=True)
        return next((said for p, old in pairs if (said := p.changed(old, p.read(), _equal))), "")

    def restore(self, before: Values) -> None:
        """Each value that was there; a scaler's notes on a step that did not end are dropped."""
        for place, old in zip(self._places, before, strict=True):
            place.restore(old)
        for one in self._met.values():
            if isinstance(one, torch.amp.GradScaler):
                one._per_optimizer_states.clear()
            elif isinstance(one, torch.optim.Optimizer):
                vars(one).pop("grad_scale", None)
                vars(one).pop("found_inf", None)

    @property
    def between_steps(self) -> bool:
        """Whether no GradScaler holds notes on a step, which it does until it is updated."""
        scalers = (one for one in self._met.values() if isinstance(one, torch.amp.GradScaler))
        return not any(scaler._per_optimizer_states for scaler in scalers)

    def replaced(self, before: Values) -> list[tuple[Place, Any, Any]]:
        """Where another object stands than before: place, name, the object now."""
        return [
            (place, name, new)
            for place, old in zip(self._places, before, strict=True)
            for name, new in place.read().items()
            if name in old and old[name] is not new and not _scalar(new)
        ]

    def watch(self, before: Values) -> None:
        """Have `changed` compare with what there is now, but for what the step itself replaces."""
        own = {(id(place), name) for place, name, _new in self.replaced(before)}
        self._watched = []
        for place in self._places:
            if place.inside:
                continue
            skipped = {name for at, name in own if at == id(place)}
            values = {name: held for name, held in place.read().items() if name not in skipped}
            quick = None
            if isinstance(place.names, tuple) and values:
                # A model has hundreds of modules: these are read without Python.
                get = operator.itemgetter(*values, next(iter(values)))
                quick = len(place.held), get, get(place.held)
            self._watched.append((place, values, skipped, quick))

    def changed(self) -> str:
        """What the script has changed since `watch`, between two steps; '' if nothing."""
        for place, before, skipped, quick in self._watched:
            if quick is not None:
                size, get, values = quick
                try:
                    if len(place.held) == size and all(map(operator.is_, get(place.held), values)):
                        continue
                except KeyError:
                    pass  # deleted
                if len(place.held) != size:
                    return place.called(next(reversed(place.held), ""))
            now = {name: held for name, held in place.read().items() if name not in skipped}
            if changed := place.changed(before, now, _same):
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
    return a is b or (_scalar(a) and _scalar(b) and _equal(a, b))


def _equal(a: Any, b: Any) -> bool:
    """Whether values are equal as far as Python can tell; of others the same type is enough."""
    if a is b or type(a) is not type(b):
        return a is b
    if _scalar(a) and _scalar(b):
        return bool(a == b or (a != a and b != b))
    return len(a) == len(b) if isinstance(a, list | tuple | dict | set | frozenset) else True


@functools.cache
def _installed(module: str | None) -> bool:
    """Whether it is a library's, Python's own or advisor's, not what a user writes for a script."""
    if module is None or module.partition(".")[0] in ("advisor", "torch", "builtins"):
        return True
    file = None if module == "__main__" else getattr(sys.modules.get(module), "__file__", None)
    return file is not None and is_library(file)
