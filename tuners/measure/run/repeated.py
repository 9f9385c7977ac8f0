"""Configs compared within a run: some steps' calls of its models, made again under each config.

While the script trains on as it is, what its models are called with is kept, and the gradient that
comes back to what they return. At the end of the step each call is made again, with the weights as
they are then and from the same random numbers: in strict fp32, in fp32 with every result rounded,
in the number format alone, and under the config. The gradient that was kept is taken back through
each. So nothing is started for it, no data or seed has to come twice, and what was compiled for the
race is compared as it is, but for models that draw random numbers: see `SameDraws`.

What this does not see:
- The loss's own code runs once. How far a loss would be off is told by its tangent: by what the
  gradient of the outputs says of their difference, which is exact where the model returns its loss.
- The weights go the way that the script's own training takes them. An error that only adds up over
  many updates shows as its part in each gradient, or not at all; nor are optimizers compared.
- Of a step of many micro-batches the first are looked at, and no gradient of a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
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
from advisor.tuners.knobs import FORMATS, KNOBS
from advisor.tuners.measure import numerics
from advisor.tuners.measure.numerics import Distances
from advisor.tuners.measure.observe import BATCHES, Named, Point, Trace, sampled
from advisor.tuners.measure.randomness import Rounding, SameDraws, amplitude
from advisor.tuners.measure.run.lasting import Beyond, Held, hooked

STEPS = BATCHES
"""Of the script that are looked at."""
CALLS = 8
"""Of one step that are made again, at most."""
ROUNDED = 3
"""Times that fp32 is rounded: how far that takes a gradient, one draw alone tells badly."""


@dataclass(slots=True, eq=False)
class _Made:
    """A call that the script made: what it was given, where the random numbers were, in which
    autocast, and `back`, the gradient of each tensor that it returned; None where none came.

    `lost`: told why one could not be kept."""

    call: Call
    given: tuple[tuple[Any, ...], dict[str, Any]]
    drawn: Drawn
    autocast: AbstractContextManager[object]
    lost: Callable[[Exception], None]
    back: list[Tensor | None] = field(default_factory=list)

    def watch(self, result: Any) -> None:
        """Keep the gradients of what the call returned, as they come."""
        for number, output in enumerate(_tensors(result)):
            self.back.append(None)
            if output.requires_grad:
                output.register_hook(functools.partial(self._came, number))

    def _came(self, number: int, gradient: Tensor) -> None:
        held, came = self.back[number], gradient.detach()
        try:
            self.back[number] = came.clone() if held is None else held + came
        except RuntimeError as exc:  # out of memory, in the script's own backward pass
            self.lost(exc)


@dataclass(frozen=True, slots=True)
class _Variant:
    """A way in which calls are made again. `draw`: of the rounding of results; 0: none."""

    config: Config
    draw: int = 0


class Repeats:
    """A Watch: compares a config with others on the script's own steps.

    Args:
        careful: the run is one that counts: a model is called again only where all that its own
            call leaves behind is put back.
    """

    def __init__(self, *, careful: bool = False) -> None:
        self._careful = careful

    def begin(
        self,
        switch: Switch,
        trained: Sequence[Trained],
        device: torch.device,
        asked: Comparison,
    ) -> None:
        """The next step is the first to be looked at; the script trains as it is."""
        self._switch, self._device, self._asked = switch, device, asked
        self._weights = _weights(trained)
        self._modules = list({m: None for one in trained for m in one.model.modules()})
        self._fp32, self._plain = _Variant(asked.fp32), _Variant(asked.plain)
        self._candidate = _Variant(asked.candidate)
        self._rounded = [_Variant(asked.fp32, 1 + number) for number in range(ROUNDED)]
        ordered = [self._fp32, *self._rounded, self._plain, self._candidate]
        self._losses: dict[_Variant, list[float]] = {variant: [] for variant in ordered}
        self._finite = dict.fromkeys(ordered, True)
        self._distances: list[Distances] = []
        self._failed: tuple[str, str] | None = None
        self._draws = False
        self._made: list[_Made] = []
        if self._careful:
            self._refuse(_beyond_repeating(self._modules))
        self._look()

    def stepped(self) -> None:
        """A step is over."""
        self._unhook()
        if self._failed is None and self._made:
            try:
                self._repeat()
            except Exception as exc:  # whatever a config raises: the run goes on without it
                self._failed = told(exc)
                exc.__traceback__ = None  # its frames hold what was computed
        self._look()

    def verdict(self) -> tuple[str, str]:
        """Outcome and reason, once all steps are over; the script is as it was."""
        self.leave()
        if self._failed is not None:
            return self._failed
        if not self._distances:
            return "failed", "no gradient came back to what the model returned"
        good, reason = numerics.judge(
            *self._each({v: self._trace(v) for v in self._losses}),
            self._asked.tolerance,
            Distances.lasting(self._distances),
        )
        return "ok" if good else "wrong", reason

    def leave(self) -> None:
        """Have the script go on as it was."""
        self._unhook()
        self._made.clear()
        self._switch.set(self._switch.own)
        if self._careful and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _each(self, traces: Mapping[_Variant, Trace]) -> tuple[Trace, list[Trace], Trace, Trace]:
        """As `numerics.judge` takes them."""
        rounded = [traces[one] for one in self._rounded]
        return traces[self._fp32], rounded, traces[self._plain], traces[self._candidate]

    def _trace(self, variant: _Variant, *points: Point) -> Trace:
        return Trace(
            losses=tuple(self._losses[variant]),
            points=points,
            moved={},
            finite=self._finite[variant],
        )

    def _look(self) -> None:
        """Keep the calls of the step that begins."""
        self._made = []
        self._seen_losses: list[Tensor] = []
        self._unhook = hooks.on_backward(self._loss)
        self._switch.set(self._switch.own)
        if self._failed is None:
            for call in self._switch.calls:
                call.act = functools.partial(self._kept, call)

    def _refuse(self, why: str) -> None:
        """Call no model again, if there is a reason."""
        if why:
            self._failed = "failed", why
            self._made.clear()

    def _lost(self, exc: Exception) -> None:
        self._failed = told(exc)
        self._made.clear()

    def _kept(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        if self._failed is not None:
            return call.plain(*args, **kwargs)
        if len(self._made) >= CALLS:
            self._unhook()  # the losses of what is not made again are none of it
            return call.plain(*args, **kwargs)
        try:
            given = mapped(_fresh, (args, kwargs))
            made = _Made(call, given, Drawn(), _autocast(self._device), self._lost)
        except RuntimeError as exc:  # out of memory, in the script's own call
            self._lost(exc)
            return call.plain(*args, **kwargs)
        beyond = Beyond(self._modules) if self._careful else None
        result = call.plain(*args, **kwargs)
        self._draws |= made.drawn.passed()
        made.watch(result)
        self._made.append(made)
        if beyond is not None:
            self._refuse(_not_put_back((args, kwargs), beyond))
        return result

    def _loss(self, loss: Tensor) -> None:
        if loss.numel() == 1:
            self._seen_losses.append(loss.detach().float())

    def _repeat(self) -> None:
        """Make the calls of the step that is over again, under each config."""
        self._made = [one for one in self._made if any(g is not None for g in one.back)]
        if not self._made:
            return
        before, held = Drawn(), Held(self._modules)
        points: dict[_Variant, Point] = {}
        slopes: dict[_Variant, Tensor] = {}
        try:
            for variant in self._losses:
                self._switch.set(variant.config)
                self._switch.began()
                points[variant], slopes[variant] = self._again(variant)
                held.put()
        finally:
            held.put()
            before.put()
        # Of a script that calls no `backward` the loss is not known, nor how much off is much.
        known = self._seen_losses
        loss = float(torch.stack(known).sum()) if known else 0.0
        for variant, point in points.items():
            apart = float(slopes[variant] - slopes[self._fp32]) if known else 0.0
            self._losses[variant].append(loss + apart)
            self._finite[variant] &= _finite(point)
        traces = {variant: self._trace(variant, point) for variant, point in points.items()}
        self._distances.append(Distances.of(*self._each(traces)))

    def _again(self, variant: _Variant) -> tuple[Point, Tensor]:
        """Make the calls again.

        Returns:
            What they come to, and the loss, but for a constant, on its tangent.
        """
        seen = Point(outputs={}, gradients={})
        slope = torch.zeros((), device=self._device)
        for number, made in enumerate(self._made):
            with ExitStack() as active:
                active.enter_context(torch.enable_grad())
                if self._draws:
                    active.enter_context(SameDraws(self._device))
                if variant.draw:
                    active.enter_context(Rounding(self._asked.rounding))
                made.drawn.put()
                if variant.draw:
                    torch.manual_seed(variant.draw)
                slope += self._call(made, seen, f"of call {number}")
        return seen, slope

    def _call(self, made: _Made, seen: Point, of: str) -> Tensor:
        """Make one call again; what it holds for its backward pass is gone afterwards."""
        args, kwargs = mapped(_fresh, made.given)
        with made.autocast:
            found = _tensors(made.call.act(*args, **kwargs))
        seen.outputs.update({f"output {n} {of}": _taken(o) for n, o in enumerate(found)})
        pairs = [(o, g) for o, g in zip(found, made.back, strict=True) if g is not None]
        wanted = {f"input {n} {of}": tensor for n, tensor in enumerate(_tensors((args, kwargs)))}
        wanted = {name: tensor for name, tensor in wanted.items() if tensor.requires_grad}
        self._take_back(pairs, self._weights | wanted, seen.gradients)
        return torch.stack([(o.detach().float() * g.float()).sum() for o, g in pairs]).sum()

    @staticmethod
    def _take_back(pairs: Sequence[tuple[Tensor, Tensor]], wanted: Named, gradients: Named) -> None:
        """Add to the gradients of these what comes back to them."""
        outputs, back = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, list(wanted.values()), back, allow_unused=True)
        for name, gradient in zip(wanted, found, strict=True):
            taken = _taken(torch.zeros_like(wanted[name]) if gradient is None else gradient)
            gradients[name] = gradients[name] + taken if name in gradients else taken


def comparison(candidate: Config, fp32: Config, tolerance: float, *, tf32: bool) -> Comparison:
    """What holds a config against strict fp32; `tf32`: the device may multiply in that."""
    same = candidate.only(*FORMATS)
    dtype = next((d for k in KNOBS if k.autocast and (d := k.autocast(candidate[k.name]))), None)
    return Comparison(
        fp32=fp32,
        plain=fp32.replace(**same),
        candidate=candidate,
        rounding=amplitude(dtype, tf32=tf32),
        tolerance=tolerance,
    )


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


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    """The script's own autocast, as it is now."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type))


def _weights(trained: Sequence[Trained]) -> Named:
    return {
        (f"{number}.{name}" if len(trained) > 1 else name): parameter
        for number, one in enumerate(trained)
        for name, parameter in one.model.named_parameters()
        if parameter.requires_grad
    }


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in it that may have a gradient."""
    return [tensor for tensor in tensors(value) if tensor.is_floating_point()]


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _taken(tensor: Tensor) -> Tensor:
    """A copy: what it is taken from is written over."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor
    return sampled(dense).float().clone()


def _finite(point: Point) -> bool:
    seen = [*point.outputs.values(), *point.gradients.values()]
    return bool(torch.stack([tensor.isfinite().all() for tensor in seen]).all())
