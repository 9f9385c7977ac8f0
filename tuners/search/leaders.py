"""What dear knobs are tried on, by what was measured without them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from advisor.cache.config import Config
from advisor.cache.record import Trial
from advisor.tuners import knobs
from advisor.tuners.search.space import Space

LIGHT = 0.7
"""Of the best at any batch: what is as fast is tried compiled before what needs a scaler, and what
is not at a large batch after all else."""
SHORT_S = 0.005
"""Steps of less are taken to wait for the host, where no graph has shown it."""
SHORT = 1.1
"""As many times faster as one graph, steps wait for the host."""


@dataclass(frozen=True, slots=True)
class Leaders:
    """What leads among trials that ran, the default's one of them."""

    space: Space
    trials: Sequence[Trial]

    @classmethod
    def among(cls, space: Space, trials: Iterable[Trial]) -> Leaders:
        """Those of the trials that ran."""
        return cls(space, [trial for trial in trials if trial.measurement.ok])

    def found(self, uses: Sequence[str]) -> list[Config]:
        """The leaders for some uses, at the user's batch.

        Of what leads at any batch, or as one graph, first what asks nothing special of a script:
        fp16's scaler waits for the device at every step, and shuts graphs out. Where no other batch
        shows what the device could do, what leads there usually is: half precision, which the host
        may hide.
        """
        default, user = self.space.default, self.space.batch
        any_batch = self._following(uses[0], self.trials)
        reach: dict[Config, float] = {}
        for trial in self.trials:
            code = knobs.code(trial.config)
            reach[code] = max(reach.get(code, 0.0), _rate(trial))

        def reached(trial: Trial) -> tuple[float, float]:
            return reach[knobs.code(trial.config)], _rate(trial)

        best = max(any_batch, key=reached)
        light = [
            trial
            for trial in any_batch
            if reached(trial)[0] >= LIGHT * reached(best)[0]
            and not knobs.heavy(trial.config, default)
        ]
        if len(self.space.batches) == 1:
            light = [t for t in light if knobs.is_half(t.config)] or light
        mine = [trial for trial in self.trials if trial.config.batch == user]
        found = [max(light, key=reached)] if light else []
        found += [max(self._following(use, mine), key=_rate) for use in uses]
        return list(dict.fromkeys(trial.config.at(user) for trial in (*found, best)))

    def is_behind(self, config: Config, first: Config) -> bool:
        """Whether one leader is far slower than the first at the largest batch of both: what is
        compiled waits for the host no more than that does."""
        ours, theirs = (
            {t.config.batch: _rate(t) for t in self.trials if t.config.knobs == one.knobs}
            for one in (config, first)
        )
        largest = max(ours.keys() & theirs.keys(), default=0)
        return largest > 0 and ours[largest] < LIGHT * theirs[largest]

    def is_short(self, config: Config) -> bool:
        """Whether the host is the limit of a config's steps, as far as trials of the same code
        tell: one graph made them faster, or they take a few milliseconds."""
        alike = [t for t in self.trials if knobs.code(t.config) == knobs.code(config)]
        graphed = [t.measurement.step_s for t in alike if knobs.is_captured(t.config)]
        plain = [t.measurement.step_s for t in alike if not knobs.is_captured(t.config)]
        if graphed and plain:
            return min(plain) >= SHORT * min(graphed)
        return min(plain + graphed, default=SHORT_S) < SHORT_S

    @property
    def batch(self) -> int:
        """That of the fastest; what was compiled at the user's may lead by that alone."""
        eager = [trial for trial in self.trials if not self.space.is_dear(trial.config)]
        return max(eager, key=_rate).config.batch

    def of_each_use(self, configs: Iterable[Config]) -> list[Config]:
        """The fastest of these for each use, the widest first."""
        asked = set(configs)
        tried = [trial for trial in self.trials if trial.config in asked]
        mine = (self._following(use, tried) for use in self.space.uses)
        return list(dict.fromkeys(max(some, key=_rate).config for some in mine if some))

    def _following(self, use: str, trials: Iterable[Trial]) -> list[Trial]:
        """Those whose configs a use can follow."""
        return [t for t in trials if knobs.follows(use, t.config, self.space.default)]


def _rate(trial: Trial) -> float:
    return trial.measurement.samples_per_s
