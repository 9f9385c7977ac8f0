"""How what `advisor serve --executor` is given becomes an executor. A new kind is one row here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from advisor.errors import UsageError
from advisor.service.executors import Executor

LOCAL, NONE = "local", "none"


def _local(_text: str, database: str) -> Executor:
    from advisor.service.executors.local import Local

    return Local(database)


def _ray(text: str, _database: str) -> Executor:
    from advisor.service.executors.ray import RayExecutor

    return RayExecutor(text)


SCHEMES: Mapping[str, Callable[[str, str], Executor]] = {
    LOCAL: _local,
    "ray-jobs": _ray,
    "ray": _ray,
}
"""By what stands before the first colon: what takes the whole text, and the database for people."""


def open_executors(texts: Iterable[str], database: str) -> list[Executor]:
    """An executor for each text; 'none' is for none at all.

    Raises:
        UsageError: one is of no known kind, or is given twice.
    """
    found: dict[str, Executor] = {}
    for text in texts:
        scheme = text.partition(":")[0]
        if text == NONE:
            continue
        if scheme not in SCHEMES:
            known = ", ".join([*SCHEMES, NONE])
            raise UsageError(f"--executor {text[:80]!r}: expected one of {known}")
        one = SCHEMES[scheme](text, database)
        if found.setdefault(one.name, one) is not one:
            raise UsageError(f"--executor {text[:80]!r}: is given twice")
    return list(found.values())
