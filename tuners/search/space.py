"""Which knobs and values make sense for this workload on this device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from advisor.cache.config import BATCH, Config, Value
from advisor.cache.key import fingerprint
from advisor.cache.record import PILOT, USES
from advisor.tuners import knobs
from advisor.tuners.knobs import COMPUTE, INPUT, SearchContext


class Space:
    """Knob names and the values offered, torch's own first; fixed knobs have one value.

    Args:
        volumes: whether inputs have three spatial dimensions. On an H200 channels_last made a 3D
            U-Net with InstanceNorm 1.45 times as slow (benchmarks/results/memory.md).
    """

    def __init__(
        self,
        choices: Mapping[str, tuple[Value, ...]],
        inputs: Mapping[str, tuple[Value, ...]] | None = None,
        *,
        volumes: bool = False,
    ) -> None:
        self.volumes = volumes
        self.choices = {name: values for name, values in choices.items() if values}
        self.inputs = {name: values for name, values in (inputs or {}).items() if values}
        self.expensive = tuple(name for name in self.choices if knobs.BY_NAME[name].compile_s)
        """Knobs that are tried on leaders only."""
        self.default = Config({name: values[0] for name, values in self.choices.items()})
        """The baseline: the values of torch, or of the script, at the user's batch."""

    @classmethod
    def of(cls, here: SearchContext) -> Space:
        by_stage: dict[str, dict[str, tuple[Value, ...]]] = {COMPUTE: {}, INPUT: {}}
        for knob in knobs.KNOBS:
            # A run loads its data in its steps.
            stage = COMPUTE if here.use == PILOT else knob.stage
            by_stage[stage][knob.name] = _offered(knob, here)
        return cls(by_stage[COMPUTE], by_stage[INPUT], volumes=here.dimensions == 5)

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(value for value in self.choices[BATCH] if type(value) is int)

    @property
    def batch(self) -> int:
        return self.batches[0]

    @property
    def is_choice(self) -> bool:
        return any(len(values) > 1 for values in self.choices.values())

    @property
    def digest(self) -> str:
        """Part of a study's name: within a study, the choices of a categorical cannot change."""
        return fingerprint({name: list(values) for name, values in self.choices.items()})[:12]

    @property
    def uses(self) -> tuple[str, ...]:
        """The uses that parts of the space need, the widest first."""
        changes = [Config({n: value}) for n, values in self.choices.items() for value in values]
        needed = {knobs.use_of(self.default | one, self.default) for one in changes}
        return tuple(use for use in reversed(USES) if use in needed)

    def leave_out(self, unwanted: Callable[[str, Value], bool]) -> None:
        """Offer no unwanted value, except as a knob's first one."""
        for name, (first, *others) in self.choices.items():
            self.choices[name] = (first, *(v for v in others if not unwanted(name, v)))

    def offers(self, name: str, value: Value) -> bool:
        return _among(value, self.choices.get(name, ()))

    def near(self, config: Mapping[str, Value]) -> Config:
        """The baseline with all values of a config that the space offers, except its batch."""
        offered = {n: v for n, v in config.items() if n != BATCH and self.offers(n, v)}
        return self.default.replace(**offered)

    def holds(self, config: Config) -> bool:
        """Whether every knob has an offered value, and no two conflict."""
        return (
            set(config) == set(self.choices)
            and all(self.offers(name, value) for name, value in config.items())
            and self._combines(config)
        )

    def _combines(self, config: Config) -> bool:
        changed = config.changed(self.default)
        return not any(
            _among(config.get(other), values) and (name in changed or other in changed)
            for name in config
            if not _among(config[name], (self._neutral(name),))
            for other, values in knobs.BY_NAME[name].conflicts.items()
        )

    def _neutral(self, name: str) -> Value:
        """The value of a knob that conflicts with nothing."""
        default = knobs.BY_NAME[name].default
        return self.default[name] if default is None else default

    def combined(self, config: Config, name: str, value: Value) -> Config:
        """The config with a knob set, and neutral values of the knobs that conflict with it."""
        clashing = {
            other: self._neutral(other)
            for other in config
            if _among(value, knobs.BY_NAME[other].conflicts.get(name, ()))
        }
        return config.replace(**{name: value}, **clashing)

    def on(self, leader: Config, changes: Mapping[str, Value]) -> Config | None:
        """A leader with some knobs set, and conflicting switches at their default; None if a value
        is not offered, or still conflicts."""
        config = leader
        for name, value in changes.items():
            config = self.combined(config, name, value)
            for other in knobs.BY_NAME[name].conflicts.keys() & (config.keys() - changes.keys()):
                if isinstance(config[other], bool):
                    config = config.replace(**{other: self.default[other]})
        return config if self.holds(config) else None

    def configs(self, batch: int, feed: Mapping[str, Value] | None = None) -> Iterator[Config]:
        held = {**(feed or {}), BATCH: batch}
        offered = [(held[n],) if n in held else values for n, values in self.choices.items()]
        for values in itertools.product(*offered):
            config = Config(dict(zip(self.choices, values, strict=True)))
            if self._combines(config):
                yield config

    def expensive_values(self, values: Mapping[str, Value]) -> set[tuple[str, Value]]:
        """The (name, value) pairs of `values` that are expensive to compile."""
        names = (name for name in self.expensive if name in values)
        return {(n, values[n]) for n in names if not _among(values[n], (self.default[n],))}


def _offered(knob: knobs.Knob, here: SearchContext) -> tuple[Value, ...]:
    """A knob's values for a search, the script's own first, without those beyond its use."""
    found = knob.values(here)
    if found and knob.name in here.own:
        own = here.own[knob.name]
        found = (own, *(value for value in found if not _among(value, (own,))))
    if knob.name in here.mapped:
        return found
    if knob.name in here.kept:
        return found[:1]
    widest = USES.index(here.use)
    return tuple(v for v in found if v is found[0] or USES.index(knob.needs(v)) <= widest)


def _among(value: Value, values: Iterable[Value]) -> bool:
    """Whether a value is among others; True, 1 and 1.0 are three."""
    return any(type(value) is type(one) and value == one for one in values)


def ladder(batch: int, *, fits: int) -> tuple[int, ...]:
    """The user's batch and its doublings up to 256 times, but none above `fits`."""
    steps = [batch * 2**power for power in range(9)]
    return (batch, *(step for step in steps[1:] if step <= fits))
