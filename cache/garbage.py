"""Records and artifacts that a store can do without, if the reader or their team signed them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from msgspec import Struct

from advisor.cache.artifacts import bare_reason, compiled_digest
from advisor.cache.name import Name, StoreKey, ranked
from advisor.cache.reader import grouped
from advisor.cache.records import Records
from advisor.cache.shown import size
from advisor.cache.stores import BLOBS, ByteStore
from advisor.errors import RecordDamaged, RecordNewer


class Garbage(Struct, frozen=True, kw_only=True):
    """A key that a store can do without. `reason` begins with its `kind`, one of KINDS."""

    store: ByteStore
    key: StoreKey
    reason: str

    @property
    def kind(self) -> str:
        return self.reason.partition(":")[0]

    @property
    def name(self) -> str:
        """The key of a record, or the name of an artifact."""
        return self.key.text.removeprefix(BLOBS)


KINDS = "superseded", "damaged", "oversized"  # only artifacts can be oversized


def find_garbage(records: Records, kinds: Sequence[str] = KINDS) -> list[Garbage]:
    """The garbage of all stores. Stores that cannot be read are in the records' `unreachable`.
    Raises StoreError if no store can be read."""
    there = records.of_each(lambda one: [*_versions(records, one), *_artifacts(records, one)])
    going = (Garbage(store=at, key=key, reason=why) for at, found in there for key, why in found)
    return [one for one in going if one.kind in kinds]


def _versions(records: Records, store: ByteStore) -> Iterator[tuple[StoreKey, str]]:
    """Yields damaged versions, and versions that rank behind a version of the same target's name
    with as much effort."""
    own = [name for name in records.names(store) if name.trusted]
    for group in grouped(own, lambda name: (name.record_key, name.target)).values():
        first: Name | None = None
        for name in ranked(group):
            if first is not None:
                if name.effort <= first.effort:
                    yield name, "superseded"
                continue
            data = store.get_many([name.text]).get(name.text)
            if data is not None and not name.is_of(data):
                yield name, "damaged: its bytes were changed"
            elif data is not None:
                with contextlib.suppress(RecordDamaged):  # a newer version may read it
                    records.read(name, data)
                    first = name


def _artifacts(records: Records, store: ByteStore) -> Iterator[tuple[StoreKey, str]]:
    """Yields artifacts that no record in the store refers to any more, or that nobody can load."""
    artifacts = records.artifacts
    there = {label: bytes_ for label, bytes_ in artifacts.on(store).items() if label.trusted}
    if not there:
        return
    advised: dict[str, set[str]] = {name.record_key: set() for name in records.names(store)}
    for one in records.look_into(store).held:
        chosen = (winner.choice.config for winner in one.record.winners)
        advised[one.name.record_key] |= {compiled_digest(one.record, c) for c in chosen}
    for label, bytes_ in there.items():
        configs = advised.get(label.record_key)  # empty if the record cannot be read
        what = f"{size(bytes_)} of artifacts"
        if configs is None:
            yield label, f"superseded: {what}: their record is gone"
        elif bytes_ > (most := artifacts.most):
            yield label, f"oversized: {what}: larger than {most} bytes (ADVISOR_MAX_ARTIFACTS)"
        elif configs and label.config not in configs:
            yield label, f"superseded: {what}: their config is no longer advised"
        else:
            try:
                artifacts.checked(store, label)
            except RecordDamaged as exc:
                if not isinstance(exc, RecordNewer):  # a newer version may load it
                    yield label, f"damaged: {what}: {bare_reason(exc)}"
