"""What models take and return: PyTorch's trees, and dataclasses, which these do not look into."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same with its tensors changed."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        other = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            # Frozen ones too: it is not the script's yet.
            object.__setattr__(other, field.name, mapped(change, getattr(leaf, field.name)))
        return other

    return tree_map(of, value)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in it, in their order."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(take, value)
    return found
