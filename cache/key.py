"""What a record is remembered under: environment, model, sample, mode, permissions."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

import msgpack

from advisor.cache.config import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device as the key sees it. `memory_gib` is rounded; `mig` is the MIG profile or ''."""

    kind: str
    name: str
    capability: str
    multiprocessors: int
    memory_gib: int
    mig: str = ""

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(9, 0) of '9.0'; (0, 0) where it is no CUDA device's."""
        major, dot, minor = self.capability.partition(".")
        return (int(major), int(minor)) if dot and major.isdigit() else (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions and limits; '' or 0 where there is none."""

    driver: str
    cuda: str
    cudnn: str
    torch: str
    power_limit_w: int = 0
    clock_cap_mhz: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where something is measured."""

    device: Device
    software: Software


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One input without its batch dimension."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if any(n < 1 for n in self.shape):
            raise ValueError(f"shape {self.shape}: expected numbers of at least 1")

    def __str__(self) -> str:
        return " ".join(filter(None, ("x".join(map(str, self.shape)), self.dtype)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Permits:
    """What the user permits; the order of the precisions does not matter to a key."""

    deterministic: bool
    precisions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """`model` is a fingerprint in hex; `optimizer` is '' for inference.

    `mix`: where a job's inputs alternate between shapes, all of them with their batches, as
    '64x3x224x224', the largest first, whose sample `sample` is; empty for a job of one shape.
    """

    environment: Environment
    model: str
    sample: Sample
    mode: str
    optimizer: str
    world_size: int
    permits: Permits
    mix: tuple[str, ...] = ()

    @property
    def inputs(self) -> str:
        """'3x224x224 float32', or the shapes of a mix: '64x3x224x224 + 17x3x224x224 float32'."""
        return f"{' + '.join(self.mix)} {self.sample.dtype}" if self.mix else str(self.sample)

    @property
    def digest(self) -> str:
        """64 hex characters over every field; an empty mix leaves it what it was before mixes."""
        return _digest(self)

    @property
    def id(self) -> str:
        """The first 12 characters of the digest: what people see and type."""
        return self.digest[:12]


PLACE = (
    "model",
    "sample.shape",
    "sample.dtype",
    "mix",
    "mode",
    "optimizer",
    "permits.deterministic",
    "permits.precisions",
    "environment.device.kind",
    "environment.device.name",
    "environment.device.capability",
    "environment.device.multiprocessors",
    "environment.device.memory_gib",
    "environment.device.mig",
)
"""Fields whose difference makes another key: a miss."""

VARIANT = (
    "environment.software.driver",
    "environment.software.cuda",
    "environment.software.cudnn",
    "environment.software.torch",
    "environment.software.power_limit_w",
    "environment.software.clock_cap_mhz",
    "world_size",
)
"""Fields whose difference makes a record stale: compatible."""

Field = Value | tuple[str, ...] | tuple[int, ...]

_GETTERS = {name: attrgetter(name) for name in (*PLACE, *VARIANT)}


def fields(key: Key) -> dict[str, Field]:
    """Every field of a key under its dotted name; precisions sorted."""
    found: dict[str, Field] = {name: get(key) for name, get in _GETTERS.items()}
    found["permits.precisions"] = tuple(sorted(set(key.permits.precisions)))
    return found


@functools.lru_cache(maxsize=256)
def _digest(key: Key) -> str:
    found = fields(key)
    if not key.mix:
        del found["mix"]
    return fingerprint(found)


def fingerprint(parts: object) -> str:
    """SHA-256 in hex of plain data: the order of mappings does not count, types do.

    Raises:
        TypeError: something in it is not plain data.
    """
    return hashlib.sha256(msgpack.packb(_canonical(parts), use_bin_type=True)).hexdigest()


def _canonical(parts: object) -> object:
    if isinstance(parts, Mapping):
        items = sorted(parts.items(), key=lambda item: (type(item[0]).__name__, str(item[0])))
        return {key: _canonical(value) for key, value in items}
    if isinstance(parts, list | tuple):
        return [_canonical(part) for part in parts]
    return parts
