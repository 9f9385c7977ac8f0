"""Samples of a training step: one forward and backward pass of it, at known weights and batches."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.tuners.measure.place import UNVERIFIED, Compared

SAMPLED = 2**16 + 1
"""Elements of one tensor that are compared, evenly taken from all."""
SLOPE, FORMAT_SLOPE, FORMAT_TENSOR = 0.03, 0.05, 0.5
"""How far a slope may be off: of one tensor from its format's, of all gradients together from
fp32's, and of one tensor from fp32's. Single tensors are off by what a format is: on an H200 plain
bf16 took 10% from the slope of GPT-2's last bias, and added 6% to a layer of ResNet-18."""
COHERENT = 1.0
"""Part of a format's error in a tensor that may lie along its gradient: two choices of algorithms
for ResNet-50 in bf16, each 11% off fp32 in a layer, were 7.5% off along it to opposite sides."""
ERRORS = 4.0
"""Standard errors that are allowed beyond a limit."""
NUDGE = 1e-6
"""Relative change of weights that shows what rounding alone does to a tensor: eight units in the
last place of float32."""
COARSE, SENSITIVE = 2.0**-8, 3.0
"""Relative change of weights that shows what rounding to a number format does to fp32's gradient:
a unit in the last place of bf16; and times as much that a format may take from it. Gradients of
deep networks shatter: on an H200 bf16 left a third of that of a fresh FCN-ResNet50 along fp32's."""
SCALED, NOISE = 1.25, 0.1
"""How far weights are disturbed: each tensor by a factor, which slopes show, each element beyond
that, which errors show."""

Named = dict[str, Tensor]


class Overflow(Exception):
    """fp16 overflows at any loss scale."""


class NoTime(Exception):
    """The time is over before the comparison is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One forward and backward pass: what it returned and every parameter's gradient.

    Attributes:
        outputs, gradients: by name, each as `sampled` gives it, with memory of its own.
        loss: of this pass; None where it is not known.
    """

    outputs: Named
    gradients: Named
    loss: float | None = None

    @property
    def tensors(self) -> Named:
        """All of them; outputs by their names, which no parameter has."""
        return self.outputs | self.gradients


class Subject(Protocol):
    """A training step that can be made again under any config, at given weights and batches."""

    @property
    def points(self) -> int:
        """Pairs of weights and a batch: half at the kept weights, half at disturbed ones."""

    @property
    def draws(self) -> bool:
        """Whether a pass draws random numbers, as dropout does."""

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        """Make one pass, with the weights that `move` makes of the kept ones for this point.

        Args:
            point: below `points`; `points` more for the same with weights nudged by NUDGE, twice
                as many more by COARSE.
            seed: of the random numbers.

        Raises:
            Overflow: no loss scale is found.
            Exception: anything else that a config raises.
        """

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        """The largest part of an update that a config's optimizer makes otherwise than the script's
        own from the same gradients, with the parameter's name; (0, '') where it has no own."""


@torch.no_grad()
def move(weights: Sequence[Tensor], point: int, points: int) -> None:
    """Change kept weights, in place, to those of a point, alike under every config.

    Values that were computed from the kept weights, as constants of compiled code, no longer fit.
    """
    disturbed, nudged = point % points >= points // 2, point >= points
    if not (disturbed or nudged):
        return
    seen: Counter[int] = Counter()
    for number, weight in enumerate(w for w in weights if w.is_floating_point()):
        draw = torch.Generator(weight.device).manual_seed(1 + number)
        # In their logical order, whatever the memory format.
        noise = 2 * torch.rand(weight.shape, generator=draw, device=weight.device) - 1
        if disturbed:
            # Up and down in turn, so that no activation grows with the depth.
            factor = SCALED if seen[weight.dim()] % 2 else 1 / SCALED
            seen[weight.dim()] += 1
            zeros = 0.2 * NOISE * noise * (weight == 0)
            weight.copy_(weight * (factor * (1 + NOISE * noise)) + zeros)
        if nudged:
            weight.mul_(1 + (NUDGE if point < 2 * points else COARSE) * noise)


def sampled(tensor: Tensor) -> Tensor:
    """A float32 copy of at most SAMPLED elements, in logical order whatever the memory format."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    # Odd, so that it does not meet the same column of every row.
    stride = math.ceil(dense.numel() / SAMPLED) | 1 if dense.numel() > SAMPLED else 1
    return dense.contiguous().flatten()[::stride].to(torch.float32, copy=True)


def dots(ours: Named, theirs: Named) -> Tensor:
    """The scalar products of tensors of equal names, as float64 on the host."""
    return torch.stack([torch.dot(ours[name], theirs[name]) for name in theirs]).double().cpu()


def norms(ours: Named, theirs: Named) -> Tensor:
    """L2 norms of the differences of tensors of equal names, as float64 on the host."""
    apart = torch._foreach_sub([ours[name] for name in theirs], list(theirs.values()))
    return torch.stack(torch._foreach_norm(apart)).double().cpu()


class Sampler:
    """Makes samples of a subject for as long as there is time.

    Attributes:
        left_s: seconds that are left.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.left_s: Callable[[], float] = lambda: math.inf
        self._took_s: dict[Config, float] = {}

    def took_s(self, config: Config) -> float:
        """Seconds of a config's last sample; 0 before the first."""
        return self._took_s.get(config, 0.0)

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        """Raises:
        NoTime: another one like the last of this config does not fit.
        """
        began = time.perf_counter()
        if self.left_s() < self.took_s(config):
            raise NoTime
        found = self.subject.sample(config, point, seed)
        if any(t.is_cuda for t in found.tensors.values()):
            torch.cuda.synchronize()
        self._took_s[config] = time.perf_counter() - began
        return found


def label(name: str, sample: Sample) -> str:
    """What a tensor is called in a sentence."""
    return f"the {name}" if name in sample.outputs else f"the gradient of {name}"


def fp32_not_finite() -> Compared:
    """The verdict where there is nothing to compare with."""
    return Compared(outcome=UNVERIFIED, reason="strict fp32 is not finite either")


def not_finite(blames: str) -> Compared:
    """A verdict."""
    reason = "an output or a gradient is not finite"
    return Compared(outcome="wrong", reason=reason, blames=blames)
