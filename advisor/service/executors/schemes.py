"""How the texts of `advisor serve --executor` become executors."""

from __future__ import annotations

from collections.abc import Iterable

from advisor.errors import UsageError
from advisor.service.executors import Executor

LOCAL, NONE = "local", "none"
_RAY = ("ray-jobs", "ray")


def open_executors(texts: Iterable[str], database: str) -> list[Executor]:
    """An executor for each text; 'none' is for none at all.

    Args:
        database: for people.

    Raises:
        UsageError: one is of no known kind, or is given twice.
    """
    found: dict[str, Executor] = {}
    for text in texts:
        if text == NONE:
            continue
        one = _opened(text, database)
        if found.setdefault(one.name, one) is not one:
            raise UsageError(f"--executor {text[:80]!r}: is given twice")
    return list(found.values())


def _opened(text: str, database: str) -> Executor:
    scheme = text.partition(":")[0]
    if scheme == LOCAL:
        from advisor.service.executors.local import Local

        return Local(database)
    if scheme in _RAY:
        from advisor.service.executors.ray import RayExecutor

        return RayExecutor(text)
    known = ", ".join([LOCAL, *_RAY, NONE])
    raise UsageError(f"--executor {text[:80]!r}: expected one of {known}")
