"""Which record answers a query: exactly, as a stale variant, or not at all."""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from advisor.cache import sizes
from advisor.cache.key import PLACE, VARIANT, Environment, Field, Key, fields, fingerprint
from advisor.cache.key import of_environment as environment_fields
from advisor.cache.record import Record
from advisor.cache.task import Task, rows

Kind = Literal["exact", "compatible", "miss"]

CONSTRAINTS = tuple(name for name, row in rows(Task).items() if row.is_constraint)
"""Permissions: a record that permits more can answer from its trials."""
SIZES = ("shapes", "others")
"""Fields with the sizes of a run's inputs."""
_DEVICES = tuple(name for name in PLACE if name.startswith("device."))

Standing = tuple[float, ...]
"""Sort key of a stored key for a query; lower is better."""
_MISS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What a script asks for. What it leaves open is no constraint.

    Attributes:
        given: checked fields of a Task by name.
        model: its fingerprint; None if there is only a name.
        threads: that torch uses here on a CPU; else 0.
    """

    environment: Environment
    given: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    threads: int = 0

    @property
    def batch(self) -> int | None:
        """Preferred among records that fit; no constraint."""
        shapes = self.given.get("shapes")
        return shapes[0][0] if shapes else None

    @property
    def sample(self) -> tuple[int, ...] | None:
        """The shape of one input, if the script names it."""
        shapes = self.given.get("shapes")
        return shapes[0][1:] if shapes else None

    @property
    def stated(self) -> dict[str, Any]:
        """The wanted fields of a key by name. Libraries are missing: only a record names them."""
        known = rows(Task)
        found: dict[str, Any] = {"model": self.model, "threads": self.threads}
        found |= {name: value for name, value in self.given.items() if known[name].decides}
        if shapes := self.given.get("shapes"):
            found["shapes"] = shapes if len(shapes) > 1 else shapes[0][1:]
        found |= environment_fields(self.environment)
        return {name: value for name, value in found.items() if value is not None}


class Difference(Struct, frozen=True, kw_only=True):
    """A field (dotted name) that differs: `wanted` now, `found` in the record."""

    field: str
    wanted: Field
    found: Field

    def __str__(self) -> str:
        owner, _, name = self.field.rpartition(".")
        label = f"device {name}" if owner == "device" else name.replace("_", " ")
        return f"{label} {_shown(self.field, self.found)} -> {_shown(self.field, self.wanted)}"


class Match(Struct, frozen=True, kw_only=True):
    """The record that answers, or on a miss the nearest one, if there is any."""

    kind: Kind = "miss"
    record: Record | None = None
    differs: tuple[Difference, ...] = ()

    @property
    def fits(self) -> bool:
        return self.kind != "miss"


MISS = Match()
"""Nothing is even near."""


def compare(wanted: Key | Query, found: Key) -> tuple[Kind, tuple[Difference, ...]]:
    """How well a recorded key answers, and the fields that decide it.

    Of another device only its name or kind is reported: the rest follows from it.
    """
    return compared(*_fields_of(wanted, found))


def _fields_of(wanted: Key | Query, found: Key) -> tuple[dict[str, Any], dict[str, Any]]:
    have = fields(found)
    if isinstance(wanted, Key):
        return fields(wanted), have
    return wanted.stated | {"libraries": tuple(map(_installed, found.libraries))}, have


def compared(
    want: Mapping[str, Field], have: Mapping[str, Field]
) -> tuple[Kind, tuple[Difference, ...]]:
    """As `compare`, from fields by name. Sizes that one side does not know make a record
    compatible, and are not reported as a difference."""

    def differing(names: Iterable[str]) -> list[Difference]:
        return [
            Difference(field=name, wanted=want[name], found=have[name])
            for name in names
            if name in want and want[name] != have[name]
        ]

    place = differing(PLACE)
    unknown = any(one.field in SIZES for one in place) and sizes.fit(want, have)
    if unknown:
        place = [one for one in place if one.field not in SIZES]
    for decisive in ("device.name", "device.kind"):
        if any(difference.field == decisive for difference in place):
            place = [d for d in place if d.field == decisive or d.field not in _DEVICES]
            break
    if place:
        return "miss", tuple(place)
    variant = differing(VARIANT)
    return ("compatible" if variant or unknown else "exact"), tuple(variant)


def place_of(key: Key) -> str:
    """A digest of the fields that make another key. Records with the same are variants."""
    known = fields(key)
    return fingerprint({name: known[name] for name in PLACE})


def best(query: Query, records: Iterable[Record]) -> Match:
    """The record that answers, or a miss with the nearest one.

    Records with the permissions that are asked for come first, then those that permit more; exact
    ones before compatible ones. Among equals the one nearest to the defaults wins, then a run for a
    run, then the batch that is asked for, then one that measured that batch, then the newest. A
    server that sends only the nearest records keeps this order.
    """
    found: list[tuple[tuple[float, ...], Match]] = []
    for record in records:
        standing, differs = _ranked(*_fields_of(query, record.key))
        match = Match(kind=kind_of(standing), record=record, differs=differs)
        preference = (
            bool(query.given.get("command")) != bool(record.key.task.command),
            record.batch != query.batch,
            not any(trial.config.batch == query.batch for trial in record.trials),
        )
        order = *standing, *(preference if match.fits else ()), -record.provenance.created
        found.append((order, match))
    return min(found, key=lambda one: one[0])[1] if found else MISS


def standing(want: Mapping[str, Field], have: Mapping[str, Field]) -> Standing:
    """The first part of the order in which `best` chooses, from fields by name."""
    return _ranked(want, have)[0]


def _ranked(
    want: Mapping[str, Field], have: Mapping[str, Field]
) -> tuple[Standing, tuple[Difference, ...]]:
    loose = {name: value for name, value in want.items() if name not in CONSTRAINTS}
    differs: tuple[Difference, ...] = ()
    for first, asked in ((0, want), (2, loose)):
        kind, differs = compared(asked, have)
        if kind != "miss":
            return (first + (kind == "compatible"), _unusual(asked, have)), differs
    return (_MISS, len(differs)), differs


def _unusual(want: Mapping[str, Field], have: Mapping[str, Field]) -> int:
    """How many of a task's fields are left open and differ from their defaults."""
    return sum(
        have[name] != row.default
        for name, row in rows(Task).items()
        if row.decides and name not in want and name != "shapes"
    )


def kind_of(one: Standing) -> Kind:
    if one[0] >= _MISS:
        return "miss"
    return "compatible" if one[0] % 2 else "exact"


class SimilarRecord(Struct, frozen=True, kw_only=True):
    """A record whose advice is worth trying first. `what` says how it is similar."""

    record: Record
    what: str


def find_similar(key: Key, family: str, records: Iterable[Record]) -> list[SimilarRecord]:
    """Records similar to a key, the nearest first: of the key itself; of the same model under other
    software, at another sample, with other permissions, on another device of the architecture;
    then of its family, in the same order. Among equals this batch comes first, then the newest."""
    want = fields(key)
    found: list[tuple[Standing, SimilarRecord]] = []
    for record in records:
        if record.key.model != key.model and (not family or record.family != family):
            continue
        if similar := relation(want, fields(record.key)):
            near, what = similar
            order = *near, record.batch != key.task.batch, -record.provenance.created
            found.append((order, SimilarRecord(record=record, what=what)))
    return [one for _order, one in sorted(found, key=lambda pair: pair[0])]


def relation(want: Mapping[str, Field], have: Mapping[str, Field]) -> tuple[Standing, str] | None:
    """How near a key of the same model or family is, and how it is similar, from the fields of
    both; None for another architecture."""
    if any(want[name] != have[name] for name in ("device.kind", "device.capability")):
        return None
    kind, differs = compared(want, have)
    names = {difference.field for difference in differs}
    listed = ", ".join(str(difference) for difference in differs if difference.field != "model")
    same_model = want["model"] == have["model"]
    tier = 0 if same_model else 8
    tier += 4 if want["device.name"] != have["device.name"] else 0
    what = f"the same model, {listed}"
    if kind == "exact":
        tier, what = -1, "the same, measured before"
    elif not same_model:
        what = f"a model of the same family{f', {listed}' if listed else ''}"
    elif kind == "miss":
        tier += 1 if names <= {"shapes", "dtype", *_DEVICES} else 2
    return (tier, abs(math.log(_values(have)) - math.log(_values(want)))), what


def _values(known: Mapping[str, Any]) -> int:
    """Numbers in one sample; of a mix, in one of its first shape."""
    shapes: Sequence[Any] = known["shapes"]
    return math.prod(shapes[0][1:] if isinstance(shapes[0], tuple) else shapes)


@functools.cache
def _installed(library: str) -> str:
    """The same library in the version installed here: 'torchvision==0.26.0'."""
    name = library.partition("==")[0]
    try:
        return f"{name}=={importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name}==none"


def _shown(field: str, value: Field) -> str:
    if field in ("model", "hooks"):
        return str(value)[:12] or "none"
    if isinstance(value, tuple):
        mixed = any(isinstance(part, tuple) for part in value)
        parts = [_shown(field, part) if mixed else str(part) for part in value]
        return ("x" if field == "shapes" and not mixed else "+").join(parts) or "none"
    return "none" if value in ("", None) else str(value)
