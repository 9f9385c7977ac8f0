"""A gate before compiled code: inputs for which no code was compiled run uncompiled.

Without it, an epoch's short last batch costs half a minute of torch.compile, and later full batches
run the slower code for any size, because PyTorch tries the code compiled last first.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from advisor.tuners.act.hooks import ModuleCall, in_backward, is_tracing, replace_call
from advisor.tuners.act.trees import held_tensors
from advisor.tuners.decisions import FREQUENT, MIN_OBSERVED_STEPS

Signature = tuple[Any, ...]

_MOST_SIGNATURES = 512
"""Signatures counted at once: if every batch has another length, no single one matters."""


def signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
    """The properties of inputs for which torch.compile may compile again: structure; shapes, dtypes
    and requires_grad of tensors; bools, strings and None by value, other values by type."""
    found: list[Any] = []
    _describe(args, found)
    if kwargs:
        _describe(kwargs, found)
    return tuple(found)


def of_any_size(one: Signature) -> Signature:
    """The signature without sizes, except sizes 0 and 1, for which torch.compile always makes
    separate code."""
    return tuple(
        tuple(min(size, 2) for size in part) if type(part) is torch.Size else part for part in one
    )


def _describe(value: Any, found: list[Any]) -> None:
    # This runs at each call of a model: the common types first.
    if isinstance(value, Tensor):
        found += (value.shape, value.dtype, value.requires_grad)
        return
    kind = type(value)
    if value is None or kind is bool or kind is str:
        found.append(value)
        return
    found.append(kind)
    if isinstance(value, list | tuple):
        found.append(len(value))
        for part in value:
            _describe(part, found)
    elif isinstance(value, Mapping):
        found.append(len(value))
        for name, part in value.items():
            found.append(name if type(name) is str else type(name))
            _describe(part, found)
    elif dataclasses.is_dataclass(value) and kind is not type:
        for name in kind.__dataclass_fields__:
            _describe(getattr(value, name, None), found)
    else:
        for part in held_tensors(value).values():
            _describe(part, found)


class Signatures:
    def __init__(self, counts: Mapping[Signature, int] | None = None) -> None:
        self._counts = Counter(counts)
        self.calls = self._counts.total()

    def add(self, one: Signature) -> int:
        self.calls += 1
        if len(self._counts) >= _MOST_SIGNATURES and one not in self._counts:
            self._counts = Counter(dict(self._counts.most_common(_MOST_SIGNATURES // 2)))
        self._counts[one] += 1
        return self._counts[one]

    def __contains__(self, one: Signature) -> bool:
        return one in self._counts

    def frequent(self) -> set[Signature]:
        """The most frequent signature, and all that a share of at least FREQUENT of calls have."""
        least = max(2, FREQUENT * self.calls)
        first = {one for one, _n in self._counts.most_common(1)}
        return first | {one for one, n in self._counts.items() if n >= least}

    def of_any_size(self) -> Signatures:
        """The same counts without sizes."""
        counts: Counter[Signature] = Counter()
        for one, n in self._counts.items():
            counts[of_any_size(one)] += n
        return Signatures(counts)


class Gate(ModuleCall):
    """Calls compiled code with frequent signatures, and the plain function with all others.

    Args:
        model: its training or evaluation mode is part of a signature.
        seen: signatures of earlier training calls; without them, the first one counts as frequent.
        sizes: whether code is compiled for each size of an input.
        inference: whether calls without gradients may run compiled code; they count separately.
        before: called before code is compiled for a new signature.
    """

    def __init__(
        self,
        model: nn.Module,
        compiled: Callable[..., Any],
        plain: Callable[..., Any],
        *,
        seen: Signatures | None = None,
        sizes: bool = True,
        inference: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._compiled, self._plain = compiled, plain
        self._sizes, self._inference, self._before = sizes, inference, before
        seen = seen or Signatures()
        self._wanted = (seen if sizes else seen.of_any_size()).frequent()
        self._refused = Signatures()
        self._admitted: set[Signature] = set()
        self._begun = {True} if self._wanted else set()  # gradient modes with compiled code
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gradients = torch.is_grad_enabled()
        traces = torch.compiler.is_compiling() or is_tracing()
        if not (gradients or self._inference) or traces:
            return self._plain(*args, **kwargs)
        one = signature(args, kwargs)
        if not self._sizes:
            one = of_any_size(one)
        if not (gradients and self._model.training):
            one = (self._model.training, gradients, *one)
        if one in self._admitted:
            self._calls += 1
            return self._compiled(*args, **kwargs)
        # Checkpointing calls again in backward: that call must be the same as in forward.
        if in_backward() or not self._admits(one, gradients):
            return self._plain(*args, **kwargs)
        self._before()
        # By default, from the second size on, PyTorch compiles slower code for any size.
        fixed = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
        with fixed if self._sizes else contextlib.nullcontext():
            return self._compiled(*args, **kwargs)

    def _admits(self, one: Signature, gradients: bool) -> bool:
        self._calls += 1
        frequent = self._refused.add(one) >= max(MIN_OBSERVED_STEPS, FREQUENT * self._calls)
        if one in self._wanted or frequent or gradients not in self._begun:
            self._admitted.add(one)
            self._begun.add(gradients)
        return one in self._admitted


def attach(model: nn.Module, **how: Any) -> None:
    """Put a gate before each compiled call within a model that was compiled in place."""
    for module in model.modules():
        if (compiled := module._compiled_call_impl) is not None:
            replace_call(module, Gate(module, compiled, module._call_impl, **how))
