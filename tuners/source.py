"""Digest of the source that decides a target's model. It reads files and imports nothing.

A definition counts with all that it refers to by name, in its own file and in the project's files
that this one imports, and with what these files run on import. The part behind
`if __name__ == "__main__":`, comments, docstrings and formatting do not count.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from advisor.cache.stores.filesystem import read_regular
from advisor.errors import TargetError
from advisor.tuners.fingerprint import is_idle, nodes, plain, references

MAX_SOURCE_BYTES = 2**18  # of all files that are read for one digest: some 7,000 lines
ABOVE = 3  # folders above a file's own that are searched for a module that the file imports
ALL, ON_IMPORT = "*", ""
"""Used as names: ALL for every definition, ON_IMPORT for statements that define no name."""
_BY_ANY_NAME = {"globals", "vars", "eval", "exec", "sys.modules"}
"""Code that uses one of these may refer to any definition of its file."""
_MAIN = ("__name__ == '__main__'", "'__main__' == __name__")
_NEVER = (*_MAIN, "TYPE_CHECKING", "typing.TYPE_CHECKING")  # conditions that are false on import
_INVALID = (SyntaxError, ValueError, RecursionError, MemoryError)  # the text is not Python


class _Import(NamedTuple):
    """`from MODULE import NAME`, with LEVEL dots; without a name the module itself."""

    module: str
    name: str = ""
    level: int = 0


_Defined = dict[str, list[ast.stmt | _Import]]
_Place = tuple[Path, str, str]
"""A file, a name in it, and the attribute of this name that is used, or ''."""
_Stamp = tuple[int, int, int] | None
_KNOWN: dict[tuple[Path, tuple[str, ...]], tuple[dict[Path, _Stamp], str]] = {}


def digest(path: Path, names: tuple[str, ...]) -> str:
    """Digest (64 hex characters) of the code that decides some names of a file. Names that the file
    lacks are ignored. It is cached until one of the files read for it changes. Raises TargetError
    if the file cannot be read."""
    known = _KNOWN.get((path, names))
    if known is None or any(_stamp(one) != stamp for one, stamp in known[0].items()):
        try:
            known = _read(path, names)
        except (OSError, *_INVALID) as exc:
            why = getattr(exc, "strerror", None) or type(exc).__name__
            raise TargetError(f"{path.name} cannot be read: {why}") from exc
        _KNOWN[path, names] = known
    return known[1]


def _read(path: Path, names: tuple[str, ...]) -> tuple[dict[Path, _Stamp], str]:
    """Read a file and its imports. Returns their stamps by path, and the digest."""
    found, left = hashlib.sha256(), MAX_SOURCE_BYTES
    stamps: dict[Path, _Stamp] = {}
    files: dict[Path, _Defined] = {}
    seen: set[_Place] = set()
    waiting: list[_Place] = [(path, name, "") for name in names]
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        at, name, attribute = place
        if at not in stamps:
            stamps[at] = _stamp(at)
            try:
                files[at], size = _definitions(at, left)
            except (OSError, *_INVALID):
                if at == path:
                    raise
                # An imported file that cannot be parsed, or is too large, counts by its stamp.
                found.update(repr(stamps[at]).encode())
                continue
            left -= size
            waiting.append((at, ON_IMPORT, ""))
        defined = files.get(at, {})
        for one in defined if name == ALL else [name]:
            for statement in defined.get(one, ()):
                text, used, imports = _parts(statement)
                found.update(f"{name} {text}\n".encode())
                for base, _, part in (word.partition(".") for word in used):
                    if base in defined:
                        waiting.append((at, base, part))
                for what in imports:
                    waiting += _imported(at, what, attribute)
                if not _BY_ANY_NAME.isdisjoint(used):
                    waiting.append((at, ALL, ""))
    return stamps, found.hexdigest()


def _stamp(path: Path) -> _Stamp:
    with contextlib.suppress(OSError):
        there = path.stat()
        return there.st_mtime_ns, there.st_size, there.st_ino
    return None


def _definitions(path: Path, most: int) -> tuple[_Defined, int]:
    """(Statements by the names that they define, size of the file), for at most `most` bytes."""
    data = read_regular(path, most)
    with warnings.catch_warnings(action="ignore"):  # Python shows them when it runs the file
        tree = ast.parse(data)
    found: _Defined = defaultdict(list, {ON_IMPORT: []})
    for statement in _executed(tree.body):
        defined = _defined(statement)
        for name, one in defined.items():
            found[name].append(one)
        # A decorated class may be registered, and then be used without its name.
        if not defined or (isinstance(statement, ast.ClassDef) and statement.decorator_list):
            found[ON_IMPORT].append(statement)
    return found, len(data)


def _executed(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that run on import, without docstrings."""
    for one in statements:
        if isinstance(one, ast.If) and ast.unparse(one.test) in _NEVER:
            yield from _executed(one.orelse)
        elif not is_idle(one):
            yield one


def _defined(one: ast.stmt) -> dict[str, ast.stmt | _Import]:
    """The names that a statement defines; none if it does more than that."""
    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {one.name: one}
    if isinstance(one, ast.Import | ast.ImportFrom):
        return {name: what for name, what in _imports(one) if what.name != ALL}
    if isinstance(one, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = one.targets if isinstance(one, ast.Assign) else [one.target]
        parts = [p for t in targets for p in (t.elts if isinstance(t, ast.Tuple) else [t])]
        names = [part.id for part in parts if isinstance(part, ast.Name)]
        return dict.fromkeys(names, one) if len(names) == len(parts) else {}
    return {}


def _imports(one: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, _Import]]:
    """Yields each name that an import statement binds, and what it imports."""
    for alias in one.names:
        if isinstance(one, ast.ImportFrom):
            yield alias.asname or alias.name, _Import(one.module or "", alias.name, one.level)
        else:
            # `import a.b` binds `a`; which attribute of `a` the code uses says little.
            whole = "." in alias.name and not alias.asname
            short = alias.asname or alias.name.partition(".")[0]
            yield short, _Import(alias.name, ALL if whole else "")


def _parts(one: ast.stmt | _Import) -> tuple[str, list[str], list[_Import]]:
    """(Digest of a statement, the names in it as by `references`, its imports)."""
    if isinstance(one, _Import):
        return repr(one), [], [one]
    statements = (node for node in nodes(one) if isinstance(node, ast.Import | ast.ImportFrom))
    imports = [what for node in statements for _name, what in _imports(node)]
    return hashlib.sha256(repr(plain(one)).encode()).hexdigest(), sorted(references(one)), imports


def _imported(at: Path, what: _Import, attribute: str) -> Iterator[_Place]:
    """Yields the places in the project that an import refers to; none for a library's module."""
    module, name = what.module, what.name
    part = name or attribute
    if part and part != ALL and (inner := _located(at, f"{module}.{part}".strip("."), what.level)):
        yield inner, (attribute if name else "") or ALL, ""
    if outer := _located(at, module, what.level):
        yield outer, part or ALL, attribute if name else ""


def _located(at: Path, module: str, level: int) -> Path | None:
    """The file of a module, searched for in the folders around the file that imports it."""
    if module.partition(".")[0] == "torch" and not level:
        return None  # the most frequent by far
    above = at.parents[level - 1 : level] if level else at.parents[: ABOVE + 1]
    return next(filter(None, (module_file(folder, module) for folder in above)), None)


def module_file(folder: Path, module: str) -> Path | None:
    """The file of a module in a folder, or None; the module '' is the folder's own package."""
    place = folder.joinpath(*module.split("."))
    files = [place / "__init__.py", *([place.with_name(f"{place.name}.py")] if module else [])]
    with contextlib.suppress(OSError):  # a file that may not be read cannot be imported either
        return next((one for one in files if one.is_file()), None)
    return None
