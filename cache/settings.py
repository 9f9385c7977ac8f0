"""What is set for a project or a shell: the stores, and what a miss does."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from advisor.errors import UsageError

KNOWN = ("cache", "on-miss")
_MENTIONED = re.compile(rb"tool\s*\.\s*advisor|^\s*advisor\b", re.MULTILINE)
_BETWEEN = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]+:|[/~.])")


def cache_urls(cache: str | Sequence[str] | None = None) -> tuple[str, ...]:
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
    listed = [cache] if isinstance(cache, str) else list(cache)
    return tuple(url for one in listed for url in _BETWEEN.split(one.strip()))


def on_miss() -> str | None:
    """$ADVISOR_ON_MISS, else [tool.advisor] on-miss; None where nothing says."""
    variable = os.environ.get("ADVISOR_ON_MISS")
    if variable:
        return variable
    _file, table = _project()
    found = table.get("on-miss")
    return None if found is None else str(found)


def _of_project() -> tuple[str, ...]:
    file, table = _project()
    given = table.get("cache")
    if given is None or file is None:
        return ()
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(url, str) and url for url in listed):
        raise UsageError(f"{file}: [tool.advisor] cache: expected a store URL or a list of them")
    return tuple(
        re.sub(
            r"^((?:disk|dir|pack):)?(\.{1,2}(?=/|$).*|[^:/~.][^:]*)$",
            lambda found: f"{found[1] or ''}{file.parent / found[2]}",
            url,
        )
        for one in listed
        for url in _BETWEEN.split(one)
    )


def _project() -> tuple[Path | None, dict[str, object]]:
    """[tool.advisor] of the nearest pyproject.toml that has it, upward from the current folder,
    else from the running script's."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    starts = [Path.cwd(), *([Path(script).resolve().parent] if script else [])]
    seen: set[Path] = set()
    for start in starts:
        for folder in (start, *start.parents):
            file = folder / "pyproject.toml"
            if folder in seen or not file.exists():
                continue
            seen.add(folder)
            table = _table(file)
            if table is not None:
                return file, table
    return None, {}


def _table(file: Path) -> dict[str, object] | None:
    try:
        data = file.read_bytes()
        if not _MENTIONED.search(data):
            return None  # without the parser, which takes milliseconds to import
        import tomllib

        found = tomllib.loads(data.decode()).get("tool", {}).get("advisor")
    except (OSError, ValueError) as exc:
        raise UsageError(f"{file}: cannot be read ({exc})") from exc
    if found is not None and not isinstance(found, dict):
        raise UsageError(f"{file}: [tool.advisor]: expected a table")
    for name in found or ():
        if name not in KNOWN:
            raise UsageError(f"{file}: [tool.advisor] {name}: expected one of {', '.join(KNOWN)}")
    return found
