"""Finds out which models and optimizers a script trains, and where its steps end."""

from __future__ import annotations

import functools
import gc
import random
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from advisor.tuners.act.gate import Signatures, signature
from advisor.tuners.act.pilot.wrappers import Wrappers
from advisor.tuners.act.trees import held_tensors
from advisor.tuners.decisions import MAX_OBSERVED_STEPS, MIN_OBSERVED_STEPS
from advisor.tuners.fingerprint import unwrapped

VARIES = 0
# Optimizers of earlier folds, which are ignored: models may train in turn.
RETIRED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
OptimizerKind = Literal["known", "new", "similar", "retired", "other"]


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a model is called with, or a list of similar tensors, whose length is then the
    first dimension. Other dimensions in which calls differ are VARIES."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True, eq=False)
class TrainedModel:
    outer: nn.Module  # the module that the script calls, such as DistributedDataParallel
    model: nn.Module  # the user's own
    caller: nn.Module  # whose call runs `outer`, as `hooks.redirects` says; else `outer`
    inputs: tuple[Input, ...] = ()
    samples: int = 0  # of the calls with gradients since the last step or block began
    evaluated: bool = False  # since the block began
    signatures: Signatures = field(default_factory=Signatures)
    steps: list[Counter[int]] = field(default_factory=lambda: [Counter()])
    """For each optimizer step, how many calls had each number of samples; the last is not over."""

    def saw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the signature and inputs of a call with gradients, and count its samples."""
        one = signature(args, kwargs)
        if one not in self.signatures:
            found = tuple(inputs_of(args, kwargs))
            self.inputs = _varying(self.inputs, found) if self.inputs else found
        self.signatures.add(one)
        self.count(args, kwargs)

    def count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = batch_of(args, kwargs)
        self.samples += found
        self.steps[-1][found] += 1

    @property
    def call_samples(self) -> int:
        """The number of samples of a call that most steps have, the largest of several. Others are
        a short batch, sample images, or an agent's choice of its next action."""
        within = Counter(size for step in self.steps for size in step)
        return max(within, key=lambda size: (within[size], size), default=0)

    def micro_batches(self, samples: int) -> int:
        """The number of calls in a step of `samples` samples."""
        return max(1, round(samples / max(1, self.call_samples)))

    def batch(self, period: int) -> int:
        """The most frequent number of samples in `period` optimizer steps, in calls of the usual
        size. Other numbers come from an extra call, or a step that a GradScaler skipped."""
        size, steps = self.call_samples, self.steps[:-1]
        ends = range(len(steps), period - 1, -period)
        counts = (sum(one[size] for one in steps[end - period : end]) for end in ends)
        found = Counter(size * count for count in counts)
        whole = size * sum(one[size] for one in steps)
        return max(found, key=lambda samples: (samples > 0, found[samples], samples), default=whole)


class RngState:
    """The current state of Python's random numbers and PyTorch's on all devices."""

    def __init__(self) -> None:
        self._python, self._host = random.getstate(), torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._host)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)

    def has_advanced(self) -> bool:
        now = RngState()
        ours, theirs = [self._host, *self._devices], [now._host, *now._devices]
        return self._python != now._python or not all(map(torch.equal, ours, theirs))


def numpy_state() -> object:
    """The state of numpy's random numbers; None if the script has not imported numpy."""
    numpy = sys.modules.get("numpy")
    return numpy and repr(numpy.random.get_state(legacy=False))


class LoopObserver:
    """Records the model calls and optimizer steps with which a script begins."""

    def __init__(self) -> None:
        self.called: dict[nn.Module, TrainedModel] = {}  # outermost modules, called with gradients
        self.autocast: torch.dtype | None = None  # of the script's own autocast in such a call
        self.optimizers: list[torch.optim.Optimizer] = []  # in the order of their first steps
        self.frees_gradients = True  # whether gradients are freed between steps, as by `zero_grad`
        self.sparse = False  # whether a gradient was sparse
        self._order: list[int] = []
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._awaited: list[weakref.ref[torch.optim.Optimizer]] | None = None
        self._gradients: dict[int, weakref.ref[Tensor]] = {}
        self._kinds = weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerKind]()

    def on_call(self, module: nn.Module, args: Any, kwargs: Any, caller: nn.Module) -> None:
        self._met.add(module)
        if not torch.is_grad_enabled() or not module.training:
            return
        if module not in self.called:
            self.called[module] = TrainedModel(module, unwrapped(module), caller)
        self.called[module].saw(args, kwargs)

    def on_autocast(self, module: nn.Module) -> None:
        """Record the autocast in which a module is called."""
        kind = next((p.device.type for p in nn.Module.parameters(module)), "")
        # Not 'meta': the modules of the library `higher` keep their weights elsewhere.
        if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
            self.autocast = torch.get_autocast_dtype(kind)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        for one in self.called.values():
            one.steps.append(Counter())
            one.samples = 0
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        at = self.optimizers.index(optimizer)
        self._order.append(at)
        gradients = [p.grad for p in weights_of(optimizer) if p.grad is not None]
        self.sparse |= any(gradient.is_sparse for gradient in gradients)
        if gradients:
            before = self._gradients.get(at)
            self.frees_gradients &= before is None or before() is not gradients[0]
            self._gradients[at] = weakref.ref(gradients[0])

    def kind(self, optimizer: torch.optim.Optimizer) -> OptimizerKind:
        """How an optimizer relates to the recorded ones.

        'known': a recorded one, or one that trains the same models. 'new': holds a weight of a
        called model that no recorded one holds. 'similar': its parameters have the shapes of a
        recorded one's, as in the next fold of a cross-validation. 'retired': of an earlier fold.
        """
        if optimizer not in self._kinds:  # cached: this runs at each step
            self._kinds[optimizer] = self._kind(optimizer)
        return self._kinds[optimizer]

    def _kind(self, optimizer: torch.optim.Optimizer) -> OptimizerKind:
        weights = weights_of(optimizer)
        ours = {id(weight) for one in self.trained() for weight in one.model.parameters()}
        if optimizer in self.optimizers or id(next(iter(weights), None)) in ours:
            return "known"
        if self._is_new(optimizer):
            return "new"
        if optimizer in RETIRED:
            return "retired"
        shapes = [weight.shape for weight in weights]
        alike = any(shapes == [p.shape for p in weights_of(one)] for one in self.optimizers)
        return "similar" if alike else "other"

    def period(self) -> int:
        """Optimizer steps that make one step of the script; 0 if not known yet."""
        steps = len(self._order)
        if steps < MIN_OBSERVED_STEPS or (steps < MAX_OBSERVED_STEPS and self._awaits_optimizer()):
            return 0
        found = period(self._order, len(self.optimizers))
        # In two cycles, an extra call, as for sample images, cannot be told from the usual ones.
        return found if steps >= min(3 * found, MAX_OBSERVED_STEPS) else 0

    def _awaits_optimizer(self) -> bool:
        """Whether an optimizer has yet to make its first step, as a GAN generator's may."""
        if self._awaited is None:
            # There is no other list of the optimizers that a script has.
            found = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
            self._awaited = [weakref.ref(one) for one in found]
        return any((one := there()) is not None and self._is_new(one) for there in self._awaited)

    def _is_new(self, optimizer: torch.optim.Optimizer) -> bool:
        held = self._held()
        called = {id(weight) for module in self._met for weight in module.parameters()}
        return any(id(p) in called and id(p) not in held for p in weights_of(optimizer))

    def trained(self) -> list[TrainedModel]:
        """The models whose parameters an optimizer holds, the largest first."""
        held = self._held()
        sizes = {
            one: sum(parameter.numel() for parameter in one.model.parameters())
            for module, one in self.called.items()
            if any(id(parameter) in held for parameter in module.parameters())
        }
        return sorted(sizes, key=lambda one: -sizes[one])

    def trains_in_evaluation_mode(self) -> bool:
        """Whether the optimizers hold parameters of a called module that is in evaluation mode."""
        held, evaluating = self._held(), (one for one in self._met if not one.training)
        return any(id(weight) in held for one in evaluating for weight in one.parameters())

    def _held(self) -> set[int]:
        return {id(weight) for optimizer in self.optimizers for weight in weights_of(optimizer)}

    @functools.cached_property
    def wrappers(self) -> Wrappers:
        """Of the trained models; all ranks ask for this first at the same step."""
        return Wrappers(one.caller for one in self.trained())

    def forget(self) -> None:
        """Drop references to the script's objects: it may need the memory."""
        self.called.clear()
        self._met.clear()
        self.optimizers.clear()
        vars(self).pop("wrappers", None)


def weights_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The weights in all parameter groups of an optimizer."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def period(order: Sequence[int], kinds: int) -> int:
    """The least length of a pattern, of all `kinds`, with which `order` ends twice; 0 if none."""
    for length in range(kinds, len(order) // 2 + 1):
        last, before = order[-length:], order[-2 * length : -length]
        if list(last) == list(before) and len(set(last)) == kinds:
            return length
    return 0


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Input]:
    """Yield the tensors of a call: '0' is the first argument, 'mask' a keyword, '0.x' in '0'."""
    return _inputs("", {**dict(enumerate(args)), **kwargs})


def _inputs(name: str, value: Any) -> Iterator[Input]:
    if isinstance(value, Tensor):
        yield Input(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        return
    if isinstance(value, list):
        samples = [tuple(_inputs("", part)) for part in value]
        if len({tuple((o.name, len(o.shape), o.dtype) for o in one) for one in samples}) == 1:
            for alike in zip(*samples, strict=True):
                shape = (len(alike), *_common(*(one.shape for one in alike)))
                yield Input(f"{name}.{alike[0].name}".strip("."), shape, alike[0].dtype)
            return
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    elif not isinstance(value, Mapping):
        value = held_tensors(value)
    for key, part in value.items():
        yield from _inputs(f"{name}.{key}".strip("."), part)


def _common(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of several shapes, with VARIES where they differ."""
    dims = zip(*shapes, strict=True)
    return tuple(sizes[0] if len(set(sizes)) == 1 else VARIES for sizes in dims)


def _varying(ours: tuple[Input, ...], theirs: tuple[Input, ...]) -> tuple[Input, ...]:
    """Inputs of earlier calls, with VARIES where a later call differs."""
    later = {one.name: one.shape for one in theirs}
    return tuple(
        replace(one, shape=one.shape[:1] + _common(one.shape, shape)[1:])
        if len(shape := later.get(one.name, one.shape)) == len(one.shape)
        else one
        for one in ours
    )


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Samples of a call: the length of its first input that has one."""
    return next((one.shape[0] for one in inputs_of(args, kwargs) if one.shape), 1)
