"""What is set for a project or a shell: the stores, and what a miss does."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from advisor.errors import UsageError

_MOST_BYTES = 2**22
ON_MISS = ("default", "nearest", "request")
KNOWN = ("cache", "on-miss")
MAX_ARTIFACTS = 64 * 2**20
"""Bytes of the artifacts of one config, packed, where nothing else is set."""
_MENTIONED = re.compile(rb"tool\s*\.\s*advisor|^\s*advisor\b", re.MULTILINE)
_BETWEEN = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]+:|[/~.])")


class ProjectUrl(str):
    """A store's URL from a project's pyproject.toml, which somebody else may have written: no
    secret of the user's environment is sent there."""


Cache = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
"""A store's URL or folder, several, or None for what the environment or the project says."""


def cache_urls(cache: Cache = None) -> tuple[str, ...]:
    """The stores' URLs: those given, else $ADVISOR_CACHE, else [tool.advisor] cache in the nearest
    pyproject.toml; none where nothing says.

    One string may list several with commas between.

    Raises:
        UsageError: pyproject.toml cannot be read, or says something else there.
    """
    if cache is None and (variable := os.environ.get("ADVISOR_CACHE")):
        cache = variable
    if cache is None:
        return _of_project()
    listed: object = [cache] if isinstance(cache, str | os.PathLike) else cache
    if isinstance(listed, bytes) or not isinstance(listed, Iterable):
        raise UsageError(f"cache {cache!r}: expected a folder, a store's URL, or several")
    return tuple(url for one in listed for url in _urls_in(one))


def server_url(cache: Cache = None) -> str:
    """Of the stores the first that is a server of the team's; '' where none is. Raises as
    `cache_urls`."""
    return next((url for url in cache_urls(cache) if url.startswith(("http://", "https://"))), "")


def _urls_in(one: object) -> list[str]:
    """A path is one folder, whatever commas are in it; a text may list several URLs."""
    if isinstance(one, os.PathLike) and isinstance(found := os.fspath(one), str):
        return [found]
    if not isinstance(one, str):
        raise UsageError(f"cache {one!r}: expected a folder or a store's URL")
    if isinstance(one, ProjectUrl):
        return [one]
    return _BETWEEN.split(one.strip())


def disabled() -> bool:
    """Whether $ADVISOR_DISABLE switches all advice off."""
    return _is_on("ADVISOR_DISABLE")


def keeps_loader() -> bool:
    """Whether $ADVISOR_KEEP_LOADER leaves the loaders of runs as they are."""
    return _is_on("ADVISOR_KEEP_LOADER")


def overrides_loader() -> bool:
    """Whether $ADVISOR_OVERRIDE_LOADER has loaders of runs tuned that have workers of their own."""
    return _is_on("ADVISOR_OVERRIDE_LOADER")


def max_artifacts() -> int:
    """$ADVISOR_MAX_ARTIFACTS: bytes of what is kept of one config's compilation; 0 for none.

    Raises:
        UsageError: it is no size.
    """
    from advisor.cache.kinds import Bytes  # here: of many lookups none comes to it

    text = os.environ.get("ADVISOR_MAX_ARTIFACTS", "")
    if not text:
        return MAX_ARTIFACTS
    if text == "0":
        return 0
    try:
        return Bytes().checked("ADVISOR_MAX_ARTIFACTS", text)
    except UsageError as exc:
        raise UsageError(f"{exc}, or 0 to keep none") from exc


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def on_miss() -> str | None:
    """$ADVISOR_ON_MISS, else [tool.advisor] on-miss; None where nothing says."""
    variable = os.environ.get("ADVISOR_ON_MISS")
    if variable:
        return variable
    _file, table = _project()
    found = table.get("on-miss")
    if found is not None and not isinstance(found, str):
        raise UsageError(f"{_file}: [tool.advisor] on-miss: expected text, got {found!r}")
    return found


def _of_project() -> tuple[str, ...]:
    file, table = _project()
    given = table.get("cache")
    if given is None or file is None:
        return ()
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(url, str) and url for url in listed):
        raise UsageError(f"{file}: [tool.advisor] cache: expected a store URL or a list of them")
    return tuple(
        ProjectUrl(
            re.sub(
                r"^((?:disk|dir|pack):)?(\.{1,2}(?=/|$).*|[^:/~.][^:]*)$",
                lambda found: f"{found[1] or ''}{file.parent / found[2]}",
                url,
            )
        )
        for one in listed
        for url in _BETWEEN.split(one)
    )


def _project() -> tuple[Path | None, dict[str, object]]:
    """[tool.advisor] of the nearest pyproject.toml that has it, upward from the current folder,
    else from the running script's."""
    starts = []
    with contextlib.suppress(OSError):  # the current folder is gone
        starts.append(Path.cwd())
    if script := getattr(sys.modules.get("__main__"), "__file__", None):
        with contextlib.suppress(OSError, RuntimeError, TypeError, ValueError):
            starts.append(Path(script).resolve().parent)
    seen: set[Path] = set()
    for start in starts:
        for folder in (start, *start.parents):
            file = folder / "pyproject.toml"
            if folder in seen or not os.path.lexists(file):
                continue
            seen.add(folder)
            table = _table(file)
            if table is not None:
                return file, table
    return None, {}


def _table(file: Path) -> dict[str, object] | None:
    from advisor.cache.stores.filesystem import read_regular  # here: the stores know the settings

    try:
        found = _parsed(read_regular(file, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as exc:
        raise UsageError(f"{file}: cannot be read ({exc})") from exc
    if found is not None and not isinstance(found, dict):
        raise UsageError(f"{file}: [tool.advisor]: expected a table")
    for name in found or ():
        if name not in KNOWN:
            raise UsageError(f"{file}: [tool.advisor] {name}: expected one of {', '.join(KNOWN)}")
    return found


@functools.lru_cache(maxsize=8)
def _parsed(data: bytes) -> object:
    """[tool.advisor] of a file, None where there is none. Parsing takes as long as all the rest of
    a lookup that was made before."""
    if not _MENTIONED.search(data):
        return None  # without the parser, which takes milliseconds to import
    import tomllib

    whole = tomllib.loads(data.decode()).get("tool")
    return whole.get("advisor") if isinstance(whole, dict) else None
