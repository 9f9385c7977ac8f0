"""Which knobs and values make sense for this workload on this device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from advisor.cache.config import BATCH, Config, Value
from advisor.cache.key import fingerprint
from advisor.cache.record import PILOT, RACED, USES
from advisor.tuners import knobs
from advisor.tuners.knobs import COMPUTE, INPUT, Situation


class Space:
    """Knob names and the values offered, torch's own first; fixed knobs have one value."""

    def __init__(
        self,
        choices: Mapping[str, tuple[Value, ...]],
        *,
        inputs: Mapping[str, tuple[Value, ...]] | None = None,
        conflicts: Mapping[str, Mapping[str, tuple[Value, ...]]] | None = None,
        dear: Iterable[str] = (),
        frugal: Iterable[str] = (),
    ) -> None:
        self.choices = {name: values for name, values in choices.items() if values}
        self.inputs = {name: values for name, values in (inputs or {}).items() if values}
        self._conflicts = conflicts or {}
        self.dear = tuple(name for name in dear if name in self.choices)
        """Knobs that are tried on leaders only."""
        self.frugal = tuple(name for name in frugal if name in self.choices)
        """Knobs that are tried where memory is what limits, and nowhere else."""
        self.default = Config({name: values[0] for name, values in self.choices.items()})
        """What torch does by itself, at the user's batch."""
        self.default_input = Config({name: values[0] for name, values in self.inputs.items()})
        """What DataLoader does by itself."""

    @classmethod
    def of(cls, here: Situation) -> Space:
        """The space of KNOBS in a situation."""
        by_stage: dict[str, dict[str, tuple[Value, ...]]] = {COMPUTE: {}, INPUT: {}}
        for knob in knobs.KNOBS:
            # A run loads its data in its steps.
            stage = COMPUTE if here.use == PILOT else knob.stage
            by_stage[stage][knob.name] = _offered(knob, here)
        return cls(
            by_stage[COMPUTE],
            inputs=by_stage[INPUT],
            conflicts={knob.name: knob.conflicts for knob in knobs.KNOBS if knob.conflicts},
            dear=(knob.name for knob in knobs.KNOBS if knob.dear),
            frugal=(knob.name for knob in knobs.KNOBS if knob.frugal),
        )

    def of_inputs(self, choices: Mapping[str, tuple[Value, ...]]) -> Space:
        """A space of other choices, with the conflicts of this one."""
        return Space(choices, conflicts=self._conflicts)

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes, the user's first."""
        return tuple(value for value in self.choices[BATCH] if type(value) is int)

    @property
    def batch(self) -> int:
        """The user's."""
        return self.batches[0]

    @property
    def is_choice(self) -> bool:
        """Whether there is anything beside torch's default."""
        return any(len(values) > 1 for values in self.choices.values())

    @property
    def digest(self) -> str:
        """Names a study: the choices of a categorical cannot change within one."""
        return fingerprint({name: list(values) for name, values in self.choices.items()})[:12]

    @property
    def uses(self) -> tuple[str, ...]:
        """Those of RACED that can follow different parts of the space, the widest first."""
        levels = {
            USES.index(knobs.use_of(self.default.replace(**{name: value}), self.default))
            for name, values in self.choices.items()
            for value in values
        }
        found: list[str] = []
        for below, use in zip(("", *RACED), RACED, strict=False):
            least = USES.index(below) if below else -1
            if not found or any(least < level <= USES.index(use) for level in levels):
                found.append(use)
        return tuple(reversed(found))

    def leave_out(self, unwanted: Callable[[str, Value], bool]) -> None:
        """Offer no such value, but a knob's first one."""
        for name, (first, *others) in self.choices.items():
            self.choices[name] = (first, *(v for v in others if not unwanted(name, v)))

    def offers(self, name: str, value: Value) -> bool:
        """Whether a knob may have a value; True and 1 are two."""
        return any(_same(value, one) for one in self.choices.get(name, ()))

    def near(self, config: Mapping[str, Value], batch: int | None = None) -> Config:
        """torch's default at a batch, with what of a config is offered here."""
        offered = {n: v for n, v in config.items() if n != BATCH and self.offers(n, v)}
        return self.default.replace(**offered).at(self.batch if batch is None else batch)

    def holds(self, config: Config) -> bool:
        """Whether every knob has a value that is offered, and none conflicts."""
        return (
            set(config) == set(self.choices)
            and all(self.offers(name, value) for name, value in config.items())
            and self._combines(config)
        )

    def _combines(self, config: Config) -> bool:
        return not any(
            not _same(config[name], self.choices[name][0])
            and other in config
            and any(_same(config[other], value) for value in values)
            for name, conflicts in self._conflicts.items()
            if name in self.choices
            for other, values in conflicts.items()
        )

    def combined(self, config: Config, name: str, value: Value) -> Config:
        """The config with a knob set, and those that then conflict with it at their default."""
        config = config.replace(**{name: value})
        for other, conflicts in self._conflicts.items():
            if other in config and any(_same(value, one) for one in conflicts.get(name, ())):
                config = config.replace(**{other: self.choices[other][0]})
        return config

    def on(self, leader: Config, changes: Mapping[str, Value]) -> Config | None:
        """A leader with some knobs set, and switches that conflict with these at their default;
        None where something is not offered, or conflicts all the same."""
        if not all(self.offers(name, value) for name, value in changes.items()):
            return None
        config = leader
        for name, value in changes.items():
            config = self.combined(config, name, value)
        for name, conflicts in self._conflicts.items():
            if name not in changes:
                continue
            for other in conflicts.keys() & (config.keys() - changes.keys()):
                if isinstance(config[other], bool):
                    config = config.replace(**{other: self.choices[other][0]})
        return config if self.holds(config) else None

    def configs(
        self, batch: int, *, dear: bool = False, feed: Mapping[str, Value] | None = None
    ) -> Iterator[Config]:
        """All configs at one batch size; dear knobs at their default, unless asked for, and frugal
        ones; `feed`: values of knobs that are fixed."""
        fixed = {*self.frugal, *(() if dear else self.dear)}
        names = [name for name in self.choices if name != BATCH]
        held = feed or {}
        offered = [
            (held[name],) if name in held else self.choices[name][: 1 if name in fixed else None]
            for name in names
        ]
        for values in itertools.product(*offered):
            config = Config(dict(zip(names, values, strict=True))).at(batch)
            if self._combines(config):
                yield config

    def is_dear(self, config: Config) -> bool:
        """Whether a config takes many seconds before its first step."""
        return bool(self.dear_in(config))

    def dear_in(self, values: Mapping[str, Value]) -> set[tuple[str, Value]]:
        """What of these values of knobs makes a config dear."""
        names = (name for name in self.dear if name in values)
        return {(n, values[n]) for n in names if not _same(values[n], self.default[n])}

    @property
    def dear_values(self) -> list[tuple[str, Value]]:
        """What may make a config dear."""
        return [(name, value) for name in self.dear for value in self.choices[name][1:]]


def _offered(knob: knobs.Knob, here: Situation) -> tuple[Value, ...]:
    """A knob's values in a situation, the script's own first, as far as its use can follow."""
    found = knob.values(here)
    if found and knob.name in here.own:
        own = here.own[knob.name]
        found = (own, *(value for value in found if not _same(value, own)))
    if knob.name in here.mapped:
        return found
    if knob.name in here.kept:
        return found[:1]
    widest = USES.index(here.use)
    return tuple(v for v in found if v is found[0] or USES.index(knob.needs(v)) <= widest)


def _same(ours: Value, theirs: Value) -> bool:
    return type(ours) is type(theirs) and ours == theirs


def ladder(batch: int, *, fits: int) -> tuple[int, ...]:
    """The user's batch and its doublings up to 256 times, while at most `fits`."""
    steps = [batch * 2**power for power in range(9)]
    return (batch, *(step for step in steps[1:] if step <= fits))
