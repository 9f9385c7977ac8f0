"""Which record answers a query: exactly, as a stale variant, or not at all."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from advisor.cache.key import PLACE, VARIANT, Environment, Field, Key, fields
from advisor.cache.key import of_environment as environment_fields
from advisor.cache.record import Record
from advisor.cache.task import Task, rows

if TYPE_CHECKING:
    from advisor.cache.reader import StoredRecord

MatchKind = Literal["exact", "compatible", "miss"]

SIZES = ("shapes", "others")
_DEVICES = tuple(name for name in PLACE if name.startswith("device."))
UNKNOWN = "?"
"""An unknown size in a task's `others`, as in 'mask 16x? bool'; `shapes` has 1 in its place."""
_INPUT = re.compile(r"(\S+) ([\d?]+(?:x[\d?]+)*) (\w+)")

Standing = tuple[float, ...]  # sort key of a stored key for a query; lower is better
_MISS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """The fields that a script asks for; a field that it leaves open is no constraint.

    Attributes:
        given: checked fields of a Task by name.
        model: its fingerprint; None if there is only a name.
        threads: number that torch uses on this CPU; 0 on another device.
        interconnect: as of a Key; None if it is not known.
    """

    environment: Environment
    given: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    threads: int = 0
    interconnect: str | None = None

    @property
    def batch(self) -> int | None:
        """The batch that is preferred among records that fit; it is no constraint."""
        shapes = self.given.get("shapes")
        return shapes[0][0] if shapes else None

    @property
    def stated(self) -> dict[str, Any]:
        """The wanted fields of a key by name. Libraries are missing: only a record names them."""
        known = rows(Task)
        found: dict[str, Any] = {n: getattr(self, n) for n in ("model", "threads", "interconnect")}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The record that answers, or on a miss the nearest one, if there is any.

    Attributes:
        answer: the part of the record that is served; `held`: where the record is. Both are None
            if nothing is served; `refused` says why, if a record fits.
        final: no other store could have a better record.
    """

    kind: MatchKind = "miss"
    record: Record | None = None
    differs: tuple[Difference, ...] = ()
    held: StoredRecord | None = None
    answer: Any = None
    refused: str = ""
    final: bool = False

    @property
    def fits(self) -> bool:
        return self.kind != "miss"


MISS = Match()


def compare(wanted: Key | Query, found: Key) -> tuple[MatchKind, tuple[Difference, ...]]:
    """How well a recorded key answers, and the fields that decide this.

    If the device differs, only its name or kind is reported: its other fields follow from that.
    """
    return compared(*_fields_of(wanted, found))


def _fields_of(wanted: Key | Query, found: Key) -> tuple[dict[str, Any], dict[str, Any]]:
    have = fields(found)
    if isinstance(wanted, Key):
        return fields(wanted), have
    return wanted.stated | {"libraries": tuple(map(_installed, found.libraries))}, have


def compared(
    want: Mapping[str, Field], have: Mapping[str, Field]
) -> tuple[MatchKind, tuple[Difference, ...]]:
    """As `compare`, from fields by name. Sizes that one side does not know make a record
    compatible, and are not reported as a difference."""

    def differing(names: Iterable[str]) -> list[Difference]:
        return [
            Difference(field=name, wanted=want[name], found=have[name])
            for name in names
            if name in want and want[name] != have[name]
        ]

    place = differing(PLACE)
    unknown = any(one.field in SIZES for one in place) and _sizes_fit(want, have)
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


def _sizes_fit(want: Mapping[str, Any], have: Mapping[str, Any]) -> bool:
    """Whether the inputs of two keys differ only in sizes that one of them does not know, because
    they differ from step to step. Which sizes a run showed depends on the steps that were seen."""
    if any(known.get("shapes") is None or "others" not in known for known in (want, have)):
        return False
    inputs, others = _inputs(want), _inputs(have)
    return inputs.keys() == others.keys() and all(
        len(sizes) == len(others[name])
        and all(a == b or UNKNOWN in (a, b) for a, b in zip(sizes, others[name], strict=True))
        for name, sizes in inputs.items()
    )


def _inputs(known: Mapping[str, Any]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The sizes of the first input, under (), and of other inputs by name and dtype. Parts that are
    no input have no sizes."""
    first = tuple(map(str, known["shapes"]))
    inputs: dict[tuple[str, ...], tuple[str, ...]] = {}
    more: dict[tuple[str, ...], tuple[str, ...]] = {}
    for part in filter(None, known["others"].split("; ")):
        if not (found := _INPUT.fullmatch(part)):
            more[(part,)] = ()
            continue
        sizes = tuple(found[2].split("x"))
        stored = tuple("1" if size == UNKNOWN else size for size in sizes)
        if not inputs and stored == first != sizes:
            first = sizes  # it is listed among the others if one of its sizes is unknown
        else:
            inputs[found[1], found[3]] = sizes
    return {(): first, **inputs, **more}


def best(query: Query, records: Iterable[Record]) -> Match:
    """The record that answers, or a miss with the nearest one.

    Records with the permissions that are asked for come first, then those that permit more; exact
    ones before compatible ones. Among equals the one nearest to the defaults wins, then a run for a
    run, then the batch that is asked for, then one that measured that batch, then the newest. A
    server that sends only the nearest records keeps this order.
    """
    found: list[tuple[Standing, Match]] = []
    for record in records:
        rank, differs = standing(*_fields_of(query, record.key))
        match = Match(kind=kind_of(rank), record=record, differs=differs)
        preference = (
            bool(query.given.get("command")) != bool(record.key.task.command),
            record.batch != query.batch,
            not any(trial.config.batch == query.batch for trial in record.trials),
        )
        order = *rank, *(preference if match.fits else ()), -record.provenance.created
        found.append((order, match))
    return min(found, key=lambda one: one[0])[1] if found else MISS


def standing(
    want: Mapping[str, Field], have: Mapping[str, Field]
) -> tuple[Standing, tuple[Difference, ...]]:
    """Return the first part of the sort key of `best`, and the differences, from fields by name.

    A record that permits more can answer from its trials. Fields that are left open and differ from
    their defaults count against it.
    """
    known = rows(Task)
    loose = {
        name: v for name, v in want.items() if name not in known or not known[name].is_constraint
    }
    for first, asked in ((0, want), (2, loose)):
        kind, differs = compared(asked, have)
        if kind != "miss":
            opened = (one for one in known.values() if one.decides and one.name != "shapes")
            unusual = sum(one.name not in asked and have[one.name] != one.default for one in opened)
            return (first + (kind == "compatible"), unusual), differs
    return (_MISS, len(differs)), differs


def kind_of(one: Standing) -> MatchKind:
    if one[0] >= _MISS:
        return "miss"
    return "compatible" if one[0] % 2 else "exact"


class SimilarRecord(Struct, frozen=True, kw_only=True):
    """A record whose advice is worth trying first. `what` says how it is similar."""

    record: Record
    what: str


def find_similar(key: Key, records: Iterable[Record]) -> list[SimilarRecord]:
    """Similar records of a key's model or family, nearest first: of the key; of the model under
    other software, at another sample, with other permissions, on another device of the
    architecture; then of the family, in this order. Of equals this batch first, then the newest."""
    want = fields(key)
    found: list[tuple[Standing, SimilarRecord]] = []
    for record in records:
        if similar := relation(want, fields(record.key)):
            near, what = similar
            order = *near, record.batch != key.task.batch, -record.provenance.created
            found.append((order, SimilarRecord(record=record, what=what)))
    return [one for _order, one in sorted(found, key=lambda pair: pair[0])]


def relation(want: Mapping[str, Field], have: Mapping[str, Field]) -> tuple[Standing, str] | None:
    """How near a key of the same model or family is, and how it is similar in words, from the
    fields of both keys; None for another architecture."""
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
    """Numbers in one sample; for a mix, in one sample of its first shape."""
    shapes: Sequence[Any] = known["shapes"]
    return math.prod(shapes[0][1:] if isinstance(shapes[0], tuple) else shapes)


@functools.cache
def _installed(library: str) -> str:
    """A record's library in the version that is installed here, such as 'torchvision==0.26.0'."""
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
