"""Store what a tuning leaves: its record, compiled code and study; and lock what it measures on."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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
from advisor.cache.stores import Remote, Store
from advisor.cache.stores.filesystem import REMEDY, beside, make_folder
from advisor.errors import Busy, StoreDamaged, StoreError
from advisor.tuners.search.plan import Progress

HOST = "cpu"
"""The name of the lock for a host's own cores."""


def check_writable(records: Records, progress: Progress) -> None:
    """Raise StoreError if no store can take a record. A damaged store is moved aside."""
    failed: StoreError | None = None
    for store in records.stores:
        try:
            return store.check_writable()
        except StoreDamaged as exc:
            aside = store.quarantine()
            return progress.notice(
                f"the store was damaged ({exc}); it is now in {aside}, a new one is begun"
            )
        except StoreError as exc:
            failed = failed or exc
    if failed is not None:
        raise failed


def keep(records: Records, record: Record, anew: bool, progress: Progress) -> Store:
    """Store a record, and return where. Warn about remote stores that could not take it. With
    `anew` it replaces earlier versions there, also those of more effort."""
    before = _versions(records, record) if anew else []
    kept = records.put(record)
    faults = list(records.unreachable)
    records.remove((s, name) for s, name in before if s is kept and records.is_ours(name))
    for store, fault in zip(records.stores, faults, strict=False):
        if isinstance(store, Remote):
            progress.warning(
                f"{fault}; the record is kept in {kept.url}. To push it later: "
                f"advisor sync {shlex.quote(kept.url)} {shlex.quote(store.url)}"
            )
    return kept


def keep_artifacts(
    records: Records,
    record: Record,
    files: Mapping[Config, Path],
    store: Store,
    progress: Progress,
) -> None:
    """Store what was compiled for a record's configs beside it."""
    from advisor.tuners import knobs
    from advisor.tuners.act.artifacts import saved

    artifacts, where = records.artifacts, record.key.environment
    for config, file in files.items():
        if (found := saved(file)) is None:
            continue
        tools, data = found
        what = knobs.described(config, record.baseline.config)
        try:
            kept = artifacts.keep(data, Purpose.of(record, config, where, tools), store)
        except StoreError as exc:
            return progress.warning(f"what was compiled is not kept: {exc}")
        limit = f"over {size(max_artifacts())} (ADVISOR_MAX_ARTIFACTS)"
        why = f"not kept: {artifacts.unsigned or limit}"
        said = f"{size(kept)} are kept with the record" if kept else why
        progress.notice(f"compiled for {what}: {said}")


def _versions(records: Records, record: Record) -> list[tuple[Store, Name]]:
    """Every version of a record. Runs and targets that were measured under one key count as two."""
    key = record.key
    versions = records.versions(record)
    held = (
        records.held(RecordFilter(model=key.model, id=key.id, batch=record.batch))
        if versions
        else []
    )
    of_run = bool(key.task.command)
    others = {
        target_key(one.record.target) for one in held if bool(one.record.key.task.command) != of_run
    }
    return [(store, name) for store, name in versions if name.target not in others]


def forget_studies(records: Records, record: Record) -> None:
    """Remove the studies behind a record. Raises Busy while another process tunes its key."""
    for study in records.studies.glob(f"{record.id}-*.journal"):
        with locked(study.parent, study.stem):
            study.unlink(missing_ok=True)


@contextlib.contextmanager
def measuring(records: Records, what: Sequence[str], devices: Sequence[str]) -> Iterator[None]:
    """Lock these devices, and a command or target, while they are measured.

    A GPU's lock is this user's on this machine, whatever store is used. The host's is the store's:
    its cores are everybody's anyway.

    Args:
        what: words of the command, or the target.
        devices: as `lock_names` returns them.

    Raises:
        Busy: another process measures. UsageError: the store has no folder.
    """
    own = own_folder()
    locks = [(records.studies, list(what), "measures this very command now; wait for it")]
    for device in sorted(set(devices), reverse=True):
        if device == HOST:
            said = "measures on this host's CPU now; wait for it"
            locks.append((records.studies, [HOST], said))
        else:
            folder = own / "devices" if own else records.studies
            said = f"measures on GPU {device} now; wait for it, or set CUDA_VISIBLE_DEVICES"
            locks.append((folder, [device, platform.node()], said))
    with contextlib.ExitStack() as held:
        for folder, parts, said in reversed(locks):
            # A folder that cannot be written is reported before anything is measured.
            with contextlib.suppress(StoreError):
                held.enter_context(locked(folder, fingerprint(parts)[:12], said))
        yield


def lock_names(device: str | None = None) -> list[str]:
    """The UUID of the GPU of this name, or HOST; None: of all that a command may use."""
    from advisor.tuners.environment import cuda_index, gpus

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
    """Hold the lock `name`.

    Args:
        said: what another process that holds it does, and what to do.

    Raises:
        Busy: one does. StoreError: the folder cannot be written, or a link lies in its place.
    """
    from filelock import FileLock, Timeout

    lock, holder = FileLock(beside(folder, f"{name}.lock")), beside(folder, f"{name}.pid")
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
        raise StoreError(f"cache {folder.parent}: {exc.strerror or exc}; {REMEDY}") from exc
    try:
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()
