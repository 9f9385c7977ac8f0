"""What a tuning leaves: its record, what was compiled for it, its study; and how they go again."""

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
from advisor.cache.seal import own_folder
from advisor.cache.settings import max_artifacts
from advisor.cache.shown import size
from advisor.cache.stores import Remote, Store
from advisor.cache.stores.filesystem import beside, make_folder
from advisor.errors import Busy, StoreDamaged, StoreError
from advisor.tuners.search.plan import Progress

HOST = "cpu"
"""What the lock of a host's own cores is called."""


def check_writable(records: Records, progress: Progress) -> None:
    """Before anything is measured: some store takes the record. A damaged one is moved aside.

    Raises:
        StoreError: none can be written.
    """
    failed: StoreError | None = None
    for store in records.stores:
        try:
            store.check_writable()
        except StoreDamaged as exc:
            aside = store.quarantine()
            progress.notice(
                f"the store was damaged ({exc}); it is now in {aside}, a new one is begun"
            )
            return
        except StoreError as exc:
            failed = failed or exc
        else:
            return
    if failed is not None:
        raise failed


def keep(records: Records, record: Record, anew: bool, progress: Progress) -> Store:
    """Put it where it can be put, and say where that is if it is not where it should be.

    What is measured anew on purpose, or finished, counts there, also where there was a record of
    more effort.

    Returns:
        Where it is.
    """
    before = _versions(records, record) if anew else []
    kept = records.put(record)
    faults = list(records.unreachable)
    records.remove((s, name) for s, name in before if s is kept and records.is_ours(name))
    passed_over = records.stores[: records.stores.index(kept)]
    for store, fault in zip(passed_over, faults, strict=True):
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
    """Put what was compiled for a record's configs beside it. Without it, it is compiled anew."""
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
            progress.warning(f"what was compiled is not kept: {exc}")
            return
        progress.notice(
            f"compiled for {what}: {size(kept)} are kept with the record"
            if kept
            else f"compiled for {what}: not kept: "
            + (artifacts.unsigned or f"over {size(max_artifacts())} (ADVISOR_MAX_ARTIFACTS)")
        )


def _versions(records: Records, record: Record) -> list[tuple[Store, Name]]:
    """Every version of a record; what runs and targets measured under one key are two."""
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
    """Remove the studies behind a record.

    Raises:
        Busy: another process tunes the same key.
    """
    for study in records.studies.glob(f"{record.id}-*.journal"):
        with locked(study.parent, study.stem):
            study.unlink(missing_ok=True)


@contextlib.contextmanager
def measuring(records: Records, what: Sequence[str], devices: Sequence[str]) -> Iterator[None]:
    """While no other process measures on these devices, or the same command or target.

    Taken before anything is started or removed. A GPU's lock is this user's on this machine,
    whatever store is used. The host's is the store's: its cores are everybody's anyway.

    Args:
        what: words of the command, or the target.
        devices: as `lock_names` has them.

    Raises:
        Busy: another process does. UsageError: the store has no folder.
    """
    with contextlib.ExitStack() as held:
        for device in sorted(set(devices)):
            folder = records.studies if device == HOST else _of_machine() or records.studies
            free = "wait for it" if device == HOST else "wait for it, or set CUDA_VISIBLE_DEVICES"
            host = [] if device == HOST else [platform.node()]
            on = "this host's CPU" if device == HOST else f"GPU {device}"
            _hold(held, folder, [device, *host], f"measures on {on} now; {free}")
        _hold(held, records.studies, list(what), "measures this very command now; wait for it")
        yield


def _hold(held: contextlib.ExitStack, folder: Path, parts: list[str], said: str) -> None:
    # A folder that cannot be written is told of, in more words, before anything is measured.
    with contextlib.suppress(StoreError):
        held.enter_context(locked(folder, fingerprint(parts)[:12], said))


def _of_machine() -> Path | None:
    folder = own_folder()
    return None if folder is None else folder / "devices"


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
    """While no other process holds the lock `name`.

    Args:
        said: what the other one does, and what to do.

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
        raise Busy(f"another advisor{_process(holder)} {said}") from exc
    except OSError as exc:
        raise StoreError(
            f"cache {folder.parent}: {exc.strerror or exc}; point --cache or ADVISOR_CACHE to "
            "another folder"
        ) from exc
    try:
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _process(holder: Path) -> str:
    """The process that a file names, as ' (process 123)'; '' where it names none."""
    try:
        number = holder.read_text()
    except OSError:
        return ""
    return f" (process {number})" if number.isdecimal() else ""
