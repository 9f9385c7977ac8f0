"""Activation checkpointing of the blocks that a model repeats: each keeps only its inputs for the
backward pass, which computes the rest again (https://docs.pytorch.org/docs/stable/checkpoint.html).
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from advisor.tuners import environment
from advisor.tuners.act.hooks import in_backward, replace_call
from advisor.tuners.act.pilot.trees import IMMUTABLE, is_cache
from advisor.tuners.faults import NotRecomputable
from advisor.tuners.offloading import EXTRA_TIME

MIN_IN_A_ROW = 3
"""Least number of blocks of one class in a row that count as repeated."""
CHECKED_CALLS = 4
"""Calls of each block until its second calls, which are checked, end early. A check waits for the
device."""
_ALIKE = 2e-2
"""Relative difference that rounding may make between two calls: in bf16, with other algorithms."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks of a model, in order, without compiled ones, and without those
    whose hooks would run again in a second call."""
    found = (one for one in _blocks(model) if vars(one).get("_compiled_call_impl") is None)
    return [one for one in found if not any(map(_has_hooks, one.modules()))]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    if hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None:
        return  # compiled by the script: its code decides what it keeps
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


def recompute_in_place(model: nn.Module) -> None:
    """Have every block recompute its activations."""
    replace_calls(blocks(model))


def replace_calls(chosen: Iterable[nn.Module]) -> None:
    for block in dict.fromkeys(chosen):  # a shared one occurs several times
        replace_call(block, RecomputedCall(block))


def recomputed_calls(model: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """The calls that `recompute_in_place` has replaced, by module."""
    calls = ((one, vars(one).get("_compiled_call_impl")) for one in model.modules())
    return {module: call for module, call in calls if isinstance(call, RecomputedCall)}


class RecomputedCall:
    """Replaces the call of a block. PyTorch's random numbers and autocast are the same in both
    calls, and running statistics are updated once. The first calls are checked.

    Raises:
        NotRecomputable: the second call would compute something else, or change something again.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block, self._unchecked = block, CHECKED_CALLS
        self.device = torch.device("cpu")  # of the last call
        self.kept_bytes = 0  # that a call keeps for backward, on a GPU
        compiled: Callable[..., Any] | None = vars(block).get("_compiled_call_impl")
        self._plain: Callable[..., Any] = block._call_impl if compiled is None else compiled
        modules = list(block.modules())
        self.norms = [m for m in modules if isinstance(m, _NormBase) and m.track_running_stats]
        self._others = [m for m in modules if m not in self.norms]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = getattr(self.block, "gradient_checkpointing", False)  # of transformers' layers
        if not torch.is_grad_enabled() or own or _has_hooks(self.block):
            return self._plain(*args, **kwargs)
        if in_backward():
            raise self.refusal("is checkpointed by the script itself")
        # Each call gets containers of its own: the script may change them before backward.
        leaves, structure = tree_flatten(_without_cache(args, kwargs))
        for leaf in leaves:
            if not isinstance(leaf, IMMUTABLE):
                what = type(leaf).__name__
                raise self.refusal(f"gets an object of class {what}, which a call may change")
        self.device = next((x.device for x in leaves if isinstance(x, Tensor)), self.device)
        return self._checkpoint(partial(self._call, structure), *leaves)

    def _call(self, structure: Any, *leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, structure)
        before = self._versions(leaves)
        found = self._plain(*args, **kwargs)
        now = tree_leaves((args, kwargs))
        same = len(now) == len(leaves) and all(map(operator.is_, now, leaves))
        if not same or before != self._versions(leaves):
            raise self.refusal("changes an input or a buffer in place")
        return found

    def _versions(self, leaves: Sequence[Any]) -> list[tuple[int, int]]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        tensors += (b for module in self._others for b in module.buffers(recurse=False))
        return [(id(one), one._version) for one in tensors if not one.is_inference()]

    def _checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        self._unchecked = max(0, self._unchecked - 1)
        checks = self._unchecked > 0  # the last one shows whether a second call may end early
        calls = _Calls(self, function, checks)
        with set_checkpoint_early_stop(not checks):  # else a second call has no outputs
            return checkpoint(calls, *args, use_reentrant=False, context_fn=calls.contexts)

    def state(self) -> list[Any]:
        """What a call may change: numbers, the lengths of lists and the like, weights and other
        tensors, and random numbers that PyTorch does not restore. Running statistics do not
        count."""
        held = [one for module in self.block.modules() for one in vars(module).values()]
        numbers = [one for one in held if type(one) in (bool, int, float)]
        numbers += [len(one) for one in held if isinstance(one, Sized)]
        buffers = (b for module in self._others for b in module.buffers(recurse=False))
        more = (one for one in held if isinstance(one, Tensor))
        every = (*self.block.parameters(), *buffers, *more)
        tensors = [float(x) for one in every for x in _signature(one)]
        numpy = sys.modules.get("numpy")
        drawn = str(numpy.random.get_state()[1:3]) if numpy else ""
        return [numbers, tensors, drawn, random.getstate()]

    def refusal(self, why: str) -> NotRecomputable:
        return NotRecomputable(f"checkpointing: {type(self.block).__name__} {why}")


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments without the cache of transformers' layers, which a second call would fill again.
    Their own checkpointing leaves it out too."""
    kwargs |= {"use_cache": False} if "use_cache" in kwargs else {}
    without = partial(map, lambda one: None if is_cache(one) else one)
    return tuple(without(args)), dict(zip(kwargs, without(kwargs.values()), strict=True))


class _Calls:
    """The first call of a block in a step, and the calls in backward."""

    def __init__(self, one: RecomputedCall, function: Callable[..., Any], checks: bool) -> None:
        self._one, self._function, self._checks = one, function, checks
        self._weights: list[nn.Parameter] | None = None
        self._outputs: list[Tensor] = []

    def __call__(self, *args: Any) -> Any:
        one, weights = self._one, list(self._one.block.parameters())
        if self._weights is None:
            self._weights = weights
            found = self._function(*args)
            self._outputs = _signatures(found) if self._checks else []
            return found
        if not all(map(operator.is_, weights, self._weights)):
            raise one.refusal("has other weights in a second call")
        before = one.state() if self._checks else []
        allocated = environment.allocated(one.device)
        with EXTRA_TIME.counted(one.device):
            found = self._function(*args)
        if not self._checks:
            return found
        one.kept_bytes = environment.allocated(one.device) - allocated
        outputs = _signatures(found)
        if len(outputs) != len(self._outputs) or not all(map(_alike, outputs, self._outputs)):
            raise one.refusal("computes something else in a second call")
        if before != one.state():
            raise one.refusal("changes something in every call")
        return found

    def contexts(self) -> tuple[contextlib.AbstractContextManager[Any], _WithoutUpdates]:
        """Context managers of the first call, and of the calls in backward."""
        return contextlib.nullcontext(), _WithoutUpdates(self._one.norms)


class _WithoutUpdates(contextlib.AbstractContextManager[None]):
    """Has norms update copies of their running statistics; may be entered several times."""

    def __init__(self, norms: Sequence[nn.Module]) -> None:
        self._norms, self._own = norms, list[list[dict[str, Tensor | None]]]()

    def __enter__(self) -> None:
        self._own.append([dict(norm._buffers) for norm in self._norms])
        for norm in self._norms:
            norm._buffers |= {n: None if b is None else b.clone() for n, b in norm._buffers.items()}

    def __exit__(self, *_exc: object) -> None:
        for norm, buffers in zip(self._norms, self._own.pop(), strict=True):
            norm._buffers |= buffers


def _signatures(found: Any) -> list[Tensor]:
    return [_signature(one) for one in tree_leaves(found) if isinstance(one, Tensor)]


def _signature(tensor: Tensor) -> Tensor:
    """The sum and the norm of a tensor: other random numbers or weights change the sum by about the
    norm of what changes."""
    values = tensor.detach()
    if not values.is_floating_point():
        values = values.double()
    norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    return torch.stack([values.sum(dtype=torch.float64), norm])


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    least = _ALIKE * float(theirs[1].nan_to_num())
    return torch.allclose(ours, theirs, rtol=0.0, atol=least, equal_nan=True)
