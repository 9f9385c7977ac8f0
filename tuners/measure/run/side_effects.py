"""What a model's call leaves behind, and what of it can be put back."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_OURS = "_compiled_call_impl"  # set by configs, not by the script
_VALUES = (bool, int, float, complex, str, bytes, type(None))


def keep_attributes(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Keep which objects modules hold; the result has them hold the same ones again."""
    tables: list[dict[str, Any]] = [t for one in modules for t in (vars(one), one._buffers)]
    kept = [{name: held for name, held in table.items() if name != _OURS} for table in tables]

    def put() -> None:
        for table, before in zip(tables, kept, strict=True):
            for name in table.keys() - before.keys() - {_OURS}:
                del table[name]
            table.update(before)

    return put


def watched(modules: Sequence[nn.Module]) -> Callable[[], str]:
    """Look for what a call may change that cannot be put back: objects that modules hold and that
    change in place, as a list or a parameter does, and numpy's random numbers; not deeper, nor what
    a model keeps elsewhere, as in a file. The result tells what has changed since, or ''."""
    before = [
        (f"{type(module).__name__}.{name}", held := [value, *_within(value)], [*map(_mark, held)])
        for module in modules
        for name, value in vars(module).items()
        if value is not module._buffers
    ]
    numpy = _numpy()

    def changed() -> str:
        if numpy != _numpy():
            return "numpy's random numbers"
        for name, held, marks in before:
            if marks != [_mark(one) for one in (held[0], *_within(held[0]))]:
                return name
        return ""

    return changed


def _within(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return itertools.chain.from_iterable(value.items())
    if isinstance(value, list | tuple | set | deque):
        return value
    if isinstance(value, nn.Module | type | Tensor) or callable(value):
        return ()
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _mark(value: object) -> object:
    """What is equal as long as an object is unchanged."""
    if isinstance(value, _VALUES):
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().numpy().tobytes()
    return id(value)


def _numpy() -> object:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, state, *rest = numpy.random.get_state()
    return kind, state.tobytes(), *rest


def hooked(modules: Sequence[nn.Module]) -> bool:
    """Whether the script has hooks that a call of these would run."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    parameters = (p for one in modules for p in one.parameters(recurse=False))
    there = (getattr(one, table) for one in modules for table in tables)
    return any(there) or any(one._backward_hooks for one in parameters)
