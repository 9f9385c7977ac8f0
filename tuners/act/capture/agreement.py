"""Whether two ways to take a step come to the same, as nearly as either comes to it twice.

Kernels that add in any order (atomics) differ from run to run, and Adam's first updates, which are
the signs of gradients, magnify that. So no constant says what is near: the runs themselves do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from advisor.tuners import tf32

ROUNDS = 4
"""Runs of each way from one state, where the first two differ."""
NUDGES = 4
"""Runs from nudged weights: of activations that rounding puts on either side of a kink some go over
to the other."""
SPREADS = 3.0
"""Of the widest distance between two runs of one way: what the two ways may be apart."""
RELATIVE = 1e-5
"""Of what a step moves: a sum in another order."""
FLIPS, FLIPPED = 4, 1e-4
"""Numbers of a tensor, and share of them, that may be rounded to their neighbours."""

Run = Callable[[], list[Tensor]]
_Kept = dict[int, Tensor]


def apart(
    ours: Run,
    theirs: Run,
    nudged: Callable[[int], list[Tensor]],
    start: list[Tensor],
    anyone: Callable[[bool], bool] = bool,
) -> tuple[int, float] | None:
    """Which tensor comes out differently, and by what share of its move; None where none does.

    Args:
        ours: takes the step one way; returns what it left, the same tensors at each call.
        theirs: the same, the other way.
        nudged: theirs, from weights moved by rounding alone, otherwise for each number: the last
            resort, for kernels that were chosen differently.
        start: what tensors held before; those beyond its end did not exist.
        anyone: whether any process that takes the step too has a doubt: it is taken by all.
    """
    left: list[_Kept] = []
    right: list[_Kept] = []
    doubted: Iterable[int] | None = None
    for _ in range(ROUNDS):
        found = ours()
        left.append(_kept(found, range(len(found)) if doubted is None else doubted))
        found = theirs()
        live = {at: found[at] for at in left[-1]}
        doubted = [at for at in live if _gap(at, left, [*right, live], start) > 1]
        if not anyone(bool(doubted)):
            return None
        right.append(_kept(found, doubted))
        left = [_kept(one, doubted, copy=False) for one in left]
        right = [_kept(one, doubted, copy=False) for one in right]
    for number in range(NUDGES):
        right.append(_kept(nudged(number), right[0]))
    shares = {
        at: _share(at, left, right, start) for at in right[0] if _gap(at, left, right, start) > 1
    }
    return max(shares.items(), key=lambda one: one[1]) if shares else None


def _kept(found: Any, which: Iterable[int], *, copy: bool = True) -> _Kept:
    # Cloned, because the next run writes over them.
    return {at: found[at].detach().clone() if copy else found[at] for at in which}


def _gap(at: int, ours: list[_Kept], theirs: list[_Kept], start: list[Tensor]) -> float:
    """The distance between the ways in units of what is allowed."""
    a, b = [one[at] for one in ours], [one[at] for one in theirs]
    least = min(_distance(x, y) for x in a for y in b)
    if least == 0:
        return 0.0
    within = [_distance(x, y) for runs in (a, b) for i, x in enumerate(runs) for y in runs[:i]]
    allowed = SPREADS * max(within, default=0.0)
    allowed += _rounding(b[0], start[at] if at < len(start) else None)
    return least / allowed if allowed else math.inf


def _share(at: int, ours: list[_Kept], theirs: list[_Kept], start: list[Tensor]) -> float:
    least = min(_distance(x[at], y[at]) for x in ours for y in theirs)
    moved = _moved(theirs[0][at], start[at] if at < len(start) else None)
    return least / moved if moved else math.inf


def _rounding(value: Tensor, start: Tensor | None) -> float:
    if not value.is_floating_point():
        return 0.0
    largest = float(value.detach().abs().max().nan_to_num()) if value.numel() else 0.0
    flips = math.sqrt(FLIPS + FLIPPED * value.numel())
    return flips * torch.finfo(value.dtype).eps * largest + RELATIVE * _moved(value, start)


def _moved(value: Tensor, start: Tensor | None) -> float:
    return _distance(value, torch.zeros_like(value) if start is None else start)


def _distance(a: Tensor, b: Tensor) -> float:
    """L2; a NaN equals a NaN and nothing else, infinities likewise."""
    if torch.equal(a, b):
        return 0.0
    a, b = (x.detach().to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, a - b)
    found = float(difference.abs().square().sum().sqrt())
    return found if math.isfinite(found) else math.inf


def nudge(weights: list[Tensor], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Each number by its last digit, up or down: what this does to a step, rounding may do to it.

    The last that is read: convolutions in TF32 do not see float32's. All in one direction would do
    nothing where a norm follows, which takes a common factor away.
    """
    nudges = []
    coarse = tf32.allowed()
    for at, weight in enumerate(w.detach() for w in weights if w.is_floating_point()):
        before = weight.clone()
        draw = torch.Generator(weight.device).manual_seed(len(weights) * seed + at)
        up = torch.empty_like(weight).bernoulli_(0.5, generator=draw)
        read = tf32.EPS if coarse and weight.is_cuda else 0.0
        weight.mul_(1 + 4 * max(read, torch.finfo(weight.dtype).eps) * (up - 0.5))
        nudges.append((weight, weight - before))
    return nudges


def nudge_back(nudges: list[tuple[Tensor, Tensor]]) -> None:
    for weight, by in nudges:
        weight.sub_(by)
