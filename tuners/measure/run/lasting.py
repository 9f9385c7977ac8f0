"""What a model's call leaves behind: what of it can be put back, and whether there is more."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_OURS = "_compiled_call_impl"
"""Not the script's: what a config has a module called through."""
_VALUES = (bool, int, float, complex, str, bytes, type(None))


class Held:
    """What modules hold, as it is now: their attributes, and the values of their buffers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        tables = [table for one in modules for table in (vars(one), one._buffers)]
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (table, {name: value for name, value in table.items() if name != _OURS})
            for table in tables
        ]
        buffers = {id(b): b for one in modules for b in one.buffers(recurse=False)}
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers.values()]

    def put_attributes(self) -> None:
        """Have modules hold the same objects again."""
        for table, before in self._tables:
            for name in table.keys() - before.keys() - {_OURS}:
                del table[name]
            table.update(before)

    @torch.no_grad()
    def put(self) -> None:
        """Have them hold that again, to the bit."""
        self.put_attributes()
        for buffer, value in self._buffers:
            buffer.copy_(value)


class Beyond:
    """What a call may change that `Held` does not put back: what hangs on modules and changes in
    itself, as a list or a parameter does, and numpy's random numbers. What lies deeper, and what a
    model keeps elsewhere, as in a file, is not seen.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._before = [
            (f"{type(module).__name__}.{name}", value, list(_marks(value)))
            for module in modules
            for name, value in vars(module).items()
            if value is not module._buffers
        ]
        self._numpy = _numpy()

    def changed(self) -> str:
        """What of it is otherwise now, for people; '' for nothing."""
        if self._numpy != _numpy():
            return "numpy's random numbers"
        for name, value, before in self._before:
            after = list(_marks(value))
            if len(before) != len(after) or not all(map(_same, before, after)):
                return name
        return ""


Mark = tuple[object, object]


def _marks(value: object) -> Iterator[Mark]:
    yield _mark(value)
    yield from map(_mark, _within(value))


def _within(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return itertools.chain.from_iterable(value.items())
    if isinstance(value, list | tuple | set | deque):
        return value
    if isinstance(value, nn.Module | type | Tensor) or callable(value):
        return ()
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _mark(value: object) -> Mark:
    """Something, and what else tells that it is as it was."""
    if isinstance(value, Tensor):
        return value, 0 if value.is_inference() else value._version
    if isinstance(value, torch.Generator):
        return value, value.get_state().numpy().tobytes()
    return value, None


def _same(before: Mark, after: Mark) -> bool:
    if isinstance(before[0], _VALUES):
        return type(before[0]) is type(after[0]) and before[0] == after[0]
    return before[0] is after[0] and before[1] == after[1]


def _numpy() -> object:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, state, *rest = numpy.random.get_state()
    return kind, state.tobytes(), *rest


def hooked(modules: Sequence[nn.Module]) -> bool:
    """Whether the script has hooks that a call of these would run, whatever they do."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    parameters = (p for one in modules for p in one.parameters(recurse=False))
    return any(getattr(one, table) for one in modules for table in tables) or any(
        one._backward_hooks for one in parameters
    )
