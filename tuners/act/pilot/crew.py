"""What trains in a script: its models, its optimizers, and where a step ends."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from advisor.tuners.act.gate import Signatures, signature
from advisor.tuners.act.pilot.drawn import Drawn

LEAST_STEPS = 4
"""Of optimizers, before it is told which of them make a step together."""
MOST_PERIOD = 64
MOST_AWAITED = 32
"""Steps that are waited for an optimizer which holds weights of a model that was called, and has
made none: twice a period of up to 15 steps of a critic for one of a generator."""
MOST_COUNTED = 256
"""Steps of optimizers of which the samples are kept."""
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

    A list of tensors that are alike is one, whose first dimension is the list's length. A
    dimension beyond the first is VARIES where it is not the same in all calls that were seen.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True, eq=False)
class Trained:
    """One model that trains.

    Attributes:
        outer: the module that the script calls, as DistributedDataParallel; `model` the user's own.
        inputs: of all calls that `saw` was told of, as `signatures` are.
        calls: with gradients, and `samples` of them, since they were last looked at.
        evaluated: whether it was called in evaluation since then.
        steps: samples before each step of an optimizer that was seen, the last of them.
    """

    outer: nn.Module
    model: nn.Module
    inputs: tuple[Input, ...] = ()
    calls: int = 0
    samples: int = 0
    evaluated: bool = False
    signatures: Signatures = field(default_factory=Signatures)
    steps: list[int] = field(default_factory=list)
    _since: int = 0
    _batches: Counter[int] = field(default_factory=Counter)

    def size(self) -> int:
        """Of its parameters, in elements."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def saw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call with gradients, of which everything is looked at."""
        one = signature(args, kwargs)
        if one not in self.signatures:
            found = inputs_of(args, kwargs)
            self.inputs = varying(self.inputs, found) if self.inputs else found
        self.signatures.add(one)
        self.count(args, kwargs)

    def count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call with gradients, of which the samples are counted."""
        found = batch_of(args, kwargs)
        self.calls += 1
        self.samples += found
        self._since += found
        self._batches[found] += 1

    def stepped(self) -> None:
        """An optimizer made a step."""
        self.steps.append(self._since)
        self._since = 0
        del self.steps[:-MOST_COUNTED]

    def micro_batches(self, samples: int) -> int:
        """The number of calls in a step with so many samples."""
        most = self._batches.most_common(1)
        return max(1, round(samples / max(1, most[0][0]))) if most else 1

    def batch(self, period: int) -> int:
        """The most frequent number of samples in a step of the script, which has `period` steps of
        optimizers: others are those of a last short batch, of an extra call, or several where a
        GradScaler has left a step out."""
        period = max(1, period)
        ends = range(len(self.steps), period - 1, -period)
        found = Counter(sum(self.steps[end - period : end]) for end in ends)
        return max(found, key=lambda samples: (samples > 0, found[samples], samples), default=0)


@dataclass(slots=True, eq=False)
class Crew:
    """Gathers what the first steps of a script show.

    Attributes:
        called: every outermost module that was called with gradients, in order.
        autocast: the number format of the script's own autocast, seen within such a call.
        draws: random numbers were drawn within such a call.
        optimizers: in the order of their first steps; `order` is that of all steps.
        spends: whether the script lets go of gradients between two steps, as `zero_grad` does.
        sparse: whether a gradient was.
    """

    called: dict[nn.Module, Trained] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    draws: bool = False
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    spends: bool = True
    sparse: bool = False
    _met: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    _awaited: list[weakref.ref[torch.optim.Optimizer]] | None = None
    _gradients: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    _before: Drawn | None = None

    def saw_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module was called by no other one."""
        before, self._before = self._before, None
        self.draws = self.draws or (before is not None and before.passed())
        self._met.add(module)
        if not torch.is_grad_enabled() or not module.training:
            return
        one = self.called.get(module)
        if one is None:
            from advisor.tuners.fingerprint import unwrapped

            one = self.called[module] = Trained(module, unwrapped(module))
        one.saw(args, kwargs)

    def saw_within(self, module: nn.Module) -> None:
        """A module is called, by another one or not."""
        self._before = self._before or Drawn()
        kind = next((p.device.type for p in module.parameters(recurse=False)), "")
        if kind and torch.is_autocast_enabled(kind):
            self.autocast = torch.get_autocast_dtype(kind)

    def saw_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer made a step."""
        for one in self.called.values():
            one.stepped()
        if not any(optimizer is one for one in self.optimizers):
            self.optimizers.append(optimizer)
        at = next(n for n, one in enumerate(self.optimizers) if one is optimizer)
        self.order.append(at)
        del self.order[: -2 * MOST_PERIOD]
        gradients = [p.grad for p in _weights(optimizer) if p.grad is not None]
        self.sparse |= any(gradient.is_sparse for gradient in gradients)
        if gradient := gradients[:1]:
            before = self._gradients.get(at)
            self.spends &= before is None or before() is not gradient[0]
            self._gradients[at] = weakref.ref(gradient[0])

    def includes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is one of these, or has taken over the parameters of one."""
        if any(optimizer is one for one in self.optimizers):
            return True
        first = _weights(optimizer)[0]
        return any(first is p for one in self.trained() for p in one.model.parameters())

    def is_like(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it holds as many parameters of the same shapes as one of these: those of a model
        that was made anew, as for each fold of a cross-validation."""
        shapes = _shapes(optimizer)
        return optimizer not in LET_GO and any(_shapes(one) == shapes for one in self.optimizers)

    def joins(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it trains a model that was called, and was not there when a step of the script
        was told: what is tuned is to be looked at anew."""
        return not self.includes(optimizer) and self._holds(optimizer)

    def period(self) -> int:
        """Optimizer steps that make one step of the script; 0 while that is not known.

        The shortest group in which every optimizer steps, and which came twice.
        """
        if len(self.order) < LEAST_STEPS or self._awaits():
            return 0
        return period(self.order, len(self.optimizers))

    def _awaits(self) -> bool:
        """Whether an optimizer has yet to make its first step, as a generator's where the critic
        makes several for one of it."""
        if self._awaited is None:
            # There is no other list of the optimizers that a script has.
            found = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
            self._awaited = [weakref.ref(one) for one in found if self._holds(one)]
        if len(self.order) >= MOST_AWAITED:
            return False
        return any((one := there()) is not None and self._holds(one) for there in self._awaited)

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it holds a weight of a model that was called, and that none of the optimizers
        holds that made a step."""
        held = {id(weight) for one in self.optimizers for weight in _weights(one)}
        called = {id(weight) for module in self._met for weight in module.parameters()}
        return any(id(p) in called and id(p) not in held for p in _weights(optimizer))

    def trained(self) -> list[Trained]:
        """The models whose parameters an optimizer holds, the largest first."""
        held = {id(weight) for optimizer in self.optimizers for weight in _weights(optimizer)}
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
        self._met.clear()
        self.optimizers.clear()


def _shapes(optimizer: torch.optim.Optimizer) -> list[torch.Size]:
    return [weight.shape for weight in _weights(optimizer)]


def _weights(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def period(order: Sequence[int], kinds: int) -> int:
    """The shortest length of a group of all kinds with which a sequence ends twice; else 0."""
    for length in range(kinds, len(order) // 2 + 1):
        last, before = order[-length:], order[-2 * length : -length]
        if list(last) == list(before) and len(set(last)) == kinds:
            return length
    return 0


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Input, ...]:
    """The tensors of a call, positional ones first: '0' is the first positional argument, 'mask'
    that keyword, '0.x' what lies deeper."""
    named = [*enumerate(args), *kwargs.items()]
    return tuple(one for name, value in named for one in _inputs(str(name), value))


def _inputs(name: str, value: Any) -> Iterator[Input]:
    if isinstance(value, Tensor):
        yield Input(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
    elif isinstance(value, list):
        yield from _samples(name, [tuple(_inputs("", part)) for part in value])
    elif isinstance(value, tuple | Mapping):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        yield from (one for key, part in parts for one in _inputs(f"{name}.{key}".strip("."), part))


def _samples(name: str, parts: Sequence[tuple[Input, ...]]) -> Iterator[Input]:
    """What a list holds: one input where its parts are alike, else each of them."""
    kinds = {tuple((one.name, len(one.shape), one.dtype) for one in part) for part in parts}
    if len(kinds) > 1:
        parts = [
            tuple(replace(o, name=f"{n}.{o.name}") for o in part) for n, part in enumerate(parts)
        ]
        yield from (replace(o, name=f"{name}.{o.name}".strip(".")) for part in parts for o in part)
        return
    for alike in zip(*parts, strict=True):
        shapes = zip(*(one.shape for one in alike), strict=True)
        shape = tuple(sizes[0] if len(set(sizes)) == 1 else VARIES for sizes in shapes)
        one = alike[0]
        yield Input(f"{name}.{one.name}".strip("."), (len(alike), *shape), one.dtype)


def varying(ours: tuple[Input, ...], theirs: tuple[Input, ...]) -> tuple[Input, ...]:
    """Inputs of earlier calls, with what is otherwise in a later one."""
    later = {one.name: one.shape for one in theirs}
    return tuple(_varying(one, later.get(one.name, one.shape)) for one in ours)


def _varying(one: Input, shape: tuple[int, ...]) -> Input:
    if len(shape) != len(one.shape):
        return one
    rest = (a if a == b else VARIES for a, b in zip(one.shape[1:], shape[1:], strict=True))
    return replace(one, shape=(*one.shape[:1], *rest))


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Samples of a call: the first dimension of its first tensor, or the length of the list that
    this tensor lies in."""
    # At each call: what is taken apart only if need be.
    found = _batch((*args, *kwargs.values()))
    if found is None:
        first = next((one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)), None)
        found = None if first is None else _first_size(first)
    return 1 if found is None else found


def _batch(values: Iterable[Any]) -> int | None:
    for value in values:
        if isinstance(value, Tensor):
            return _first_size(value)
        if isinstance(value, list):
            found = None if _batch(value[:1]) is None else len(value)
        elif isinstance(value, tuple | Mapping):
            found = _batch(value.values() if isinstance(value, Mapping) else value)
        else:
            continue
        if found is not None:
            return found
    return None


def _first_size(tensor: Tensor) -> int:
    return int(tensor.shape[0]) if tensor.dim() else 1
