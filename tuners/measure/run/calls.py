"""Calls that a running script has made of its models, kept to be made again under other configs.

While the script trains on unmodified, four of its steps are looked at: what its models are called
with, and the gradient that comes back to what they return. The weights at that time are set aside
once. To compare a config, they are copied in, the calls are made again through the very code that
was timed, and the script's own weights are copied back.

What this does not see: the loss's own code runs once, and how far a loss would be off is told by
its tangent; errors that only add up over many updates; of a step of many micro-batches the calls
beyond the first few; gradients of gradients.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from advisor.cache.config import Config
from advisor.tuners.act.pilot import hooks
from advisor.tuners.act.pilot.crew import Trained
from advisor.tuners.act.pilot.drawn import Drawn
from advisor.tuners.act.pilot.orders import Comparison, told
from advisor.tuners.act.pilot.switch import Call, Switch
from advisor.tuners.act.pilot.trees import foreign, mapped, tensors
from advisor.tuners.measure.compare import References
from advisor.tuners.measure.place import UNVERIFIED, Compared
from advisor.tuners.measure.run.lasting import Beyond, Held, hooked
from advisor.tuners.measure.samples import Named, Sample, move, sampled

POINTS = 4
"""Steps of the script that are kept."""
CALLS = 8
"""Of one step that are kept, at most."""
UPDATED = 64
"""Parameters of an optimizer whose updates are compared, at most."""


@dataclass(slots=True, eq=False)
class _Kept:
    """One call: what it was given, where the random numbers were, in which autocast, and the
    gradient of each tensor that it returned; None where none came."""

    call: Call
    given: tuple[tuple[Any, ...], dict[str, Any]]
    drawn: Drawn
    autocast: tuple[str, torch.dtype] | None
    back: list[Tensor | None] = field(default_factory=list)

    def watch(self, result: Any, lost: Callable[[Exception], None]) -> None:
        """Keep the gradients of what the call returned, as they come."""
        for number, output in enumerate(_floating(result)):
            self.back.append(None)
            if output.requires_grad:
                output.register_hook(functools.partial(self._came, number, lost))

    def _came(self, number: int, lost: Callable[[Exception], None], gradient: Tensor) -> None:
        held, came = self.back[number], gradient.detach()
        try:
            self.back[number] = came.clone() if held is None else held + came
        except RuntimeError as exc:  # out of memory, in the script's own backward pass
            lost(exc)

    def entered(self) -> AbstractContextManager[object]:
        """The script's own autocast at the call."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.autocast[0], self.autocast[1])


@dataclass(slots=True, eq=False)
class _Step:
    """The calls of one step, and its loss; nan where no `backward` was called on one."""

    calls: list[_Kept] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    @property
    def loss(self) -> float:
        return float(torch.stack(self.losses).sum()) if self.losses else math.nan


class KeptCalls:
    """A Watch, and the Subject of its comparisons.

    Args:
        careful: the run is a real one: a model is called again only where all that its own call
            leaves behind is put back.
    """

    def __init__(self, *, careful: bool = False) -> None:
        self._careful = careful
        self._steps: list[_Step] = []
        self._refused = ""
        self._references: References | None = None
        self._asked: Comparison | None = None
        self._switch: Switch | None = None
        self._unhook: hooks.Remove = _nothing
        self._weights: Named = {}
        self._state: list[Tensor] = []
        self._aside: list[Tensor] = []
        self._modules: list[nn.Module] = []
        self._left_from = 0.0
        self.draws = False

    # A Watch ------------------------------------------------------------------------------------

    def begin(
        self,
        switch: Switch,
        trained: Sequence[Trained],
        device: torch.device,
        asked: Comparison,
    ) -> bool:
        """As `Watch.begin`."""
        self._asked, self._left_from = asked, time.monotonic()
        if self._switch is None:
            self._take(switch, trained, device)
        if self._ready:
            return True
        self._look()
        return False

    def stepped(self) -> bool:
        """As `Watch.stepped`."""
        self._unhook()
        last = self._steps[-1]
        last.calls = [one for one in last.calls if any(g is not None for g in one.back)]
        if not last.calls:
            self._refused = self._refused or "no gradient came back to what the model returned"
        if self._ready:
            assert self._switch is not None
            for call in self._switch.calls:
                call.act = call.plain
            return True
        self._look()
        return False

    def verdict(self) -> tuple[str, str, str]:
        """As `Watch.verdict`."""
        if self._refused:
            return UNVERIFIED, self._refused, ""
        found = self._compared()
        return found.outcome, found.reason, found.blames

    def close(self) -> None:
        """As `Watch.close`."""
        self._unhook()
        self._steps, self._references, self._switch = [], None, None
        self._weights, self._state, self._aside, self._modules = {}, [], [], []

    @property
    def _ready(self) -> bool:
        return bool(self._refused) or len(self._steps) >= POINTS

    def _take(self, switch: Switch, trained: Sequence[Trained], device: torch.device) -> None:
        """Set aside what the models hold now."""
        self._switch, self._device = switch, device
        self._modules = list({m: None for one in trained for m in one.model.modules()})
        self._weights = _weights(trained)
        state = [*self._weights.values(), *_buffers(self._modules)]
        self._state = state
        self._aside = _copies(state, device)
        if self._careful:
            self._refused = _beyond_repeating(self._modules)

    def _look(self) -> None:
        """Keep the calls of the step that begins."""
        assert self._switch is not None
        self._steps.append(_Step())
        self._unhook = hooks.on_backward(self._loss)
        self._switch.set(self._switch.own)
        for call in self._switch.calls:
            call.act = functools.partial(self._kept, call)

    def _kept(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        step = self._steps[-1]
        if self._refused or len(step.calls) >= CALLS:
            return call.plain(*args, **kwargs)
        try:
            given = mapped(_fresh, (args, kwargs))
            kept = _Kept(call, given, Drawn(), _autocast(self._device))
        except RuntimeError as exc:  # out of memory, in the script's own call
            self._lost(exc)
            return call.plain(*args, **kwargs)
        beyond = Beyond(self._modules) if self._careful else None
        result = call.plain(*args, **kwargs)
        self.draws |= kept.drawn.passed()
        kept.watch(result, self._lost)
        step.calls.append(kept)
        if beyond is not None:
            self._refused = self._refused or _not_put_back((args, kwargs), beyond)
        return result

    def _loss(self, loss: Tensor) -> None:
        if loss.numel() == 1:
            self._steps[-1].losses.append(loss.detach().float())

    def _lost(self, exc: Exception) -> None:
        self._refused = f"its calls could not be kept: {told(exc)[1]}"
        self._steps[-1].calls.clear()

    def _compared(self) -> Compared:
        asked, switch = self._asked, self._switch
        assert asked is not None and switch is not None
        if self._references is None:
            self._references = References(self, asked.fp32, tolerance=asked.tolerance)
        ends = self._left_from + asked.left_s
        before, held = Drawn(), Held(self._modules)
        own = _copies(self._state, self._device)
        config = switch.config
        try:
            return self._references.compare(
                asked.candidate, asked.plain, left_s=lambda: ends - time.monotonic()
            )
        finally:
            _copy_in(self._state, own)
            held.put()
            before.put()
            switch.set(config)
            if self._careful and self._device.type == "cuda":
                torch.cuda.empty_cache()

    # A Subject ----------------------------------------------------------------------------------

    @property
    def points(self) -> int:
        """As `Subject.points`."""
        return POINTS

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        """As `Subject.sample`."""
        switch, step = self._switch, self._steps[point % POINTS]
        assert switch is not None
        if switch.config != config:
            switch.set(config)
        _copy_in(self._state, self._aside)
        move(list(self._weights.values()), point, POINTS)
        held = Held(self._modules)
        switch.began()
        outputs: Named = {}
        gradients: Named = {}
        slope = torch.zeros((), device=self._device, dtype=torch.float64)
        for number, kept in enumerate(step.calls):
            kept.drawn.put()
            if self.draws:
                torch.manual_seed(seed + number)
            slope += self._call(kept, f"of call {number}", outputs, gradients)
        held.put()
        return Sample(outputs=outputs, gradients=gradients, loss=self._loss_of(point, step, slope))

    def _call(self, kept: _Kept, of: str, outputs: Named, gradients: Named) -> Tensor:
        """Make one call again, and take back its gradients; the loss's change along its tangent."""
        args, kwargs = mapped(_fresh, kept.given)
        with torch.enable_grad(), kept.entered():
            found = _floating(kept.call.act(*args, **kwargs))
        outputs |= {f"output {n} {of}": sampled(o) for n, o in enumerate(found)}
        pairs = [(o, g) for o, g in zip(found, kept.back, strict=True) if g is not None]
        slope = sum((o.detach().double() * g.double()).sum() for o, g in pairs)
        ours, back = zip(*pairs, strict=True)
        wanted = self._weights
        got = torch.autograd.grad(ours, list(wanted.values()), back, allow_unused=True)
        for (name, weight), gradient in zip(wanted.items(), got, strict=True):
            taken = sampled(torch.zeros_like(weight) if gradient is None else gradient)
            gradients[name] = gradients[name] + taken if name in gradients else taken
        return torch.as_tensor(slope, device=self._device)

    def _loss_of(self, point: int, step: _Step, slope: Tensor) -> float | None:
        """The loss, but for a constant: only differences between configs at one point count."""
        known = step.loss
        if math.isnan(known) or point % POINTS >= POINTS // 2:
            return None
        return known + float(slope)

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        """As `Subject.optimizer_error`."""
        switch = self._switch
        assert switch is not None
        changes = switch.optimizer_changes(config)
        if not changes:
            return 0.0, ""
        worst = (0.0, "")
        names = {parameter: name for name, parameter in self._weights.items()}
        for optimizer in switch.optimizers:
            plain, other = _updated(optimizer, {}), _updated(optimizer, changes)
            for parameter, ours in plain.items():
                move_ = float(ours.double().norm())
                apart = float((other[parameter].double() - ours.double()).norm())
                # What rounding a weight after its update leaves.
                apart -= 2 * torch.finfo(parameter.dtype).eps * float(parameter.detach().double().norm())
                part = apart / move_ if move_ else float(apart > 0)
                worst = max(worst, (part, names.get(parameter, "a parameter")))
        return worst


def _updated(optimizer: torch.optim.Optimizer, changes: dict[str, Any]) -> dict[Tensor, Tensor]:
    """How a step of an optimizer with some settings changes its parameters, by parameter.

    The step is one of a copy of it, on copies of parameters and state, which no hook sees.
    """
    shadow: Any = copy.copy(optimizer)
    shadow.state = defaultdict(dict)
    shadow.param_groups = []
    copies: dict[Tensor, nn.Parameter] = {}
    for group in optimizer.param_groups:
        taken = [p for p in group["params"] if p.grad is not None and not p.grad.is_sparse]
        for parameter in taken[: UPDATED - len(copies)]:
            own = nn.Parameter(parameter.detach().clone())
            own.grad = parameter.grad.detach().clone()
            shadow.state[own] = {n: _cloned(v) for n, v in optimizer.state[parameter].items()}
            copies[parameter] = own
        held = {**group, **changes, "params": [copies[p] for p in taken if p in copies]}
        shadow.param_groups.append(held)
    if changes:
        for own, state in shadow.state.items():
            if isinstance(step := state.get("step"), Tensor):
                state["step"] = step.to(own.device)
    step = torch.no_grad()(type(optimizer).step)
    step = getattr(step, "__wrapped__", step)
    while hasattr(step, "__wrapped__"):  # what calls hooks around it
        step = step.__wrapped__
    with torch.no_grad():
        step(shadow)
    return {parameter: own.detach() - parameter.detach() for parameter, own in copies.items()}


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def _copies(state: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of tensors: on the device where there is room for them, else on the host."""
    size = sum(tensor.nbytes for tensor in state)
    room = device.type != "cuda" or torch.cuda.mem_get_info(device)[0] > 4 * size
    with torch.no_grad():
        return [t.detach().clone() if room else t.detach().to("cpu", copy=True) for t in state]


@torch.no_grad()
def _copy_in(state: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """In place: what was captured goes on with the same memory."""
    for tensor, value in zip(state, values, strict=True):
        tensor.copy_(value)


def _weights(trained: Sequence[Trained]) -> Named:
    return {
        (f"{number}.{name}" if len(trained) > 1 else name): parameter
        for number, one in enumerate(trained)
        for name, parameter in one.model.named_parameters()
        if parameter.requires_grad
    }


def _buffers(modules: Sequence[nn.Module]) -> list[Tensor]:
    return list({id(b): b for one in modules for b in one.buffers(recurse=False)}.values())


def _floating(value: Any) -> list[Tensor]:
    """The tensors in it that may have a gradient."""
    return [tensor for tensor in tensors(value) if tensor.is_floating_point()]


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _autocast(device: torch.device) -> tuple[str, torch.dtype] | None:
    """The script's own autocast, as it is now."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return device.type, torch.get_autocast_dtype(device.type)


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


def _nothing() -> None:
    """What takes no hook away."""
