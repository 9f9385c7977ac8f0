"""Config: one value per knob, as plain data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

from advisor.errors import UsageError

Value = str | int | float | bool | None

BATCH = "batch_size"  # the only knob that Config itself treats by name
_ALLOWED = (str, int, float, bool, type(None))
_EXPECTED = "str, int of at most 64 bits, finite float, bool or None"


class Config(Mapping[str, Value]):
    """Immutable, hashable, sorted by name; True, 1 and 1.0 are three different values. Raises
    UsageError if a name is no str, or a value no str, 64-bit int, finite float, bool or None."""

    __slots__ = ("_identity", "_values")

    def __init__(self, mapping: Mapping[str, Value] | None = None, /, **values: Value) -> None:
        merged = dict(mapping or {}) | values
        for name, value in merged.items():
            if type(name) is not str:
                raise UsageError(f"config name {name!r}: expected a str")
            large = type(value) is int and not -(2**63) <= value < 2**64
            endless = type(value) is float and not math.isfinite(value)
            if type(value) not in _ALLOWED or large or endless:
                raise UsageError(f"config value {name}={value!r}: expected {_EXPECTED}")
        self._values = {name: merged[name] for name in sorted(merged)}
        self._identity = tuple((name, type(v), v) for name, v in self._values.items())

    def __or__(self, other: Mapping[str, Value]) -> Config:
        return Config({**self._values, **other})

    def replace(self, **changes: Value) -> Config:
        return Config(self._values, **changes)

    def without(self, *names: str) -> Config:
        """A copy without these names, as far as the config has them."""
        return Config({name: v for name, v in self._values.items() if name not in names})

    def only(self, *names: str) -> Config:
        return Config({name: v for name, v in self._values.items() if name in names})

    @property
    def batch(self) -> int:
        """Samples per step; 0 where the config does not say."""
        value = self._values.get(BATCH)
        return value if type(value) is int else 0

    def at(self, batch: int) -> Config:
        return self.replace(**{BATCH: batch})

    @property
    def knobs(self) -> Config:
        """All but the batch size."""
        return self.without(BATCH)

    def changed(self, default: Config) -> Config:
        """The values that differ from another config's, without the batch size; True is not 1."""
        theirs = {*default._identity, (BATCH, int, self.batch)}
        return Config({one[0]: one[2] for one in self._identity if one not in theirs})

    @property
    def digest(self) -> str:
        """12 hex characters, the same in every process: the start of `key.fingerprint(self)`."""
        import msgpack  # here, because every process of a run imports this file

        return hashlib.sha256(msgpack.packb(self._values)).hexdigest()[:12]

    def __getattr__(self, name: str) -> Value:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(
                f"config has no {name!r}; it has {', '.join(self._values) or 'nothing'}"
            )
        return self._values[name]

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, Config) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def __reduce__(self) -> tuple[type[Config], tuple[dict[str, Value]]]:
        return type(self), (self._values,)
