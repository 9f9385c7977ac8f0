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
    """A device as the key sees it. `memory_gib` is rounded; `mig` is the MIG profile or ''."""

    kind: str
    name: str
    capability: str
    multiprocessors: Count
    memory_gib: Count
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
    power_limit_w: Count = 0
    clock_cap_mhz: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where something is measured."""

    device: Device
    software: Software


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """`model` is a fingerprint in hex, `hooks` one of the target's make_batch and loss, or ''.

    `libraries`: of the model's classes, as 'torchvision==0.26.0'. `threads`: torch's, on a CPU.
    """

    environment: Environment
    model: Fingerprint
    task: Task
    hooks: Hex = ""
    libraries: tuple[str, ...] = ()
    threads: Count = 0

    @property
    def digest(self) -> str:
        """64 hex characters over `fields`, without those of `ADDED` at their default."""
        return _digest(self)

    @property
    def id(self) -> str:
        """The first 12 characters of the digest."""
        return self.digest[:12]


_ENVIRONMENT = tuple(
    f"{part}.{field.name}"
    for part, cls in (("device", Device), ("software", Software))
    for field in dataclasses.fields(cls)
)
_GETTERS = {name: attrgetter(name) for name in _ENVIRONMENT}

PLACE = (
    "model",
    "hooks",
    *(name for name, row in rows(Task).items() if row.decides),
    *(name for name in _ENVIRONMENT if name.startswith("device.")),
)
"""Fields whose difference makes another key: a miss."""

VARIANT = (
    *(name for name in _ENVIRONMENT if name.startswith("software.")),
    "libraries",
    "threads",
)
"""Fields whose difference makes a record stale: compatible."""

FIRST = {
    *("model", "hooks", "libraries", "threads", "shapes", "dtype", "vocab", "mode", "optimizer"),
    *("precisions", "deterministic", "max_memory", "batches", "compile", "step_graph"),
    *("tolerance", "processes", "others", "script"),
    *("device.kind", "device.name", "device.capability", "device.multiprocessors"),
    *("device.memory_gib", "device.mig", "software.driver", "software.cuda", "software.cudnn"),
    *("software.torch", "software.power_limit_w", "software.clock_cap_mhz"),
}
"""Fields of the first version, which digests always count. Never add to it: a later field is left
out of the digest at its default, so that older keys stay the same."""

ADDED = {
    prefix + field.name: field.default
    for prefix, cls in (("", Task), ("", Key), ("device.", Device), ("software.", Software))
    for field in dataclasses.fields(cls)
    if prefix + field.name in {*PLACE, *VARIANT} - FIRST
}
"""Later fields, with the defaults that older keys mean."""

Field = Value | tuple[str, ...] | tuple[int, ...]


def of_environment(environment: Environment) -> dict[str, Any]:
    """Its fields under their dotted names."""
    return {name: get(environment) for name, get in _GETTERS.items()}


def fields(key: Key) -> dict[str, Any]:
    """Every field of a key under its name, in the order of PLACE and VARIANT."""
    found = of_environment(key.environment) | key.task.decisive
    found |= {"model": key.model, "hooks": key.hooks, "libraries": key.libraries}
    found["threads"] = key.threads
    return {name: found[name] for name in (*PLACE, *VARIANT)}


def terms_of(known: Mapping[str, Any]) -> str:
    """A digest of all fields but the model: equal for keys that match any other equally well."""
    return _digest_of({name: value for name, value in known.items() if name != "model"})[:16]


def as_fields(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in plain data, with tuples for its lists."""
    return {name: _tuples(value) for name, value in plain.items()}


def completed(known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a key that an older version may have written."""
    return {**ADDED, **known}


def are_whole(known: Mapping[str, Any]) -> bool:
    """Whether these are all fields of a key, with possible shapes."""
    shapes = known.get("shapes") or None
    sizes = shapes[0] if isinstance(shapes, tuple) and isinstance(shapes[0], tuple) else shapes
    possible = isinstance(sizes, tuple) and all(isinstance(n, int) and n > 0 for n in sizes)
    return possible and known.keys() >= {*PLACE, *VARIANT}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@functools.lru_cache(maxsize=256)
def _digest(key: Key) -> str:
    return _digest_of(fields(key))


def _digest_of(known: Mapping[str, Any]) -> str:
    known = as_fields(known)
    return fingerprint({name: v for name, v in known.items() if (name, v) not in ADDED.items()})


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
