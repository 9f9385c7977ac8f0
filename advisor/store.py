"""Store: the records in one place, or in several that are read in order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from advisor.cache import exchange, garbage
from advisor.cache.exchange import CopyResult
from advisor.cache.record import Record, Wanted, every
from advisor.cache.records import Records
from advisor.cache.settings import Cache, cache_urls
from advisor.cache.stores import open_stores
from advisor.cache.stores.url import without_password
from advisor.errors import AdvisorWarning, StoreError, check_type
from advisor.open_store import open_records


class Store:
    """The records and compiled code in one or several stores.

        Store("https://advisor.example").sync("dir:/data/records")

    A method raises StoreError if it can read (or, to write, write) none of the stores. One
    AdvisorWarning names other stores and records that could not be read.

    Args:
        url: a folder, a store's URL, or several; None for what $ADVISOR_CACHE names, else the
            nearest pyproject.toml, else the user's cache folder.

    Raises:
        UsageError: `url` is none of these.
    """

    def __init__(self, url: Cache = None) -> None:
        self.urls = cache_urls(url)

    def __repr__(self) -> str:
        return f"Store({', '.join(map(without_password, self.urls)) or None!r})"

    def records(self) -> list[Record]:
        """The newest version of every record that can be read."""
        records = self._open()
        found = records.all()
        _warn(records)
        return found

    def export(self, path: str | os.PathLike[str], *, only: Wanted = every) -> int:
        """Write the records for which `only` is true into the pack `path`. Returns their number.

        Raises:
            NoRecord: `only` is true for no record.
        """
        file, records = _file(path, only), self._open()
        count = exchange.export(records, file, only)
        _warn(records)
        return count

    def import_(self, path: str | os.PathLike[str], *, only: Wanted = every) -> list[CopyResult]:
        """Copy the records of the pack `path` for which `only` is true into the first store that
        can be written. Returns each record's outcome.

        Raises:
            UsageError: there is no such file.
        """
        return list(exchange.unpack(_file(path, only), self._open(), only)[1])

    def sync(
        self, other: Store | str | os.PathLike[str], *, only: Wanted = every
    ) -> list[CopyResult]:
        """Copy the records that `other` lacks into `other`. Returns each record's outcome. Records
        in `other` stay unchanged.

        Raises:
            UsageError: this or `other` is several stores, or both are the same store.
        """
        check_type("only", only, Callable, "a function of a record")
        target = other if isinstance(other, Store) else Store(other)
        sides = (side.urls or (open_stores()[0].url,) for side in (self, target))
        urls = [url for side in sides for url in side]
        return list(exchange.sync(open_records(urls), only))

    def prune(self, *, dry_run: bool = True) -> list[garbage.Garbage]:
        """Find superseded records and unused artifacts among those that you measured.
        Returns them; with `dry_run=False`, also removes them.

        Raises:
            StoreError: also if an item cannot be removed; the other items are removed.
        """
        records = self._open()
        going = garbage.find_garbage(records)
        _warn(records)
        if not dry_run:
            records.remove((one.store, one.key) for one in going)
        if records.stuck:
            raise StoreError(f"not removed: {'; '.join(records.stuck)}")
        return going

    def _open(self) -> Records:
        return open_records(self.urls or None)


def _file(path: str | os.PathLike[str], only: Wanted) -> Path:
    """The path of a pack. Raises UsageError if `path` or `only` has a wrong type."""
    check_type("path", path, (str, os.PathLike), "the path of a file")
    check_type("only", only, Callable, "a function of a record")
    return Path(path)


def _warn(records: Records) -> None:
    """Warn in one line of stores and records that could not be read."""
    lines = [*records.unreachable, *(f"record {line}" for line in records.damaged)]
    if lines:
        more = f"; {len(lines) - 1} more cannot be read, see advisor show" if lines[1:] else ""
        warnings.warn(f"advisor: {lines[0]}{more}", AdvisorWarning, stacklevel=3)
