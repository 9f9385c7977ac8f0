"""Reads the losses that a script passes to backward, without waiting for the device."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from advisor.tuners.act import hooks


class LossObserver:
    """Copies the scalar losses of each step, from the first `begin` until `remove`."""

    def __init__(self) -> None:
        self._steps: list[list[Tensor]] = []  # the last one is not over
        self._scaled: tuple[Any, Tensor] = (lambda: self, torch.empty(0))  # and its loss
        self._hooks = contextlib.ExitStack()

    def begin(self) -> None:
        """Forget the losses so far."""
        if not self._steps:
            self._hooks.callback(hooks.on_backward(self._keep))
            self._hooks.callback(hooks.Patch(torch.amp.GradScaler, "scale", self._scale).remove)
        self._steps = [[]]

    def taken(self) -> tuple[float, ...]:
        """For each step with a loss, the sum over its backward passes. Waits for the device."""
        return tuple(sum(map(float, losses)) for losses in self._steps[:-1] if losses)

    def end_step(self) -> None:
        self._steps += [[]] if self._steps else []

    def remove(self) -> None:
        self._hooks.close()
        self._steps = []

    def _scale(self, plain: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = plain(scaler, outputs)
        if isinstance(outputs, Tensor):
            self._scaled = weakref.ref(scaled), outputs.detach()
        return scaled

    def _keep(self, tensors: Any) -> None:
        # Checkpointing calls backward within backward; a graph's capture would record the copy.
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if capturing or hooks.in_backward() or torch.compiler.is_compiling():
            return
        with contextlib.suppress(Exception):  # a tensor may be of the script's own class
            for loss in tree_leaves(tensors):
                loss = self._scaled[1] if self._scaled[0]() is loss else loss
                if isinstance(loss, Tensor) and loss.numel() == 1:
                    self._steps[-1].append(loss.detach().clone())
