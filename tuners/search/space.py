"""Which knobs and values make sense for this workload on this device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

from advisor.cache.config import Config, Value
from advisor.cache.key import fingerprint
from advisor.tuners.knobs import COMPUTE, INPUT, KNOBS, Situation


class Space:
    """Knob names and the values offered, torch's own first; fixed knobs have one value."""

    def __init__(
        self,
        choices: Mapping[str, tuple[Value, ...]],
        *,
        inputs: Mapping[str, tuple[Value, ...]] | None = None,
        conflicts: Mapping[str, Mapping[str, tuple[Value, ...]]] | None = None,
        dear: Iterable[str] = (),
    ) -> None:
        self.choices = {name: values for name, values in choices.items() if values}
        self.inputs = {name: values for name, values in (inputs or {}).items() if values}
        self._conflicts = conflicts or {}
        self.dear = tuple(name for name in dear if name in self.choices)
        """Knobs that are tried on leaders only."""

    @classmethod
    def of(cls, here: Situation) -> Space:
        """The space of KNOBS in a situation."""
        by_stage: dict[str, dict[str, tuple[Value, ...]]] = {COMPUTE: {}, INPUT: {}}
        for knob in KNOBS:
            by_stage[knob.stage][knob.name] = knob.values(here)
        conflicts = {knob.name: knob.conflicts for knob in KNOBS if knob.conflicts}
        return cls(
            by_stage[COMPUTE],
            inputs=by_stage[INPUT],
            conflicts=conflicts,
            dear=(knob.name for knob in KNOBS if knob.dear),
        )

    @property
    def default(self) -> Config:
        """What torch does by itself, at the user's batch."""
        return Config({name: values[0] for name, values in self.choices.items()})

    @property
    def default_input(self) -> Config:
        """What DataLoader does by itself."""
        return Config({name: values[0] for name, values in self.inputs.items()})

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes, the user's first."""
        return tuple(int(value) for value in self.choices["batch_size"] if value is not None)

    @property
    def is_choice(self) -> bool:
        """Whether there is anything beside torch's default."""
        return any(len(values) > 1 for values in self.choices.values())

    @property
    def digest(self) -> str:
        """Names a study: the choices of a categorical cannot change within one."""
        return fingerprint({name: list(values) for name, values in self.choices.items()})[:12]

    def holds(self, config: Config) -> bool:
        """Whether every knob has a value that is offered, and none conflicts."""
        return (
            set(config) == set(self.choices)
            and all(
                any(value == v and type(value) is type(v) for v in self.choices[name])
                for name, value in config.items()
            )
            and self._combines(config)
        )

    def _combines(self, config: Config) -> bool:
        return not any(
            config.get(name) != self.choices[name][0] and config.get(other) in values
            for name, conflicts in self._conflicts.items()
            if name in self.choices
            for other, values in conflicts.items()
        )

    def combined(self, config: Config, name: str, value: Value) -> Config:
        """The config with a knob set, and those that then conflict with it at their default."""
        config = config.replace(**{name: value})
        for other, conflicts in self._conflicts.items():
            if other in config and value in conflicts.get(name, ()):
                config = config.replace(**{other: self.choices[other][0]})
        return config

    def configs(self, batch: int, *, dear: bool = False) -> Iterator[Config]:
        """All configs at one batch size; dear knobs at their default, unless asked for."""
        names = [name for name in self.choices if name != "batch_size"]
        offered = [
            self.choices[name][: 1 if name in self.dear and not dear else None] for name in names
        ]
        for values in itertools.product(*offered):
            config = Config(dict(zip(names, values, strict=True)), batch_size=batch)
            if self._combines(config):
                yield config

    def changed(self, config: Config) -> dict[str, Value]:
        """The knobs of a config that differ from torch's default, the batch left out."""
        default = self.default | self.default_input
        return {
            name: value
            for name, value in config.items()
            if name != "batch_size" and name in default and value != default[name]
        }


def ladder(batch: int, *, fits: int) -> tuple[int, ...]:
    """The user's batch and its doublings up to 256 times, while at most `fits`."""
    steps = [batch * 2**power for power in range(9)]
    return (batch, *(step for step in steps[1:] if step <= fits))
