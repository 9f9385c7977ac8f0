"""Fused SGD's momentum, where a GradScaler may skip the first step.

PyTorch makes it in that step, uninitialised, for the kernel to write. Where a gradient is infinite
the kernel writes nothing, and the next step goes on from what was there (torch/optim/sgd.py,
_fused_sgd): ResNet-50's loss became NaN on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def begin(optimizer: torch.optim.Optimizer, _args: Any, _how: Any) -> None:
    """Before a step: make what momentum it would make itself, as its first step means it.

    For `register_optimizer_step_pre_hook`.
    """
    skipped = getattr(optimizer, "found_inf", None)  # which a GradScaler gives to fused kernels
    if skipped is None or not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        new = [w for w in group["params"] if w.grad is not None and _is_new(optimizer, w)]
        if not group["momentum"] or not new:
            continue
        if not group["dampening"]:
            # The first step takes the gradient as it is: so does one that adds it to nothing.
            for weight in new:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight.grad)
        elif bool(skipped):
            # Dampened is every gradient but the first: there is no step until there is one.
            for weight in new:
                weight.grad = None


def _is_new(optimizer: torch.optim.Optimizer, weight: Tensor) -> bool:
    return optimizer.state[weight].get("momentum_buffer") is None
