"""Store a tuning's record and compiled code, remove studies, and lock devices."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from advisor.cache.artifacts import Purpose
from advisor.cache.config import Config
from advisor.cache.key import fingerprint
from advisor.cache.name import Name, target_key
from advisor.cache.reader import RecordFilter
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.settings import max_artifacts
from advisor.cache.shown import size
from advisor.cache.signing import own_folder
from advisor.cache.stores import ByteStore, Remote
from advisor.cache.stores.filesystem import REMEDY, make_folder, study_file
from advisor.errors import Busy, StoreDamaged, StoreError, reason
from advisor.tuners.environment import cuda_index, gpus
from advisor.tuners.knobs import described
from advisor.tuners.search.plan import Progress

HOST = "cpu"  # the lock name of the host's CPU


def check_writable(records: Records, progress: Progress) -> None:
    """Raise StoreError if no store can take a record. A damaged store is moved aside."""

    def check(store: ByteStore) -> None:
        try:
            store.check_writable()
        except StoreDamaged as exc:
            aside = store.quarantine()
            what = str(exc).partition("; ")[0]
            progress.notice(f"{what}; it was moved to {aside}, and a new store is created")

    next(records.of_each(check))


def keep(records: Records, record: Record, anew: bool, progress: Progress) -> ByteStore:
    """Store a record. Returns the store that took it; warns of remote stores that could not.
    With `anew`, remove earlier versions from that store, even those of more effort."""
    before = _versions(records, record) if anew else []
    kept = records.put(record)
    faults = list(records.unreachable)
    records.remove((s, name) for s, name in before if s is kept and records.is_ours(name))
    for store, fault in zip(records.stores, faults, strict=False):
        if isinstance(store, Remote):
            push = f"advisor sync {shlex.quote(kept.url)} {shlex.quote(store.url)}"
            said = f"{fault}; the record is kept in {kept.url}. To push it later: {push}"
            progress.warning(said)
    return kept


def keep_artifacts(
    records: Records,
    record: Record,
    files: Mapping[Config, Path],
    store: ByteStore,
    progress: Progress,
) -> None:
    """Store the compiled code of a record's configs in the record's store."""
    from advisor.tuners.act.artifacts import saved

    artifacts, where = records.artifacts, record.key.environment
    for config, file in files.items():
        if (found := saved(file)) is None:
            continue
        tools, data = found
        what = described(config, record.baseline.config)
        try:
            kept = artifacts.keep(data, Purpose.of(record, config, where, tools), store)
        except StoreError as exc:
            return progress.warning(f"compiled code is not kept: {exc}")
        limit = f"over {size(max_artifacts())} (ADVISOR_MAX_ARTIFACTS)"
        why = f"not kept: {artifacts.unsigned or limit}"
        said = f"{size(kept)} kept with the record" if kept else why
        progress.notice(f"compiled code for {what}: {said}")


def _versions(records: Records, record: Record) -> list[tuple[ByteStore, Name]]:
    """Every version of a record. A run and a target with the same key have separate records."""
    key = record.key
    same = RecordFilter(model=key.model, id=key.id, batch=record.batch)
    others = {
        target_key(one.record.target)
        for one in records.held(same)
        if bool(one.record.key.task.command) != bool(key.task.command)
    }
    versions = records.versions(key.id, record.batch)
    return [(store, name) for store, name in versions if name.target not in others]


def forget_studies(records: Records, record: Record) -> None:
    """Remove the studies of a record. Raises Busy if another process is tuning its key."""
    for study in records.studies.glob(f"{record.id}-*.journal"):
        with locked(study.parent, study.stem):
            study.unlink(missing_ok=True)


@contextlib.contextmanager
def measuring(records: Records, what: Sequence[str], devices: Sequence[str]) -> Iterator[None]:
    """Context manager: locks devices (by their `lock_names`), and the words of a command or target,
    while they are measured. Raises Busy if another process holds a lock, UsageError if the store
    has no folder.

    A GPU's lock covers all tunings of this user on this machine. The CPU's lock covers one store
    only, because other users share the cores anyway.
    """
    own = own_folder()
    locks = []
    for device in sorted(set(devices)):
        if device == HOST:
            locks.append((records.studies, [HOST], "measures on this host's CPU now; wait for it"))
        else:
            folder = own / "devices" if own else records.studies
            said = f"measures on GPU {device} now; wait for it, or set CUDA_VISIBLE_DEVICES"
            locks.append((folder, [device, platform.node()], said))
    locks.append((records.studies, list(what), "measures this very command now; wait for it"))
    with contextlib.ExitStack() as held:
        for folder, parts, said in locks:
            # A folder that cannot be written gets no lock here: `check_writable` reports it.
            with contextlib.suppress(StoreError):
                held.enter_context(locked(folder, fingerprint(parts)[:12], said))
        yield


def lock_names(device: str | None = None) -> list[str]:
    """[UUID] of the GPU called `device`, or [HOST]. None: of all devices that a command may use."""
    if device == "cpu":
        return [HOST]
    found = [one.uuid for one in gpus()]
    if device is None:
        return found or [HOST]
    index = cuda_index(device)
    return [found[index] if index < len(found) else device]


@contextlib.contextmanager
def locked(
    folder: Path, name: str, said: str = "measures this very key now; wait for it"
) -> Iterator[None]:
    """Context manager: holds the lock `name` in a folder. Raises Busy with a message that ends with
    `said` if another process holds it, StoreError if the folder cannot be written or is a link."""
    lock, holder = FileLock(study_file(folder, f"{name}.lock")), study_file(folder, f"{name}.pid")
    try:
        make_folder(folder)
        lock.acquire(timeout=0)
        holder.write_text(str(os.getpid()))
    except Timeout as exc:
        number = ""
        with contextlib.suppress(OSError):
            number = holder.read_text()
        who = f" (process {number})" if number.isdecimal() else ""
        raise Busy(f"another advisor{who} {said}") from exc
    except OSError as exc:
        raise StoreError(f"cache {folder.parent}: {reason(exc)}; {REMEDY}") from exc
    try:
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()
