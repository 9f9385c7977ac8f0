"""The state of a training step, kept and restored."""

from __future__ import annotations

import torch
from torch import Tensor

from advisor.tuners.act.capture.recorder import Recorder
from advisor.tuners.act.capture.watch import Watch


class Moment:
    """All that a step may change, kept: tensors, gradients, Python's values, random numbers."""

    def __init__(
        self, tensors: list[Tensor], weights: list[Tensor], recorder: Recorder, watch: Watch
    ) -> None:
        self._recorder, self._watch = recorder, watch
        self.tensors = tensors
        self.clones = [tensor.detach().clone() for tensor in tensors]
        self._gradients = [(weight, weight.grad) for weight in weights]
        self._grads = [None if g is None else g.detach().clone() for _, g in self._gradients]
        self.random = recorder.random_state()
        self.seen = watch.read()

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, clone in zip(self.tensors, self.clones, strict=True):
                tensor.detach().copy_(clone)
            for (weight, gradient), held in zip(self._gradients, self._grads, strict=True):
                weight.grad = gradient
                if gradient is not None and held is not None:
                    gradient.detach().copy_(held)
        self._recorder.set_random_state(self.random)
        self._watch.put_back(self.seen)
