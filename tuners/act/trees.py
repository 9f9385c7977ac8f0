"""Maps over the tensors that models take and return."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

IMMUTABLE = (
    *(Tensor, int, float, complex, str, bytes, type(None), range, slice, frozenset, Enum),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout, FunctionType),
)


def map_tensors(
    change: Callable[[Tensor], Tensor], value: Any, *, _around: tuple[Any, ...] = ()
) -> Any:
    """Return `value` with its tensors changed, also in objects of any class, which are copied."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        contents = _contents(leaf)
        if not contents or any(leaf is one for one in _around):
            return leaf
        other = map_tensors(change, contents, _around=(*_around, leaf))
        same = all(map(operator.is_, tree_leaves(contents), tree_leaves(other)))
        return leaf if same else _with_contents(leaf, other)

    return tree_map(of, value)


def _contents(leaf: Any) -> dict[str, Any]:
    """An object's attributes, and a dictionary's items."""
    if isinstance(leaf, IMMUTABLE) or callable(leaf):
        return {}
    slots = [name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*getattr(leaf, "__dict__", ()), *slots]
    items = dict(leaf) if isinstance(leaf, dict) else {}
    return items | {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}


def held_tensors(value: Any) -> dict[str, Tensor]:
    """The tensors that are attributes of an object, such as a batch of a class of its own."""
    return {name: one for name, one in _contents(value).items() if isinstance(one, Tensor)}


def _with_contents(leaf: Any, contents: dict[str, Any]) -> Any:
    """A copy of an object with these contents."""
    other = copy.copy(leaf)
    for name, value in contents.items():
        if isinstance(leaf, dict) and name in leaf:
            other[name] = value
        else:
            object.__setattr__(other, name, value)  # sets frozen dataclasses' fields too
    return other


def is_cache(value: object) -> bool:
    """Whether this is a cache of transformers' layers, which a call fills."""
    kinds = (kind for kind in type(value).__mro__ if kind.__name__ == "Cache")
    return any(kind.__module__.startswith("transformers.") for kind in kinds)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, such as a model's output, in order."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(take, value)
    return found


def mutable_class(value: Any) -> str:
    """The class of an object in `value` that another call may change; '' if there is none."""
    for leaf in tree_leaves(value):
        found = "" if isinstance(leaf, IMMUTABLE) else type(leaf).__name__
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found = mutable_class([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        if found:
            return found
    return ""
