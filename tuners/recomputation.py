"""Activation checkpointing of the blocks that a model repeats: each keeps only its inputs for the
backward pass, which computes the rest again (https://docs.pytorch.org/docs/stable/checkpoint.html).
"""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from advisor.tuners import environment
from advisor.tuners.act.hooks import ModuleCall, in_backward, replace_call
from advisor.tuners.act.trees import IMMUTABLE, is_cache
from advisor.tuners.faults import NotRecomputable
from advisor.tuners.offloading import EXTRA_TIME

LEAST_REPEATS = 3
"""Least number of a model's modules of one class that count as repeated."""
CHECKED_CALLS = 4
"""Second calls of each block that are checked; the last one ends early, as all later ones do. A
check waits for the device."""
_LEAST_ALIKE = 1e-5
"""Relative difference that rounding may make between two calls, or a quarter of a format's own. On
an H200 they differed no more than two plain calls do (benchmarks/results/memory.md)."""
_MOST_COMPARED = 2**12
"""Elements of an output that are compared, evenly spaced."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of classes that a model repeats, in order, without compiled ones, and
    without those whose hooks would run again in a second call, or that change their input."""
    kinds = Counter(map(type, _walk(model, lambda one: True)))
    found = _walk(model, lambda one: kinds[type(one)] < LEAST_REPEATS)
    repeated = (one for one in found if kinds[type(one)] >= LEAST_REPEATS)
    return [
        one
        for one in repeated
        if not (any(map(_has_hooks, one.modules())) or _begins_in_place(one))
    ]


def _walk(module: nn.Module, enters: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """Generator: yields the modules within a module that may be blocks, and those within them if
    `enters` says so."""
    if _is_compiled(module):
        return
    for child in module._modules.values():  # repeats shared ones
        if child is None or _is_compiled(child) or not any(True for _ in child.children()):
            continue  # a single layer keeps its input
        is_list = _is_list(child)
        if not is_list:
            yield child
        if is_list or enters(child):
            yield from _walk(child, enters)


def _is_compiled(module: nn.Module) -> bool:
    """Whether the script has compiled a module, so that its code decides what it keeps."""
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None


def _is_list(module: nn.Module) -> bool:
    """Whether a module only holds others: a list, or a sequence of modules that have parts."""
    if not isinstance(module, nn.Sequential):
        return isinstance(module, nn.ModuleList | nn.ModuleDict)
    kinds = {type(one) for one in module if any(True for _ in one.children())}
    return bool(kinds) and (type(module) is nn.Sequential or kinds == set(map(type, module)))


def _begins_in_place(block: nn.Module) -> bool:
    layers = (one for one in block.modules() if not any(True for _ in one.children()))
    return bool(getattr(next(layers), "inplace", False))


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


class RecomputedCall(ModuleCall):
    """Replaces the call of a block. Random numbers of PyTorch's default generators and autocast are
    the same in both calls, and running statistics are updated once. The first calls are checked.

    Raises:
        NotRecomputable: the second call would compute something else, or change something again.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block, self.unchecked = block, CHECKED_CALLS
        self.device = torch.device("cpu")  # of the last call
        self.kept_bytes = 0  # that a call keeps for backward, on a GPU
        compiled: Callable[..., Any] | None = vars(block).get("_compiled_call_impl")
        self._plain: Callable[..., Any] = block._call_impl if compiled is None else compiled
        self.modules = list(block.modules())
        self.norms = [m for m in self.modules if isinstance(m, _NormBase) and m.track_running_stats]
        self._others = [m for m in self.modules if not isinstance(m, _NormBase)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = getattr(self.block, "gradient_checkpointing", False)  # of transformers' layers
        if not torch.is_grad_enabled() or own or any(map(_has_hooks, self.modules)):
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
        calls = _Calls(self, function, self.unchecked)
        how: dict[str, Any] = {"use_reentrant": False}
        how["context_fn"] = lambda: (contextlib.nullcontext(), _WithoutUpdates(self))
        with set_checkpoint_early_stop(self.unchecked < 2):  # else a second call has no outputs
            return checkpoint(calls, *args, **how)

    def state(self) -> list[Any]:
        """What a call may change: numbers, containers, generators of random numbers, weights and
        other tensors. Running statistics do not count."""
        held = [one for module in self.modules for one in vars(module).values()]
        lists = [one for one in held if isinstance(one, dict | list | tuple | set | deque)]
        inner = [x for one in lists for x in (one.values() if isinstance(one, dict) else one)]
        every = [*held, *inner]
        buffers = (b for module in self._others for b in module.buffers(recurse=False))
        tensors = (*self.block.parameters(), *buffers, *(x for x in held if isinstance(x, Tensor)))
        numpy = sys.modules.get("numpy")
        return [
            [one for one in every if type(one) in (bool, int, float)],
            list(map(len, lists)),
            [drawn for one in every if (drawn := _drawn(one)) is not None],
            list(map(_summary, tensors)),
            str(numpy.random.get_state()[1:3]) if numpy else "",
            random.getstate(),
        ]

    def refusal(self, why: str) -> NotRecomputable:
        return NotRecomputable(f"checkpointing: {type(self.block).__name__} {why}")


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments without the cache of transformers' layers, which a second call would fill again.
    Their own checkpointing leaves it out too."""
    if not any(map(is_cache, (*args, *kwargs.values()))):
        return args, kwargs
    without = partial(map, lambda one: None if is_cache(one) else one)
    kwargs |= {"use_cache": False} if "use_cache" in kwargs else {}
    return tuple(without(args)), dict(zip(kwargs, without(kwargs.values()), strict=True))


class _Calls:
    """The first call of a block in a step, and the calls in backward. `unchecked`: how many checks
    are left."""

    def __init__(self, one: RecomputedCall, function: Callable[..., Any], unchecked: int) -> None:
        self._one, self._function, self._unchecked = one, function, unchecked
        self._weights: list[tuple[int, int]] | None = None
        self._outputs: list[Tensor] = []

    def __call__(self, *args: Any) -> Any:
        one = self._one
        weights = [(id(weight), weight._version) for weight in one.block.parameters()]
        if self._weights is None:
            self._weights = weights
            found = self._function(*args)
            self._outputs = _samples(found) if self._unchecked > 1 else []
            return found
        if weights != self._weights:
            raise one.refusal("has other weights in a second call")
        before = one.state() if self._unchecked else []
        one.unchecked = min(one.unchecked, max(0, self._unchecked - 1))
        allocated = environment.allocated(one.device)
        try:
            with EXTRA_TIME.counted(one.device):
                found = self._function(*args)
        finally:  # a call that ends early raises
            kept = environment.allocated(one.device) - allocated
            if self._unchecked and before != one.state():
                raise one.refusal("changes something in every call")
        if self._unchecked > 1:
            one.kept_bytes, outputs = kept, _samples(found)
            if len(outputs) != len(self._outputs) or not all(map(_alike, outputs, self._outputs)):
                raise one.refusal("computes something else in a second call")
        return found


class _WithoutUpdates(contextlib.AbstractContextManager[None]):
    """Has norms update copies of their running statistics, modules train as now, and tensors that
    modules hold, such as an output that the script reads, restored; may be entered several
    times."""

    def __init__(self, one: RecomputedCall) -> None:
        self._norms, self._modules = one.norms, one.modules
        self._training = [module.training for module in one.modules]
        self._own = list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]()

    def __enter__(self) -> None:
        held = [
            {n: v for n, v in vars(one).items() if isinstance(v, Tensor) or n == "training"}
            for one in self._modules
        ]
        self._own.append(([dict(norm._buffers) for norm in self._norms], held))
        for module, training in zip(self._modules, self._training, strict=True):
            vars(module)["training"] = training
        for norm in self._norms:
            norm._buffers |= {n: None if b is None else b.clone() for n, b in norm._buffers.items()}

    def __exit__(self, *_exc: object) -> None:
        every, held = self._own.pop()
        for norm, buffers in zip(self._norms, every, strict=True):
            norm._buffers |= buffers
        for module, tensors in zip(self._modules, held, strict=True):
            vars(module).update(tensors)


def _samples(found: Any) -> list[Tensor]:
    """Some elements of each tensor in a block's output."""
    tensors = [one.detach() for one in tree_leaves(found) if isinstance(one, Tensor)]
    real = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors)
    flat = [one.reshape(-1) for one in real]
    return [x[:: x.numel() // _MOST_COMPARED | 1].clone() for x in flat]


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape or not torch.equal(ours.isnan(), theirs.isnan()):
        return False
    own = torch.finfo(ours.dtype).eps / 4 if ours.is_floating_point() else 0.0
    off, size = (x.double().nan_to_num().norm() for x in (ours - theirs, theirs))
    return bool(off <= max(_LEAST_ALIKE, own) * size)


def _summary(tensor: Tensor) -> Any:
    """A value that stays equal as long as a tensor is unchanged."""
    values = tensor.detach()
    with contextlib.suppress(RuntimeError):  # of sparse or 8-bit formats
        values = torch.view_as_real(values) if values.is_complex() else values
        found = [values.sum(dtype=torch.float64)]
        if values.is_floating_point():
            found.append(torch.linalg.vector_norm(values, dtype=torch.float64))
        return str(torch.stack(found).tolist())  # as text, because nan != nan
    return id(tensor), tensor._version


def _drawn(one: Any) -> Any:
    """The state of a generator of random numbers; None for any other object."""
    if isinstance(one, torch.Generator):
        return one.get_state().tolist()
    if isinstance(one, random.Random):
        return one.getstate()
    return str(one.bit_generator.state) if hasattr(one, "bit_generator") else None
