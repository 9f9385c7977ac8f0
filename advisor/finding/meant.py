"""Which of the records of a target is meant."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from advisor.cache.config import Config
from advisor.cache.match import NARROWING, Difference, Match, Query, best
from advisor.cache.record import Record, Target
from advisor.cache.task import NONE
from advisor.errors import NoRecord, UsageError
from advisor.finding.request import Request
from advisor.printed import is_copy
from advisor.tuners import source
from advisor.tuners.target import Spec, origin_of, parse

CODE, FILE = "code", "file"
"""Fields of a difference: in what the target's file holds now, and in which file it is."""


class Meant:
    """What a request means by its target: by name one file, whatever folder it was tuned in,
    without a name several, with the model in hand any. Raises TargetError where a name has no known
    form, or its file is not there."""

    def __init__(self, request: Request) -> None:
        self._request = request
        target = request.target
        self.named = spec_of(target) if isinstance(target, str) else None
        specs = [self.named] if self.named else [] if request.in_hand else beside()
        self._specs = {spec.origin: spec for spec in specs}

    @property
    def origins(self) -> frozenset[str]:
        """Of the files that are meant, as records keep them."""
        return frozenset(self._specs)

    def apart(self, record: Record) -> tuple[Difference, ...]:
        """In what a record's target is not what is meant: its file, the code that is in it now, or
        the arguments that the model is built with."""
        return (*self._moved(record.target), *self._built_otherwise(record.key.task.model_args))

    def _moved(self, target: Target) -> Iterator[Difference]:
        spec = self._specs.get(target.origin)
        if spec is not None:
            if self.named is None and not self._is_imported(spec):
                yield Difference(field=FILE, wanted=f"imported by {script().name}", found="not")
            elif edited := _tuned_of(spec, target).edited(target.code):
                yield Difference(field=CODE, wanted=edited, found="as tuned")
        elif isinstance(self._request.target, str) and not (
            self.named and is_copy(self.named, target)
        ):
            yield Difference(field=FILE, wanted="this one", found="another of this name")

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

    def wanted_of(self, found: Iterable[Record]) -> list[Record]:
        """Those of the very file and code, built with the arguments that are given."""
        return [one for one in found if not self.apart(one)]

    def the_one(self, found: Sequence[Record], query: Query) -> Match:
        """The match among all records of a target, where it is plain which is meant.

        Raises:
            NoRecord: records of several targets or samples fit.
        """
        mine = self.wanted_of(found)
        match = matched(mine, query)
        if match.record is None:
            return match if mine else self._elsewhere(match, found, query)
        if self._request.in_hand or len(mine) == 1:
            return match
        loose = query.without(*NARROWING)
        fitting = [record for record in mine if best(loose, [record]).record is not None]
        plain = [record for record in fitting if record.key.task.model_args == NONE]
        if plain and "model_args" not in self._request.given:
            # Without model_args, the model that is built without them is meant.
            fitting, match = plain, matched(plain, query)
        rivals = {(r.target.name, r.key.task.model_args, r.key.task.inputs): r for r in fitting}
        if len(rivals) < 2:
            return match
        listed = "; ".join(map(_named, rivals.values()))
        raise NoRecord(
            f"several records fit: {listed}. Name one: apply(target, shape=..., dtype=..., "
            "model_args=...)"
        )

    def _elsewhere(self, match: Match, found: Sequence[Record], query: Query) -> Match:
        """A miss for want of a record of this very target, where there are others of its name."""
        if not found:
            return match
        own = [one for one in found if FILE not in {d.field for d in self.apart(one)}]
        if not own and self.named is None:
            return match  # files beside the script that are none of its own
        match = matched(own or found, query)
        near = match.record or match.nearest
        assert near is not None
        differs = self.apart(near) + (match.differs if match.record is None else ())
        return Match(kind="miss", record=None, differs=differs, nearest=near)


def _tuned_of(spec: Spec, target: Target) -> Spec:
    """What of a file was tuned: a name may leave that open."""
    return dataclasses.replace(spec, attribute=target.name.rpartition(":")[2])


def matched(found: Sequence[Record], query: Query) -> Match:
    """As asked; else a record that permits more, whose trials in what is asked are the answer."""
    match = best(query, found)
    return match if match.record is not None else best(query.without(*NARROWING), found)


def _named(record: Record) -> str:
    given = _listed(record.key.task.model_args)
    return f"{record.target.name}{f'({given})' if given else ''} {record.key.task.inputs}"


def _listed(arguments: Config) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def spec_of(text: str) -> Spec:
    """Of a file looked for here, else beside the script, wherever that was started from.

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
    """The running script's file; one that is not there where there is none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not file:
        return Path("(no script)")
    with contextlib.suppress(FileNotFoundError):  # the current folder is gone
        return Path(file).absolute()
    return Path(file)


def folder() -> Path | None:
    """The current folder; None where it is gone."""
    with contextlib.suppress(OSError):
        return Path.cwd()
    return None


def beside() -> list[Spec]:
    """The running script and the modules beside it, imported or not; of one in a package, also
    those around it."""
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
