"""Where a recorded step reads its batch from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class Buffers:
    """Room for one batch like the example, which stays where it is."""

    def __init__(self, example: Any) -> None:
        leaves, self._tree = _flatten(example)
        self._held = [torch.empty_like(x) if _dense(x) else x for x in leaves]

    def leaves(self, batch: Any) -> list[Any] | None:
        """A batch in parts; None where it is not like the example."""
        leaves, tree = _flatten(batch)
        return leaves if tree == self._tree and all(map(_alike, leaves, self._held)) else None

    def fill(self, leaves: list[Any]) -> None:
        for buffer, leaf in zip(self._held, leaves, strict=True):
            if _dense(buffer):
                buffer.copy_(leaf, non_blocking=True)

    def batch(self) -> Any:
        """What they hold, as a batch."""
        return tree_unflatten(self._held, self._tree)

    def drop(self) -> None:
        self._held = []


def _flatten(batch: Any) -> tuple[list[Any], Any]:
    # A DataLoader yields lists where datasets hold tuples: one as good as the other.
    return tree_flatten(list(batch) if type(batch) is tuple else batch)


def _dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _alike(a: Any, b: Any) -> bool:
    """Whether a graph that was captured with `b` is right for `a`."""
    if _dense(a) and _dense(b):
        return (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
    try:
        return a is b or bool(type(a) is type(b) and a == b)
    except (RuntimeError, ValueError, TypeError):  # arrays, and what has an order of its own
        return False
