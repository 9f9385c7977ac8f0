"""The made-up data of a workload: batches of its shapes, and their targets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from advisor.cache.task import Task
from advisor.errors import TargetError, TargetFailed
from advisor.tuners.target import Loaded, failed


def make_batch(loaded: Loaded, task: Task, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Inputs and their target, on the CPU. The target is None unless the user's make_batch made it.

    Raises:
        TargetFailed: the user's make_batch raised, or does not fit the task.
    """
    hook, batch = loaded.make_batch, shape[0]
    if hook is None:
        dtype = getattr(torch, task.dtype)
        if dtype.is_floating_point:
            return torch.randn(shape).to(dtype), None
        return torch.randint(0, task.vocab, shape).to(dtype), None
    more = (shape[1:],) if len(inspect.signature(hook).parameters) > 2 else ()
    if task.mix and not more:
        raise TargetFailed(
            f"target {loaded.spec.name!r}: for several shapes make_batch must take a "
            "third parameter, the shape of a sample: make_batch(batch_size, device, shape)"
        )
    try:
        made = hook(batch, torch.device("cpu"), *more)
    except Exception as exc:  # the user's code may raise anything; it is reported whole
        raise failed(loaded.spec, f"make_batch({batch}, 'cpu') raised", exc) from exc
    if not isinstance(made, tuple) or len(made) != 2:
        raise TargetFailed(f"target {loaded.spec.name!r}: make_batch must return (inputs, target)")
    return made


def outputs_of(output: Any) -> list[Tensor]:
    """The tensors that a loss is taken of: `.logits` where there are, else all floating ones."""
    logits = (
        output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    )
    # Inception and GoogLeNet outputs are named tuples with auxiliary heads beside the logits.
    if isinstance(logits, Tensor) and not isinstance(output, tuple):
        return [logits]
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in outputs_of(part)]
    return []


def random_targets(output: Any) -> Tensor | list[Tensor]:
    """Labels for outputs with two dimensions, else values; a list where there are several."""
    found = [
        torch.randint(0, one.shape[1], (one.shape[0],))
        if one.dim() == 2
        else torch.randn(one.shape)
        for one in outputs_of(output)
    ]
    if not found:
        raise TargetError(
            f"the model's output ({type(output).__name__}) holds no floating-point tensor; "
            "define loss(output, target) in the target's file"
        )
    return found[0] if len(found) == 1 else found
