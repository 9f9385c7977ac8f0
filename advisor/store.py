"""Store: the records in one place, or in several that are read in order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.cache.settings import Cache, cache_urls

if TYPE_CHECKING:
    from advisor.cache.exchange import Carried
    from advisor.cache.garbage import Garbage
    from advisor.cache.record import Record
    from advisor.cache.records import Records

Wanted = Callable[["Record"], bool]


def _every(_record: Record) -> bool:
    return True


class Store:
    """Records, and what is kept with them.

        Store("https://advisor.example").sync("dir:/data/records")

    Every method raises StoreError if no store can be read, or none written if it writes. One
    AdvisorWarning names what else could not be read.

    Args:
        url: a folder, a store's URL, or several; None for what $ADVISOR_CACHE names, else the
            nearest pyproject.toml, else the user's cache folder.

    Raises:
        UsageError: `url` is none of these.
    """

    def __init__(self, url: Cache = None) -> None:
        self.urls = cache_urls(url)

    def __repr__(self) -> str:
        from advisor.cache.stores.url import without_password

        return f"Store({', '.join(map(without_password, self.urls)) or None!r})"

    def records(self) -> list[Record]:
        """The newest version of every record that can be read."""
        records = self._open()
        found = records.all()
        _warn(records)
        return found

    def export(self, path: str | os.PathLike[str], *, only: Wanted = _every) -> int:
        """Write the records for which `only` is true into the pack `path`, and return how many.

        Raises:
            NoRecord: no record fits.
        """
        from advisor.cache import exchange

        records = self._open()
        count = exchange.export(records, Path(path), only)
        _warn(records)
        return count

    def import_(self, path: str | os.PathLike[str], *, only: Wanted = _every) -> list[Carried]:
        """Copy the records of the pack `path` for which `only` is true into the first store that
        can be written, and return what became of each.

        Raises:
            UsageError: there is no such file.
        """
        from advisor.cache import exchange

        return list(exchange.unpack(Path(path), self._open(), only)[1])

    def sync(
        self, other: Store | str | os.PathLike[str], *, only: Wanted = _every
    ) -> list[Carried]:
        """Copy what this store has and `other` has not into `other`, and return what became of
        each. No record there is changed or lost.

        Raises:
            UsageError: one of them is several stores, or both are the same.
        """
        from advisor.cache import exchange
        from advisor.cache.stores import open_stores
        from advisor.open_store import open_records

        target = other if isinstance(other, Store) else Store(other)
        sides = (side.urls or (open_stores()[0].url,) for side in (self, target))
        urls = [url for side in sides for url in side]
        return list(exchange.sync(open_records(urls), only))

    def prune(self, *, dry_run: bool = True) -> list[Garbage]:
        """List what may go of what you measured: superseded and stale records, unused artifacts,
        files of writers that were killed. With `dry_run=False` remove it.

        Raises:
            StoreError: also if something cannot be removed; the rest is gone then.
        """
        from advisor.cache import garbage
        from advisor.errors import StoreError

        records = self._open()
        going = garbage.all_garbage(records)
        _warn(records)
        if not dry_run and (stuck := garbage.remove(going)):
            raise StoreError(f"not removed: {'; '.join(stuck)}")
        return going

    def _open(self) -> Records:
        from advisor.open_store import open_records

        return open_records(self.urls or None)


def _warn(records: Records) -> None:
    """Name what could not be read in one line."""
    from advisor.errors import AdvisorWarning

    lines = [*records.unreachable, *(f"record {line}" for line in records.damaged)]
    if lines:
        more = f"; {len(lines) - 1} more cannot be read, see advisor show" if lines[1:] else ""
        warnings.warn(f"advisor: {lines[0]}{more}", AdvisorWarning, stacklevel=3)
