"""What a tuning leaves: its record, what was compiled for it, its study; and how they go again."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from advisor.cache.artifacts import Purpose
from advisor.cache.config import Config
from advisor.cache.name import Name, called
from advisor.cache.reader import Sought
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.settings import max_artifacts
from advisor.cache.shown import size
from advisor.cache.stores import Remote, Store
from advisor.cache.stores.filesystem import beside, make_folder
from advisor.errors import Busy, StoreDamaged, StoreError
from advisor.tuners.search.plan import Progress


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
            aside = store.set_aside()
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
    held = records.held(Sought(model=key.model, id=key.id, batch=record.batch)) if versions else []
    of_run = bool(key.task.command)
    others = {
        called(one.record.target) for one in held if bool(one.record.key.task.command) != of_run
    }
    return [(store, name) for store, name in versions if name.called not in others]


def forget_studies(records: Records, record: Record) -> None:
    """Remove the studies behind a record.

    Raises:
        Busy: another process tunes the same key.
    """
    for study in records.studies.glob(f"{record.id}-*.journal"):
        with locked(study.parent, study.stem):
            study.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """While no other process measures the study `name`.

    Raises:
        Busy: one does. StoreError: the folder cannot be written, or a link lies in its place.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(beside(folder, f"{name}.lock"))
    try:
        make_folder(folder)
        lock.acquire(timeout=0)
    except Timeout as exc:
        raise Busy("another advisor tune measures this very key now; wait for it") from exc
    except OSError as exc:
        raise StoreError(
            f"cache {folder.parent}: {exc.strerror or exc}; point --cache or ADVISOR_CACHE to "
            "another folder"
        ) from exc
    try:
        yield
    finally:
        lock.release()
