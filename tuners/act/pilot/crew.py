"""What trains in a script: its models, its optimizers, and where a step ends."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from advisor.tuners.act.pilot.drawn import Drawn

LEAST_STEPS = 4
"""Of optimizers, before it is told which of them make a step together."""
MOST_PERIOD = 64
VARIES = 0
LET_GO: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Of models that another one took over from, as in a cross-validation: none is taken up again, so
that models which train in turn are not set over and over."""


class Unclear(Exception):
    """What trains in a script, or where its steps end, cannot be told: it is left alone."""


class Untrained(Exception):
    """The process ends, and no optimizer made a step in it; another one may train."""


class Brief(Exception):
    """The process ends after so few steps that nothing was told of them; another one may train."""


class Over(Exception):
    """What was found to train does so no more; the script trains something else."""


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor that a model is called with: where it stands, its shape and dtype.

    A dimension beyond the first is VARIES where it is not the same in all calls that were seen.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True, eq=False)
class Trained:
    """One model that trains.

    Attributes:
        outer: the module that the script calls, as DistributedDataParallel; `model` the user's own.
        inputs: of its first calls.
        calls: with gradients, and `samples` of them, since they were last looked at.
        evaluated: whether it was called in evaluation since then.
    """

    outer: nn.Module
    model: nn.Module
    inputs: tuple[Input, ...]
    calls: int = 0
    samples: int = 0
    evaluated: bool = False

    def size(self) -> int:
        """Of its parameters, in elements."""
        return sum(parameter.numel() for parameter in self.model.parameters())


@dataclass(slots=True, eq=False)
class Crew:
    """Gathers what the first steps of a script show.

    Attributes:
        called: every outermost module that was called with gradients, in order.
        autocast: the number format of the script's own autocast, seen within such a call.
        draws: random numbers were drawn within such a call.
        optimizers: in the order of their first steps; `order` is that of all steps.
        spends: whether the script lets go of gradients between two steps, as `zero_grad` does.
    """

    called: dict[nn.Module, Trained] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    draws: bool = False
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    spends: bool = True
    _gradients: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    _before: Drawn | None = None

    def saw_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module was called by no other one."""
        before, self._before = self._before, None
        self.draws = self.draws or (before is not None and before.passed())
        if not torch.is_grad_enabled() or not module.training:
            return
        one = self.called.get(module)
        found = inputs_of(args, kwargs)
        if one is None:
            from advisor.tuners.fingerprint import unwrapped

            one = self.called[module] = Trained(module, unwrapped(module), found)
        one.inputs = varying(one.inputs, found)
        one.calls += 1
        one.samples += batch_of(args, kwargs)

    def saw_within(self, module: nn.Module) -> None:
        """A module is called, by another one or not."""
        self._before = self._before or Drawn()
        kind = next((p.device.type for p in module.parameters(recurse=False)), "")
        if kind and torch.is_autocast_enabled(kind):
            self.autocast = torch.get_autocast_dtype(kind)

    def saw_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer made a step."""
        if not any(optimizer is one for one in self.optimizers):
            self.optimizers.append(optimizer)
        at = next(n for n, one in enumerate(self.optimizers) if one is optimizer)
        self.order.append(at)
        del self.order[: -2 * MOST_PERIOD]
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
        if (gradient := next((g for g in gradients if g is not None), None)) is not None:
            before = self._gradients.get(at)
            self.spends &= before is None or before() is not gradient
            self._gradients[at] = weakref.ref(gradient)

    def includes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is one of these, or has taken over the parameters of one."""
        if any(optimizer is one for one in self.optimizers):
            return True
        first = optimizer.param_groups[0]["params"][0]
        return any(first is p for one in self.trained() for p in one.model.parameters())

    def is_like(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it holds as many parameters of the same shapes as one of these: those of a model
        that was made anew, as for each fold of a cross-validation."""
        shapes = _shapes(optimizer)
        return optimizer not in LET_GO and any(_shapes(one) == shapes for one in self.optimizers)

    def period(self) -> int:
        """Optimizer steps that make one step of the script; 0 while that is not known.

        The shortest group in which every optimizer steps, and which came twice.
        """
        if len(self.order) < LEAST_STEPS:
            return 0
        return period(self.order, len(self.optimizers))

    def trained(self) -> list[Trained]:
        """The models whose parameters an optimizer holds, the largest first."""
        held = {
            id(parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        found = [
            one
            for module, one in self.called.items()
            if any(id(parameter) in held for parameter in module.parameters())
        ]
        return sorted(found, key=lambda one: -one.size())

    @staticmethod
    def compiled(one: Trained) -> bool:
        """Whether the script has compiled a model itself, whole or in part."""
        return any(
            hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None
            for module in one.outer.modules()
        )

    def looked_at(self) -> None:
        """Count anew."""
        for one in self.called.values():
            one.calls = one.samples = 0
            one.evaluated = False

    def forget(self) -> None:
        """Hold on to nothing: the script may have done with it, and need its memory."""
        self.called.clear()
        self.optimizers.clear()


def _shapes(optimizer: torch.optim.Optimizer) -> list[torch.Size]:
    return [p.shape for group in optimizer.param_groups for p in group["params"]]


def period(order: Sequence[int], kinds: int) -> int:
    """The shortest length of a group of all kinds with which a sequence ends twice; else 0."""
    for length in range(kinds, len(order) // 2 + 1):
        last, before = order[-length:], order[-2 * length : -length]
        if list(last) == list(before) and len(set(last)) == kinds:
            return length
    return 0


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Input, ...]:
    """The tensors of a call, positional ones first."""
    flat, _ = tree_flatten_with_path((args, kwargs))
    return tuple(
        Input(_name(path), tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for path, value in flat
        if isinstance(value, Tensor)
    )


def varying(ours: tuple[Input, ...], theirs: tuple[Input, ...]) -> tuple[Input, ...]:
    """Inputs of earlier calls, with what is otherwise in a later one."""
    later = {one.name: one.shape for one in theirs}
    return tuple(_varying(one, later.get(one.name, one.shape)) for one in ours)


def _varying(one: Input, shape: tuple[int, ...]) -> Input:
    if len(shape) != len(one.shape):
        return one
    rest = (a if a == b else VARIES for a, b in zip(one.shape[1:], shape[1:], strict=True))
    return replace(one, shape=(*one.shape[:1], *rest))


def _name(path: Any) -> str:
    """'0' of the first positional argument, 'mask' of that keyword, '0.x' of what lies deeper."""
    text = keystr(path[1:])
    return text.replace("']['", ".").replace("][", ".").strip("[]'").replace("'", "")


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Samples of a call: the first dimension of its first tensor."""
    # At each call: what is taken apart only if need be.
    first = _first((*args, *kwargs.values()))
    if first is None:
        first = _first(tree_leaves((args, kwargs)))
    return int(first.shape[0]) if first is not None and first.dim() else 1


def _first(values: Iterable[Any]) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return value
    return None
