"""Each kind of value: what it takes, in which form it is held, how it is refused and written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from advisor.cache import kinds
from advisor.cache.config import Config
from advisor.errors import UsageError

CHOICE = kinds.SingleChoice(("sgd", "adamw"))
MULTI = kinds.MultiChoice(("default", "tf32", "bf16"))
MOST = 2**31 - 1
NINE = [f"{n}x3" for n in range(1, 10)]


@pytest.mark.parametrize(
    ("kind", "given", "held"),
    [
        (kinds.Text(), "a b", "a b"),
        (CHOICE, "sgd", "sgd"),
        (kinds.SingleChoice(("float32",)), "torch.float32", "float32"),
        (MULTI, "bf16, default,bf16", ("default", "bf16")),
        (MULTI, ["bf16"], ("bf16",)),
        (kinds.Switch(), False, False),
        (kinds.Whole(), 1, 1),
        (kinds.Whole(), "12", 12),
        (kinds.Whole(), MOST, MOST),
        (kinds.Whole(0), 0, 0),
        (kinds.Fraction(), 0, 0.0),
        (kinds.Fraction(), "0.999", 0.999),
        *((kinds.DeviceName(), one, one) for one in ("cpu", "cuda", "cuda:9999")),
        (kinds.Numbers(), "16, 8,16", (8, 16)),
        (kinds.Numbers(), [3, "2"], (2, 3)),
        (kinds.Numbers(), [], ()),
        (kinds.Numbers(), range(1, 65), tuple(range(1, 65))),
        (kinds.ByteSize(), 1, 1),
        (kinds.ByteSize(), "512", 512),
        (kinds.ByteSize(), "2k", 2048),
        (kinds.ByteSize(), "512MB", 512 * 10**6),
        (kinds.ByteSize(), " 1.5 GiB ", 3 * 2**29),
        (kinds.ByteSize(), "2tb", 2 * 10**12),
        (kinds.ByteSize(), 2**62, 2**62),
        (kinds.Duration(), 90, 90.0),
        (kinds.Duration(), "0.5", 0.5),
        (kinds.Duration(), "90s", 90.0),
        (kinds.Duration(), "5m", 300.0),
        (kinds.Duration(), "50ms", 0.05),
        (kinds.Duration(), "2d1s", 172_801.0),
        (kinds.Duration(), "1h30m", 5400.0),
        (kinds.Duration(), " 1.5h1m1s ", 5461.0),
        (kinds.Duration(), 999_999_999, 999_999_999.0),
        (kinds.Shapes(), "64x3X8", ((64, 3, 8),)),
        (kinds.Shapes(), (64, 3), ((64, 3),)),
        (kinds.Shapes(), ["64", "3"], ((64, 3),)),
        (kinds.Shapes(), [1] * 16, ((1,) * 16,)),
        (kinds.Shapes(), [[2, 3], "4x3", (3, 4)], ((3, 4), (4, 3), (2, 3))),
        (kinds.Shapes(), f"{MOST}x1", ((MOST, 1),)),
        (kinds.Arguments(), "width=8", Config(width=8)),
        (kinds.Options(("batch",)), ["batch=--size"], Config(batch="--size")),
        (kinds.Options(("batch",)), {"batch": "-b"}, Config(batch="-b")),
        (kinds.Arguments(), {"width": 8}, Config(width=8)),
        (
            kinds.Arguments(),
            ["a=1", "b=1.5", "c=True", "d=false", "e=NONE", 'f="1"', "g=x=y", 'h="', "i="],
            Config(a=1, b=1.5, c=True, d=False, e=None, f="1", g="x=y", h='"', i=""),
        ),
        (kinds.Arguments(), ['a=""', 'b="x', 'c=x"'], Config(a="", b='"x', c='x"')),
    ],
)
def test_taken(kind: kinds.Kind[Any], given: object, held: object) -> None:
    found = kind.checked("it", given)
    assert found == held
    assert type(found) is type(held)
    # What is in its own form is taken as it is.
    assert kind.checked("it", found) == found


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (kinds.Text(), ["", "a\n", 1]),
        (CHOICE, ["adam", 3]),
        (MULTI, ["int8", "bf16,int8", (), 3]),
        (kinds.Switch(), [1, "true"]),
        (kinds.Whole(), [0, MOST + 1, True, 2.5, "2.5", "2.0", "1e3", "", "\u0664", None]),
        (kinds.Whole(0), [-1]),
        (kinds.Fraction(), [1, -0.1, math.nan, None, "x"]),
        (kinds.DeviceName(), ["cuda:", "CPU", "cuda:12345", "cuda:0-", "cuda:0-3", "all", "cpu\n"]),
        (kinds.Numbers(), [3, [0], "", "16.0,32", "1e1", range(65)]),
        (kinds.ByteSize(), [0, "1PB", "GiB", "-1", 2**63, "1e999", None]),
        (kinds.Duration(), [0, "", "-5", "1w", "1h5", "1m30", "1ms5", "5m1h", 10**9]),
        (
            kinds.Shapes(),
            ["64", 7, "0x3", f"{MOST + 1}x3", "axb", [None], [[1] * 17], [], "1e3x3", "16.0x3"],
        ),
        (kinds.Options(("batch",)), [3, "lr=--lr", 2 * ["batch=-b"], {"batch": "$(x)"}]),
        (kinds.Arguments(), [3, "width", ["a=1", "a=2"], "a b=1", {3: 1}]),
        (kinds.Words(), ["a b", 3, ["a\n"]]),
    ],
)
def test_refused(kind: kinds.Kind[Any], given: list[object]) -> None:
    for value in given:
        with pytest.raises(UsageError) as refused:
            kind.checked("it", value)
        assert str(refused.value) == f"it {value!r}: expected {kind.expected}"


@pytest.mark.parametrize("given", [["4x3", "4x3"], ["4x3", "4x3x3"], NINE])
def test_shapes_that_do_not_go_together(given: list[str]) -> None:
    with pytest.raises(UsageError, match=r"different shapes with the same number of dimensions"):
        kinds.Shapes().checked("it", given)


def test_the_texts_of_an_option_that_repeats_are_shown_as_typed() -> None:
    with pytest.raises(UsageError, match=r"^shape '4x3', 'x': expected a batch and a sample"):
        kinds.Shapes().checked("shape", ("4x3", "x"))


def test_a_run_may_have_another_optimizer_than_a_person_gives() -> None:
    known = kinds.SingleChoice(("sgd",), "[a-z]+")
    assert known.checked("it", "lion") == "lion"
    with pytest.raises(UsageError, match="expected one of sgd"):
        known.asked("it", "lion")


@pytest.mark.parametrize(
    ("kind", "held", "texts", "literal"),
    [
        (kinds.Text(), "a", ["a"], '"a"'),
        (kinds.Text(), 'say "a"', ['say "a"'], "'say \"a\"'"),
        (kinds.Text(), "it's", ["it's"], '"it\'s"'),
        (CHOICE, "sgd", ["sgd"], '"sgd"'),
        (MULTI, ("tf32", "bf16"), ["tf32,bf16"], '["tf32", "bf16"]'),
        (kinds.Switch(), True, ["True"], "True"),
        (kinds.Fraction(), 0.25, ["0.25"], "0.25"),
        (kinds.DeviceName(), "cuda:1", ["cuda:1"], '"cuda:1"'),
        (kinds.Numbers(), (8, 16), ["8,16"], "[8, 16]"),
        (kinds.ByteSize(), 3 * 2**30, ["3GiB"], '"3GiB"'),
        (kinds.ByteSize(), 3 * 2**20 + 1, ["3145729"], '"3145729"'),
        (kinds.Duration(), 90.0, ["90s"], '"90s"'),
        (kinds.Shapes(), ((4, 3),), ["4x3"], "(4, 3)"),
        (kinds.Shapes(), ((4, 3), (2, 5)), ["4x3", "2x5"], "[(4, 3), (2, 5)]"),
        (
            kinds.Arguments(),
            Config(a=1, b=None, c="x", d="1", e=True, f="none"),
            ["a=1", "b=none", "c=x", 'd="1"', "e=True", 'f="none"'],
            '{"a": 1, "b": None, "c": "x", "d": "1", "e": True, "f": "none"}',
        ),
    ],
)
def test_written(kind: kinds.Kind[Any], held: object, texts: list[str], literal: str) -> None:
    assert kind.texts(held) == texts
    assert kind.literal(held) == literal
    assert eval(literal) == held or kind.checked("it", eval(literal)) == held
