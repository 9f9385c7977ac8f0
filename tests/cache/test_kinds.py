"""Value kinds and task fields: parsing, refusing, printing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from advisor.cache import kinds
from advisor.cache.config import Config
from advisor.cache.task import PERMITTED, Task, changed, rows, shell
from advisor.errors import UsageError

CHOICE = kinds.SingleChoice(("sgd", "adamw"))
MULTI = kinds.MultiChoice(("default", "tf32", "bf16"))
BATCH = kinds.Options(("batch",))
MAX_INT = 2**31 - 1
NINE_SHAPES = [f"{n}x3" for n in range(1, 10)]
ARGUMENTS = ["a=1", "b=1.5", "c=True", "d=false", "e=NONE", 'f="1"', "g=x=y", 'h="', "i="]
PARSED = Config(a=1, b=1.5, c=True, d=False, e=None, f="1", g="x=y", h='"', i="")


@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        (kinds.Text(), [("a b", "a b")]),
        (CHOICE, [("sgd", "sgd"), ("torch.sgd", "sgd")]),
        (MULTI, [("bf16, default,bf16", ("default", "bf16")), (["bf16"], ("bf16",))]),
        (kinds.Switch(), [(False, False)]),
        (kinds.Whole(), [(1, 1), ("12", 12), (MAX_INT, MAX_INT)]),
        (kinds.Whole(0), [(0, 0)]),
        (kinds.Fraction(), [(0, 0.0), ("0.999", 0.999)]),
        (kinds.DeviceName(), [(one, one) for one in ("cpu", "cuda", "cuda:9999")]),
        (kinds.Numbers(), [("16, 8,16", (8, 16)), ([3, "2"], (2, 3)), ([], ())]),
        (kinds.Numbers(), [(range(1, 65), tuple(range(1, 65)))]),
        (kinds.ByteSize(), [(1, 1), ("512", 512), ("2k", 2048), ("512MB", 512 * 10**6)]),
        (kinds.ByteSize(), [(" 1.5 GiB ", 3 * 2**29), ("2tb", 2 * 10**12), (2**62, 2**62)]),
        (kinds.Duration(), [(90, 90.0), ("0.5", 0.5), ("90s", 90.0), ("5m", 300.0)]),
        (kinds.Duration(), [("50ms", 0.05), ("2d1s", 172_801.0), ("1h30m", 5400.0)]),
        (kinds.Duration(), [(" 1.5h1m1s ", 5461.0), (999_999_999, 999_999_999.0)]),
        (kinds.Shapes(), [("64x3X8", ((64, 3, 8),)), ((64, 3), ((64, 3),))]),
        (kinds.Shapes(), [(["64", "3"], ((64, 3),)), ([1] * 16, ((1,) * 16,))]),
        (kinds.Shapes(), [([[2, 3], "4x3", (3, 4)], ((3, 4), (4, 3), (2, 3)))]),
        (kinds.Shapes(), [(f"{MAX_INT}x1", ((MAX_INT, 1),))]),
        (
            BATCH,
            [(["batch=--size"], Config(batch="--size")), ({"batch": "-b"}, Config(batch="-b"))],
        ),
        (kinds.Arguments(), [("width=8", Config(width=8)), ({"width": 8}, Config(width=8))]),
        (kinds.Arguments(), [(ARGUMENTS, PARSED)]),
        (kinds.Arguments(), [(['a=""', 'b="x', 'c=x"'], Config(a="", b='"x', c='x"'))]),
    ],
)
def test_valid_values_are_parsed(kind: kinds.Kind[Any], taken: list[tuple[object, object]]) -> None:
    for given, parsed in taken:
        value = kind.checked("it", given)
        assert (value, type(value)) == (parsed, type(parsed))
        assert kind.checked("it", value) == value  # a parsed value stays the same


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (kinds.Text(), ["", "a\n", 1]),
        (CHOICE, ["adam", 3]),
        (MULTI, ["int8", "bf16,int8", (), 3]),
        (kinds.Switch(), [1, "true"]),
        (kinds.Whole(), [0, MAX_INT + 1, True, 2.5, "2.5", "2.0", "1e3", "", "\u0664", None]),
        (kinds.Whole(0), [-1]),
        (kinds.Fraction(), [1, -0.1, math.nan, None, "x"]),
        (kinds.DeviceName(), ["cuda:", "CPU", "cuda:12345", "cuda:0-", "cuda:0-3", "all", "cpu\n"]),
        (kinds.Numbers(), [3, [0], "", "16.0,32", "1e1", range(65)]),
        (kinds.ByteSize(), [0, "1PB", "GiB", "-1", 2**63, "1e999", None]),
        (kinds.Duration(), [0, "", "-5", "1w", "1h5", "1m30", "1ms5", "5m1h", 10**9]),
        (kinds.Shapes(), ["64", 7, "0x3", f"{MAX_INT + 1}x3", "axb", [None], [[1] * 17], []]),
        (kinds.Shapes(), ["1e3x3", "16.0x3"]),
        (BATCH, [3, "lr=--lr", 2 * ["batch=-b"], {"batch": "$(x)"}]),
        (kinds.Arguments(), [3, "width", ["a=1", "a=2"], "a b=1", {3: 1}]),
        (kinds.Words(), ["a b", 3, ["a\n"]]),
    ],
)
def test_invalid_values_are_refused(kind: kinds.Kind[Any], given: list[object]) -> None:
    for value in given:
        with pytest.raises(UsageError) as refused:
            kind.checked("it", value)
        assert str(refused.value) == f"it {value!r}: expected {kind.expected}"


def test_incompatible_shapes_are_refused() -> None:
    for given in (["4x3", "4x3"], ["4x3", "4x3x3"], NINE_SHAPES):
        with pytest.raises(UsageError, match=r"different shapes with the same number of dimens"):
            kinds.Shapes().checked("it", given)
    with pytest.raises(UsageError, match=r"^shape '4x3', 'x': expected a batch and a sample"):
        kinds.Shapes().checked("shape", ("4x3", "x"))  # the error shows the original text


def test_runs_may_report_choices_that_users_cannot_give() -> None:
    known = kinds.SingleChoice(("sgd",), "[a-z]+")
    assert known.checked("it", "lion") == "lion"
    with pytest.raises(UsageError, match="expected one of sgd"):
        known.asked("it", "lion")


@pytest.mark.parametrize(
    ("kind", "value", "texts", "literal"),
    [
        (kinds.Text(), "a", "a", '"a"'),
        (kinds.Text(), 'say "a"', 'say "a"', "'say \"a\"'"),
        (kinds.Text(), "it's", "it's", '"it\'s"'),
        (CHOICE, "sgd", "sgd", '"sgd"'),
        (MULTI, ("tf32", "bf16"), "tf32,bf16", '["tf32", "bf16"]'),
        (kinds.Switch(), True, "True", "True"),
        (kinds.Fraction(), 0.25, "0.25", "0.25"),
        (kinds.DeviceName(), "cuda:1", "cuda:1", '"cuda:1"'),
        (kinds.Numbers(), (8, 16), "8,16", "[8, 16]"),
        (kinds.ByteSize(), 3 * 2**30, "3GiB", '"3GiB"'),
        (kinds.ByteSize(), 3 * 2**20 + 1, "3145729", '"3145729"'),
        (kinds.Duration(), 90.0, "90s", '"90s"'),
        (kinds.Shapes(), ((4, 3),), "4x3", "(4, 3)"),
        (kinds.Shapes(), ((4, 3), (2, 5)), "4x3 2x5", "[(4, 3), (2, 5)]"),
        (
            kinds.Arguments(),
            Config(a=1, b=None, c="x", d="1", e=True, f="none"),
            'a=1 b=none c=x d="1" e=True f="none"',
            '{"a": 1, "b": None, "c": "x", "d": "1", "e": True, "f": "none"}',
        ),
    ],
)
def test_values_are_written(kind: kinds.Kind[Any], value: object, texts: str, literal: str) -> None:
    assert " ".join(kind.texts(value)) == texts
    assert kind.literal(value) == literal
    assert eval(literal) == value or kind.checked("it", eval(literal)) == value


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
    "allow": ["bf16-reduce"],
}


def test_the_examples_cover_every_option() -> None:
    keywords = {row.keyword for row in rows(Task).values() if row.option or row.switches}
    assert keywords == {"map", *ODD}  # map: only for runs


@pytest.mark.parametrize("keyword", ODD)
def test_printed_options_round_trip(keyword: str) -> None:
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

    keywords = {row.keyword: eval(row.kind.literal(v)) for row, v in changed(made) if row.asked}
    unasked = {name: r.default for name, r in rows(Task).items() if r.printed and not r.asked}
    assert Task.of("model.py:Net", keywords) == dataclasses.replace(made, **unasked)
    made = dataclasses.replace(made, **unasked)
    assert len(keywords) == 1 + (made != task()) + (keyword == "vocab") - (keyword == "shape")


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
def test_invalid_tasks_are_refused(given: dict[str, object], says: str) -> None:
    """For single fields see `test_invalid_values_are_refused`."""
    with pytest.raises(UsageError, match=says):
        task(**given)


@pytest.mark.parametrize("target", ["", "a\nb.py", "\udcff.py"])
def test_unprintable_targets_are_refused(target: str) -> None:
    with pytest.raises(UsageError, match="expected text on one line"):
        Task.of(target, {"shape": "4x64"})


def test_irrelevant_options_keep_their_defaults() -> None:
    assert task(mode="infer", optimizer="adamw") == task(mode="infer", tolerance=0.3)
    assert task(vocab=7) == task()
    assert task(dtype="int64", vocab=7) != task(dtype="int64")
    assert task(batches=[8, 64, 8]) == task(batches=(8,))
    assert task(precisions=PERMITTED[::-1]) == task(precisions=",".join(PERMITTED)) == task()
    assert task(shape=["4x3", "8x3"]).shapes == ((8, 3), (4, 3))
    assert task(shape=["4x3", "8x3"]).batches == ()
