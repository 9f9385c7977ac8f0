"""Which record answers a question: exactly, as a stale variant, or not at all."""

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

NARROWING = tuple(name for name, row in rows(Task).items() if row.is_constraint)
"""Permissions: a record of more than is asked for can answer, from its trials."""
SIZES = ("shapes", "others")
"""Fields with the sizes of a run's inputs."""
_DEVICES = tuple(name for name in PLACE if name.startswith("device."))
_NEARNESS: Mapping[Kind, int] = {"exact": 0, "compatible": 1}
_MISS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What a script asks for: what it leaves open does not constrain.

    Attributes:
        given: fields of a Task by name, as checked.
        model, hooks: fingerprints; None where they are not in hand.
        threads: that torch itself uses here, on a CPU; else 0.
    """

    environment: Environment
    given: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    hooks: str | None = None
    threads: int = 0

    @property
    def batch(self) -> int | None:
        """Preferred, of several records that fit: it constrains nothing."""
        shapes = self.given.get("shapes")
        return shapes[0][0] if shapes else None

    @property
    def stated(self) -> dict[str, Any]:
        """What it wants of a key's fields, by name; but of libraries, which only a record names."""
        known = rows(Task)
        found: dict[str, Any] = {"model": self.model, "hooks": self.hooks, "threads": self.threads}
        found |= {name: value for name, value in self.given.items() if known[name].decides}
        if shapes := self.given.get("shapes"):
            found["shapes"] = shapes if len(shapes) > 1 else shapes[0][1:]
        found |= environment_fields(self.environment)
        return {name: value for name, value in found.items() if value is not None}

    @property
    def sample(self) -> tuple[int, ...] | None:
        """The shape of one input, where the script names it."""
        shapes = self.given.get("shapes")
        return shapes[0][1:] if shapes else None

    def without(self, *names: str) -> Query:
        """The same with these fields of the task left open."""
        left = {name: value for name, value in self.given.items() if name not in names}
        return Query(
            environment=self.environment,
            given=left,
            model=self.model,
            hooks=self.hooks,
            threads=self.threads,
        )


class Difference(Struct, frozen=True, kw_only=True):
    """A field (dotted name) that differs: what is `wanted` now, what was `found` recorded."""

    field: str
    wanted: Field
    found: Field

    def __str__(self) -> str:
        owner, _, name = self.field.rpartition(".")
        label = f"device {name}" if owner == "device" else name.replace("_", " ")
        return f"{label} {_shown(self.field, self.found)} -> {_shown(self.field, self.wanted)}"


class Match(Struct, frozen=True, kw_only=True):
    """`record` is None for a miss; `differs` then names what the `nearest` record has otherwise."""

    kind: Kind
    record: Record | None
    differs: tuple[Difference, ...]
    nearest: Record | None = None


MISS = Match(kind="miss", record=None, differs=())
"""Where nothing is near either."""


def compare(wanted: Key | Query, found: Key) -> tuple[Kind, tuple[Difference, ...]]:
    """How well a recorded key answers, and the fields that decide it.

    Of another device only its name is reported, or its kind: the rest follows from it.
    """
    if isinstance(wanted, Key):
        return compared(fields(wanted), fields(found))
    libraries = {"libraries": tuple(map(_installed, found.libraries))}
    return compared(wanted.stated | libraries, fields(found))


def compared(
    want: Mapping[str, Field], have: Mapping[str, Field]
) -> tuple[Kind, tuple[Difference, ...]]:
    """As `compare`, of fields by name: what is wanted of them, and those of a key. Sizes that one
    of them does not know make a record compatible, and no difference that is reported."""

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
    """A digest of what makes another key: two records with the same are variants of one another."""
    known = fields(key)
    return fingerprint({name: known[name] for name in PLACE})


def best(query: Key | Query, records: Iterable[Record]) -> Match:
    """An exact record, else a compatible one, else a miss.

    Of several the one whose task is nearest to the defaults in what the query leaves open, then
    what a run measured for a run and a target for a target, then the one of the batch that is asked
    for, else one that measured it, else the newest. A miss carries
    the differences of the nearest record: none where there are no records.
    """
    matches = [
        Match(kind=kind, record=record, differs=differs)
        for record in records
        for kind, differs in [compare(query, record.key)]
    ]
    for kind in ("exact", "compatible"):
        fitting = [match for match in matches if match.kind == kind]
        if fitting:
            return max(fitting, key=functools.partial(_preferred, query))
    if not matches:
        return MISS
    nearest = min(matches, key=lambda match: (len(match.differs), -_created(match)))
    return Match(kind="miss", record=None, differs=nearest.differs, nearest=nearest.record)


def _preferred(query: Key | Query, match: Match) -> tuple[int, bool, bool, bool, float]:
    record = match.record
    assert record is not None
    if isinstance(query, Key):
        return 0, True, True, True, _created(match)
    batch = query.batch
    measured = any(trial.config.batch == batch for trial in record.trials)
    odd = _odd(query.stated, fields(record.key))
    alike = bool(query.given.get("command")) == bool(record.key.task.command)
    return -odd, alike, record.batch == batch, measured, _created(match)


def _odd(want: Mapping[str, Field], have: Mapping[str, Field]) -> int:
    """How many of a task's fields are left open and not at their defaults."""
    return sum(
        have[name] != row.default
        for name, row in rows(Task).items()
        if row.decides and name not in want and name != "shapes"
    )


Standing = tuple[float, ...]
"""Where a key stands among several, the least first."""


def standing(want: Mapping[str, Field], have: Mapping[str, Field]) -> Standing:
    """By what of fields `best` chooses: first of all keys, and then with the permissions left open.

    Of those that stand alike the batch decides and the time; of those that do not fit, the time.
    """
    loose = {name: value for name, value in want.items() if name not in NARROWING}
    for turn, asked in enumerate((want, loose)):
        kind, differs = compared(asked, have)
        if kind != "miss":
            return 2 * turn + _NEARNESS[kind], _odd(asked, have)
    return _MISS, len(differs)


def kind_of(one: Standing) -> Kind:
    """How a key that stands so answers."""
    if one[0] >= _MISS:
        return "miss"
    return "compatible" if one[0] % 2 else "exact"


def _created(match: Match) -> float:
    return match.record.provenance.created if match.record else 0.0


class Kin(Struct, frozen=True, kw_only=True):
    """A record whose advice is worth trying first. `what` says how it is akin."""

    record: Record
    what: str


def kin(key: Key, family: str, records: Iterable[Record]) -> list[Kin]:
    """Records akin to a key, the nearest first: of the key itself; of the same model under other
    software, at another sample, with other permissions, on another device of the architecture;
    then of its family, in the same order. Of those that are as near, of this batch, then the
    newest."""
    want = fields(key)
    found: list[tuple[Standing, Kin]] = []
    for record in records:
        if record.key.model != key.model and (not family or record.family != family):
            continue
        if akin := relation(want, fields(record.key)):
            near, what = akin
            order = *near, record.batch != key.task.batch, -record.provenance.created
            found.append((order, Kin(record=record, what=what)))
    return [one for _order, one in sorted(found, key=lambda pair: pair[0])]


def relation(want: Mapping[str, Field], have: Mapping[str, Field]) -> tuple[Standing, str] | None:
    """How near a key of the same model or family is, and how it is akin, from the fields of both;
    None of another architecture."""
    if any(want[name] != have[name] for name in ("device.kind", "device.capability")):
        return None
    kind, differs = compared(want, have)
    names = {difference.field for difference in differs}
    told = ", ".join(str(difference) for difference in differs if difference.field != "model")
    same_model = want["model"] == have["model"]
    tier = 0 if same_model else 8
    tier += 4 if want["device.name"] != have["device.name"] else 0
    what = f"the same model, {told}"
    if kind == "exact":
        tier, what = -1, "the same, measured before"
    elif not same_model:
        what = f"a model of the same family{f', {told}' if told else ''}"
    elif kind == "miss":
        tier += 1 if names <= {"shapes", "dtype", *_DEVICES} else 2
    return (tier, abs(math.log(_values(have)) - math.log(_values(want)))), what


def _values(known: Mapping[str, Any]) -> int:
    """In one sample; of a mix, in one of its first shape."""
    shapes: Sequence[Any] = known["shapes"]
    return math.prod(shapes[0][1:] if isinstance(shapes[0], tuple) else shapes)


@functools.cache
def _installed(library: str) -> str:
    """The same library as it is installed here: 'torchvision==0.26.0'."""
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
