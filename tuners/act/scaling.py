"""Training in fp16: without a GradScaler, small gradients become zero. A GradScaler may skip a
step, which breaks fused SGD if it is the first one."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection
from traceback import walk_stack
from typing import Any

import torch
from torch import nn

from advisor.errors import AdvisorWarning
from advisor.tuners.act.hooks import STEP_HOOKS


class MissingScaler:
    """Checks the first optimizer step after `watch`, of `models` or, if there are none, of any:
    calls `scaled` if a GradScaler makes the step, and warns if not."""

    def __init__(self, models: Collection[nn.Module], scaled: Callable[[], None]) -> None:
        self._models, self._scaled = models, scaled
        self._unhook: Callable[[], None] | None = None

    def watch(self) -> None:
        if self._unhook is None:
            see = weakref.WeakMethod(self._see)
            self._unhook = STEP_HOOKS.register(lambda one: found(one) if (found := see()) else None)
            weakref.finalize(self, self._unhook)

    def _see(self, optimizer: torch.optim.Optimizer) -> None:
        ours = {id(weight) for model in self._models for weight in model.parameters()}
        if ours and not any(id(w) in ours for g in optimizer.param_groups for w in g["params"]):
            return
        assert self._unhook is not None
        self._unhook()
        callers = (frame.f_locals.get("self") for frame, _line in walk_stack(sys._getframe(1)))
        if any(isinstance(one, torch.amp.GradScaler) for one in callers):
            self._scaled()  # the script's own scaler is as good as the advice's
        else:
            warnings.warn(
                "advisor: this advice trains in fp16, and the optimizer stepped without a scaler: "
                "small gradients become zero. Call advice.step(loss, optimizer), or advice.scaler "
                "as PyTorch's examples have it; for bf16, which needs none, tune with --precisions "
                "bf16",
                AdvisorWarning,
                stacklevel=2,
            )


def init_momentum(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Initialise fused SGD's momentum before its first step. PyTorch leaves it uninitialised, the
    kernel writes nothing if a gradient is infinite, and the next step reads the random memory
    (torch/optim/sgd.py, _fused_sgd): ResNet-50's loss became NaN on an H200."""
    skipped = getattr(optimizer, "found_inf", None)  # set by a GradScaler for fused kernels
    if skipped is None or not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for weight in group["params"] if group["momentum"] else ():
            if weight.grad is None or optimizer.state[weight].get("momentum_buffer") is not None:
                continue
            if not group["dampening"]:
                # The first step sets momentum to the gradient; adding it to zeros is the same.
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight.grad)
            elif bool(skipped):
                # Only the first gradient is not dampened: without one, the next is still the first.
                weight.grad = None
