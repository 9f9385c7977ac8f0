"""Each kind of value: what it takes, in which form it is held, how it is refused and written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from advisor.cache import kinds
from advisor.cache.config import Config
from advisor.errors import UsageError

CHOICE = kinds.Choice(("sgd", "adamw"))
MULTI = kinds.MultiChoice(("default", "tf32", "bf16"))
MOST = 2**31 - 1

DEVICES = "expected cpu, cuda or cuda:N, e.g. cuda:0"
ONE_DEVICE = "tune measures on one device; give one, as cuda:0"


@pytest.mark.parametrize(
    ("kind", "given", "held"),
    [
        (kinds.Text(), "a b", "a b"),
        (CHOICE, "sgd", "sgd"),
        (kinds.Choice(("float32",)), "torch.float32", "float32"),
        (MULTI, "bf16, default,bf16", ("default", "bf16")),
        (MULTI, ["bf16"], ("bf16",)),
        (kinds.Switch(), False, False),
        (kinds.Whole(), 1, 1),
        (kinds.Whole(), "12", 12),
        (kinds.Whole(), MOST, MOST),
        (kinds.Whole(0), 0, 0),
        (kinds.Fraction(), 0, 0.0),
        (kinds.Fraction(), "0.999", 0.999),
        (kinds.Device(), "cpu", "cpu"),
        (kinds.Device(), "cuda", "cuda"),
        (kinds.Device(), "cuda:9999", "cuda:9999"),
        (kinds.Numbers(), "16, 8,16", (8, 16)),
        (kinds.Numbers(), [3, "2"], (2, 3)),
        (kinds.Numbers(), [], ()),
        (kinds.Numbers(), range(1, 65), tuple(range(1, 65))),
        (kinds.Bytes(), 1, 1),
        (kinds.Bytes(), "512", 512),
        (kinds.Bytes(), "512b", 512),
        (kinds.Bytes(), "2k", 2048),
        (kinds.Bytes(), "2kb", 2000),
        (kinds.Bytes(), "2KiB", 2048),
        (kinds.Bytes(), "512MiB", 512 * 2**20),
        (kinds.Bytes(), "512MB", 512 * 10**6),
        (kinds.Bytes(), " 1.5 GiB ", 3 * 2**29),
        (kinds.Bytes(), "1G", 2**30),
        (kinds.Bytes(), "2TiB", 2**41),
        (kinds.Bytes(), "2tb", 2 * 10**12),
        (kinds.Bytes(), 2**62, 2**62),
        (kinds.Seconds(), 90, 90.0),
        (kinds.Seconds(), "0.5", 0.5),
        (kinds.Seconds(), "90s", 90.0),
        (kinds.Seconds(), "5m", 300.0),
        (kinds.Seconds(), "1h30m", 5400.0),
        (kinds.Seconds(), " 1.5h1m1s ", 5461.0),
        (kinds.Seconds(), 999_999_999, 999_999_999.0),
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


NO_SHAPE = f": expected a batch and a sample, each number from 1 to {MOST}, e.g. 64x3x256x256"


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (kinds.Text(), "", "it '': expected text on one line"),
        (kinds.Text(), "a\n", "it 'a\\n': expected text on one line"),
        (kinds.Text(), 1, "it 1: expected text on one line"),
        (CHOICE, "adam", "it 'adam': expected one of sgd, adamw"),
        (MULTI, "int8", "it 'int8': expected one of default, tf32, bf16"),
        (MULTI, (), "it (): expected some of default, tf32, bf16"),
        (MULTI, 3, "it 3: expected some of default, tf32, bf16"),
        (kinds.Switch(), 1, "it 1: expected True or False"),
        (kinds.Whole(), 0, f"it 0: expected a number from 1 to {MOST}"),
        (kinds.Whole(), MOST + 1, f"it {MOST + 1}: expected a number from 1 to {MOST}"),
        (kinds.Whole(0), -1, f"it -1: expected a number from 0 to {MOST}"),
        (kinds.Whole(), True, f"it True: expected a number from 1 to {MOST}"),
        (kinds.Whole(), 2.0, f"it 2.0: expected a number from 1 to {MOST}"),
        (kinds.Whole(), "2.0", f"it '2.0': expected a number from 1 to {MOST}"),
        (kinds.Fraction(), 1, "it 1: expected a fraction such as 0.02"),
        (kinds.Fraction(), -0.1, "it -0.1: expected a fraction such as 0.02"),
        (kinds.Fraction(), math.nan, "it nan: expected a fraction such as 0.02"),
        (kinds.Fraction(), None, "it None: expected a fraction such as 0.02"),
        (kinds.Fraction(), "x", "it 'x': expected a fraction such as 0.02"),
        (kinds.Device(), "cuda:", f"it 'cuda:': {DEVICES}"),
        (kinds.Device(), "CPU", f"it 'CPU': {DEVICES}"),
        (kinds.Device(), "cuda:12345", f"it 'cuda:12345': {DEVICES}"),
        (kinds.Device(), "cuda:0-", f"it 'cuda:0-': {ONE_DEVICE}"),
        (kinds.Device(), "cuda:0-3", f"it 'cuda:0-3': {ONE_DEVICE}"),
        (kinds.Device(), "all", f"it 'all': {ONE_DEVICE}"),
        (kinds.Numbers(), 3, "it 3: expected numbers of at least 1, as 16,32,64"),
        (kinds.Numbers(), [0], f"it 0: expected a number from 1 to {MOST}"),
        (kinds.Numbers(), "", f"it '': expected a number from 1 to {MOST}"),
        (
            kinds.Numbers(),
            range(65),
            "it range(0, 65): expected numbers of at least 1, as 16,32,64",
        ),
        (kinds.Bytes(), 0, "it 0: expected a positive size such as 40GiB or 512MiB"),
        (kinds.Bytes(), "1PB", "it '1PB': expected a positive size such as 40GiB or 512MiB"),
        (kinds.Bytes(), "GiB", "it 'GiB': expected a positive size such as 40GiB or 512MiB"),
        (kinds.Bytes(), "-1", "it '-1': expected a positive size such as 40GiB or 512MiB"),
        (kinds.Bytes(), 2**63, f"it {2**63}: expected a positive size such as 40GiB or 512MiB"),
        (kinds.Bytes(), "1e999", "it '1e999': expected a positive size such as 40GiB or 512MiB"),
        (kinds.Seconds(), 0, "it 0: expected a time above zero, as 90s, 5m or 1h30m"),
        (kinds.Seconds(), "", "it '': expected a time above zero, as 90s, 5m or 1h30m"),
        (kinds.Seconds(), "-5", "it '-5': expected a time above zero, as 90s, 5m or 1h30m"),
        (kinds.Seconds(), "1d", "it '1d': expected a time above zero, as 90s, 5m or 1h30m"),
        (
            kinds.Seconds(),
            10**9,
            "it 1000000000: expected a time above zero, as 90s, 5m or 1h30m",
        ),
        (kinds.Shapes(), "64", f"shape '64'{NO_SHAPE}"),
        (kinds.Shapes(), 7, f"shape 7{NO_SHAPE}"),
        (kinds.Shapes(), "0x3", f"shape '0x3'{NO_SHAPE}"),
        (kinds.Shapes(), f"{MOST + 1}x3", f"shape '{MOST + 1}x3'{NO_SHAPE}"),
        (kinds.Shapes(), "axb", f"shape 'axb'{NO_SHAPE}"),
        (kinds.Shapes(), [None], f"shape None{NO_SHAPE}"),
        (kinds.Shapes(), [[1] * 17], f"shape {[1] * 17}{NO_SHAPE}"),
        (kinds.Shapes(), [], f"shape []{NO_SHAPE}"),
        (kinds.Shapes(), ["4x3", "4x3"], "shapes 4x3, 4x3: one is given twice; give each once"),
        (
            kinds.Shapes(),
            ["4x3", "4x3x3"],
            "shapes 4x3, 4x3x3: expected the same number of dimensions in all",
        ),
        (
            kinds.Shapes(),
            [f"{n}x3" for n in range(1, 10)],
            f"shapes {', '.join(f'{n}x3' for n in range(1, 10))}: expected one to 8, got 9",
        ),
        (kinds.Options(("batch",)), 3, "it 3: expected KNOB=OPTION, e.g. batch=--batch-size"),
        (kinds.Options(("batch",)), "lr=--lr", "it 'lr': expected one of batch"),
        (kinds.Options(("batch",)), 2 * ["batch=-b"], "it: batch is given twice; give it once"),
        (
            kinds.Options(("batch",)),
            {"batch": "$(x)"},
            "it '$(x)': expected an option, e.g. batch=--batch-size",
        ),
        (kinds.Arguments(), 3, "it 3: expected NAME=VALUE, e.g. num_classes=10"),
        (kinds.Arguments(), "width", "it 'width': expected NAME=VALUE, e.g. num_classes=10"),
        (kinds.Arguments(), ["a=1", "a=2"], "it: a is given twice; give it once"),
        (kinds.Arguments(), "a b=1", "it 'a b': expected a name, e.g. num_classes"),
        (kinds.Arguments(), {3: 1}, "it 3: expected a name, e.g. num_classes"),
    ],
)
def test_refused(kind: kinds.Kind[Any], given: object, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        kind.checked("it", given)
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("kind", "held", "texts", "literal"),
    [
        (kinds.Text(), "a", ["a"], '"a"'),
        (kinds.Text(), 'say "a"', ['say "a"'], "'say \"a\"'"),
        (kinds.Text(), "a\\b", ["a\\b"], "'a\\\\b'"),
        (kinds.Text(), "it's", ["it's"], '"it\'s"'),
        (CHOICE, "sgd", ["sgd"], '"sgd"'),
        (MULTI, ("tf32", "bf16"), ["tf32,bf16"], '["tf32", "bf16"]'),
        (kinds.Switch(), True, ["True"], "True"),
        (kinds.Whole(), 7, ["7"], "7"),
        (kinds.Fraction(), 0.25, ["0.25"], "0.25"),
        (kinds.Device(), "cuda:1", ["cuda:1"], '"cuda:1"'),
        (kinds.Numbers(), (8, 16), ["8,16"], "[8, 16]"),
        (kinds.Bytes(), 3 * 2**30, ["3GiB"], '"3GiB"'),
        (kinds.Bytes(), 3 * 2**20, ["3MiB"], '"3MiB"'),
        (kinds.Bytes(), 3 * 2**20 + 1, ["3145729"], '"3145729"'),
        (kinds.Seconds(), 90.0, ["90s"], '"90s"'),
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


def test_what_stands_for_a_value_in_help() -> None:
    every = (kinds.Text(), CHOICE, MULTI, kinds.Switch(), kinds.Whole(), kinds.Shapes())
    assert [kind.metavar for kind in every] == [
        *("TEXT", "sgd|adamw", "LIST", "", "N", "BATCHxSAMPLE")
    ]
    assert [kind.repeats for kind in every] == [False] * 5 + [True]
