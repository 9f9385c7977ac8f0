"""Samples of a training step: one forward and backward pass of it, at known weights and batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.tuners.decisions import DISTURBED, POINTS

Named = dict[str, Tensor]
NUDGE = 8 * torch.finfo(torch.float32).eps
"""Relative change of the weights that shows what rounding alone does to a tensor."""
COARSE = torch.finfo(torch.bfloat16).eps / 2
"""The same for rounding to bf16."""
_MOST = 2**16 + 1  # elements of a tensor that are compared, evenly spaced


class Overflow(Exception):
    """fp16 overflows at any loss scale."""


class NoTime(Exception):
    """The time is over before the comparison is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Outputs and gradients of one forward and backward pass, by name and made by `sampled`, and
    its loss if that is known."""

    outputs: Named
    gradients: Named
    loss: float | None = None

    @property
    def tensors(self) -> Named:
        """Outputs, then gradients; no parameter has an output's name."""
        return self.outputs | self.gradients


class Subject(Protocol):
    """A training step that can be made again under any config, at each of POINTS pairs of weights
    and a batch."""

    @property
    def draws(self) -> bool:
        """Whether a pass draws random numbers, as dropout does."""

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        """Make one pass from a seed, with the weights that `move` makes for a point.

        Args:
            point: below POINTS; add POINTS for weights nudged by NUDGE, twice that for COARSE.

        Raises:
            Overflow: no loss scale is found.
            Exception: anything else that a config raises.
        """

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        """The largest difference of an update by a config's optimizer from the script's own, as
        part of the update, and the parameter's name; (0, '') if the config sets no optimizer."""


def is_disturbed(point: int) -> bool:
    """Whether a point is not at the kept weights; every second half of POINTS is."""
    return point % POINTS >= POINTS // 2


@torch.no_grad()
def move(weights: Sequence[Tensor], point: int) -> None:
    """Change kept weights, in place, to those of a point, alike under every config. Values computed
    from the kept weights, such as constants of compiled code, no longer fit."""
    disturbed, nudged = is_disturbed(point), point >= POINTS
    if not (disturbed or nudged):
        return
    seen: Counter[int] = Counter()
    for number, weight in enumerate(w for w in weights if w.is_floating_point()):
        draw = torch.Generator(weight.device).manual_seed(1 + number)
        # In their logical order, whatever the memory format.
        noise = 2 * torch.rand(weight.shape, generator=draw, device=weight.device) - 1
        if disturbed:
            # Up and down in turn, so that no activation grows with the depth.
            factor = (1 + DISTURBED) ** (1 if seen[weight.dim()] % 2 else -1)
            seen[weight.dim()] += 1
            zeros = DISTURBED / 10 * noise * (weight == 0)
            weight.copy_(weight * (factor * (1 + DISTURBED / 2 * noise)) + zeros)
        if nudged:
            weight.mul_(1 + (NUDGE if point < 2 * POINTS else COARSE) * noise)


def part_of(tensor: Tensor) -> Tensor:
    """A tensor's elements that are compared, in logical order whatever the memory format."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    # Odd, so that it does not meet the same column of every row.
    stride = math.ceil(dense.numel() / _MOST) | 1 if dense.numel() > _MOST else 1
    return dense.contiguous().flatten()[::stride]


def sampled(tensor: Tensor) -> Tensor:
    """A float32 copy of `part_of` a tensor."""
    return part_of(tensor).to(torch.float32, copy=True)


@torch.no_grad()
def worst_update(updates: Iterable[tuple[str, Tensor, Tensor, Tensor]]) -> tuple[float, str]:
    """The largest error of an update, as part of it, and the weight's name, from names and weights:
    before the update, after the right one, and as found."""
    worst = (0.0, "")
    for name, *weights in updates:
        before, wanted, found = (one.double() for one in weights)
        # Rounding the weight twice is no error.
        rounding = 2 * torch.finfo(weights[0].dtype).eps * before.norm()
        off, moved = float((found - wanted).norm() - rounding), float((wanted - before).norm())
        part = off / moved if moved else float(off > 0)
        if not part <= worst[0]:  # also one that is not a number
            worst = (part, name)
    return worst
