from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from advisor.cache.task import PERMITTED, Task, changed, rows, shell
from advisor.errors import UsageError


def task(**given: object) -> Task:
    return Task.of("model.py:Net", {"shape": "64x3x8x8", **given})


ODD = {
    "shape": (32, 3, 9, 9),
    "dtype": "int64",
    "vocab": 50304,
    "mode": "infer",
    "optimizer": "adamw",
    "model_args": {"width": 8, "name": "a b", "flag": True, "nothing": None, "text": "1"},
    "data": "data.py:make_dataset",
    "data_args": {"root": "a b", "size": 5},
    "device": "cuda:1",
    "precisions": ["tf32", "bf16"],
    "any_order": True,
    "deterministic": True,
    "max_memory": "40GiB",
    "batches": [16, 8],
    "compile": False,
    "step_graph": False,
    "tolerance": 0.5,
}


def test_the_table_is_tried_whole() -> None:
    said = {row.keyword for row in rows(Task).values() if row.option or row.switches}
    assert said == {"map", *ODD}  # the first is of runs alone


@pytest.mark.parametrize("keyword", ODD)
def test_what_is_printed_says_the_same_when_it_is_read_again(keyword: str) -> None:
    given: dict[str, Any] = {keyword: ODD[keyword]}
    if keyword == "vocab":
        given["dtype"] = "int64"
    if keyword in ("data_args", "any_order"):
        given["data"] = "data.py"
    made = task(**given)

    words = shell(made)
    again: dict[str, Any] = {}
    known = {row.option: row for row in rows(Task).values()}
    switches = {name: (row, v) for row in rows(Task).values() for name, v in row.switches.items()}
    while words:
        word = words.pop(0)
        if word in switches:
            row, value = switches[word]
            again[row.keyword] = value
        elif known[word].kind.repeats:
            again.setdefault(known[word].keyword, []).append(words.pop(0))
        else:
            again[known[word].keyword] = words.pop(0)
    assert Task.of("model.py:Net", again) == made

    said = {row.keyword: eval(row.kind.literal(v)) for row, v in changed(made) if row.asked}
    unasked = {name: r.default for name, r in rows(Task).items() if r.printed and not r.asked}
    assert Task.of("model.py:Net", said) == dataclasses.replace(made, **unasked)
    made = dataclasses.replace(made, **unasked)
    assert len(said) == 1 + (made != task()) + (keyword == "vocab") - (keyword == "shape")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dtype": "complex64"}, "expected one of float32"),
        ({"device": "gpu"}, "expected cpu, cuda or cuda:N"),
        ({"batches": "0,4"}, "numbers of at least 1"),
        ({"shape": ["4x3", "8x3"], "batches": [4]}, "tuned at its own batches"),
        ({"shape": ["4x3", "8x3"], "data": "data.py"}, "advisor tunes no loader"),
        ({"any_order": True}, "any order: needs data too"),
        ({"data_args": {"root": "a"}}, "data args: needs data too"),
        ({"map": {"batch": "-b"}}, "a TARGET has no options"),
        ({"colour": "red"}, "colour: expected one of target, shape"),
        ({"shape": None}, "give your batch and the sample"),
    ],
)
def test_what_is_refused(given: dict[str, object], says: str) -> None:
    """See `test_kinds` for the values of one field."""
    with pytest.raises(UsageError, match=says):
        task(**given)


def test_what_does_not_matter_is_left_at_its_default() -> None:
    assert task(mode="infer", optimizer="adamw") == task(mode="infer", tolerance=0.3)
    assert task(vocab=7) == task()
    assert task(dtype="int64", vocab=7) != task(dtype="int64")
    assert task(batches=[8, 64, 8]) == task(batches=(8,))
    assert task(precisions=PERMITTED[::-1]) == task(precisions=",".join(PERMITTED)) == task()
    assert task(shape=["4x3", "8x3"]).shapes == ((8, 3), (4, 3))
    assert task(shape=["4x3", "8x3"]).batches == ()
