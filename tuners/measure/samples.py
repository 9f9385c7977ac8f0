"""Outputs and gradients of a training step at known weights and batches, and fp32's reference."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.tuners.decisions import LOST, NEGLIGIBLE, PERTURBATION, POINTS

NamedTensors = dict[str, Tensor]
# Relative changes of weights that show the effect of rounding to fp32, and to bf16.
NUDGE, COARSE = 8 * torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps / 2
# The first seed of fp32's draws; other draws use others, as equal masks would enlarge their slopes.
FP32_SEEDS = 1_000_003
TINY = 1e-30  # instead of 0 in a denominator
_MAX_ELEMENTS = 2**16 + 1  # elements of a tensor that are compared, evenly spaced


class Unsuited(Exception):
    """A number format cannot train this model."""


class Overflow(Unsuited):
    """fp16 overflows at any loss scale."""


class NoTime(Exception):
    """The time ran out before the comparison was complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Outputs and gradients of one pass, by name and made by `sampled`."""

    outputs: NamedTensors
    gradients: NamedTensors
    loss: float | None = None  # if it is known


class RepeatableStep(Protocol):
    """A training step that can be repeated under any config, at POINTS weights and batches."""

    draws: bool  # whether a pass draws random numbers, as dropout does

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        """Make a pass with a random seed, at the weights that `perturb` makes for a point. Add
        POINTS to the point for weights nudged by NUDGE, 2 * POINTS for COARSE. Raises Unsuited,
        such as Overflow if no loss scale is found, and any exception of the config."""

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        """`worst_update` of a config's optimizer; (0, '') if the config changes none."""


def is_perturbed(point: int) -> bool:
    """Whether a point has perturbed weights, as the second half of POINTS has."""
    return point % POINTS >= POINTS // 2


@torch.no_grad()
def perturb(weights: Sequence[Tensor], point: int) -> None:
    """Change weights in place to those of a point, so that constants made from them are stale."""
    disturbed, nudged = is_perturbed(point), point >= POINTS
    if not (disturbed or nudged):
        return
    seen: Counter[int] = Counter()
    for number, weight in enumerate(w for w in weights if w.is_floating_point()):
        draw = torch.Generator(weight.device).manual_seed(1 + number)
        # In their logical order, whatever the memory format.
        noise = 2 * torch.rand(weight.shape, generator=draw, device=weight.device) - 1
        if disturbed:
            # Up and down in turn, so that no activation grows with the depth.
            factor = (1 + PERTURBATION) ** (1 if seen[weight.dim()] % 2 else -1)
            seen[weight.dim()] += 1
            zeros = PERTURBATION / 10 * noise * (weight == 0)
            weight.copy_(weight * (factor * (1 + PERTURBATION / 2 * noise)) + zeros)
        if nudged:
            weight.mul_(1 + (NUDGE if point < 2 * POINTS else COARSE) * noise)


def part_of(tensor: Tensor) -> Tensor:
    """A tensor's elements that are compared, in logical order whatever the memory format."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    # Odd, so that it does not meet the same column of every row.
    stride = math.ceil(dense.numel() / _MAX_ELEMENTS) | 1 if dense.numel() > _MAX_ELEMENTS else 1
    return dense.contiguous().flatten()[::stride]


def sampled(tensor: Tensor) -> Tensor:
    return part_of(tensor).to(torch.float32, copy=True)


@torch.no_grad()
def worst_update(updates: Iterable[tuple[str, Tensor, Tensor, Tensor]]) -> tuple[float, str]:
    """The largest error of an update, as part of the update, and the weight's name. `updates`: the
    name, and the weight before the update, after the right update, and after the tested one."""
    worst = (0.0, "")
    for name, *weights in updates:
        before, wanted, found = (one.double() for one in weights)
        # Rounding the weight twice is no error.
        rounding = 2 * torch.finfo(weights[0].dtype).eps * before.norm()
        off, moved = float((found - wanted).norm() - rounding), float((wanted - before).norm())
        part = off / moved if moved else float(off > 0)
        if not part <= worst[0]:  # also if `part` is NaN
            worst = (part, name)
    return worst


class Draws:
    """Passes of a config at each point in turn; a round is one pass at each point."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.count = 0
        self.distances: list[Tensor] = []  # by point: how far its first pass is from fp32's
        self.shift = torch.zeros(())  # (tensor) how far its means are from fp32's; see `draw`
        self._before: dict[int, Tensor] = {}
        self._projections: list[Tensor] = []
        self._spreads: list[Tensor] = []
        self._losses: list[float] = []

    def add(self, vector: Tensor, loss: float | None, direction: Tensor) -> None:
        """Add a pass at the next point; `direction`: fp32's mean at this point."""
        reference, point = self._reference, self.count % POINTS
        self._projections.append(reference.dots(vector, direction, point))
        if reference.draws:
            outputs = vector[: sum(reference.sizes[point][: reference.outputs])].clone()
            if self.count // POINTS % 2:
                distances = reference.norms(outputs - self._before[point], point, outputs=True)
                self._spreads.append(distances.square() / 2)
            self._before[point] = outputs
        self._losses.append(math.nan if loss is None else loss)
        self.count += 1

    @property
    def projections(self) -> Tensor:
        """(round, point, tensor) scalar products with fp32's mean of this point."""
        return torch.stack(self._projections).view(-1, POINTS, len(self._projections[0]))

    @property
    def variances(self) -> Tensor:
        """(round / 2, point, output) half the squared distances of two draws."""
        if not self._spreads:
            return torch.zeros(0, POINTS, 0)
        return torch.stack(self._spreads).view(-1, POINTS, len(self._spreads[0]))

    @property
    def losses(self) -> Tensor:
        """(round, point) losses; NaN if a loss is not known."""
        return torch.tensor(self._losses, dtype=torch.float64).view(-1, POINTS)


class Reference:
    """Strict fp32's passes, with which other configs are compared. Each pass is one vector: its
    outputs, then its gradients, end to end.

    Attributes:
        rounds: in a comparison; 1 if the model draws no random numbers.
        sizes: of each tensor by point: batches may differ. `counts`: the same as (point, tensor),
            of all ranks. `single`: (tensor) whether a rank has one number, at some point.
        signal: (point, tensor) squared norms of fp32's means; `size`: norms of its first passes.
        rounding: (point, tensor) the effect of rounding alone, as part of `size`.
        summed: sums a tensor over the ranks of a job, which then all come to the same verdict.
        usual: (point, tensor) the norm of a gradient of usual size, as part of `size`.
    """

    def __init__(
        self,
        subject: RepeatableStep,
        fp32: Config,
        summed: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._subject, self.fp32, self.summed = subject, fp32, summed
        self.draws = subject.draws
        self.rounds = POINTS if self.draws else 1
        self.left_s: Callable[[], float] = lambda: math.inf
        self.took_s: dict[Config, float] = defaultdict(float)  # seconds of each config's last pass
        self.names: list[str] = []  # of the tensors in a vector
        self.sizes: list[list[int]] = [[] for _ in range(POINTS)]
        self.outputs = 0  # the number of outputs, which come first
        self.own = Draws(self)
        self._sums: list[Tensor] = []  # by point: sums of the even and of the odd rounds
        self._firsts: list[Tensor] = []  # by point: the first pass
        self._noise: list[Tensor] = []
        self._formats: dict[tuple[Config, int], Draws] = {}
        self._shares: dict[Config, Tensor] = {}

    def extend(self) -> None:
        """Make fp32's passes of all `rounds`; slopes are measured along their mean."""
        if self.own.count >= self.rounds * POINTS:
            return
        while (count := self.own.count) < self.rounds * POINTS:
            point, seed = count % POINTS, self._own_seed(count)
            vector, loss = self.sample(self.fp32, point, seed)
            if len(self._noise) <= point:
                nudged, _ = self.sample(self.fp32, point + POINTS, seed)
                self._noise.append(self.norms(nudged - vector, point))
                self._firsts.append(vector)
                self._sums.append(vector.new_zeros(2, len(vector) if self.draws else 0))
            if self.draws:
                self._sums[point][count // POINTS % 2] += vector
            self.own.add(vector, loss, vector)
        sizes = torch.tensor(self.sizes, dtype=torch.float64)
        self.counts = self._over_ranks(sizes)
        self.single = self._over_ranks((sizes < 2).double()).sum(0) > 0
        self.signal = torch.stack([self.dots(*self._halves(at), at) for at in range(POINTS)])
        self._formats.clear()  # these were compared with fewer rounds
        self._shares.clear()
        size = torch.stack([self.norms(one, point) for point, one in enumerate(self._firsts)])
        gradients = slice(self.outputs, None)
        elements = self.counts[:, gradients].sum(1, keepdim=True)
        usual = size[:, gradients].norm(dim=1, keepdim=True) / elements.sqrt() * self.counts.sqrt()
        floor = NUDGE * usual  # a tensor below this norm counts as zero
        self.size = size.maximum(floor).clamp(min=TINY)
        self.usual = usual / self.size
        noise = torch.stack(self._noise).maximum(floor) / self.size
        # Of a gradient near 0, other code may round off more than NUDGE shows.
        self.rounding = noise.maximum((NEGLIGIBLE * self.usual * noise).clamp(max=1))

    def of(self, config: Config) -> Draws:
        """Draws of fp32 or of a 'plain' config, made once."""
        if config == self.fp32 and not self.draws:
            return self.own
        if (config, self.rounds) not in self._formats:
            means = self.draws and config != self.fp32
            self._formats[config, self.rounds] = self.draw(config, means=means)
        return self._formats[config, self.rounds]

    def draw(
        self, config: Config, offset: int = 0, *, first: bool = False, means: bool = False
    ) -> Draws:
        """Make passes of any config, at points moved by `offset`, all with the same seeds. `first`:
        one round, with the seeds of fp32's first round. `means`: also compute `Draws.shift`."""
        drawn, count = Draws(self), self.rounds * POINTS
        seeds = range(count, 2 * count)
        if first or not self.draws:
            seeds = range(self._own_seed(0), self._own_seed(POINTS))
        sums = [torch.zeros_like(one) for one in self._sums] if means else None
        for number, seed in enumerate(seeds):
            point = number % POINTS
            vector, loss = self.sample(config, point + offset, seed)
            even, odd = self._halves(point)
            drawn.add(vector, loss, (even + odd) / 2)
            if sums is not None:
                sums[point][number // POINTS % 2] += vector
            if number < POINTS:
                distances = self.norms(vector - self._firsts[point], point)
                drawn.distances.append(distances / self.size[point])
        if sums is not None:
            # The product of two independent halves: random differences average out.
            halves = self.rounds / 2
            squares = torch.zeros_like(self.signal[0])
            for at, (ours, own) in enumerate(zip(sums, self._sums, strict=True)):
                even, odd = (ours - own) / halves
                squares += self.dots(even, odd, at)
            signal = self.signal.sum(0).clamp(min=TINY)
            drawn.shift = (squares.clamp(min=0) / signal).sqrt()
        return drawn

    def share(self, plain: Config) -> Tensor:
        """(point, tensor) the relative effect of a number format; at least the median effect."""
        if plain not in self._shares:
            share = self.rounding
            if plain != self.fp32:
                drawn = self.draw(plain, first=True) if self.draws else self.of(plain)
                distances = torch.stack(drawn.distances)
                if self.draws:  # equal seeds may give other masks in another format
                    distances = distances.minimum(self.of(plain).shift)
                share = share.maximum(distances)
            usual = share.median(dim=1, keepdim=True).values.clamp(max=LOST)
            self._shares[plain] = share.maximum(usual)
        return self._shares[plain]

    def _own_seed(self, count: int) -> int:
        return FP32_SEEDS + count if self.draws else count

    def _halves(self, point: int) -> tuple[Tensor, Tensor]:
        if not self.draws:
            return self._firsts[point], self._firsts[point]
        even, odd = self._sums[point] / (self.own.count / POINTS / 2)
        return even, odd

    def sample(self, config: Config, point: int, seed: int) -> tuple[Tensor, float | None]:
        """A pass as one vector, and its loss; raises NoTime if too little time is left."""
        began = time.perf_counter()
        if self.is_late(self.took_s[config]):
            raise NoTime
        found = self._subject.sample(config, point, seed)
        tensors = found.outputs | found.gradients  # no parameter has an output's name
        if not self.names:
            self.names, self.outputs = list(tensors), len(found.outputs)
        self.sizes[point % POINTS] = [tensors[name].numel() for name in self.names]
        vector = torch.cat([tensors[name] for name in self.names])
        if vector.is_cuda:
            torch.cuda.synchronize()
        self.took_s[config] = time.perf_counter() - began
        if self.summed is None:
            return vector, found.loss
        one = math.nan if found.loss is None else found.loss
        loss = float(self.summed(torch.tensor([one], dtype=torch.float64)))
        return vector, None if math.isnan(loss) else loss

    def is_late(self, seconds: float) -> bool:
        """Whether less than `seconds` are left to any rank."""
        late = self.left_s() < seconds
        return bool(self._over_ranks(torch.tensor([float(late)], dtype=torch.float64)) > 0)

    def _over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor if self.summed is None else self.summed(tensor)

    def dots(self, ours: Tensor, theirs: Tensor, point: int) -> Tensor:
        sizes = self.sizes[point]
        pairs = zip(ours.split(sizes), theirs.split(sizes), strict=True)
        return self._over_ranks(torch.stack([torch.dot(a, b) for a, b in pairs]).double().cpu())

    def norms(self, vector: Tensor, point: int, *, outputs: bool = False) -> Tensor:
        """The L2 norm of each tensor, as float64 on the host; `outputs`: of outputs alone."""
        parts = vector.split(self.sizes[point][: self.outputs if outputs else None])
        found = torch.stack(torch._foreach_norm(list(parts))).double().cpu()
        return found if self.summed is None else self.summed(found.square()).sqrt()

    def label(self, tensor: int) -> str:
        """The name of a tensor in messages."""
        name = self.names[tensor]
        return f"the {name}" if tensor < self.outputs else f"the gradient of {name}"
