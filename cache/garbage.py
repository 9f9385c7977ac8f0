"""What a store can do without, of what the reader or their team signed.

Whatever others wrote stays, and so does the only record for an environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.cache.artifacts import Label, compiled_of
from advisor.cache.match import place_of
from advisor.cache.name import MARKS, Mark, Name, ranked
from advisor.cache.reader import Marks, stale_of
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.shown import size
from advisor.cache.stores import Store
from advisor.errors import RecordDamaged, StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """A key that a store can do without, or a file that a killed writer left.

    Attributes:
        reason: why it may go; the first word is its `kind`.
    """

    store: Store
    named: Name | Mark | Label | Path
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
        return self.named.text if isinstance(self.named, Name | Mark) else self.named.name

    def remove(self) -> None:
        """Raises StoreError or OSError if it cannot be removed."""
        if isinstance(self.named, Path):
            self.named.unlink(missing_ok=True)
        else:
            self.store.delete(self.named.text)


LEFT = "left by a writer that was killed"
KINDS = "superseded", "stale", "damaged", "oversized"
"""Why records and artifacts may go; only artifacts are damaged or oversized."""


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
    return [
        *_versions(records, store),
        *_artifacts(records, store),
        *(Garbage(store=store, named=path, reason=LEFT) for path in store.leftovers()),
    ]


def _versions(records: Records, store: Store) -> Iterator[Garbage]:
    """Versions behind one of at least their effort under the same target's name, marks that a newer
    one replaces or whose version is gone, and records that their GPU has outlived."""
    texts = store.keys()
    names = [name for text in texts if (name := records.parse(text)) and name.trusted]
    newest: Marks = {}
    records.mark(newest, store, texts)
    versions = {(name.place, name.version.digest) for text in texts if (name := Name.parse(text))}
    for text in texts:
        mark = records.parse_mark(text) if text.startswith(MARKS) else None
        if mark and (newest[mark.version_of][0] != mark or mark.version_of not in versions):
            yield Garbage(store=store, named=mark, reason="superseded")
    counting: list[tuple[Name, Record]] = []
    groups: dict[tuple[str, str, str], list[Name]] = {}
    for name in names:
        groups.setdefault((name.place, *name.called), []).append(name)
    for group in groups.values():
        first: Name | None = None
        for name in ranked(group, stale_of(group, newest)):
            if first is not None:
                if name.version.effort <= first.version.effort:
                    yield Garbage(store=store, named=name, reason="superseded")
                continue
            with contextlib.suppress(RecordDamaged):  # not for this version to judge
                data = store.get_many([name.text]).get(name.text)
                if data is not None:
                    counting.append((name, records.read(name, data)))
                    first = name
    for name, change in _outlived(counting):
        yield Garbage(store=store, named=name, reason=f"stale: {change} on the same GPU since")


def _outlived(counting: Iterable[tuple[Name, Record]]) -> Iterator[tuple[Name, str]]:
    """Records of a GPU that runs under another driver by now, and was measured again for their task
    with at least their effort; and the change of driver."""
    machines: dict[str, list[tuple[Name, Record]]] = {}
    for name, record in counting:
        if record.provenance.device_uuid:  # else nobody knows which machine it was
            machines.setdefault(record.provenance.device_uuid, []).append((name, record))
    for there in machines.values():
        _name, last = max(there, key=lambda pair: pair[1].provenance.created)
        now = _driver(last)
        again = {
            (place_of(record.key), record.batch): name.version.effort
            for name, record in there
            if _driver(record) == now and not record.stale
        }
        for name, record in there:
            task = place_of(record.key), record.batch
            if _driver(record) != now and again.get(task, -1) >= name.version.effort:
                yield name, f"driver {_driver(record)} -> {now}"


def _driver(record: Record) -> str:
    return record.key.environment.software.driver


def _artifacts(records: Records, store: Store) -> Iterator[Garbage]:
    """Artifacts that no record in the store leads to any more, or that nobody can load."""
    artifacts = records.artifacts
    there = {label: size for label, size in artifacts.on(store).items() if label.trusted}
    if not there:
        return
    advised: dict[str, set[str]] = {name.place: set() for name in records.names(store)}
    for one in records.look_into(store).held:
        configs = (winner.choice.config for winner in one.record.winners)
        advised[one.name.place] |= {compiled_of(one.record, config) for config in configs}
    for label, bytes_ in there.items():
        if found := artifacts.useless(store, label, bytes_, advised):
            kind, why = found
            reason = f"{kind}: {size(bytes_)} of artifacts: {why}"
            yield Garbage(store=store, named=label, reason=reason)
