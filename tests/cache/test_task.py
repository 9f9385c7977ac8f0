from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.cache.task import PERMITTED, Task, python, rows, shell
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
    assert {row.keyword for row in rows(Task).values() if row.given} == {"target", *ODD}


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

    said = eval(f"dict({', '.join(python(made))})")
    unasked = {name: r.default for name, r in rows(Task).items() if not r.asked and r.given}
    assert Task.of("model.py:Net", said) == dataclasses.replace(made, **unasked)
    made = dataclasses.replace(made, **unasked)
    assert len(python(made)) == 1 + (made != task()) + (keyword == "vocab") - (keyword == "shape")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shape": "64"}, "shape '64': expected a batch and a sample"),
        ({"dtype": "complex64"}, "expected one of float32"),
        ({"vocab": 0}, "expected a number from 1"),
        ({"mode": "test"}, "expected one of train, infer"),
        ({"model_args": ["width"]}, "model args .*expected NAME=VALUE"),
        ({"device": "gpu"}, "expected cpu, cuda or cuda:N"),
        ({"precisions": "bf16,int8"}, "expected some of default, tf32"),
        ({"deterministic": 1}, "expected True or False"),
        ({"max_memory": "plenty"}, "max memory 'plenty': expected a positive size"),
        ({"batches": "0,4"}, "numbers of at least 1"),
        ({"shape": ["4x3", "8x3"], "batches": [4]}, "tuned at the batches given"),
        ({"shape": ["4x3", "8x3"], "data": "data.py"}, "has no loader that is tuned"),
        ({"any_order": True}, "any order: of which data"),
        ({"data_args": {"root": "a"}}, "data args: of which data"),
        ({"map": {"batch": "-b"}}, "a TARGET has no options"),
        ({"tolerance": 1}, "expected a fraction"),
        ({"colour": "red"}, "colour: expected one of target, shape"),
    ],
)
def test_what_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        task(**given)


def test_without_a_shape() -> None:
    with pytest.raises(UsageError, match="give your batch and the sample"):
        Task.of("model.py", {})


def test_what_does_not_matter_is_left_at_its_default() -> None:
    assert task(mode="infer", optimizer="adamw") == task(mode="infer", tolerance=0.3)
    assert task(vocab=7) == task()
    assert task(dtype="int64", vocab=7) != task(dtype="int64")
    assert task(batches=[8, 64, 8]) == task(batches=(8,))
    assert task(precisions=PERMITTED[::-1]) == task(precisions=",".join(PERMITTED)) == task()
    assert task(shape=["4x3", "8x3"]).shapes == ((8, 3), (4, 3))
    assert task(shape=["4x3", "8x3"]).batches == ()


def test_parts() -> None:
    one, mix = task(), task(shape=["4x3x8x8", "8x3x4x4"])
    assert (one.batch, one.sample, one.mix, one.inputs) == (64, (3, 8, 8), (), "3x8x8 float32")
    assert (mix.batch, mix.sample, mix.mix) == (4, (3, 8, 8), mix.shapes)
    assert mix.inputs == "4x3x8x8+8x3x4x4 float32".replace("+", " + ")
    assert one.decisive["shapes"] == (3, 8, 8)
    assert mix.decisive["shapes"] == mix.shapes
    assert dataclasses.replace(one, model_args=Config(a=1)).decisive == one.decisive
