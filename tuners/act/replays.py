"""Copies outputs and gradients of models that replay CUDA graphs: the next replay overwrites them.

PyTorch raises if an overwritten tensor is used (https://github.com/pytorch/pytorch/issues/169545).
So tensors that a script may need are copied: accumulated gradients, outputs of evaluation, a loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from advisor.tuners.act.hooks import STEP_HOOKS, replace_call
from advisor.tuners.decisions import LARGE_BYTES


class Replays:
    """Copies tensors of the compiled models of one advice, if the script may still need them."""

    def __init__(self) -> None:
        self._open = False  # whether the backward of a forward pass may follow
        self._own: dict[int, weakref.ref[Tensor]] = {}
        self._spent: list[torch.optim.Optimizer] = []
        self._models: set[nn.Module] = set()
        self._unread: set[nn.Module] = set()  # not called since `let_go`
        self._let_go: set[int] = set()

    def attach(self, model: nn.Module) -> None:
        """Wrap a model's compiled call. It adds no hooks: they would be compiled, too."""
        inner = model._compiled_call_impl
        if inner is None:
            return
        if not self._models:
            itself = weakref.ref(self)

            def close(_optimizer: torch.optim.Optimizer) -> None:
                if (one := itself()) is not None:
                    one._open = False

            weakref.finalize(self, STEP_HOOKS.register(close))
        self._models.add(model)
        replace_call(model, self._around(inner, model))

    def begin(self) -> None:
        """Begin a step: from now on, a replay may overwrite earlier outputs."""
        torch.compiler.cudagraph_mark_step_begin()
        self._open = False

    def stepped(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Note that these optimizers have stepped: the next forward pass clears their gradients."""
        self._spent += optimizers

    def let_go(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Note that the script will clear these optimizers' gradients: the next forward pass may
        overwrite them."""
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        self._let_go = {id(weight) for group in groups for weight in group["params"]}
        self._unread.update(self._models)

    def _around(self, inner: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
        weights = [weight for weight in model.parameters() if weight.requires_grad]

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                # Within a step, such as a teacher's pass, the step's own tensors must stay.
                if not self._open:
                    torch.compiler.cudagraph_mark_step_begin()
                return tree_map_only(Tensor, Tensor.clone, inner(*args, **kwargs))
            self._open = True
            needed = weights
            if model in self._unread:
                self._unread.remove(model)
                needed = [weight for weight in weights if id(weight) not in self._let_go]
            self._move_gradients(needed)
            return tree_map_only(Tensor, _copied_if_small, inner(*args, **kwargs))

        return call

    def _move_gradients(self, weights: list[nn.Parameter]) -> None:
        for optimizer in self._spent:
            optimizer.zero_grad(set_to_none=True)
        self._spent.clear()
        found = {}
        for weight in weights:
            own, gradient = self._own.get(id(weight)), weight.grad
            if gradient is not None and (own is None or own() is not gradient):
                found[weight] = gradient.detach()
        try:
            copies = _copies(list(found.values()))
        except RuntimeError:
            # Gradients of an earlier step were overwritten. Nobody can read them any more, and
            # PyTorch raises if the script adds to them.
            found = {weight: one for weight, one in found.items() if _is_readable(one)}
            copies = _copies(list(found.values()))
        for weight, gradient in zip(found, copies, strict=True):
            weight.grad = gradient
            self._own[id(weight)] = weakref.ref(gradient)


def _copies(gradients: list[Tensor]) -> list[Tensor]:
    # One call for all takes a kernel or two; clones would take hundreds.
    copies = [torch.empty_like(gradient) for gradient in gradients]
    if copies:
        torch._foreach_copy_(copies, gradients)
    return copies


def _is_readable(gradient: Tensor) -> bool:
    try:
        return bool(gradient.data_ptr()) or not gradient.numel()
    except RuntimeError:
        return False


def _copied_if_small(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.nbytes < LARGE_BYTES else tensor
