"""The steps that were timed, made again at given weights and batches to compare them with fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from advisor.cache.config import Config
from advisor.tuners.decisions import SAMPLED
from advisor.tuners.measure.samples import Named, Overflow, Sample, Subject, move, sampled
from advisor.tuners.measure.workload import Workload

POINTS = 4
"""Two at the kept weights, two at disturbed ones: each pair rules out what one batch alone does."""
OPTIMIZER_STEPS = 2
"""Updates that are compared: what an optimizer keeps of the first shows in the second."""
SCALE_STEPS = 20
"""Halvings of 65536, GradScaler's first scale, after which it is below 1."""


class WorkloadSubject:
    """Workloads of one task under any config: the very ones that are timed.

    Args:
        build: a new model as all workloads have had it at first.
        workload: the one that is timed under a config, built where it is not there.
        device: where they train.
        draws: whether a step draws random numbers.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        workload: Callable[[Config], Workload],
        device: torch.device,
        *,
        draws: bool,
    ) -> None:
        self._build, self._workload = build, workload
        self._device = device
        self._draws = draws
        self._host: Named = {}
        self._values: Named = {}
        self._touched: dict[Config, Workload] = {}

    @property
    def points(self) -> int:
        """See Subject."""
        return POINTS

    @property
    def draws(self) -> bool:
        """See Subject."""
        return self._draws

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        """See Subject."""
        workload = self._workload(config)
        self._touched[config] = workload
        outputs = self._pass(workload, lambda: self._set(workload, point), point, seed)
        loss = workload.loss
        return Sample(
            outputs={
                f"output {number}" if number else "output": one.clone()
                for number, one in enumerate(outputs)
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
        self._touched[config] = workload
        self._set(workload, 0)
        weights = dict(_trained(workload))
        starts = {name: _part(weight).clone() for name, weight in weights.items()}
        shadows = {name: nn.Parameter(start.clone()) for name, start in starts.items()}
        optimizer = workload.plain_optimizer(list(shadows.values()))
        for step in range(OPTIMIZER_STEPS):
            self._pass(workload, lambda: None, step, step)
            for name, shadow in shadows.items():
                grad = weights[name].grad
                shadow.grad = None if grad is None else _part(grad)
            optimizer.step()
        return _apart(weights, shadows, starts)

    def restore(self) -> None:
        """Leave all workloads as they were built, and free what comparing them took."""
        for workload in self._touched.values():
            self._set(workload, 0)
        self._touched.clear()
        self._values.clear()

    def forget(self, config: Config) -> None:
        """A workload is not there any more."""
        self._touched.pop(config, None)

    def _pass(
        self, workload: Workload, begin: Callable[[], None], point: int, seed: int
    ) -> list[Tensor]:
        """A step that no GradScaler skips; samples of its outputs.

        Gradients are read after it: the optimizer leaves them as they were, but for the scale,
        which it, or the scaler before it, divides them by.
        """
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
        """Set weights, buffers and optimizer state, in place: a graph goes on with its memory."""
        values = self._values or self._placed()
        for name, tensor in _state(workload.model):
            tensor.copy_(values[name])
        move([weight for _, weight in _trained(workload)], point, POINTS)
        states = workload.optimizer.state.values() if workload.optimizer is not None else ()
        for state in states:
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def _placed(self) -> Named:
        if not self._host:
            model = self._build()
            self._host = {name: tensor.detach() for name, tensor in _state(model)}
        self._values = {name: tensor.to(self._device) for name, tensor in self._host.items()}
        return self._values


_: Callable[..., Subject] = WorkloadSubject


def _state(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _trained(workload: Workload) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in workload.model.named_parameters() if p.requires_grad]


def _part(tensor: Tensor) -> Tensor:
    """A sample of a tensor in its own number format."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return dense.contiguous().flatten()[:: dense.numel() // SAMPLED | 1]


@torch.no_grad()
def _apart(
    weights: dict[str, nn.Parameter], shadows: dict[str, nn.Parameter], starts: Named
) -> tuple[float, str]:
    """The largest part of an update that the other optimizer does not make; whose it is."""
    worst = (0.0, "")
    for name, shadow in shadows.items():
        start, own = starts[name].double(), _part(weights[name]).double()
        # Rounding a weight after each update is no difference.
        rounding = OPTIMIZER_STEPS * torch.finfo(shadow.dtype).eps * start.norm()
        error, update = (own - shadow.double()).norm() - rounding, (shadow.double() - start).norm()
        part = float(error / update) if update > 0 else float(error > 0)
        worst = max(worst, (part, name))
    return worst
