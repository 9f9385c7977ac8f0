"""Repeats timed training steps at given weights and batches, to compare them with fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from advisor.cache.config import Config
from advisor.tuners.decisions import POINTS
from advisor.tuners.measure.samples import (
    Named,
    Overflow,
    Sample,
    Subject,
    move,
    part_of,
    sampled,
    worst_update,
)
from advisor.tuners.measure.workload import Workload

OPTIMIZER_STEPS = 2
"""Updates that are compared: what an optimizer keeps of the first shows in the second."""
SCALE_STEPS = 20
"""Halvings of 65536, GradScaler's first scale, after which it is below 1."""


class WorkloadSubject:
    """A Subject over the workloads that are timed; `build` makes their model as it was at first."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        workload: Callable[[Config], Workload],
        device: torch.device,
    ) -> None:
        self._build, self._workload = build, workload
        self._device = device
        self.draws = False
        self._values: Named = {}

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        """See Subject."""
        workload = self._workload(config)
        outputs = self._pass(workload, lambda: self._set(workload, point), point, seed)
        loss = workload.loss
        return Sample(
            outputs={
                f"output {n}" if n else "output": one.clone() for n, one in enumerate(outputs)
            },
            gradients={
                name: sampled(torch.zeros_like(weight) if weight.grad is None else weight.grad)
                for name, weight in _trained(workload)
            },
            loss=None if loss is None else float(loss),
        )

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        """See Subject."""
        workload = self._workload(config)
        if workload.optimizer is None:
            return 0.0, ""
        self._set(workload, 0)
        weights = dict(_trained(workload))
        starts = {name: part_of(weight).clone() for name, weight in weights.items()}
        shadows = {name: nn.Parameter(start.clone()) for name, start in starts.items()}
        optimizer = workload.plain_optimizer(list(shadows.values()))
        for step in range(OPTIMIZER_STEPS):
            self._pass(workload, lambda: None, step, step)
            for name, shadow in shadows.items():
                grad = weights[name].grad
                shadow.grad = None if grad is None else part_of(grad)
            optimizer.step()
        return worst_update(
            (name, starts[name], shadow, part_of(weights[name])) for name, shadow in shadows.items()
        )

    def restore(self, workloads: Iterable[Workload]) -> None:
        """Set workloads back to how they were built, and free the device memory of comparing."""
        for workload in workloads if self._values else ():
            self._set(workload, 0)
        self._values = {}

    def _pass(
        self, workload: Workload, begin: Callable[[], None], point: int, seed: int
    ) -> list[Tensor]:
        """A step that no GradScaler skips; samples of its outputs. Its gradients stay as they are:
        the optimizer, or the scaler before it, only divides them by the scale."""
        scaler = workload.advice.scaler
        for _ in range(SCALE_STEPS):
            begin()
            workload.rewind(point % POINTS)
            torch.manual_seed(seed)
            scale = scaler.get_scale()
            outputs = workload.observed_step()
            if scaler.get_scale() >= scale:
                return outputs
        raise Overflow(f"the GradScaler skipped {SCALE_STEPS} steps in a row: fp16 overflows here")

    @torch.no_grad()
    def _set(self, workload: Workload, point: int) -> None:
        """Set weights, buffers and optimizer state, in place, as a graph keeps its memory."""
        if not self._values:
            self._values = {name: one.to(self._device) for name, one in self._host.items()}
        for name, tensor in _state(workload.model):
            tensor.copy_(self._values[name])
        move([weight for _, weight in _trained(workload)], point)
        states = workload.optimizer.state.values() if workload.optimizer is not None else ()
        for state in states:
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    @functools.cached_property
    def _host(self) -> Named:
        return {name: tensor.detach() for name, tensor in _state(self._build())}


_: Callable[..., Subject] = WorkloadSubject


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _trained(workload: Workload) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in workload.model.named_parameters() if p.requires_grad]
