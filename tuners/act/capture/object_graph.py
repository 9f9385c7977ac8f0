"""The Python values that a training step uses, which no replay updates: closures and globals of the
step and of the user's functions that the step names, attributes of the step's object that this code
names, and the contents of these objects, one level deep."""

from __future__ import annotations

import dis
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from advisor.tuners.act.pilot.loop_observer import weights_of
from advisor.tuners.fingerprint import codes_in, is_library

_SCALARS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_SCALER = ("_scale", "_growth_tracker", "_growth_factor", "_backoff_factor", "_growth_interval")
_MODULE = frozenset(vars(nn.Module())) - {"training"}
_SCHEDULER = torch.optim.lr_scheduler.LRScheduler
_TORCH = (nn.Module, torch.optim.Optimizer, _SCHEDULER, torch.amp.GradScaler)
_WIDE = 1000
"""Of a container with more entries only the length is read: it holds data, not settings."""
_ABSENT = object()

Values = list[dict[Any, Any]]
"""The values of each ValueHolder, by name."""


@dataclass(frozen=True, slots=True)
class ValueHolder:
    """An object that holds values: a dictionary, a sequence, a class, a closure's cell."""

    label: str  # its name in messages
    held: Any
    names: Collection[str] | None = None  # only these are read; None: all
    inside: bool = False  # values may change between steps, but not in a step

    def read(self) -> dict[Any, Any]:
        held = vars(self.held) if isinstance(self.held, type) else self.held
        if self.names is not None:
            return {name: held[name] for name in self.names if name in held}
        if isinstance(held, CellType):
            return {"": held.cell_contents} if held != CellType() else {}  # not assigned yet
        if len(held) > _WIDE:
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
        """Restore the values in `before`, and drop entries that were added to a list."""
        if "len()" in before:
            return
        now = self.read()
        if isinstance(self.held, list | deque) and len(now) != len(before):
            self.held.clear()
            self.held.extend(before.values())
        for name, value in before.items():
            if now.get(name, _ABSENT) is not value:
                self.write(name, value)

    def reads(self, but: Collection[Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield (name in messages, function that reads) of all values but those named in `but`."""
        if not isinstance(self.held, dict | type):
            yield self.label, lambda: tuple(v for n, v in self.read().items() if n not in but)
            return
        # A model has hundreds of modules: C functions read dictionaries without Python code.
        held = vars(self.held) if isinstance(self.held, type) else self.held
        if self.names is None:
            yield self.label, partial(len, held)
        for name in {*(self.read() if self.names is None else self.names)}.difference(but):
            yield self.called(name), partial(held.get, name, _ABSENT)

    def called(self, name: Any) -> str:
        """The name of a value in messages: 'self.weight', 'schedule.last_epoch'."""
        return ".".join(part for part in (self.label, str(name)) if part)


class ObjectGraph:
    """The objects that `train_step` uses now; `tensors`: their tensors, which a step may change."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        modules: Iterable[nn.Module],
        stepped: Collection[torch.optim.Optimizer | torch.amp.GradScaler],
    ) -> None:
        self._holders: list[ValueHolder] = []
        self._reads: list[tuple[str, Callable[[], Any]]] = [("no_grad", torch.is_grad_enabled)]
        self._watched: list[tuple[str, Callable[[], Any], Any]] = []
        self._names: set[str] = set()  # in the code of the step
        self._stepped = {id(one) for one in stepped}
        self._met: dict[int, Any] = {}  # an object's id stays its own while the object lives
        if isinstance(train_step, FunctionType | MethodType):
            self._add(getattr(train_step, "__self__", None), "self")
            self._add_function(train_step)
        else:
            self._add(train_step, "self")
            self._add_function(type(train_step).__call__)
        known = 0
        while known < len(self._holders):  # a method may name other functions
            known = len(self._holders)
            for _place, _name, value in self._entries():
                self._add_function(value)
        for holder, name, value in self._entries():
            self._add(value, holder.called(name))
        for one in (*modules, *stepped):
            self._add(one, type(one).__name__)
        held = (value for *_at, value in self._entries() if isinstance(value, Tensor))
        self.tensors = [value for value in dict.fromkeys(held) if not value.is_inference()]

    def _entries(self) -> list[tuple[ValueHolder, Any, Any]]:
        return [(holder, *entry) for holder in self._holders for entry in holder.read().items()]

    def _add_function(self, value: Any) -> None:
        """Add the closure of a function, method or property, and the globals that it names."""
        function = getattr(value, "fget", getattr(value, "__func__", value))
        if not isinstance(function, FunctionType) or id(function) in self._met:
            return
        self._met[id(function)] = function
        if _installed(function.__module__):
            return
        read: set[str] = set()
        for code in codes_in(function.__code__):
            self._names |= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
            # Not all of co_names: a script's global `step` is not an optimizer's method `step`.
            loads = (one for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")
            read |= {str(one.argval) for one in loads}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._holders += [ValueHolder(name, cell) for name, cell in cells]
        world = function.__globals__
        self._holders.append(ValueHolder("", world, read))
        for name in read & world.keys():
            if isinstance(world[name], ModuleType) and not _installed(world[name].__name__):
                self._holders.append(ValueHolder(name, vars(world[name]), self._names))

    def _add_module(self, whole: nn.Module, label: str) -> None:
        for name, module in whole.named_modules(prefix=label):
            self._met[id(module)] = module
            types = object if (kinds := _kinds(module)) else bool | float
            own = {n: one for n, one in vars(module).items() if n not in _MODULE}
            names = {n for n, one in own.items() if isinstance(one, types)}
            names.update(*map(vars, kinds))  # a module may get its class's attributes later
            parts = (module._parameters, module._buffers, module._modules)
            self._holders += [ValueHolder(name, part) for part in parts if part]
            self._holders.append(ValueHolder(name, vars(module), names))
        self._holders += [ValueHolder(label, kind, self._names) for kind in _kinds(whole)]
        self._reads.append(("which weights train", partial(_train, [*whole.parameters()])))

    def _add_optimizer(self, value: torch.optim.Optimizer, label: str) -> None:
        other = id(value) not in self._stepped
        self._holders += [ValueHolder(label, group, inside=other) for group in value.param_groups]
        states = [state for state in value.state.values() if isinstance(state, dict)]
        self._holders += [ValueHolder(f"{label}.state", state, inside=True) for state in states]
        if not other:
            weights = weights_of(value)
            self._reads += [
                (f"{label}.state", partial(getattr, value, "state")),  # replaced on loading
                (f"{label}.param_groups", partial(len, value.param_groups)),
                ("where weights lie", lambda: array("Q", map(Tensor.data_ptr, weights)).tobytes()),
                ("which weights train", partial(_train, weights)),
            ]

    def _add(self, value: Any, label: str, *, deeper: bool = False) -> None:
        """Add the values of an object and of PyTorch objects in it; `deeper`: only PyTorch ones."""
        if id(value) in self._met or not isinstance(value, _TORCH if deeper else object):
            return
        known = len(self._holders)
        self._met[id(value)] = value
        if isinstance(value, nn.Module):
            self._add_module(value, label)
        elif isinstance(value, torch.amp.GradScaler):
            self._holders.append(ValueHolder(label, vars(value), _SCALER))
        elif isinstance(value, torch.optim.Optimizer):
            self._add_optimizer(value, label)
        elif isinstance(value, _SCHEDULER):
            self._holders.append(ValueHolder(label, vars(value), inside=True))
        elif isinstance(value, dict | list | deque):
            self._holders.append(ValueHolder(label, value))
        elif isinstance(value, tuple):
            for part in value[:_WIDE]:
                self._add(part, label)
        elif not isinstance(value, type | ModuleType) and (kinds := _kinds(value)):
            held = (getattr(value, "__dict__", {}), *kinds)
            self._holders += [ValueHolder(label, one, self._names) for one in held]
        for holder in () if deeper else self._holders[known:]:
            for name, part in holder.read().items():
                self._add(part, holder.called(name), deeper=True)

    def read(self) -> Values:
        return [holder.read() for holder in self._holders]

    def changed_in_step(self, before: Values) -> str:
        """The name of a Python value that a step has changed, as 'schedule.last_epoch'; '' if none.
        Another object of the same type, such as a kept output, is no change."""
        for holder, old in zip(self._holders, before, strict=True):
            now = holder.read()
            for name in {**now, **old}:
                if not _alike(now.get(name, _ABSENT), old.get(name, _ABSENT)):
                    return holder.called(name)
        return ""

    def restore(self, before: Values) -> None:
        """Restore the values in `before`, and drop GradScalers' state of an unfinished step."""
        for holder, old in zip(self._holders, before, strict=True):
            holder.restore(old)
        for one in self._met.values():
            if isinstance(one, torch.amp.GradScaler):
                one._per_optimizer_states.clear()
            elif isinstance(one, torch.optim.Optimizer):
                vars(one).pop("grad_scale", None)
                vars(one).pop("found_inf", None)

    @property
    def between_steps(self) -> bool:
        """Whether no GradScaler has made a step without an `update` after it."""
        scalers = (one for one in self._met.values() if isinstance(one, torch.amp.GradScaler))
        return not any(scaler._per_optimizer_states for scaler in scalers)

    def replaced(self, before: Values) -> list[tuple[ValueHolder, Any, Any]]:
        """(Holder, name, new object) of each value that is another object than in `before`."""
        return [
            (holder, name, new)
            for holder, old in zip(self._holders, before, strict=True)
            for name, new in holder.read().items()
            if name in old and old[name] is not new and not _scalar(new)
        ]

    def watch(self, before: Values, followed: Collection[int]) -> None:
        """Have `changed` compare with the present values, except those that the step replaces, and
        learning rates of the groups with ids in `followed`."""
        own = {id(holder): ["lr"] for holder in self._holders if id(holder.held) in followed}
        for holder, name, _new in self.replaced(before):
            own.setdefault(id(holder), []).append(name)
        reads = list(self._reads)
        for holder in self._holders:
            if not holder.inside:
                reads += holder.reads(own.get(id(holder), ()))
        self._watched = [(label, read, read()) for label, read in reads]

    def changed(self) -> str:
        """The name of a value that the script has changed since `watch`; '' if none."""
        for label, read, before in self._watched:
            if (now := read()) is not before and not _same(now, before):
                return label
        return ""


def _train(weights: Iterable[Tensor]) -> bytes:
    return bytes([weight.requires_grad for weight in weights])


def _kinds(value: object) -> list[type]:
    return [kind for kind in type(value).__mro__ if not _installed(kind.__module__)]


def _scalar(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_scalar, value))
    return isinstance(value, _SCALARS)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (_scalar(a) and _alike(a, b))


def _alike(a: Any, b: Any) -> bool:
    """Whether scalars are equal, or containers equally long; else the same type is enough."""
    if type(a) is not type(b):
        return False
    if _scalar(a) and _scalar(b):
        return bool(a == b or (a != a and b != b))
    return len(a) == len(b) if isinstance(a, list | tuple | dict | set | frozenset) else True


@cache
def _installed(module: str | None) -> bool:
    """Whether a module belongs to a library, Python or advisor, and not to the user's script."""
    if module is None or module.partition(".")[0] in ("advisor", "torch", "builtins"):
        return True
    file = None if module == "__main__" else getattr(sys.modules.get(module), "__file__", None)
    return file is not None and is_library(file)
