"""Which record answers a question: exactly, as a stale variant, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from advisor.cache.key import PLACE, VARIANT, Environment, Field, Key, fields
from advisor.cache.record import Record

Kind = Literal["exact", "compatible", "miss"]

_DEVICE = "environment.device."


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
    """`record` is None for a miss; `differs` then names what the nearest record has otherwise."""

    kind: Kind
    record: Record | None
    differs: tuple[Difference, ...]


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


def best(query: Key | Query, records: Iterable[Record]) -> Match:
    """The newest exact record, else the newest compatible one, else a miss.

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
            return max(fitting, key=_created)
    if not matches:
        return Match(kind="miss", record=None, differs=())
    nearest = min(matches, key=lambda match: (len(match.differs), -_created(match)))
    return Match(kind="miss", record=None, differs=nearest.differs)


def _created(match: Match) -> float:
    return match.record.provenance.created if match.record else 0.0


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
