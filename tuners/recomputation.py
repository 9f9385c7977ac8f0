"""Activation checkpointing of the blocks that a model repeats: each keeps only its inputs for the
backward pass, which computes the rest again (https://docs.pytorch.org/docs/stable/checkpoint.html).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from advisor.tuners.act.pilot.trees import mutable_class

_FLAG = ("gradient_checkpointing", "_gradient_checkpointing_func")  # of transformers' layers
ContextManager = contextlib.AbstractContextManager[None]
MIN_IN_A_ROW = 3
"""Least number of blocks of one class in a row that count as repeated."""


class NotRecomputable(RuntimeError):
    """A block would compute something else in its second call."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks of a model, in order, without those whose calls have side
    effects that advisor cannot undo: hooks run again in a second call."""
    return [one for one in _blocks(model) if not any(map(_has_hooks, one.modules()))]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = [one for one in module._modules.values() if one is not None]  # repeats shared ones
    lists = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    for _kind, found in itertools.groupby(children, type if lists else id):
        run = list(found)
        # A single layer saves little more than its input.
        if len(run) >= MIN_IN_A_ROW and any(True for _ in run[0].children()):
            yield from run
        else:
            for child in run:
                yield from _blocks(child)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def recompute_in_place(model: nn.Module, every: int, *, compiled: bool = False) -> None:
    """Have the first of `every` blocks recompute its activations; 0: none. `compiled`: also blocks
    with compiled code, which else is the script's own."""
    for block in blocks(model)[::every] if every else ():
        if compiled or vars(block).get("_compiled_call_impl") is None:
            call: Any = RecomputedCall(block)
            block._compiled_call_impl = call


def recomputed_calls(model: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """The calls that `recompute_in_place` has replaced, by module."""
    calls = ((one, vars(one).get("_compiled_call_impl")) for one in model.modules())
    return {module: call for module, call in calls if isinstance(call, RecomputedCall)}


def keep_activations(model: nn.Module) -> None:
    """Undo `recompute_in_place`."""
    for module in recomputed_calls(model):
        del module._compiled_call_impl


class RecomputedCall:
    """Replaces the call of a block. Random numbers and autocast are the same in both calls, and
    running statistics are updated once.

    Raises:
        NotRecomputable: an argument is an object that the first call may have changed, or the block
            has changed an input or a buffer in place.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        compiled: Callable[..., Any] | None = vars(block).get("_compiled_call_impl")
        self._plain: Callable[..., Any] = block._call_impl if compiled is None else compiled
        self._norms = [
            one for one in block.modules() if isinstance(one, _NormBase) and one.track_running_stats
        ]
        updated = {id(buffer) for norm in self._norms for buffer in norm.buffers()}
        self._fixed = [buffer for buffer in block.buffers() if id(buffer) not in updated]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        # transformers' layers leave out their cache, which a second call would fill again.
        if hasattr(type(self._block), "gradient_checkpointing"):
            with self._by_its_own_flag():
                return self._plain(*args, **kwargs)
        name = type(self._block).__name__
        if kind := mutable_class((args, kwargs)):
            raise NotRecomputable(f"a second call of {name} may change its {kind} again")
        watched = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        watched += self._fixed
        before = [one._version for one in watched if not one.is_inference()]
        found = checkpoint(
            partial(self._plain, **kwargs), *args, use_reentrant=False, context_fn=self._contexts
        )
        if before != [one._version for one in watched if not one.is_inference()]:
            raise NotRecomputable(f"{name} changes an input or a buffer in place")
        return found

    @contextlib.contextmanager
    def _by_its_own_flag(self) -> Iterator[None]:
        block: Any = self._block
        own = {name: vars(block)[name] for name in _FLAG if name in vars(block)}
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = self._checkpoint
        try:
            yield
        finally:
            for name in _FLAG:
                delattr(block, name)
            vars(block).update(own)

    def _checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[ContextManager, ContextManager]:
        """Context managers of the first and of the second call."""
        return contextlib.nullcontext(), self._without_updates()

    @contextlib.contextmanager
    def _without_updates(self) -> Iterator[None]:
        """Have norms update copies of their running statistics. They do not read them in
        training."""
        own = [dict(norm._buffers) for norm in self._norms]
        for norm, buffers in zip(self._norms, own, strict=True):
            norm._buffers |= {n: None if b is None else b.clone() for n, b in buffers.items()}
        try:
            yield
        finally:
            for norm, buffers in zip(self._norms, own, strict=True):
                norm._buffers |= buffers
