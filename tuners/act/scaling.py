"""Training in fp16: without a scaler small gradients become zero, and with one a step may be
skipped, which fused SGD does not expect of the first."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection
from itertools import islice
from traceback import walk_stack
from typing import Any

import torch
from torch import nn

from advisor.errors import AdvisorWarning
from advisor.tuners.act.hooks import STEP_HOOKS

_DEPTH = 16
"""Callers looked at: the scaler's step, a schedule's wrapper and the hook's own lie between."""


class MissingScaler:
    """Looks at the first optimizer step of these models, or of any, after `watch`: calls `scaled`
    if a GradScaler takes it, and warns if none does."""

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
        callers = islice(walk_stack(sys._getframe(1)), _DEPTH)
        if any(isinstance(f.f_locals.get("self"), torch.amp.GradScaler) for f, _line in callers):
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
    """Before a step: make the momentum that fused SGD would make uninitialised in its first. Its
    kernel writes nothing if a gradient is infinite, and the next step goes on from what was there
    (torch/optim/sgd.py, _fused_sgd): ResNet-50's loss became NaN on an H200."""
    skipped = getattr(optimizer, "found_inf", None)  # which a GradScaler gives to fused kernels
    if skipped is None or not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for weight in group["params"] if group["momentum"] else ():
            if weight.grad is None or optimizer.state[weight].get("momentum_buffer") is not None:
                continue
            if not group["dampening"]:
                # The first step takes the gradient as it is: so does one that adds it to nothing.
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight.grad)
            elif bool(skipped):
                # Dampened is every gradient but the first: there is no step until there is one.
                weight.grad = None
