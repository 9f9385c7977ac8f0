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
        fits = tree == self._tree and all(map(_alike, leaves, self._held))
        return leaves if fits else None

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


def _alike(ours: Any, held: Any) -> bool:
    """Whether a graph that was captured with `held` is right for `ours`."""
    if _dense(held) and _dense(ours):
        return bool(
            ours.shape == held.shape
            and ours.dtype == held.dtype
            and ours.requires_grad == held.requires_grad
        )
    if ours is held:
        return True
    if type(ours) is not type(held):
        return False
    try:
        return bool(ours == held)
    except (RuntimeError, ValueError, TypeError):  # arrays, and what has an order of its own
        return False
