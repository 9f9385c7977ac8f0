"""What a short training run shows of a config: losses, outputs, every gradient, every update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from advisor.tuners.measure.randomness import Rounding, SameDraws, salted, uniform
from advisor.tuners.measure.workload import Workload

BATCHES = 4
"""Different batches that every run cycles through."""
POINTS = 2
"""Places at which gradients are compared, each a batch and weights of its own."""
SAMPLED = 2**18 + 1
"""Elements of one tensor that are compared, evenly taken from all."""
OPTIMIZER_STEPS = 8
"""Steps in which the optimizer's updates are followed by PyTorch's own, from the same gradients."""
SCALE_STEPS = 20
"""Halvings from 65536 after which no loss scale is found."""

Named = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One batch at given weights: the outputs, and the gradient of every parameter."""

    outputs: Named
    gradients: Named


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One short training run.

    Attributes:
        losses: of each step.
        points: the same weights in all runs: as built, and disturbed in every parameter, which
            shows what was computed from values of another time.
        moved: how far each parameter came.
        optimizer: the largest part of an update that PyTorch's optimizer, given the same
            gradients, does not make, with the parameter's name.
        finite: all of it, and the weights at the end.
        skipped: steps that the GradScaler skipped after its scale search.
    """

    losses: tuple[float, ...]
    points: tuple[Point, ...]
    moved: Named
    optimizer: tuple[float, str] = (0.0, "")
    finite: bool = True
    skipped: int = 0

    def to(self, device: torch.device) -> Trace:
        """The same with its tensors on a device."""

        def placed(named: Named) -> Named:
            return {name: tensor.to(device) for name, tensor in named.items()}

        points = tuple(
            Point(outputs=placed(point.outputs), gradients=placed(point.gradients))
            for point in self.points
        )
        return dataclasses.replace(self, points=points, moved=placed(self.moved))


class NoScale(Exception):
    """The GradScaler finds no loss scale."""


class Observer:
    """Trains one workload, built with BATCHES batches and `watch=True`, and looks at it.

    Args:
        rounding: of results, beside what the config itself does; None for none.
        seed: for what `SameDraws` does not draw.
    """

    def __init__(
        self, workload: Workload, *, rounding: Rounding | None = None, seed: int = 0
    ) -> None:
        assert workload.optimizer is not None
        self._workload = workload
        self._optimizer = workload.optimizer
        self._scaler = workload.advice.scaler
        self._seed = seed
        self._step = 0
        self._draws = SameDraws(workload.advice.device)
        self._rounding = rounding or Rounding(0.0)
        self._modes: list[AbstractContextManager[object]] = [self._draws]
        if rounding:
            self._modes.append(self._rounding)
        self._weights = {n: p for n, p in workload.model.named_parameters() if p.requires_grad}
        self._gradients = {name: torch.zeros_like(sampled(p)) for name, p in self._weights.items()}
        self._start = [tensor.detach().clone() for tensor in self._state()]

    def trace(self, steps: int) -> Trace:
        """Raises:
        NoScale: fp16 overflows at any loss scale.
        """
        with self._watching():
            self._run(self._workload.start)
            points = tuple(self._point(number) for number in range(POINTS))
            self._restore()
            self._workload.rewind()
            losses, skipped, apart = self._train(steps)
        before = self._named(self._start)
        moved = {
            name: _taken(sampled(p) - sampled(before[name])) for name, p in self._weights.items()
        }
        seen = [*moved.values(), *(t for point in points for t in point.gradients.values())]
        seen += [t for point in points for t in point.outputs.values()]
        return Trace(
            losses=tuple(losses),
            points=points,
            moved=moved,
            optimizer=apart,
            finite=bool(torch.stack([t.isfinite().all() for t in seen]).all()),
            skipped=skipped,
        )

    def points(self) -> tuple[Point, ...]:
        """Those of a trace again: the same, but for what `SameDraws` does not draw."""
        self._seed += 15485863
        with self._watching():
            return tuple(self._point(number) for number in range(POINTS))

    def draws(self, count: int) -> Tensor:
        """Outputs of one batch, flat, for draws of the model's own randomness: (count, size)."""
        self._modes = []
        with self._watching():
            self._run(self._workload.start)
            found = []
            for number in range(count):
                self._restore()
                self._workload.rewind()
                self._seed = 7919 * (1 + number)
                self._run(self._workload.step)
                found.append(torch.cat([sampled(o).float() for o in self._workload.outputs]).cpu())
        return torch.stack(found)

    def _run(self, step: Callable[[], None]) -> None:
        """One step, with random numbers that its number and the seed alone decide."""
        self._draws.salt[0].fill_(self._step)
        torch.manual_seed(self._seed + self._step)
        with ExitStack() as active:
            for mode in self._modes:
                active.enter_context(mode)
            step()
        self._step += 1

    def _point(self, number: int) -> Point:
        for _ in range(SCALE_STEPS):
            self._restore()
            if number:
                self._disturb()
            self._workload.rewind(number)
            self._step = 1000 * (1 + number)
            scale = self._scaler.get_scale()
            self._run(self._workload.step)
            if self._scaler.get_scale() >= scale:
                outputs = {
                    f"output {n}" if n else "the output": _taken(sampled(o))
                    for n, o in enumerate(self._workload.outputs)
                }
                gradients = {name: _taken(kept) for name, kept in self._gradients.items()}
                return Point(outputs=outputs, gradients=gradients)
        raise NoScale(f"the GradScaler skipped {SCALE_STEPS} steps in a row: fp16 overflows here")

    def _train(self, steps: int) -> tuple[list[float], int, tuple[float, str]]:
        shadows = {name: nn.Parameter(sampled(p).clone()) for name, p in self._weights.items()}
        optimizer = self._workload.plain_optimizer(list(shadows.values()))
        losses: list[float] = []
        skipped = 0
        apart = (0.0, "")
        self._step = 0
        for step in range(steps):
            scale = self._scaler.get_scale()
            self._run(self._workload.step)
            assert self._workload.loss is not None
            losses.append(float(self._workload.loss))
            skip = self._scaler.get_scale() < scale
            skipped += skip
            if step < OPTIMIZER_STEPS and not skip:
                for name, shadow in shadows.items():
                    shadow.grad = self._gradients[name].to(shadow.dtype)
                optimizer.step()
            if step == OPTIMIZER_STEPS - 1:
                apart = self._unlike(shadows)
        return losses, skipped, apart

    @torch.no_grad()
    def _unlike(self, shadows: dict[str, nn.Parameter]) -> tuple[float, str]:
        """The part of an update that the optimizer alone does not explain, the worst named."""
        worst = (0.0, "")
        before = self._named(self._start)
        for name, shadow in shadows.items():
            start = sampled(before[name]).double()
            error = (sampled(self._weights[name]).double() - shadow.double()).norm()
            # What rounding a weight after each update leaves.
            error -= 2 * torch.finfo(shadow.dtype).eps * start.norm()
            move = (shadow.double() - start).norm()
            part = float(error / move) if move > 0 else float(error > 0)
            if part > worst[0]:
                worst = (part, name)
        return worst

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Every optimizer step's gradients are kept, in captured steps too."""
        handles = [
            self._optimizer.register_step_pre_hook(self._before),
            self._optimizer.register_step_post_hook(self._after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, _optimizer: object, _args: object, _how: object) -> None:
        self._rounding.on = False
        scale = getattr(self._optimizer, "grad_scale", None)  # which fused kernels divide by
        for name, weight in self._weights.items():
            kept = self._gradients[name]
            if weight.grad is None:
                kept.zero_()
            else:
                grad = weight.grad
                kept.copy_(sampled(grad.to_dense() if grad.is_sparse else grad))
                if scale is not None:
                    kept.div_(scale)

    def _after(self, _optimizer: object, _args: object, _how: object) -> None:
        self._rounding.on = True

    def _state(self) -> list[Tensor]:
        return [*self._weights.values(), *self._workload.model.buffers()]

    def _named(self, state: list[Tensor]) -> Named:
        return dict(zip(self._weights, state, strict=False))

    @torch.no_grad()
    def _restore(self) -> None:
        """As built, in place: what is captured goes on with the same memory."""
        for tensor, start in zip(self._state(), self._start, strict=True):
            tensor.copy_(start)
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    @torch.no_grad()
    def _disturb(self) -> None:
        """Other values of the same size in every parameter, in place, alike in all runs."""
        for number, weight in enumerate(self._weights.values()):
            if not weight.is_floating_point():
                continue
            # In their logical order, whatever the memory format.
            flat = weight.detach().contiguous().flatten()
            noise = 2 * uniform(flat.shape, salted(1 + number, flat.device)).to(flat.dtype) - 1
            moved = flat.roll(1) * (1 + 0.2 * noise) + 0.02 * noise * (flat == 0)
            weight.copy_(moved.view(weight.shape))


def sampled(tensor: Tensor) -> Tensor:
    """At most SAMPLED elements, in their logical order, whatever the memory format."""
    flat = tensor.detach().contiguous().flatten()
    # Odd, so that it does not meet the same column of every row.
    stride = math.ceil(flat.numel() / SAMPLED) | 1 if flat.numel() > SAMPLED else 1
    return flat[::stride]


def _taken(tensor: Tensor) -> Tensor:
    """A copy: what it is taken from is written over by the next step."""
    return torch.empty_like(tensor, dtype=torch.float32).copy_(tensor)
