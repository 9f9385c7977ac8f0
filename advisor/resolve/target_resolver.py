"""Decide which records a request means by its target."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from advisor.cache.config import Config
from advisor.cache.match import MISS, Difference, Match, Query, best
from advisor.cache.reader import RecordFilter
from advisor.cache.record import Record, Target
from advisor.cache.task import NO_ARGUMENTS
from advisor.command_snippets import is_copy
from advisor.errors import NoRecord, TargetError, UsageError
from advisor.resolve.request import Request
from advisor.tuners.target import Spec, parse

CODE, FILE = "code", "file"
"""Values of `Difference.field`: the code of the target's file, and the file itself."""


class TargetResolver:
    """Finds the records that a request's target means: a name means one file, wherever tuned; a
    model means any file. Raises TargetError for a bad name."""

    def __init__(self, request: Request, query: Query) -> None:
        self._request, self.query = request, query
        self._named = spec_of(request.target) if isinstance(request.target, str) else None

    def sought(self) -> RecordFilter:
        """The filter for the records of a store."""
        named, query = self._named, self.query
        if named is None:
            return RecordFilter(model=query.model, query=query)
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
            match = best(self.query, mine or own or found)
            if match.record is None:
                return MISS
            differs = () if match.fits else match.differs
            return Match(record=match.record, differs=self.differences(match.record) + differs)
        if self._named is not None:
            if "model_args" not in self._request.given:  # prefer the model that is built without
                plain = [one for one in fitting if one.key.task.model_args == NO_ARGUMENTS]
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
        named = self._named
        if named is None:
            return
        # The name may be the file alone: the record says what in the file was tuned.
        tuned = dataclasses.replace(named, attribute=target.name.rpartition(":")[2])
        if target.origin != named.origin:
            if not is_copy(named, target):
                yield Difference(field=FILE, wanted="this one", found="another of this name")
        elif edited := tuned.edited(target.code):
            yield Difference(field=CODE, wanted=edited, found="as tuned")


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
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        with contextlib.suppress(UsageError):
            return parse(text, base=Path(script or "").parent)
        raise
