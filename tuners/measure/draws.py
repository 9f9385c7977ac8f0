"""Passes of strict fp32 and of number formats alone, which others are compared with."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.tuners.decisions import LOST, POINTS
from advisor.tuners.measure.samples import NUDGE, NoTime, Subject

OWN_SEEDS = 1_000_003
"""The first seed of fp32's own draws. The others must not share their masks: a mean would seem too
large along the mean of the same draws."""
TINY = 1e-30  # instead of 0 in a denominator


class Draws:
    """Passes of a config at each point in turn; a round is one at each."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.count = 0
        self.apart: list[Tensor] = []  # by point: how far its first pass is from fp32's
        self._before: dict[int, Tensor] = {}
        self._along: list[Tensor] = []
        self._spreads: list[Tensor] = []
        self._losses: list[float] = []

    def add(self, vector: Tensor, loss: float | None, direction: Tensor) -> None:
        """Add a pass at the next point, whose mean in fp32 is `direction`."""
        reference, point = self._reference, self.count % POINTS
        self._along.append(reference.dots(vector, direction))
        if reference.draws:
            outputs = vector[: sum(reference.sizes[: reference.outputs])].clone()
            if self.count // POINTS % 2:
                apart = reference.norms(outputs - self._before[point], outputs=True)
                self._spreads.append(apart.square() / 2)
            self._before[point] = outputs
        self._losses.append(math.nan if loss is None else loss)
        self.count += 1

    @property
    def along(self) -> Tensor:
        """(round, point, tensor) scalar products with fp32's mean of this point."""
        return torch.stack(self._along).view(-1, POINTS, len(self._along[0]))

    @property
    def spreads(self) -> Tensor:
        """(round / 2, point, output) half the squared distances of two draws."""
        if not self._spreads:
            return torch.zeros(0, POINTS, 0)
        return torch.stack(self._spreads).view(-1, POINTS, len(self._spreads[0]))

    @property
    def losses(self) -> Tensor:
        """(round, point); not a number where a loss is not known."""
        return torch.tensor(self._losses, dtype=torch.float64).view(-1, POINTS)


class Reference:
    """Strict fp32's own passes, and what others are measured by. Each pass is one vector: its
    outputs, then its gradients, end to end.

    Attributes:
        draws: whether a pass draws random numbers.
        rounds: that a comparison takes. One tells all of a model that draws none.
        left_s: seconds that are left; `took_s` of each config's last pass.
        names, sizes: of the tensors in a vector; the first `outputs` of them are outputs.
        signal: (point, tensor) squares of fp32's mean gradients.
        rounding: (point, tensor) what rounding alone does to a tensor, as a part of it.
    """

    def __init__(self, subject: Subject, fp32: Config) -> None:
        self._subject, self.fp32 = subject, fp32
        self.draws = subject.draws
        self.rounds = POINTS if self.draws else 1
        self.left_s: Callable[[], float] = lambda: math.inf
        self.took_s: dict[Config, float] = defaultdict(float)
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.outputs = 0
        self.own = Draws(self)
        self._sums = torch.zeros(())  # of the even and the odd rounds at each point
        self._firsts: list[Tensor] = []  # of each point
        self._noise: list[Tensor] = []
        self._formats: dict[tuple[Config, int], Draws] = {}
        self._shares: dict[Config, Tensor] = {}

    def extend(self) -> None:
        """Make as many passes as others have; slopes are taken along their mean."""
        own = self.own
        if own.count >= self.rounds * POINTS:
            return
        while (count := own.count) < self.rounds * POINTS:
            point, seed = count % POINTS, self._own_seed(count)
            vector, loss = self.sample(self.fp32, point, seed)
            if len(self._noise) <= point:
                nudged, _ = self.sample(self.fp32, point + POINTS, seed)
                self._noise.append(self.norms(nudged - vector))
                self._firsts.append(vector)
            if self.draws:
                if not count:
                    self._sums = vector.new_zeros(POINTS, 2, len(vector))
                self._sums[point, count // POINTS % 2] += vector
            own.add(vector, loss, vector)
        self.signal = torch.stack([self.dots(*self._halves(point)) for point in range(POINTS)])
        self._formats.clear()  # which were compared with fewer
        size = torch.stack([self.norms(one) for one in self._firsts])
        gradients = slice(self.outputs, None)
        usual = size[:, gradients].norm(dim=1, keepdim=True) / self.counts[gradients].sum().sqrt()
        # A tensor below this is nothing.
        floor = NUDGE * usual * self.counts.sqrt()
        self._size = size.maximum(floor).clamp(min=TINY)
        self.rounding = torch.stack(self._noise).maximum(floor) / self._size

    @property
    def counts(self) -> Tensor:
        """Elements of each tensor."""
        return torch.tensor(self.sizes, dtype=torch.float64)

    def of(self, config: Config) -> Draws:
        """Passes of fp32 or a plain format."""
        if config == self.fp32 and not self.draws:
            return self.own
        if (config, self.rounds) not in self._formats:
            self._formats[config, self.rounds] = self.draw(config)
        return self._formats[config, self.rounds]

    def draw(self, config: Config, offset: int = 0, *, first: bool = False) -> Draws:
        """Passes of any config, at points moved by `offset`. All have the same seeds: masks that
        are equal in both, as between number formats, leave little to chance. `first`: one round
        that has the seeds of fp32's own first one."""
        drawn, count = Draws(self), self.rounds * POINTS
        seeds = range(count, 2 * count)
        if first or not self.draws:
            seeds = range(self._own_seed(0), self._own_seed(POINTS))
        for number, seed in enumerate(seeds):
            point = number % POINTS
            vector, loss = self.sample(config, point + offset, seed)
            even, odd = self._halves(point)
            drawn.add(vector, loss, (even + odd) / 2)
            if number < POINTS:
                apart = self.norms(vector - self._firsts[point])
                drawn.apart.append(apart / self._size[point])
        return drawn

    def share(self, plain: Config) -> Tensor:
        """(point, tensor): What a format, or rounding, does to a tensor as a part of it: at least
        what it does to the usual one."""
        if plain not in self._shares:
            share = self.rounding
            if plain != self.fp32:
                drawn = self.draw(plain, first=True) if self.draws else self.of(plain)
                share = share.maximum(torch.stack(drawn.apart))
            usual = share.median(dim=1, keepdim=True).values.clamp(max=LOST)
            self._shares[plain] = share.maximum(usual)
        return self._shares[plain]

    def _own_seed(self, count: int) -> int:
        return OWN_SEEDS + count if self.draws else count

    def _halves(self, point: int) -> tuple[Tensor, Tensor]:
        """fp32's mean over the even rounds, and over as many odd ones."""
        if not self.draws:
            return self._firsts[point], self._firsts[point]
        even, odd = self._sums[point] / (self.own.count / POINTS / 2)
        return even, odd

    def sample(self, config: Config, point: int, seed: int) -> tuple[Tensor, float | None]:
        """As `Subject.sample`, and its loss; raises NoTime if the config's last one took longer
        than is left."""
        began = time.perf_counter()
        if self.left_s() < self.took_s[config]:
            raise NoTime
        found = self._subject.sample(config, point, seed)
        tensors = found.tensors
        if not self.names:
            self.names, self.outputs = list(tensors), len(found.outputs)
            self.sizes = [one.numel() for one in tensors.values()]
        vector = torch.cat([tensors[name] for name in self.names])
        if vector.is_cuda:
            torch.cuda.synchronize()
        self.took_s[config] = time.perf_counter() - began
        return vector, found.loss

    def dots(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """The scalar product of each tensor, as float64 on the host."""
        pairs = zip(ours.split(self.sizes), theirs.split(self.sizes), strict=True)
        return torch.stack([torch.dot(a, b) for a, b in pairs]).double().cpu()

    def norms(self, vector: Tensor, *, outputs: bool = False) -> Tensor:
        """The L2 norm of each tensor, as float64 on the host; `outputs`: it holds no others."""
        parts = vector.split(self.sizes[: self.outputs] if outputs else self.sizes)
        return torch.stack(torch._foreach_norm(list(parts))).double().cpu()

    def label(self, tensor: int) -> str:
        """What to call a tensor in a sentence."""
        name = self.names[tensor]
        return f"the {name}" if tensor < self.outputs else f"the gradient of {name}"
