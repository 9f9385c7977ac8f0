"""Which records of a target are meant by a request."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from advisor.cache.config import Config
from advisor.cache.match import MISS, Difference, Match, Query, best
from advisor.cache.reader import CurrentFile, RecordFilter
from advisor.cache.record import Record
from advisor.cache.task import NONE
from advisor.command_snippets import is_copy
from advisor.errors import NoRecord, TargetError, UsageError
from advisor.resolve.request import Request
from advisor.tuners import source
from advisor.tuners.target import Spec, origin_of, parse

CODE, FILE = "code", "file"
"""Fields of a difference: what the target's file has now, and which file it is."""


class TargetResolver:
    """What a request means by its target: a name means one file, wherever it was tuned; no name
    means the script's own files; a model in hand means any.

    Raises:
        TargetError: a name has no known form, or its file is not there.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        target = request.target
        self._named = spec_of(target) if isinstance(target, str) else None
        specs = [self._named] if self._named else [] if request.in_hand else _around_script()
        self._specs = {spec.origin: spec for spec in specs}

    def sought(self, query: Query) -> RecordFilter:
        """What a store is asked for."""
        named = self._named
        if self._request.in_hand:
            return RecordFilter(model=query.model, query=query)
        if named is None:
            return RecordFilter(origins=frozenset(self._specs), query=query)
        if not named.attribute:  # the record says of what in the file the code is
            return RecordFilter(file=named.name, query=query)
        now = None
        with contextlib.suppress(TargetError):  # the file cannot be read
            now = CurrentFile(code=named.code, origin=named.origin)
        return RecordFilter(target=named.name, query=query, now=now)

    def differences(self, record: Record) -> tuple[Difference, ...]:
        """How a record's target differs from the one that is meant: in its file, its code now, or
        the arguments that the model is built with."""
        return (*self._moved(record), *self._built_otherwise(record.key.task.model_args))

    def _moved(self, record: Record) -> Iterator[Difference]:
        target = record.target
        spec = self._specs.get(target.origin)
        if spec is None:
            named = self._named
            if isinstance(self._request.target, str) and not (named and is_copy(named, target)):
                yield Difference(field=FILE, wanted="this one", found="another of this name")
            return
        # A name may leave open what in the file was tuned.
        tuned = dataclasses.replace(spec, attribute=target.name.rpartition(":")[2])
        if self._named is None and not self._is_imported(spec):
            yield Difference(field=FILE, wanted=f"imported by {script().name}", found="not")
        elif edited := tuned.edited(target.code):
            yield Difference(field=CODE, wanted=edited, found="as tuned")

    def _is_imported(self, spec: Spec) -> bool:
        """Whether a file is the running script, or that imports it: by its text, or has by now."""
        if spec.origin in self._read:
            return True
        name = Path(spec.file).name
        loaded = (str(getattr(one, "__file__", "")) for one in list(sys.modules.values()))
        return spec.origin in {origin_of(Path(one)) for one in loaded if one.endswith(name)}

    @functools.cached_property
    def _read(self) -> frozenset[str]:
        return frozenset(map(origin_of, {script(), *source.imported_by(script())}))

    def _built_otherwise(self, arguments: Config) -> Iterator[Difference]:
        given = self._request.given.get("model_args", arguments)
        if given != arguments:
            yield Difference(field="model_args", wanted=_listed(given), found=_listed(arguments))

    def match(self, found: Sequence[Record], query: Query) -> Match:
        """The best match, if it is plain which target is meant.

        Raises:
            NoRecord: records of several targets or samples fit.
        """
        mine = [one for one in found if not self.differences(one)]
        match = best(query, mine)
        if not match.fits:
            return match if mine else self._elsewhere(found, query)
        if self._request.in_hand or len(mine) == 1:
            return match
        fitting = [record for record in mine if best(query, [record]).fits]
        plain = [record for record in fitting if record.key.task.model_args == NONE]
        if plain and "model_args" not in self._request.given:
            # Without model_args, the model that is built without them is meant.
            fitting, match = plain, best(query, plain)
        rivals = {(r.target.name, r.key.task.model_args, r.key.task.inputs): r for r in fitting}
        if len(rivals) < 2:
            return match
        listed = "; ".join(map(_named, rivals.values()))
        raise NoRecord(
            f"several records fit: {listed}. Name one: apply(target, shape=..., dtype=..., "
            "model_args=...)"
        )

    def _elsewhere(self, found: Sequence[Record], query: Query) -> Match:
        """A miss: no record is of this very target, but there may be others of its name."""
        own = [one for one in found if FILE not in {d.field for d in self.differences(one)}]
        if not own and self._named is None:
            return MISS  # files beside the script that it does not import
        match = best(query, own or found)
        if match.record is None:
            return match
        differs = () if match.fits else match.differs
        return Match(record=match.record, differs=self.differences(match.record) + differs)


def _named(record: Record) -> str:
    given = _listed(record.key.task.model_args)
    return f"{record.target.name}{f'({given})' if given else ''} {record.key.task.inputs}"


def _listed(arguments: Config) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def spec_of(text: str) -> Spec:
    """The target of this name in the current folder, else beside the script.

    Raises:
        TargetError: there is none.
    """
    try:
        return parse(text)
    except UsageError:
        with contextlib.suppress(UsageError):
            return parse(text, base=script().parent)
        raise


def script() -> Path:
    """The running script's file; a path that does not exist if there is none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not file:
        return Path("(no script)")
    with contextlib.suppress(FileNotFoundError):  # the current folder is gone
        return Path(file).absolute()
    return Path(file)


def _around_script() -> list[Spec]:
    """The running script and the modules beside it; of one in a package, also those around it."""
    here = script()
    if not here.is_absolute():
        return []
    files = {here}
    if here.is_file():
        for folder in here.parents:
            files |= set(folder.glob("*.py"))
            if not (folder / "__init__.py").is_file():
                break
    return [Spec(kind="file", place=str(one), attribute="", file=str(one)) for one in files]
