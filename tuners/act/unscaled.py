"""Half precision without a scaler: small gradients become zero, and nothing says so."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection

import torch
from torch import nn

from advisor.errors import AdvisorWarning
from advisor.tuners.act.steps import EVERY_STEP

_DEPTH = 16
"""Callers looked at: the scaler's step, a schedule's wrapper and the hook's own lie between."""


class Unscaled:
    """Looks once, at the first optimizer step after `watch`, whether a GradScaler takes it.

    Args:
        models: whose optimizers are meant; where there are none, any.

    Attributes:
        scaled: whether it did; False while nothing was seen.
    """

    def __init__(self, models: Collection[nn.Module]) -> None:
        self.scaled = False
        self._models = models
        self._unhook: Callable[[], None] | None = None

    def watch(self) -> None:
        """Costs a comparison at all calls but the first."""
        if self._unhook is None:
            see = weakref.WeakMethod(self._see)
            self._unhook = EVERY_STEP.tell(
                lambda optimizer: found(optimizer) if (found := see()) else None
            )
            weakref.finalize(self, self._unhook)

    def _see(self, optimizer: torch.optim.Optimizer) -> None:
        ours = {id(weight) for model in self._models for weight in model.parameters()}
        if ours and not any(id(w) in ours for g in optimizer.param_groups for w in g["params"]):
            return
        assert self._unhook is not None
        self._unhook()
        frame = sys._getframe(1)
        for _ in range(_DEPTH):
            # The script's own scaler is as good as the advice's.
            if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
                self.scaled = True
                return
            if frame.f_back is None:
                break
            frame = frame.f_back
        warnings.warn(
            "advisor: this advice trains in fp16, and the optimizer stepped without a scaler: "
            "small gradients become zero. Call advice.step(loss, optimizer), or advice.scaler as "
            "PyTorch's examples have it; for bf16, which needs none, tune with --precisions bf16",
            AdvisorWarning,
            stacklevel=2,
        )
