"""A step that was recorded, and what a replay of it leaves behind in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from advisor.tuners.act.capture.object_graph import Held, Place

_CLEARED = object()


class Gradient:
    """Where a recorded step leaves a weight's gradient, and how it found it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.before: Any = weight.grad
        self.after: Any = None

    def recorded(self) -> None:
        self.after = self.weight.grad
        self.weight.grad = self.before
        if self.clears:
            self.before = _CLEARED  # not kept alive: it is as large as the weight

    @property
    def clears(self) -> bool:
        """Whether the step replaces the gradient that it finds."""
        return self.before is not None and self.after is not self.before

    def as_recorded(self) -> bool:
        """A step that clears gradients first does not care; others find them as they were."""
        return self.clears or self.weight.grad is self.before


class CapturedGraph:
    """What `Recorder.record` gave, for batches in the same buffers.

    Args:
        recording: what plays it again, and what the step returned.
        gradients: of the weights, as they were found.

    Attributes:
        attached: whether the weights have the gradients that a replay writes.
    """

    def __init__(
        self, recording: tuple[Callable[[], None], Any], gradients: list[Gradient]
    ) -> None:
        self._play, self._output = recording
        for gradient in gradients:
            gradient.recorded()
        self.gradients = gradients
        self.attached = False
        self._replaced: list[tuple[Place, Any]] = []
        self._alive: Held = []

    def keep(self, replaced: list[tuple[Place, Any, Any]], before: Held) -> None:
        """Objects that the step replaces: where, and the new ones; and all that it found."""
        self._replaced = [(place, name) for place, name, _new in replaced]
        self._output = tree_map(detached, (self._output, [new for *_, new in replaced]))
        self._alive = before  # a tensor that has been replaced is still read by the graph

    def kept(self) -> list[Any]:
        """What stands there now."""
        return [place.read()[name] for place, name in self._replaced]

    def play(self, fill: Callable[[], None]) -> Any:
        """Fill the buffers and take the step; what it returns is the caller's."""
        # Copies: the next replay writes over the graph's own, and a script may keep its losses.
        # Made before: a batch that has been trained on cannot be given up.
        output, kept = rooms = tree_map(_room, self._output)
        fill()
        self._play()
        tree_map(_copy, rooms, self._output)
        for gradient in self.gradients:
            if not self.attached or (gradient.before is None and gradient.after is not None):
                gradient.weight.grad = gradient.after
        self.attached = True
        for (place, name), value in zip(self._replaced, kept, strict=True):
            place.write(name, value)
        return output


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _room(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, Tensor) else value


def _copy(to: Any, source: Any) -> None:
    if isinstance(to, Tensor):
        to.copy_(source)
