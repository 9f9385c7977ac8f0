"""Compares a replayed step's result with the eager step's. Kernels that sum in varying order differ
from run to run, and Adam's first updates magnify that: so repeated runs set the tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from advisor.tuners import tf32
from advisor.tuners.decisions import POINTS, RELATIVE, SPREADS

_Kept = dict[int, Tensor]


def compare_outputs(
    replayed: Callable[[], list[Tensor]],
    eager: Callable[[int | None], list[Tensor]],
    start: list[Tensor],
) -> tuple[int, float] | None:
    """The index of the tensor that differs most, and the error as part of its change; None if none.

    Args:
        replayed: replays the step and returns its results, in the same tensors at each call.
        eager: the same with the eager step; a seed has it start from weights changed by `nudge`.
        start: tensors before the step; `replayed` may return more, which did not exist then.
    """
    left: list[_Kept] = []
    right: list[_Kept] = []
    doubted: Iterable[int] | None = None
    for seed in (None, *range(POINTS)):
        found = replayed()
        left.append(_copies(found, range(len(found)) if doubted is None else doubted))
        right.append(dict(enumerate(eager(seed))))
        doubted = [at for at in left[-1] if _gap(at, left, right, start) > 1]
        if not doubted:
            return None
        right[-1] = _copies(right[-1], doubted)
        left = [{at: one[at] for at in doubted} for one in left]
    shares = {}
    for at in left[0]:
        moved = _moved(right[0][at], start, at)
        shares[at] = _closest(at, left, right) / moved if moved else math.inf
    return max(shares.items(), key=lambda one: one[1])


def _copies(found: list[Tensor] | _Kept, which: Iterable[int]) -> _Kept:
    return {at: found[at].detach().clone() for at in which}  # the next run overwrites the tensors


def _gap(at: int, ours: list[_Kept], theirs: list[_Kept], start: list[Tensor]) -> float:
    """The distance between the two kinds of runs, divided by the allowed distance."""
    closest = _closest(at, ours, theirs)
    if closest == 0:
        return 0.0
    ways = [[one[at] for one in way] for way in (ours, theirs)]
    allowed = max(
        (_distance(x, y) for way in ways for i, x in enumerate(way) for y in way[:i]), default=0.0
    )
    value = theirs[0][at].detach()
    if value.is_floating_point():
        largest = float(value.abs().max().nan_to_num()) if value.numel() else 0.0
        allowed += torch.finfo(value.dtype).eps * largest
        allowed += RELATIVE * _moved(value, start, at)
    return closest / (SPREADS * allowed) if allowed else math.inf


def _closest(at: int, ours: list[_Kept], theirs: list[_Kept]) -> float:
    return min(_distance(x[at], y[at]) for x in ours for y in theirs)


def _moved(value: Tensor, start: list[Tensor], at: int) -> float:
    return _distance(value, start[at] if at < len(start) else torch.zeros_like(value))


def _distance(a: Tensor, b: Tensor) -> float:
    """The L2 distance. A NaN equals only a NaN, an infinity only the same infinity."""
    if torch.equal(a, b):
        return 0.0
    a, b = (x.detach().to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    found = float(torch.where(same, 0.0, a - b).abs().square().sum().sqrt())
    return found if math.isfinite(found) else math.inf


def nudge(weights: list[Tensor], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Change each element by the last digit that kernels read (TF32 reads fewer), up or down at
    random: norms divide out a common factor. Returns (weight, change) pairs, to subtract again."""
    nudges = []
    coarse = "tf32" in tf32.describe()
    for at, weight in enumerate(w.detach() for w in weights if w.is_floating_point()):
        before = weight.clone()
        draw = torch.Generator(weight.device).manual_seed(len(weights) * seed + at)
        up = torch.empty_like(weight).bernoulli_(0.5, generator=draw)
        read = tf32.EPS if coarse and weight.is_cuda else 0.0
        weight.mul_(1 + 4 * max(read, torch.finfo(weight.dtype).eps) * (up - 0.5))
        nudges.append((weight, weight - before))
    return nudges
