"""The key of a record: environment, model, and the fields of the task that decide."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgpack

from advisor.cache.config import Value
from advisor.cache.domain import Count, Fingerprint, Hex
from advisor.cache.task import Task, rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device's part of a key. `memory_gib` is rounded; `mig` is the MIG profile or ''."""

    kind: str
    name: str
    capability: str
    multiprocessors: Count
    memory_gib: Count
    mig: str = ""

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(9, 0) for '9.0'; (0, 0) for a device without CUDA."""
        major, dot, minor = self.capability.partition(".")
        return (int(major), int(minor)) if dot and major.isdigit() else (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions and limits; '' or 0 if there is none."""

    driver: str
    cuda: str
    cudnn: str
    torch: str
    power_limit_w: Count = 0
    clock_cap_mhz: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    device: Device
    software: Software


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """`model`: fingerprint in hex; `hooks`: that of the target's make_batch and loss, or '';
    `libraries`: those of the model's classes, as 'torchvision==0.26.0'; `threads`: on a CPU;
    `interconnect`: of a job's ranks, as '8 per host, NVLink', else ''."""

    environment: Environment
    model: Fingerprint
    task: Task
    hooks: Hex = ""
    libraries: tuple[str, ...] = ()
    threads: Count = 0
    interconnect: str = ""

    @property
    def digest(self) -> str:
        """64 hex characters over `fields`, without those of ADDED at their default."""
        return _digest(self)

    @property
    def id(self) -> str:
        return _digest(self)[:12]


_DECIDING = {name: row for name, row in rows(Task).items() if row.decides}
_DEVICE = tuple(f"device.{field.name}" for field in dataclasses.fields(Device))
_SOFTWARE = tuple(f"software.{field.name}" for field in dataclasses.fields(Software))
_GETTERS = {name: attrgetter(name) for name in (*_DEVICE, *_SOFTWARE)}

PLACE = ("model", "hooks", *_DECIDING, *_DEVICE)  # a difference makes a lookup miss
VARIANT = (*_SOFTWARE, "libraries", "threads", "interconnect")  # a difference makes a record stale
ADDED = {name: row.default for name, row in _DECIDING.items() if row.added} | {"interconnect": ""}
"""Fields that the first keys did not have, with the defaults that these keys mean."""

Field = Value | tuple[str, ...] | tuple[int, ...]


def of_environment(environment: Environment) -> dict[str, Any]:
    return {name: get(environment) for name, get in _GETTERS.items()}


def fields(key: Key) -> dict[str, Any]:
    """Every field of a key under its name, in the order of PLACE and VARIANT."""
    parts = of_environment(key.environment) | key.task.decisive
    names = (*PLACE, *VARIANT)
    return {name: parts[name] if name in parts else getattr(key, name) for name in names}


def terms_of(known: Mapping[str, Any]) -> str:
    """A digest of all fields except the model: equal for keys that differ only in their model."""
    return _digest_of({name: value for name, value in known.items() if name != "model"})[:16]


def as_fields(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of plain data, with tuples in place of lists."""

    def held(value: Any) -> Any:
        return tuple(map(held, value)) if isinstance(value, list) else value

    return {name: held(value) for name, value in plain.items()}


def completed(known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a key, with defaults for fields that an older version did not write."""
    return {**ADDED, **known}


def are_whole(known: Mapping[str, Any]) -> bool:
    """Whether `known` has all fields of a key, and its shapes are possible."""
    shapes = known.get("shapes") or None
    sizes = shapes[0] if isinstance(shapes, tuple) and isinstance(shapes[0], tuple) else shapes
    possible = isinstance(sizes, tuple) and all(isinstance(n, int) and n > 0 for n in sizes)
    return possible and known.keys() >= {*PLACE, *VARIANT}


@functools.lru_cache(maxsize=256)
def _digest(key: Key) -> str:
    return _digest_of(fields(key))


def _digest_of(known: Mapping[str, Any]) -> str:
    known = as_fields(known)
    return fingerprint({name: v for name, v in known.items() if (name, v) not in ADDED.items()})


def fingerprint(parts: object) -> str:
    """SHA-256 in hex of plain data: the order of mappings does not count, types do."""
    # Names of files need not be UTF-8.
    packed = msgpack.packb(_canonical(parts), unicode_errors="surrogateescape")
    return hashlib.sha256(packed).hexdigest()


def _canonical(parts: object) -> object:
    if isinstance(parts, Mapping):
        items = sorted(parts.items(), key=lambda item: (type(item[0]).__name__, str(item[0])))
        return {key: _canonical(value) for key, value in items}
    if isinstance(parts, list | tuple):
        return [_canonical(part) for part in parts]
    return parts
