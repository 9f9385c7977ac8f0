"""What some steps of a command show of a config: losses, every gradient, every update.

The command is started once for each config, from the same seeds; up to where the pilot takes over
all of them train alike. From there on what a model draws is the same in all of them too, see
`SameDraws`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from advisor.tuners.act.pilot import hooks
from advisor.tuners.act.pilot.crew import Trained
from advisor.tuners.act.steps import EVERY_STEP
from advisor.tuners.measure.observe import POINTS, Named, Point, Trace, sampled
from advisor.tuners.measure.randomness import Rounding, SameDraws

FILE, STEPS = "ADVISOR_TRACE", "ADVISOR_TRACE_STEPS"
"""Environment variables: where the trace goes, and of how many steps."""
ROUNDED, DRAW = "ADVISOR_TRACE_ROUNDING", "ADVISOR_TRACE_DRAW"
"""The same: what results are rounded to, relatively, 0 for not at all, and which draw of that."""
SEED = 1


class Tracer:
    """Looks at the steps of one process from where the pilot has set a config."""

    def __init__(self, file: Path, steps: int, rounding: float, draw: int) -> None:
        self._file, self._steps, self._draw = file, steps, draw
        self._rounding = Rounding(rounding)
        self._rounded = rounding > 0
        self._active = ExitStack()
        self._done = 0
        self._losses: list[list[Tensor]] = [[]]
        self._points: list[Named] = []
        random.seed(SEED)
        torch.manual_seed(SEED)
        if (numpy := _numpy()) is not None:
            numpy.random.seed(SEED)

    def began(self, trained: Sequence[Trained], device: torch.device) -> None:
        """A config is set; the next step is the first one."""
        self._weights = dict(_weights(trained))
        self._start = {name: sampled(weight).clone() for name, weight in self._weights.items()}
        torch.manual_seed(SEED + self._draw)
        self._active.callback(hooks.on_backward(self._loss))
        self._active.callback(register_optimizer_step_pre_hook(self._before).remove)
        self._active.callback(EVERY_STEP.tell(self._after))
        self._draws = SameDraws(device)
        self._active.enter_context(self._draws)
        if self._rounded:
            self._active.enter_context(self._rounding)
        self._points.append({})

    def stepped(self) -> None:
        """A step is over."""
        self._done += 1
        if self._done == self._steps:
            self._active.close()
            if os.environ.get("RANK", "0") == "0":
                self._keep()
            return
        self._draws.salt[0].fill_(self._done)
        self._losses.append([])
        if self._done < POINTS:
            self._points.append({})

    def _loss(self, loss: Tensor) -> None:
        if loss.numel() == 1:
            self._losses[-1].append(loss.detach().float())

    def _before(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._rounding.on = False
        if self._done >= POINTS:
            return
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, weight in self._weights.items():
            if id(weight) in mine and weight.grad is not None:
                grad = weight.grad
                kept = sampled(grad.to_dense() if grad.is_sparse else grad)
                self._points[-1][name] = kept.float().clone()

    def _after(self, _optimizer: torch.optim.Optimizer) -> None:
        self._rounding.on = True

    def _keep(self) -> None:
        moved = {n: sampled(w).float() - self._start[n].float() for n, w in self._weights.items()}
        losses = [float(torch.stack(one).mean()) if one else 0.0 for one in self._losses]
        found = {"losses": losses, "points": self._points, "moved": moved}
        unready = self._file.with_suffix(".part")
        torch.save(torch.utils._pytree.tree_map(_on_host, found), unready)
        unready.replace(self._file)


def _weights(trained: Sequence[Trained]) -> Iterator[tuple[str, nn.Parameter]]:
    for number, one in enumerate(trained):
        before = f"{number}." if len(trained) > 1 else ""
        for name, parameter in one.model.named_parameters():
            if parameter.requires_grad:
                yield before + name, parameter


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def read(file: Path) -> Trace:
    """What a tracer kept."""
    found = torch.load(file, weights_only=True)
    # What got no gradient in any run is no part of the comparison.
    points = tuple(Point(outputs={}, gradients=dict(one)) for one in found["points"])
    seen = [*found["moved"].values(), *(t for one in points for t in one.gradients.values())]
    return Trace(
        losses=tuple(found["losses"]),
        points=points,
        moved=found["moved"],
        finite=all(bool(tensor.isfinite().all()) for tensor in seen),
    )


def from_environment() -> Tracer | None:
    """The tracer that this process was started with, if any."""
    file = os.environ.get(FILE)
    if not file:
        return None
    rounding, draw = float(os.environ[ROUNDED]), int(os.environ[DRAW])
    return Tracer(Path(file), int(os.environ[STEPS]), rounding, draw)
