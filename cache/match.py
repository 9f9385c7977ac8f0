"""Which record answers a question: exactly, as a stale variant, or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from advisor.cache.key import PLACE, VARIANT, Environment, Field, Key, fields, fingerprint
from advisor.cache.record import Record

Kind = Literal["exact", "compatible", "miss"]

_DEVICE = "environment.device."
_DEVICES = tuple(name for name in PLACE if name.startswith(_DEVICE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A key of which parts may be left open: a field that is None does not constrain."""

    environment: Environment
    mode: str
    world_size: int
    model: str | None = None
    shape: tuple[int, ...] | None = None
    mix: tuple[str, ...] | None = None
    dtype: str | None = None
    optimizer: str | None = None
    deterministic: bool | None = None
    precisions: tuple[str, ...] | None = None
    batch: int | None = None
    """Preferred, of several records that fit: it constrains nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field (dotted name) that differs: what is `wanted` now, what was `found` recorded."""

    field: str
    wanted: Field
    found: Field

    def __str__(self) -> str:
        owner, _, name = self.field.rpartition(".")
        label = f"device {name}" if owner == "environment.device" else name
        return f"{label} {_shown(self.field, self.found)} -> {_shown(self.field, self.wanted)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """`record` is None for a miss; `differs` then names what the `nearest` record has otherwise."""

    kind: Kind
    record: Record | None
    differs: tuple[Difference, ...]
    nearest: Record | None = None


def compare(wanted: Key | Query, found: Key) -> tuple[Kind, tuple[Difference, ...]]:
    """How well a recorded key answers, and the fields that decide it.

    Of another device only its name is reported, or its kind: the rest follows from it.
    """
    have, want = fields(found), _constraints(wanted)

    def differing(names: Iterable[str]) -> list[Difference]:
        return [
            Difference(field=name, wanted=want[name], found=have[name])
            for name in names
            if name in want and want[name] != have[name]
        ]

    place = differing(PLACE)
    for decisive in (_DEVICE + "name", _DEVICE + "kind"):
        if any(difference.field == decisive for difference in place):
            place = [d for d in place if d.field == decisive or not d.field.startswith(_DEVICE)]
            break
    if place:
        return "miss", tuple(place)
    variant = differing(VARIANT)
    return ("compatible" if variant else "exact"), tuple(variant)


def place_of(key: Key) -> str:
    """A digest of what makes another key: two records with the same are variants of one another."""
    known = fields(key)
    return fingerprint({name: known[name] for name in PLACE})


def best(query: Key | Query, records: Iterable[Record]) -> Match:
    """An exact record, else a compatible one, else a miss; of several the one of the batch that is
    asked for, else one that measured it, else the newest.

    A miss carries the differences of the nearest record: none where there are no records.
    """
    matches = [
        Match(kind=kind, record=record, differs=differs)
        for record in records
        for kind, differs in [compare(query, record.key)]
    ]
    for kind in ("exact", "compatible"):
        fitting = [match for match in matches if match.kind == kind]
        if fitting:
            batch = None if isinstance(query, Key) else query.batch
            return max(fitting, key=lambda match: (*_at(match, batch), _created(match)))
    if not matches:
        return Match(kind="miss", record=None, differs=())
    nearest = min(matches, key=lambda match: (len(match.differs), -_created(match)))
    return Match(kind="miss", record=None, differs=nearest.differs, nearest=nearest.record)


def _at(match: Match, batch: int | None) -> tuple[bool, bool]:
    """Whether a record is of a batch, and whether it has measured it."""
    record = match.record
    if batch is None or record is None:
        return False, False
    measured = any(trial.config.get("batch_size") == batch for trial in record.trials)
    return record.batch == batch, measured


def _created(match: Match) -> float:
    return match.record.provenance.created if match.record else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kin:
    """A record whose advice is worth trying first. `what` says how it is akin."""

    record: Record
    what: str


def kin(key: Key, family: str, records: Iterable[Record]) -> list[Kin]:
    """Records akin to a key, the nearest first: of the key itself; of the same model under other
    software, at another sample, with other permissions, on another device of the architecture;
    then of its family, in the same order."""
    found: list[tuple[tuple[int, float, float], Kin]] = []
    for record in records:
        kind, differs = compare(key, record.key)
        names = {difference.field for difference in differs}
        device, other = key.environment.device, record.key.environment.device
        if (device.kind, device.capability) != (other.kind, other.capability):
            continue
        same_model = record.key.model == key.model
        if not same_model and (not family or record.family != family):
            continue
        told = ", ".join(str(difference) for difference in differs if difference.field != "model")
        tier = 0 if same_model else 8
        tier += 4 if device.name != other.name else 0
        if kind == "exact":
            what = "the same, measured before"
            tier = -1
        elif same_model and kind == "compatible":
            what = f"the same model, {told}"
        elif same_model:
            tier += 1 if names <= {"sample.shape", "sample.dtype", "mix", *_DEVICES} else 2
            what = f"the same model, {told}"
        else:
            what = f"a model of the same family{f', {told}' if told else ''}"
        apart = abs(math.log(math.prod(record.key.sample.shape) / math.prod(key.sample.shape)))
        nearness = tier, apart, -record.provenance.created
        found.append((nearness, Kin(record=record, what=what)))
    return [one for _nearness, one in sorted(found, key=lambda pair: pair[0])]


def _constraints(wanted: Key | Query) -> dict[str, Field]:
    if isinstance(wanted, Key):
        return fields(wanted)
    stated: dict[str, Field] = {
        "model": wanted.model,
        "sample.shape": wanted.shape,
        "sample.dtype": wanted.dtype,
        "mix": wanted.mix,
        "mode": wanted.mode,
        "optimizer": wanted.optimizer,
        "permits.deterministic": wanted.deterministic,
        "permits.precisions": (
            None if wanted.precisions is None else tuple(sorted(set(wanted.precisions)))
        ),
        "world_size": wanted.world_size,
    }
    for name in (*PLACE, *VARIANT):
        if name.startswith("environment."):
            _, part, field = name.split(".")
            stated[name] = getattr(getattr(wanted.environment, part), field)
    return {name: value for name, value in stated.items() if value is not None}


def _shown(field: str, value: Field) -> str:
    if field == "model":
        return str(value)[:12]
    if isinstance(value, tuple):
        return ("x" if field == "sample.shape" else "+").join(map(str, value)) or "none"
    return "none" if value in ("", None) else str(value)
