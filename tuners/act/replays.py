"""Models compiled to replay CUDA graphs: outputs and gradients lie where the next replay writes.

PyTorch raises if one is used after that (https://github.com/pytorch/pytorch/issues/169545). What a
script may still need is copied in time: accumulated gradients, outputs of evaluation, a loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from advisor.tuners.act.hooks import STEP_HOOKS
from advisor.tuners.decisions import LARGE_BYTES


class Replays:
    """Copies what a script may still need of the compiled models of one advice."""

    def __init__(self) -> None:
        self._open = False  # a forward pass whose backward may be to come
        self._own: dict[int, weakref.ref[Tensor]] = {}
        self._spent: list[torch.optim.Optimizer] = []
        self._models: set[nn.Module] = set()
        self._unread: set[nn.Module] = set()  # not called since gradients were let go of
        self._let_go: set[int] = set()

    def attach(self, model: nn.Module) -> None:
        """Wraps the compiled call of a model, not its hooks: they are compiled with it."""
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
        model._compiled_call_impl = self._around(inner, model)

    def begin(self) -> None:
        """From here on outputs of before may be written over."""
        torch.compiler.cudagraph_mark_step_begin()
        self._open = False

    def stepped(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Their gradients can be read until the next forward pass, and are gone after it."""
        self._spent += optimizers

    def let_go(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """The script clears their gradients before it adds to them: the next forward pass may write
        over them."""
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        self._let_go = {id(weight) for group in groups for weight in group["params"]}
        self._unread.update(self._models)

    def _around(self, inner: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
        weights = [weight for weight in model.parameters() if weight.requires_grad]

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                # Within a step, as a teacher's pass, the step's own tensors must stay.
                if not self._open:
                    torch.compiler.cudagraph_mark_step_begin()
                return tree_map(_copied, inner(*args, **kwargs))
            self._open = True
            needed = weights
            if model in self._unread:
                self._unread.remove(model)
                needed = [weight for weight in weights if id(weight) not in self._let_go]
            self._move_gradients(needed)
            return tree_map(_copied_if_small, inner(*args, **kwargs))

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
            # Those of an earlier step were written over: nobody can read them any more, and a
            # script that adds to them is told so by PyTorch.
            found = {weight: one for weight, one in found.items() if _is_readable(one)}
            copies = _copies(list(found.values()))
        for weight, gradient in zip(found, copies, strict=True):
            weight.grad = gradient
            self._own[id(weight)] = weakref.ref(gradient)


def _copies(gradients: list[Tensor]) -> list[Tensor]:
    # All at once take a kernel or two, where clones would take hundreds.
    copies = [torch.empty_like(gradient) for gradient in gradients]
    if copies:
        torch._foreach_copy_(copies, gradients)
    return copies


def _is_readable(gradient: Tensor) -> bool:
    try:
        return bool(gradient.data_ptr()) or not gradient.numel()
    except RuntimeError:
        return False


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _copied_if_small(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.nbytes < LARGE_BYTES else value
