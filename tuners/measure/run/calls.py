"""The steps of a running script as a Subject: its models' calls, made again under any config.

Of four steps, which the script makes unmodified, what its models are called with is kept, and the
gradient that comes back to what they return; and the weights as they were then. A pass copies these
weights into the parameters, makes the calls of one step as training makes them, through the code
that was compiled for a config, takes the kept gradient back through each, and puts everything back.

What this does not see:
- The loss's own code runs once. How far a loss would be off is told by its tangent, which is exact
  where the model returns its loss.
- An error that only adds up over many updates.
- Of a step of many micro-batches those beyond the first, and gradients of gradients.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from advisor.cache.config import Config
from advisor.tuners.act.acting import Acting
from advisor.tuners.act.pilot import hooks
from advisor.tuners.act.pilot.crew import Drawn, Trained
from advisor.tuners.act.pilot.orders import Comparison, told
from advisor.tuners.act.pilot.switch import Call, Switch
from advisor.tuners.act.pilot.trees import foreign, mapped, tensors
from advisor.tuners.measure.compare import References
from advisor.tuners.measure.place import UNVERIFIED, Compared
from advisor.tuners.measure.run.lasting import Beyond, Held, hooked
from advisor.tuners.measure.run.updates import KeptUpdates
from advisor.tuners.measure.samples import Named, Sample, move, sampled

STEPS = 4
"""Steps of the script that are kept, each a point: half of them for the kept weights."""
CALLS = 8
"""Calls of one step that are made again, at most."""
ROOM = 3.0
"""Times the weights' memory that must be free for keeping them on the device: the copy that is
kept, that of the script's own meanwhile, and the gradients of a pass."""


@dataclass(slots=True, eq=False)
class _Kept:
    """A call that the script made.

    Attributes:
        given: its arguments, cloned; `autocast` and `drawn` the state that it was made in.
        needs: of each of the models' parameters whether it required a gradient.
        back: the gradient of each tensor that it returned; None where none came.
        slope: the sum of what it returned times these.
        lost: told why a gradient could not be kept.
    """

    call: Call
    given: tuple[tuple[Any, ...], dict[str, Any]]
    autocast: _Autocast
    needs: list[bool]
    lost: Callable[[Exception], None]
    back: list[Tensor | None] = field(default_factory=list)
    slope: Tensor | None = None

    def watch(self, result: Any) -> None:
        """Keep the gradients of what the call returned, as they come."""
        for number, output in enumerate(_floating(result)):
            self.back.append(None)
            if output.requires_grad:
                value = output.detach()
                output.register_hook(functools.partial(self._came, number, value))

    def _came(self, number: int, value: Tensor, gradient: Tensor) -> None:
        held, came = self.back[number], gradient.detach()
        try:
            self.back[number] = came.clone() if held is None else held + came
            slope = (value.float() * came.float()).sum()
            self.slope = slope if self.slope is None else self.slope + slope
        except RuntimeError as exc:  # out of memory, in the script's own backward pass
            self.lost(exc)


@dataclass(frozen=True, slots=True)
class _Step:
    """The calls of one step, and the sum of its losses; None where the script has none."""

    calls: list[_Kept]
    loss: float | None


@dataclass(frozen=True, slots=True)
class _Autocast:
    """The state of autocast on a device."""

    kind: str
    enabled: bool
    dtype: torch.dtype
    caches: bool

    @classmethod
    def now(cls, kind: str) -> _Autocast:
        """As it is."""
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls(kind, enabled, dtype, torch.is_autocast_cache_enabled())

    def again(self) -> AbstractContextManager[object]:
        """A context with that state, which compiled code looks at."""
        if self == _Autocast.now(self.kind):
            return nullcontext()
        return torch.autocast(self.kind, self.dtype, self.enabled, self.caches)


_Place = tuple[dict[str, Any], str]
"""Where a module holds a parameter or buffer, which the script may replace by another."""


class KeptCalls:
    """Compares configs with strict fp32 on a script's own steps, as a Subject.

    It is a pilot's Watch.

    Args:
        careful: the run is one that counts: a model is called again only where all that its own
            call leaves behind is put back.
    """

    def __init__(self, *, careful: bool = False) -> None:
        self._careful = careful
        self._switch: Switch | None = None
        self._drop()

    def _drop(self) -> None:
        self._unhook: Callable[[], None] = _nothing
        self._refused = ""
        self._steps: list[_Step] = []
        self._calls: list[_Kept] = []
        self._losses: list[Tensor] = []
        self._raised = False
        self._draws = False
        self._named: Named = {}
        self._modules: list[nn.Module] = []
        self._parameters: list[_Place] = []
        self._buffers: list[_Place] = []
        self._values: list[Tensor] = []
        self._updates: KeptUpdates | None = None
        self._references: References | None = None
        self._held: Held | None = None
        self._placed = -1

    def close(self) -> None:
        """Let go of the model, and of all that was kept of it."""
        self._unhook()
        self._drop()
        self._switch = None

    @property
    def ready(self) -> bool:
        """Whether a config can be compared without another step of the script."""
        return bool(self._refused) or len(self._steps) == STEPS

    # What a pilot calls.

    def begin(
        self,
        switch: Switch,
        trained: Sequence[Trained],
        device: torch.device,
        asked: Comparison,
    ) -> tuple[str, str, str] | None:
        """As `Watch.begin`: the script makes its next steps unmodified, unless they are kept."""
        self._asked, self._began = asked, time.monotonic()
        if self._switch is not switch:
            self.close()
            self._switch, self._device = switch, device
            self._named = _weights(trained)
            self._modules = list({m: None for one in trained for m in one.model.modules()})
            if self._careful:
                self._refused = _beyond_repeating(self._modules)
        if not self.ready:
            self._set(switch.own)
            self._look()
        return self._verdict()

    def stepped(self) -> tuple[str, str, str] | None:
        """As `Watch.stepped`."""
        if not self.ready:
            self._step_over()
            (self._rest if self.ready else self._look)()
        return self._verdict()

    def _step_over(self) -> None:
        self._unhook()
        calls = [one for one in self._calls if any(g is not None for g in one.back)]
        if calls and not self._raised:
            loss = float(torch.stack(self._losses).sum()) if self._losses else None
            self._steps.append(_Step(calls, loss))
            if self._updates is None:
                self._updates = KeptUpdates(self._of_switch.optimizers)
        self._calls = []

    def _verdict(self) -> tuple[str, str, str] | None:
        """None while steps are missing."""
        if not self.ready:
            return None
        ends = self._began + self._asked.left_s
        found = self.compare(self._asked, lambda: ends - time.monotonic())
        if self._careful and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return found.outcome, found.reason, found.blames

    def compare(self, asked: Comparison, left_s: Callable[[], float]) -> Compared:
        """Compare a config with strict fp32; the script has its own config afterwards."""
        self._rest()
        if not self._refused and len(self._steps) < 2:
            self._refused = "no gradient came back to what the model returned"
        if self._refused:
            return Compared(outcome=UNVERIFIED, reason=self._refused)
        if self._references is None:
            self._references = References(self, asked.fp32, tolerance=asked.tolerance)
        with self._aside():
            return self._references.compare(asked.candidate, asked.plain, left_s=left_s)

    # A Subject.

    @property
    def points(self) -> int:
        """See Subject."""
        return len(self._steps) // 2 * 2

    @property
    def draws(self) -> bool:
        """See Subject."""
        return self._draws

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        """See Subject."""
        with self._aside() as held, torch.enable_grad():
            if self._of_switch.config != config:
                self._set(config)
            self._place(point)
            if self._draws:
                torch.manual_seed(seed)
                random.seed(seed)
            self._of_switch.began()
            found = self._pass(self._steps[point % self.points], disturbed=self._disturbed(point))
            held.put_attributes()
            return found

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        """See Subject."""
        own = Acting(config, self._of_switch.own, self._device).optimizer()
        if not own or self._updates is None:
            return 0.0, ""
        names = {id(tensor): name for name, tensor in self._named.items()}
        return self._updates.error(own, names)

    def _disturbed(self, point: int) -> bool:
        return point % self.points >= self.points // 2

    def _pass(self, step: _Step, *, disturbed: bool) -> Sample:
        """Make the calls of a step; what each holds for its backward pass is gone after it."""
        outputs: Named = {}
        gradients: Named = {}
        slope = torch.zeros((), device=self._device)
        for number, kept in enumerate(step.calls):
            of = f" of call {number}" if len(step.calls) > 1 else ""
            for tensor, needs in zip(_there(self._parameters), kept.needs, strict=True):
                if tensor.requires_grad != needs:
                    tensor.requires_grad_(needs)
            args, kwargs = mapped(_fresh, kept.given)
            with kept.autocast.again():
                found = _floating(kept.call.act(*args, **kwargs))
            pairs = [
                (o, g.to(o.dtype)) for o, g in zip(found, kept.back, strict=True) if g is not None
            ]
            slope += torch.stack([(o.detach().float() * g.float()).sum() for o, g in pairs]).sum()
            for n, output in enumerate(found):
                outputs[f"output {n}{of}"] = sampled(output).to(self._device)
            inputs = {f"input {n}{of}": one for n, one in enumerate(_floating((args, kwargs)))}
            wanted = {n: one for n, one in (self._named | inputs).items() if one.requires_grad}
            self._take_back(pairs, wanted, gradients)
        loss = None
        if step.loss is not None and not disturbed:
            own = [kept.slope for kept in step.calls if kept.slope is not None]
            loss = step.loss + float(slope - torch.stack(own).sum())
        return Sample(outputs=outputs, gradients=gradients, loss=loss)

    def _take_back(
        self, pairs: Sequence[tuple[Tensor, Tensor]], wanted: Named, gradients: Named
    ) -> None:
        """Add to the gradients of these what comes back to them."""
        outputs, back = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, list(wanted.values()), back, materialize_grads=True)
        for name, gradient in zip(wanted, found, strict=True):
            taken = sampled(gradient).to(self._device)
            gradients[name] = gradients[name].add_(taken) if name in gradients else taken

    # What is kept, and put back.

    @property
    def _of_switch(self) -> Switch:
        assert self._switch is not None, "it has begun"
        return self._switch

    def _set(self, config: Config) -> None:
        self._of_switch.set(config)

    def _look(self) -> None:
        """Keep the calls of the step that begins, and before the first one the weights."""
        self._calls, self._losses, self._raised = [], [], False
        try:
            if not self._values:
                self._keep_values()
        except RuntimeError as exc:  # out of memory
            self._lost(exc)
            return
        self._unhook = hooks.on_backward(self._saw_loss)
        for call in self._of_switch.calls:
            call.act = functools.partial(self._keep, call)

    def _rest(self) -> None:
        """Keep no more calls."""
        self._unhook()
        self._unhook = _nothing
        if self._switch is not None:
            for call in self._switch.calls:
                act = call.act
                if isinstance(act, functools.partial) and act.func == self._keep:
                    call.act = call.plain

    def _keep_values(self) -> None:
        self._parameters = _places([one._parameters for one in self._modules])
        self._buffers = _places([one._buffers for one in self._modules])
        self._values = self._copies()

    def _tensors(self) -> list[Tensor]:
        return _there(self._parameters + self._buffers)

    def _copies(self) -> list[Tensor]:
        """Of all weights and buffers; on the host where the device has little room."""
        found = self._tensors()
        roomy = self._device.type != "cuda"
        if not roomy:
            free = torch.cuda.mem_get_info(self._device)[0]
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            roomy = free + unused > ROOM * sum(tensor.nbytes for tensor in found)
        if roomy:
            return [tensor.detach().clone() for tensor in found]
        return [tensor.detach().to("cpu", copy=True) for tensor in found]

    def _keep(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        if self._refused or len(self._calls) >= CALLS:
            self._unhook()  # the losses of what is not made again are none of it
            return call.plain(*args, **kwargs)
        try:
            given = mapped(_fresh, (args, kwargs))
        except RuntimeError as exc:  # out of memory, in the script's own call
            self._lost(exc)
            return call.plain(*args, **kwargs)
        needs = [tensor.requires_grad for tensor in _there(self._parameters)]
        kept = _Kept(call, given, _Autocast.now(self._device.type), needs, self._lost)
        drawn = Drawn()
        beyond = Beyond(self._modules) if self._careful else None
        try:
            result = call.plain(*args, **kwargs)
        except BaseException:
            self._raised = True
            raise
        self._draws |= drawn.passed()
        kept.watch(result)
        self._calls.append(kept)
        if beyond is not None and (why := _not_put_back((args, kwargs), beyond)):
            self._refuse(why)
        return result

    def _lost(self, exc: Exception) -> None:
        self._refuse(told(exc)[1])

    def _refuse(self, why: str) -> None:
        self._refused = why
        self._calls.clear()
        self._steps.clear()

    def _saw_loss(self, loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().float())

    @contextlib.contextmanager
    def _aside(self) -> Iterator[Held]:
        """Set the script's own weights, buffers, attributes and random numbers aside meanwhile."""
        if self._held is not None:
            yield self._held
            return
        self._set(self._of_switch.own)
        drawn, held, tensors, values = Drawn(), Held(self._modules), self._tensors(), self._copies()
        needs = [tensor.requires_grad for tensor in tensors]
        self._held, self._placed = held, -1
        try:
            yield held
        finally:
            self._held = None
            self._set(self._of_switch.own)
            held.put_attributes()
            _copy(tensors, values)
            for tensor, one in zip(tensors, needs, strict=True):
                if tensor.requires_grad != one:
                    tensor.requires_grad_(one)
            drawn.put()

    def _place(self, point: int) -> None:
        """Have the kept buffers in place, and the weights of a point."""
        weights = point // self.points * 2 + self._disturbed(point)
        parameters, count = _there(self._parameters), len(self._parameters)
        _copy(_there(self._buffers), self._values[count:])
        if weights != self._placed:
            _copy(parameters, self._values[:count])
            move(parameters, point, self.points)
            self._placed = weights


def _places(tables: Sequence[dict[str, Any]]) -> list[_Place]:
    """Where tensors are, each once."""
    found = {id(one): (table, name) for table in tables for name, one in table.items()}
    return [(table, name) for table, name in found.values() if table[name] is not None]


def _there(places: Sequence[_Place]) -> list[Tensor]:
    return [table[name] for table, name in places]


@torch.no_grad()
def _copy(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """In place, so that compiled code and CUDA graphs find them where they were."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _nothing() -> None:
    """What takes no hook away."""


def _beyond_repeating(modules: Sequence[nn.Module]) -> str:
    """Why models whose run counts are not called again, whatever a call does; or ''."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    if there and torch.distributed.get_world_size() > 1:
        return "of several processes one might wait for another within a call made again"
    return "the script has hooks in its model, which would run again" if hooked(modules) else ""


def _not_put_back(given: Any, beyond: Beyond) -> str:
    """The same, of a call that was made."""
    if what := foreign(given):
        return f"the model is called with a {what}, which another call might change"
    if what := beyond.changed():
        return f"a call of the model changes {what}, which could not be put back"
    return ""


def _weights(trained: Sequence[Trained]) -> Named:
    return {
        (f"{number}.{name}" if len(trained) > 1 else name): parameter
        for number, one in enumerate(trained)
        for name, parameter in one.model.named_parameters()
    }


def _floating(value: Any) -> list[Tensor]:
    """The tensors in it that may have a gradient."""
    return [tensor for tensor in tensors(value) if tensor.is_floating_point()]


def _fresh(tensor: Tensor) -> Tensor:
    """A clone with the same strides, which compiled code looks at."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    compact = tensor.detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            compact = compact.narrow(dim, 0, 1)
    shape, strides = compact.shape, compact.stride()
    clone = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    clone.copy_(compact)
    if shape != tensor.shape:
        clone = clone.expand(tensor.shape)
    return clone.requires_grad_(tensor.requires_grad)
