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

Wanted = Callable[["Record"], bool]


def _every(_record: Record) -> bool:
    return True


class Store:
    """Records, and what is kept with them.

        Store("https://advisor.example").sync("dir:/data/records")

    Every method raises StoreError where the store cannot be read, or written if it writes.

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
        from advisor.opening import open_records

        return open_records(self._cache).all()

    def export(self, path: str | os.PathLike[str], *, only: Wanted = _every) -> int:
        """Write the records for which `only` is true into the pack `path`, and return how many.

        What cannot be read is left out, with an AdvisorWarning each.

        Raises:
            NoRecord: no record fits.
        """
        from advisor import sharing
        from advisor.errors import AdvisorWarning

        count, damaged = sharing.export(Path(path), only, cache=self._cache)
        for line in damaged:
            warnings.warn(f"advisor: {line}", AdvisorWarning, stacklevel=2)
        return count

    def import_(self, path: str | os.PathLike[str], *, only: Wanted = _every) -> list[Carried]:
        """Take the records of the pack `path` for which `only` is true into the first store that
        can be written, and return what became of each.

        Raises:
            UsageError: there is no such file.
        """
        from advisor import sharing

        return list(sharing.import_(Path(path), only, cache=self._cache)[1])

    def sync(
        self, other: Store | str | os.PathLike[str], *, only: Wanted = _every
    ) -> list[Carried]:
        """Copy what this store has and `other` has not into `other`, and return what became of
        each. No record there is changed or lost.

        Raises:
            UsageError: one of them is several stores, or both are the same.
        """
        from advisor import sharing

        target = other if isinstance(other, Store) else Store(other)
        return list(sharing.sync(self._single(), target._single(), only))

    def prune(self, *, dry_run: bool = True) -> list[Garbage]:
        """List what may go of what you measured: superseded and stale records, unused artifacts,
        files of writers that were killed. With `dry_run=False` remove it.

        Raises:
            StoreError: also where something of it cannot be removed; the rest is gone then.
        """
        from advisor import sharing
        from advisor.errors import StoreError

        records, going = sharing.gc(cache=self._cache)
        stuck = [] if dry_run else sharing.remove(records, going)
        if stuck:
            raise StoreError(f"not removed: {'; '.join(stuck)}")
        return going

    @property
    def _cache(self) -> Cache:
        return self.urls or None

    def _single(self) -> str:
        """The URL, where it is one store.

        Raises:
            UsageError: it is several.
        """
        from advisor.cache.stores import open_stores
        from advisor.errors import UsageError

        if len(self.urls) > 1:
            raise UsageError(f"sync: expected one store for each side, not {self}")
        return self.urls[0] if self.urls else open_stores()[0].url
