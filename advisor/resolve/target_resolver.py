"""Decide which records a request means by its target."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from advisor.cache.config import Config
from advisor.cache.match import MISS, Difference, Match, Query, best
from advisor.cache.reader import RecordFilter
from advisor.cache.record import Record, Target
from advisor.cache.task import NONE
from advisor.command_snippets import is_copy
from advisor.errors import NoRecord, TargetError, UsageError
from advisor.resolve.request import Request
from advisor.tuners import source
from advisor.tuners.target import Spec, origin_of, parse

CODE, FILE = "code", "file"
"""Values of `Difference.field`: the code of the target's file, and the file itself."""


class TargetResolver:
    """Finds the records that a request's target means. A name means one file, wherever tuned; no
    name means the script's own files; a model means any file. Raises TargetError for a bad name."""

    def __init__(self, request: Request, query: Query) -> None:
        self._request, self.query = request, query
        target = request.target
        self._named = spec_of(target) if isinstance(target, str) else None
        specs = [self._named] if self._named else [] if request.has_model else _around_script()
        self._specs = {spec.origin: spec for spec in specs}

    def sought(self) -> RecordFilter:
        """The filter for the records of a store."""
        named, query = self._named, self.query
        if self._request.has_model:
            return RecordFilter(model=query.model, query=query)
        if named is None:
            return RecordFilter(origins=frozenset(self._specs), query=query)
        if not named.attribute:  # the record says which class or function was tuned
            return RecordFilter(file=named.name, query=query)
        now = None
        with contextlib.suppress(TargetError):  # the file cannot be read
            now = Target(name=named.name, code=named.code, origin=named.origin)
        return RecordFilter(target=named.name, query=query, now=now)

    def match(self, found: Sequence[Record]) -> Match:
        """The best match, or a miss with the nearest record. Raises NoRecord if records of several
        targets or samples fit."""
        mine = [one for one in found if not self.differences(one)]
        fitting = [one for one in mine if best(self.query, [one]).fits]
        if not fitting:
            own = [one for one in found if all(d.field != FILE for d in self.differences(one))]
            # Without a name, records of files that the script does not import do not count.
            match = best(self.query, mine or own or (found if self._named else ()))
            if match.record is None:
                return MISS
            differs = () if match.fits else match.differs
            return Match(record=match.record, differs=self.differences(match.record) + differs)
        if not self._request.has_model:
            if "model_args" not in self._request.given:  # prefer the model that is built without
                plain = [one for one in fitting if one.key.task.model_args == NONE]
                fitting = plain or fitting
            rivals = {(r.target.name, r.key.task.model_args, r.key.task.inputs): r for r in fitting}
            if len(rivals) > 1:
                raise NoRecord(
                    f"several records fit: {'; '.join(map(_named, rivals.values()))}. Name one: "
                    "apply(target, shape=..., dtype=..., model_args=...)"
                )
        return best(self.query, fitting)

    def differences(self, record: Record) -> tuple[Difference, ...]:
        """How a record's target differs from the requested one: in its file, its present code, or
        the arguments that the model is built with."""
        moved, built = tuple(self._moved(record.target)), record.key.task.model_args
        given = self._request.given.get("model_args", built)
        if given == built:
            return moved
        return *moved, Difference(field="model_args", wanted=_listed(given), found=_listed(built))

    def _moved(self, target: Target) -> Iterator[Difference]:
        named, spec = self._named, self._specs.get(target.origin)
        if spec is None:
            if named is not None and not is_copy(named, target):
                yield Difference(field=FILE, wanted="this one", found="another of this name")
            return
        # The name may be the file alone: the record says what in the file was tuned.
        tuned = dataclasses.replace(spec, attribute=target.name.rpartition(":")[2])
        if named is None and not self._is_imported(spec):
            yield Difference(field=FILE, wanted=f"imported by {script().name}", found="not")
        elif edited := tuned.edited(target.code):
            yield Difference(field=CODE, wanted=edited, found="as tuned")

    def _is_imported(self, spec: Spec) -> bool:
        """Whether a file is the script or is imported by it: in its text, or already loaded."""
        if spec.origin in self._read:
            return True
        name = Path(spec.file).name
        loaded = (str(getattr(one, "__file__", "")) for one in list(sys.modules.values()))
        return spec.origin in {origin_of(Path(one)) for one in loaded if one.endswith(name)}

    @functools.cached_property
    def _read(self) -> frozenset[str]:
        return frozenset(map(origin_of, {script(), *source.imported_by(script())}))


def _named(record: Record) -> str:
    given = _listed(record.key.task.model_args)
    return f"{record.target.name}{f'({given})' if given else ''} {record.key.task.inputs}"


def _listed(arguments: Config) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def spec_of(text: str) -> Spec:
    """The target of this name in the current folder, else in the script's folder."""
    try:
        return parse(text)
    except UsageError:
        with contextlib.suppress(UsageError):
            return parse(text, base=script().parent)
        raise


def script() -> Path:
    """The running script's file; without a script, a path that does not exist."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not file:
        return Path("(no script)")
    with contextlib.suppress(FileNotFoundError):  # the current folder is gone
        return Path(file).absolute()
    return Path(file)


def _around_script() -> list[Spec]:
    """The script and the modules in its folder; within a package, in the folders above too."""
    here = script()
    files = {here} if here.is_absolute() else set()
    for folder in here.parents if here.is_file() else ():
        files |= set(folder.glob("*.py"))
        if not (folder / "__init__.py").is_file():
            break
    return [Spec(kind="file", place=str(one), attribute="", file=str(one)) for one in files]
