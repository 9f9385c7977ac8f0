"""The state of a training step, kept and restored."""

from __future__ import annotations

import torch
from torch import Tensor

from advisor.tuners.act.capture.object_graph import ObjectGraph
from advisor.tuners.act.capture.recorder import Recorder


class StateSnapshot:
    """All that a step may change, kept: tensors, gradients, Python's values, random numbers."""

    def __init__(
        self, tensors: list[Tensor], weights: list[Tensor], recorder: Recorder, objects: ObjectGraph
    ) -> None:
        self._recorder, self._objects = recorder, objects
        self._gradients = [(weight, weight.grad) for weight in weights]
        self._written = [*tensors, *(g for _, g in self._gradients if g is not None)]
        self._clones = [tensor.detach().clone() for tensor in self._written]
        self.tensors, self.clones = tensors, self._clones[: len(tensors)]
        self._random = recorder.random_state()
        self.held = objects.read()

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, clone in zip(self._written, self._clones, strict=True):
                tensor.detach().copy_(clone)
        for weight, gradient in self._gradients:
            weight.grad = gradient
        self._recorder.set_random_state(self._random)
        self._objects.put_back(self.held)
