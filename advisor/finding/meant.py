"""Which of the records of a target is meant."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from advisor.cache.match import Difference, Match, Query, best
from advisor.cache.record import Record
from advisor.cache.task import NONE, Task, rows
from advisor.errors import NoRecord, UsageError
from advisor.finding.request import Request
from advisor.tuners.target import Spec, origin_of, parse

_NARROWING = tuple(name for name, row in rows(Task).items() if row.narrows)


def wanted_of(found: Sequence[Record], request: Request) -> list[Record]:
    """Those of the very file that is meant, built with the arguments that were given."""
    if isinstance(request.target, str):
        origin = spec_of(request.target).origin
        found = [record for record in found if record.target.origin == origin]
    arguments = request.given.get("model_args")
    if arguments is not None:
        found = [record for record in found if record.key.task.model_args == arguments]
    return list(found)


def matched(found: Sequence[Record], query: Query) -> Match:
    """As asked; else a record that permits more, whose trials in what is asked are the answer."""
    match = best(query, found)
    return match if match.record is not None else best(query.without(*_NARROWING), found)


def the_one(found: Sequence[Record], request: Request, query: Query) -> Match:
    """The match among all records of a target, where it is plain which is meant.

    Raises:
        NoRecord: records of several targets or samples fit.
    """
    mine = wanted_of(found, request)
    match = matched(mine, query)
    if match.record is None:
        return match if mine else _elsewhere(match, found)
    if query.model is not None:
        return match
    loose = query.without(*_NARROWING)
    fitting = [record for record in mine if best(loose, [record]).record is not None]
    plain = [record for record in fitting if record.key.task.model_args == NONE]
    if plain and "model_args" not in request.given:
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


def _elsewhere(match: Match, found: Sequence[Record]) -> Match:
    """A miss for want of a record of this very file, where there are others of its name."""
    if not found:
        return match
    near = found[0]
    differs = Difference(field="file", wanted="this one", found="another of this name")
    return Match(kind="miss", record=None, differs=(differs,), nearest=near)


def _named(record: Record) -> str:
    arguments = record.key.task.model_args
    given = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"{record.target.name}{f'({given})' if given else ''} {record.key.task.inputs}"


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
    return Path(file).absolute() if file else Path("(no script)")


def origins() -> set[str]:
    """Of the running script and the modules beside it."""
    here = script()
    mine = {origin_of(here)}
    if here.parent.is_dir() and here.is_file():
        mine |= {origin_of(path) for path in here.parent.glob("*.py")}
    return mine
