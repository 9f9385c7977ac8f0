"""Settings of a project or a shell: the stores, and switches."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from advisor.errors import UsageError, printable, reason

_log = logging.getLogger("advisor")

_MAX_BYTES = 2**22
MAX_ARTIFACTS = 64 * 2**20  # default for the most bytes of one config's artifacts, packed
_MENTIONED = re.compile(rb"tool\s*\.\s*advisor|^\s*advisor\b", re.MULTILINE)
_BETWEEN = re.compile(r"\s*,\s*(?=[A-Za-z][A-Za-z0-9+.-]+:|[/~.])")
_RELATIVE = re.compile(r"^((?:disk|dir|pack):)?(\.{1,2}(?=/|$).*|[^:/~.][^:]*)$")


class ProjectUrl(str):
    """A store's URL from a project's pyproject.toml, which somebody else may have written: no
    secret of the user's environment is sent there."""


Cache = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
"""A store's URL or folder; or several; or None, for those of the environment or the project."""


def cache_urls(cache: Cache = None) -> tuple[str, ...]:
    """The stores' URLs: those given, else $ADVISOR_CACHE, else [tool.advisor] cache in the nearest
    pyproject.toml, else none. One string may list several with commas between."""
    given = cache if cache is not None else os.environ.get("ADVISOR_CACHE") or _project_urls()
    listed: object = [given] if isinstance(given, str | bytes | os.PathLike) else given
    if not isinstance(listed, Iterable):
        raise UsageError(f"cache {cache!r}: expected a folder, a store's URL, or several")
    return tuple(url for one in listed for url in _split(one))


def server_url(cache: Cache = None) -> str:
    """The URL of the first store that is a server; '' if none is."""
    return next((url for url in cache_urls(cache) if url.startswith(("http://", "https://"))), "")


def _split(one: object) -> list[str]:
    """A path is one folder, whatever commas are in it; a text may list several URLs."""
    if isinstance(one, ProjectUrl):
        return [one]
    if isinstance(one, str):
        from advisor.cache.stores.url import without_password  # here: the stores import this module

        urls = _BETWEEN.split(one.strip())
        if "," in one and not all(url and url.strip(",") == url for url in urls):
            raise UsageError(
                f"cache {without_password(one)!r}: expected a URL on each side of a comma"
            )
        return urls
    if isinstance(one, os.PathLike) and isinstance(path := os.fspath(one), str):
        return [path]
    raise UsageError(f"cache {one!r}: expected a folder or a store's URL")


def is_on(variable: str) -> bool:
    return _means_on(variable, os.environ.get(variable, ""))


@functools.cache
def _means_on(variable: str, value: str) -> bool:
    """Whether a variable's value means on. A value that means nothing counts as on."""
    if value.lower() in ("", "0", "false", "no", "off"):
        return False
    if value.lower() not in ("1", "true", "yes", "on") and os.environ.get("RANK", "0") == "0":
        _log.warning("%s=%s: expected 1 or 0; it counts as 1", variable, printable(value))
    return True


def disabled() -> bool:
    return is_on("ADVISOR_DISABLE")


def max_artifacts() -> int:
    """$ADVISOR_MAX_ARTIFACTS: most bytes of one config's artifacts, packed; 0 keeps none."""
    from advisor.cache.kinds import ByteSize  # here: few lookups need it

    text = os.environ.get("ADVISOR_MAX_ARTIFACTS") or str(MAX_ARTIFACTS)
    try:
        return 0 if text == "0" else ByteSize().checked("ADVISOR_MAX_ARTIFACTS", text)
    except UsageError as exc:
        raise UsageError(f"{exc}, or 0 to keep none") from exc


def _project_urls() -> list[str]:
    """[tool.advisor] cache of the nearest pyproject.toml that has such a table, upward from the
    current folder, else from the running script's; a relative path starts from its folder."""
    starts = []
    with contextlib.suppress(OSError):  # the current folder is gone
        starts.append(Path.cwd())
    if script := getattr(sys.modules.get("__main__"), "__file__", None):
        with contextlib.suppress(OSError, RuntimeError, TypeError, ValueError):
            starts.append(Path(script).resolve().parent)
    folders = dict.fromkeys(folder for start in starts for folder in (start, *start.parents))
    files = (file for folder in folders if os.path.lexists(file := folder / "pyproject.toml"))
    found = ((file, table) for file in files if (table := _table(file)) is not None)
    file, table = next(found, (Path(), {}))
    given = table.get("cache", [])
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(url, str) and url for url in listed):
        raise UsageError(f"{file}: [tool.advisor] cache: expected a store URL or a list of them")

    def beside_it(found: re.Match[str]) -> str:
        return f"{found[1] or ''}{file.parent / found[2]}"

    return [ProjectUrl(_RELATIVE.sub(beside_it, url)) for one in listed for url in _split(one)]


def _table(file: Path) -> dict[str, object] | None:
    from advisor.cache.stores.filesystem import read_regular  # here: the stores import this module

    try:
        found = _parsed(read_regular(file, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as exc:
        raise UsageError(f"{file}: cannot be read ({reason(exc)})") from exc
    if found is not None and not isinstance(found, dict):
        raise UsageError(f"{file}: [tool.advisor]: expected a table")
    if others := {*(found or ())} - {"cache"}:
        raise UsageError(f"{file}: [tool.advisor] {min(others)}: no such setting; cache is one")
    return found


@functools.lru_cache(maxsize=8)
def _parsed(data: bytes) -> object:
    """[tool.advisor] of a file, or None. Cached: parsing takes as long as a whole lookup."""
    if not _MENTIONED.search(data):
        return None  # without the parser, which takes milliseconds to import
    import tomllib

    tools = tomllib.loads(data.decode()).get("tool")
    return tools.get("advisor") if isinstance(tools, dict) else None
