"""Sizes of a run's inputs that are not known, because they differ from step to step.

Which sizes a run showed depends on the steps that were looked at: what is unknown fits any size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNKNOWN = "?"
"""In a task's `others`, as in 'mask 16x? bool'; in `shapes` it is 1."""
_INPUT = re.compile(r"(\S+) ([\d?]+(?:x[\d?]+)*) (\w+)")

_Sizes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Sizes of the first input and, by name and dtype, of the others; and what is no input."""

    first: _Sizes
    others: Mapping[tuple[str, str], _Sizes]
    more: tuple[str, ...]

    @classmethod
    def of(cls, shapes: tuple[Any, ...], others: str) -> _Inputs:
        first = tuple(map(str, shapes))
        inputs: dict[tuple[str, str], _Sizes] = {}
        more = []
        for part in filter(None, others.split("; ")):
            if not (found := _INPUT.fullmatch(part)):
                more.append(part)
                continue
            sizes = tuple(found[2].split("x"))
            known = tuple("1" if size == UNKNOWN else size for size in sizes)
            if not inputs and UNKNOWN in sizes and known == first:
                first = sizes  # it stands among the others where a size of it is unknown
            else:
                inputs[found[1], found[3]] = sizes
        return cls(first, inputs, tuple(more))


def fit(want: Mapping[str, Any], have: Mapping[str, Any]) -> bool:
    """Whether the inputs of two keys differ only in sizes that one of them does not know; of keys
    by field, as `cache.key.fields` gives them."""
    if any(known.get("shapes") is None or "others" not in known for known in (want, have)):
        return False
    one, other = (_Inputs.of(known["shapes"], known["others"]) for known in (want, have))
    return (
        one.more == other.more
        and one.others.keys() == other.others.keys()
        and _fit(one.first, other.first)
        and all(_fit(sizes, other.others[name]) for name, sizes in one.others.items())
    )


def _fit(one: _Sizes, other: _Sizes) -> bool:
    pairs = list(zip(one, other, strict=False))
    return len(one) == len(other) and all(a == b or UNKNOWN in (a, b) for a, b in pairs)
