"""What a store can do without, of what the reader or their team signed.

Whatever others wrote stays, and so does the only record for an environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.cache.artifacts import Artifacts, Label, bare_reason, compiled_digest
from advisor.cache.match import place_of
from advisor.cache.name import Name, StoreKey, ranked
from advisor.cache.reader import grouped
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.shown import size
from advisor.cache.stores import Store
from advisor.errors import RecordDamaged, RecordNewer, StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """A key that a store can do without, or a file that a killed writer left.

    Attributes:
        reason: why it may go; the first word is its `kind`.
    """

    store: Store
    named: StoreKey | Path
    reason: str

    @property
    def kind(self) -> str:
        return self.reason.partition(":")[0]

    @property
    def what(self) -> str:
        """The id of the record, or the name of the file."""
        return self.named.name if isinstance(self.named, Path) else self.named.record_id

    @property
    def name(self) -> str:
        """The key of a record, or the name of an artifact or file."""
        return self.named.name if isinstance(self.named, Label | Path) else self.named.text

    def remove(self) -> None:
        """Raises StoreError or OSError if it cannot be removed."""
        if isinstance(self.named, Path):
            self.named.unlink(missing_ok=True)
        else:
            self.store.delete(self.named.text)


LEFT = "left by a writer that was killed"
KINDS = "superseded", "stale", "damaged", "oversized"
"""Why records and artifacts may go; only artifacts are oversized."""


def all_garbage(records: Records, kinds: Sequence[str] = KINDS) -> list[Garbage]:
    """What may go from each store. Stores that cannot be read are in the records' `unreachable`.

    Raises:
        StoreError: no store can be read.
    """
    there = records.of_each(lambda store: garbage(records, store))
    return [one for _store, going in there for one in going if one.kind in (*kinds, LEFT)]


def remove(going: Iterable[Garbage]) -> list[str]:
    """Remove exactly these; a line for each that stays."""
    stuck = []
    for one in going:
        try:
            one.remove()
        except (StoreError, OSError) as exc:
            stuck.append(f"{one.what}: {exc}")
    return stuck


def garbage(records: Records, store: Store) -> list[Garbage]:
    """All of it in one store.

    Raises:
        StoreError: the store cannot be read.
    """
    found = [*_versions(records, store), *_artifacts(records, store)]
    return [
        *(Garbage(store=store, named=key, reason=reason) for key, reason in found),
        *(Garbage(store=store, named=path, reason=LEFT) for path in store.leftovers()),
    ]


def _versions(records: Records, store: Store) -> Iterator[tuple[StoreKey, str]]:
    """Damaged versions; versions behind one of at least their effort under the same target's name;
    records of an earlier driver."""
    counting: list[tuple[Name, Record]] = []
    own = [name for name in records.names(store) if name.trusted]
    for group in grouped(own, lambda name: (name.record_key, name.target)).values():
        first: Name | None = None
        for name in ranked(group):
            if first is not None:
                if name.effort <= first.effort:
                    yield name, "superseded"
            elif (data := store.get_many([name.text]).get(name.text)) is not None:
                if name.is_of(data):
                    with contextlib.suppress(RecordDamaged):  # a newer version may read it
                        counting.append((name, records.read(name, data)[0]))
                        first = name
                else:
                    yield name, "damaged: its bytes are not what was written"
    for name, change in _outdated(counting):
        yield name, f"stale: {change} on the same GPU since"


def _outdated(counting: Iterable[tuple[Name, Record]]) -> Iterator[tuple[Name, str]]:
    """Records of a GPU that has another driver now and was measured again for their task with at
    least their effort; and the change of driver."""
    known = [pair for pair in counting if pair[1].provenance.device_uuid]
    for there in grouped(known, lambda pair: pair[1].provenance.device_uuid).values():
        _name, last = max(there, key=lambda pair: pair[1].provenance.created)
        now = _driver(last)
        again = {
            (place_of(record.key), record.batch): name.effort
            for name, record in there
            if _driver(record) == now and not record.stale
        }
        for name, record in there:
            task = place_of(record.key), record.batch
            if _driver(record) != now and again.get(task, -1) >= name.effort:
                yield name, f"driver {_driver(record)} -> {now}"


def _driver(record: Record) -> str:
    return record.key.environment.software.driver


def _artifacts(records: Records, store: Store) -> Iterator[tuple[StoreKey, str]]:
    """Artifacts that no record in the store leads to any more, or that nobody can load."""
    artifacts = records.artifacts
    there = {label: bytes_ for label, bytes_ in artifacts.on(store).items() if label.trusted}
    if not there:
        return
    advised: dict[str, set[str]] = {name.record_key: set() for name in records.names(store)}
    for one in records.look_into(store).held:
        configs = (winner.choice.config for winner in one.record.winners)
        advised[one.name.record_key] |= {compiled_digest(one.record, c) for c in configs}
    for label, bytes_ in there.items():
        if found := _fault(artifacts, store, label, bytes_, advised.get(label.record_key)):
            kind, why = found
            yield label, f"{kind}: {size(bytes_)} of artifacts: {why}"


def _fault(
    artifacts: Artifacts, store: Store, label: Label, bytes_: int, advised: Collection[str] | None
) -> tuple[str, str] | None:
    """The kind of garbage that artifacts are and why; None if they are of use.

    Args:
        advised: the configs of their record; empty if it cannot be read, None if it is gone.
    """
    if advised is None:
        return "superseded", "their record is gone"
    if bytes_ > artifacts.most:
        return "oversized", f"larger than {artifacts.most} bytes (ADVISOR_MAX_ARTIFACTS)"
    if advised and label.config not in advised:
        return "superseded", "their config is advised no more"
    try:
        artifacts.checked(store, label)
    except RecordNewer:  # a newer version may load it
        return None
    except RecordDamaged as exc:
        return "damaged", bare_reason(exc)
    return None
