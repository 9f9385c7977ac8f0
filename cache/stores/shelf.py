"""A folder of artifacts: one file each, no locks, readable where it lies."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.cache.stores.filesystem import abandoned, read_regular, write_whole
from advisor.errors import RecordDamaged, StoreError

if TYPE_CHECKING:
    from advisor.cache.stores import Shelf

ARTIFACTS = "artifacts"
"""The folder beside the records, and what an object store and a server call it."""
_PLAIN = re.compile(r"[0-9a-f][0-9a-f-]{0,120}\.[0-9a-f]{12}")


def plain(name: str) -> str:
    """The name, which can be no way elsewhere.

    Raises:
        RecordDamaged: it could be.
    """
    if not _PLAIN.fullmatch(name):
        raise RecordDamaged(f"artifacts {name[:80]!r}: no name of any")
    return name


def is_plain(name: str, start: str = "") -> bool:
    """Whether it is a name that artifacts can have, and begins so."""
    return name.startswith(start) and _PLAIN.fullmatch(name) is not None


def too_large(name: str, most: int) -> RecordDamaged:
    """What is raised of what is larger than `most` bytes."""
    return RecordDamaged(f"artifacts {name}: larger than {most} bytes; refused")


class FolderShelf:
    """The files lie directly in the folder, which is made with the first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def sizes(self, start: str = "") -> dict[str, int]:
        try:
            with os.scandir(self.path) as entries:
                files = (one for one in entries if is_plain(one.name, start))
                return {one.name: one.stat().st_size for one in files if one.is_file()}
        except FileNotFoundError:
            return {}
        except OSError as exc:
            raise self._mapped(exc) from exc

    def get(self, name: str, most: int) -> bytes | None:
        try:
            return read_regular(self.path / plain(name), most)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno == errno.EFBIG:
                raise too_large(name, most) from exc
            raise self._mapped(exc) from exc

    def put(self, name: str, data: bytes) -> None:
        try:
            write_whole(self.path / plain(name), data)
        except OSError as exc:
            raise self._mapped(exc) from exc

    def delete(self, name: str) -> bool:
        try:
            (self.path / plain(name)).unlink()
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise self._mapped(exc) from exc
        return True

    def leavings(self) -> list[Path]:
        """What writers that were killed left behind."""
        try:
            return abandoned(self.path)
        except OSError as exc:
            raise self._mapped(exc) from exc

    def _mapped(self, exc: OSError) -> StoreError:
        return StoreError(f"artifacts {self.path}: {exc.strerror or exc}")


def _proof(shelf: FolderShelf) -> Shelf:
    return shelf
