"""What of a target's files decides its model: read, and never imported.

That is a definition and what it refers to by name, transitively: in its own file, and in those of
the project that it imports from; and what these files run on import. The part behind
`if __name__ == "__main__":` does not count, nor do comments, docstrings and formatting. It may be
more than what the model's fingerprint is made of: then `advisor tune` finds it tuned already.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from advisor.cache.stores.filesystem import read_regular
from advisor.errors import TargetError
from advisor.tuners.fingerprint import NOT_COMPUTED, plain

MOST_BYTES = 2**18
"""Of all files that are taken apart for one digest: some 7,000 lines."""
MOST_KNOWN = 64
"""Digests that are kept for the next lookup."""
ABOVE = 3
"""Folders above a file's own in which a module that it imports is looked for."""
ALL = "*"
"""Every definition of a file."""
_BY_ANY_NAME = {"globals", "vars", "eval", "exec", "sys.modules"}
"""Who uses one of these may refer to any definition of the file."""
_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What a text that is none raises."""


@dataclass(frozen=True, slots=True)
class _Import:
    """`from MODULE import NAME`, with LEVEL dots; without a name the module itself."""

    module: str
    name: str = ""
    level: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """A statement: the digest of what it computes, the names in it, and what it imports itself.
    Of `a.b.c` the first two count, as 'a.b'."""

    text: str
    names: tuple[str, ...] = ()
    imports: tuple[_Import, ...] = ()


@dataclass(frozen=True, slots=True)
class _File:
    """A file's definitions by name, and what else it runs on import."""

    bound: dict[str, list[ast.stmt | _Import]] = field(default_factory=dict)
    running: list[ast.stmt] = field(default_factory=list)
    _pieces: dict[int, _Piece] = field(default_factory=dict)

    def pieces(self, of: Iterable[ast.stmt | _Import]) -> Iterator[_Piece]:
        """Taken apart, each once."""
        for one in of:
            if id(one) not in self._pieces:
                self._pieces[id(one)] = _piece(one)
            yield self._pieces[id(one)]


_Place = tuple[Path, str, str]
"""A file, a name in it, and which attribute of that is used, or ''."""
_Stamp = tuple[int, int, int] | None
_KNOWN: dict[tuple[Path, tuple[str, ...]], tuple[dict[Path, _Stamp], str]] = {}


def digest(path: Path, names: tuple[str, ...]) -> str:
    """64 hex characters over what decides these names of a file; what is not there is nothing.

    Files that were read for it before are only looked at, while they stay as they were.

    Raises:
        TargetError: the file cannot be read.
    """
    stamps, known = _KNOWN.get((path, names), ({}, ""))
    if not known or any(_stamp(one) != stamp for one, stamp in stamps.items()):
        reading = _Reading()
        known = reading.digest(path, names)
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[path, names] = reading.stamps, known
    return known


def imported_by(script: Path) -> set[Path]:
    """The project's files that a script imports, by the statements in it and in these files; what
    is imported by a string is not seen, nor what lies beyond MOST_BYTES of text."""
    found: set[Path] = set()
    waiting, left = [script], MOST_BYTES
    while waiting:
        at = waiting.pop()
        try:
            data = read_regular(at, left)
            left -= len(data)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(data)
        except (OSError, *_NO_PYTHON):
            continue
        statements = (one for one in ast.walk(tree) if isinstance(one, ast.Import | ast.ImportFrom))
        for what in (what for one in statements for _name, what in _imports(one)):
            new = set(_files(at, what)) - found
            found |= new
            waiting += new
    return found


def _files(at: Path, what: _Import) -> Iterator[Path]:
    """The project's files that an import runs: a module's, and those of the packages around it."""
    parts = [*filter(None, what.module.split(".")), *([what.name] if what.name != ALL else [])]
    for end in range(0 if what.level else 1, len(parts) + 1):
        if file := _located(at, ".".join(parts[:end]), what.level):
            yield file


class _Reading:
    """The files read for one digest. `stamps`: as they were then."""

    def __init__(self) -> None:
        self.stamps: dict[Path, _Stamp] = {}
        self._files: dict[Path, _File] = {}
        self._left = MOST_BYTES

    def digest(self, path: Path, names: Iterable[str]) -> str:
        try:
            self._read(path)
            return self._followed(path, names)
        except OSError as exc:
            raise TargetError(f"{path.name} cannot be read: {exc.strerror}") from exc
        except _NO_PYTHON as exc:
            raise TargetError(f"{path.name} cannot be read: {type(exc).__name__}") from exc

    def _followed(self, path: Path, names: Iterable[str]) -> str:
        found = hashlib.sha256()
        seen: set[_Place] = set()
        waiting: list[_Place] = [(path, name, "") for name in names]
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                for piece in self._pieces(place):
                    found.update(f"{place[1]} {piece.text}\n".encode())
                    waiting += self._referred(place, piece)
        return found.hexdigest()

    def _pieces(self, place: _Place) -> Iterator[_Piece]:
        """Of a name; before the first one of a file, of what that runs on import."""
        at, name, _attribute = place
        if at not in self.stamps:
            with contextlib.suppress(OSError, *_NO_PYTHON):
                self._read(at)
        if (file := self._files.get(at)) is None:
            # What cannot be taken apart, or is too much of it, counts by when it was written.
            yield _Piece(repr(self.stamps[at]))
            return
        yield from file.pieces(file.running)
        chosen = file.bound if name == ALL else [name]
        for one in chosen:
            yield from file.pieces(file.bound.get(one, ()))

    def _referred(self, place: _Place, piece: _Piece) -> Iterator[_Place]:
        at, _name, attribute = place
        bound = self._files[at].bound if at in self._files else {}
        for used, _, part in (name.partition(".") for name in piece.names):
            if used in bound:
                yield at, used, part
        for one in piece.imports:
            yield from _imported(at, one, attribute)
        if not _BY_ANY_NAME.isdisjoint(piece.names):
            yield at, ALL, ""

    def _read(self, path: Path) -> None:
        self.stamps[path] = _stamp(path)
        data = read_regular(path, self._left)
        self._left -= len(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python says them when it runs the file
            self._files[path] = _taken_apart(ast.parse(data).body)


def _stamp(path: Path) -> _Stamp:
    with contextlib.suppress(OSError):
        there = path.stat()
        return there.st_mtime_ns, there.st_size, there.st_ino
    return None


def _taken_apart(statements: Iterable[ast.stmt]) -> _File:
    file = _File()
    for statement in _run(statements):
        binds = dict(_binds(statement))
        for name, one in binds.items():
            file.bound.setdefault(name, []).append(one)
        # A class that is decorated may be registered, and be used by no name.
        if not binds or (isinstance(statement, ast.ClassDef) and statement.decorator_list):
            file.running.append(statement)
    return file


def _run(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that are more than a text and run when their file is imported."""
    for one in statements:
        if isinstance(one, ast.If) and _is_never(one.test):
            yield from _run(one.orelse)
        elif not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)):
            yield one


def _is_never(test: ast.expr) -> bool:
    """Whether it holds for no module that is imported."""
    return ast.unparse(test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def _binds(one: ast.stmt) -> Iterator[tuple[str, ast.stmt | _Import]]:
    """The names that a statement gives a value and does nothing else; none where it does more."""
    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield one.name, one
    elif isinstance(one, ast.Import | ast.ImportFrom):
        for name, what in _imports(one):
            if what.name != ALL:
                yield name, what
    elif isinstance(one, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = one.targets if isinstance(one, ast.Assign) else [one.target]
        parts = [p for t in targets for p in (t.elts if isinstance(t, ast.Tuple) else [t])]
        if all(isinstance(part, ast.Name) for part in parts):
            yield from ((part.id, one) for part in parts if isinstance(part, ast.Name))


def _imports(one: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, _Import]]:
    """What an import statement binds, by name."""
    for alias in one.names:
        if isinstance(one, ast.ImportFrom):
            what = _Import(one.module or "", alias.name, one.level)
            yield alias.asname or alias.name, what
        else:
            # Of `import a.b` the name is `a`, and which attribute is used says little.
            apart = "." in alias.name and not alias.asname
            yield (
                alias.asname or alias.name.partition(".")[0],
                _Import(alias.name, ALL if apart else ""),
            )


def _piece(one: ast.stmt | _Import) -> _Piece:
    if isinstance(one, _Import):
        return _Piece(repr(one), imports=(one,))
    nodes = list(_nodes(one))
    parts = {
        node.value: f"{node.value.id}.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    names = {parts.get(node, node.id) for node in nodes if isinstance(node, ast.Name)}
    imports = [
        what
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for _name, what in _imports(node)
    ]
    text = hashlib.sha256(repr(plain(one)).encode()).hexdigest()
    return _Piece(text, tuple(sorted(names)), tuple(imports))


def _nodes(one: ast.AST) -> Iterator[ast.AST]:
    """It and all below it that is computed with."""
    waiting: list[object] = [one]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, ast.AST):
            yield node
            waiting += [getattr(node, f, None) for f in node._fields if f not in NOT_COMPUTED]


def _imported(at: Path, what: _Import, attribute: str) -> Iterator[_Place]:
    """Where in the project what a file imports lies; nowhere where a library has it."""
    module, name = what.module, what.name
    part = name or attribute
    if part and part != ALL and (inner := _located(at, f"{module}.{part}".strip("."), what.level)):
        yield inner, (attribute if name else "") or ALL, ""
    if outer := _located(at, module, what.level):
        yield outer, part or ALL, attribute if name else ""


def _located(at: Path, module: str, level: int) -> Path | None:
    """The file of a module, as it lies around one that imports it."""
    if module.partition(".")[0] == "torch" and not level:
        return None  # the most frequent by far
    above = at.parents[level - 1 : level] if level else at.parents[: ABOVE + 1]
    for folder in above:
        place = folder.joinpath(*module.split("."))
        files = [place / "__init__.py"]
        if module:
            files.append(place.with_name(f"{place.name}.py"))
        with contextlib.suppress(OSError):  # what may not be looked at is not imported either
            if file := next((one for one in files if one.is_file()), None):
                return file
    return None
