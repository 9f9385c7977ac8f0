"""What compiles: in which order it is tried, and what of it was built before it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from advisor.cache.config import Config, Value
from advisor.cache.record import Measurement
from advisor.tuners import knobs
from advisor.tuners.measure.runner import Builder, Built
from advisor.tuners.search.space import Space

QUICKER = 6.0
"""As many times quicker a built config is expected to start in the worker, until one has: measured
were 4 to 12 (FACTS)."""


def order(
    space: Space,
    leaders: Iterable[Config],
    values: Iterable[tuple[str, Value]],
    short: Callable[[Config], bool] | None,
) -> list[list[Config]]:
    """What to try of dear knobs: on each leader the recipes, then the other `values` by themselves.

    Where steps are `short` a graph over the compiled step is the first; None: nowhere.
    """
    found: list[list[Config]] = []
    for leader in leaders:
        recipes: Sequence[Mapping[str, Value]] = knobs.LEADERS
        if short and short(leader):
            recipes = sorted(recipes, key=lambda recipe: not knobs.is_captured(recipe))
        others = ({name: value} for name, value in values)
        for part in (recipes, others):
            found.append([on for changes in part if (on := space.on(leader, changes))])
    return found


def together(
    configs: Iterable[Config], room: int, needs_s: Callable[[Config], float]
) -> list[list[Config]]:
    """The same in groups for each of which `room` codes that need as long are compiled at once; in
    each first what is built before it is measured."""
    left, found = list(dict.fromkeys(configs)), []
    while left:
        codes: dict[Config, float] = {}
        group = []
        for config in left:
            code, long_s = knobs.code(config), needs_s(config)
            if knobs.compiles(config) and code not in codes:
                if len(codes) == room or any(long_s != seconds for seconds in codes.values()):
                    continue
                codes[code] = long_s
            group.append(config)
        left = [config for config in left if config not in group]
        found.append(sorted(group, key=lambda config: not knobs.compiles(config)))
    return found


@dataclass(slots=True)
class Builds:
    """What was built ahead of being measured.

    Attributes:
        builder: that can build several configs at once; None: there is none.
        again: seconds in which what was built started in the worker.
    """

    builder: Builder | None
    again: dict[Config, float] = field(default_factory=dict)
    _built: dict[Config, Built] = field(default_factory=dict)
    """By code."""
    _owed_s: dict[Config, float] = field(default_factory=dict)
    """Of what building took at once, each code's share, until a trial has it."""

    def room(self, peak_bytes: int) -> int:
        """How many may be built at once."""
        return self.builder.room(peak_bytes) if self.builder else 1

    def open(self, configs: Iterable[Config]) -> list[Config]:
        """Of these what is to be built: one for each code that was not."""
        heads: dict[Config, Config] = {}
        for config in configs:
            if knobs.compiles(config) and knobs.code(config) not in self._built:
                heads.setdefault(knobs.code(config), config)
        return list(heads.values())

    def keep(self, built: Mapping[Config, Built], took_s: float) -> None:
        """What was built at once, in so many seconds."""
        for config, one in built.items():
            self._built[knobs.code(config)] = one
            self._owed_s[knobs.code(config)] = took_s / len(built)

    def failed(self, config: Config) -> bool:
        """Whether its code could not be built."""
        built = self._of(config)
        return built is not None and not built.ok

    def built(self, config: Config) -> bool:
        """Whether a worker finds it compiled."""
        built = self._of(config)
        return built is not None and built.ok

    def first_step_s(self, config: Config) -> float:
        """Seconds of the first step of what was built, when nothing was compiled yet."""
        built = self._of(config)
        return built.first_step_s if built else 0.0

    def expected_s(self, config: Config) -> float:
        """Seconds until a built config starts in the worker."""
        cold = {c: self.first_step_s(c) for c in self.again}
        seen = [seconds / cold[c] for c, seconds in self.again.items() if cold[c]]
        return self.again.get(config, self.first_step_s(config) * max(seen, default=1 / QUICKER))

    def measured(self, config: Config, measured: Measurement) -> float:
        """What a trial of a built config gave; seconds of building that it has to bear."""
        if measured.ok:
            self.again[config] = measured.first_step_s
        return self._owed_s.pop(knobs.code(config), 0.0)

    def _of(self, config: Config) -> Measurement | None:
        built = self._built.get(knobs.code(config)) if knobs.compiles(config) else None
        return built.measurement if built else None
