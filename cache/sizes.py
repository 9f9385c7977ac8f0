"""Sizes of a run's inputs that are not known, because they differ from step to step.

Which sizes a run showed depends on the steps that were looked at: what is unknown fits any size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

UNKNOWN = "?"
"""In a task's `others`, as in 'mask 16x? bool'; in `shapes` it is 1."""
_INPUT = re.compile(r"(\S+) ([\d?]+(?:x[\d?]+)*) (\w+)")

Inputs = tuple[tuple[str, ...], dict[tuple[str, str], tuple[str, ...]], list[str]]
"""Sizes of the first input and, by name and dtype, of the others; and what is no input."""


def _inputs(known: Mapping[str, Any]) -> Inputs:
    first = tuple(map(str, known["shapes"]))
    inputs: dict[tuple[str, str], tuple[str, ...]] = {}
    more = []
    for part in filter(None, known["others"].split("; ")):
        if not (found := _INPUT.fullmatch(part)):
            more.append(part)
            continue
        sizes = tuple(found[2].split("x"))
        if (
            not inputs
            and UNKNOWN in sizes
            and first == tuple("1" if size == UNKNOWN else size for size in sizes)
        ):
            first = sizes  # it is listed among the others if one of its sizes is unknown
        else:
            inputs[found[1], found[3]] = sizes
    return first, inputs, more


def fit(want: Mapping[str, Any], have: Mapping[str, Any]) -> bool:
    """Whether the inputs of two keys differ only in sizes that one of them does not know; of keys
    by field, as `cache.key.fields` gives them."""
    if any(known.get("shapes") is None or "others" not in known for known in (want, have)):
        return False
    (first, inputs, more), (other_first, others, other_more) = map(_inputs, (want, have))
    return (
        (more, inputs.keys()) == (other_more, others.keys())
        and _fit(first, other_first)
        and all(_fit(sizes, others[name]) for name, sizes in inputs.items())
    )


def _fit(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    pairs = list(zip(one, other, strict=False))
    return len(one) == len(other) and all(a == b or UNKNOWN in (a, b) for a, b in pairs)
