"""What an explanation says, word for word."""

from __future__ import annotations

import math

import pytest

from advisor.cache.config import Config
from advisor.cache.explanation import MAX_LISTED, Explanation, NearMiss
from advisor.cache.match import Difference, Query
from advisor.cache.shown import interval, size, speedup
from tests.cache import examples


def near(number: int, *differs: Difference, signed: bool = True) -> NearMiss:
    where = {"target": "model.py:Net", "store": "dir:/a"}
    return NearMiss(id=f"{number}", signed=signed, differs=differs, **where)


def test_a_miss() -> None:
    edited = Difference(field="code", wanted="edited since", found="as tuned")
    strict = Difference(field="deterministic", wanted=False, found=True)
    given = {"shapes": ((8, 3, 256, 256),), "mode": "train", "deterministic": False}
    given |= {"model_args": Config(a=1, b="x")}
    said = Explanation(
        target="model.py:Net",
        query=Query(environment=examples.ENVIRONMENT, given=given, model=examples.KEY.model),
        reason="nothing there",
        stores=[("dir:/a", "1 record"), ("redis://b", "did not answer")],
        refused=["1 is damaged", "2 is not signed"],
        near_misses=(near(16, signed=False), *[near(32, edited, strict)] * (MAX_LISTED + 1)),
    )
    *lines, more = str(said).splitlines()
    assert more.strip() == "and 2 more; see: advisor show"
    assert lines[: 2 - MAX_LISTED] == [
        "looked for  model.py:Net",
        "  model         abababababab",
        "  shape         8x3x256x256",
        "  mode          train",
        "  model_args    a=1 b=x",
        "  deterministic False",
        "  device        NVIDIA H200",
        "  driver        580.1",
        "  CUDA          13.0",
        "  cuDNN         91900",
        "  torch         2.11.0",
        "looked in   dir:/a: 1 record",
        "            redis://b: did not answer",
        "miss        nothing there",
        "refused     1 is damaged",
        "refused     2 is not signed",
        "not served  16 model.py:Net (unsigned): it fits, but cannot serve this (see above), or "
        "another was preferred",
        "not served  32 model.py:Net: code as tuned -> edited since, deterministic True -> False",
    ]


def test_a_size_has_the_unit_that_fits() -> None:
    texts = {0: "-", 512: "512 B", 1000 * 1024: "1000 KiB", 2**20: "1 MiB", 3 * 2**29: "1.5 GiB"}
    assert {count: size(count) for count in texts} == texts
    assert size(5000 * 2**40) == "5000 TiB"


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.36, 1.41, "1.36-1.41"),
        (1.78, 15.27, "1.78-15.27"),
        (0.2, 0.9, "0.20-0.90"),
        (0.0, math.inf, "could not tell"),
        (0.6, 1.8, "could not tell"),
    ],
)
def test_figures_that_say_nothing_are_not_shown(low: float, high: float, text: str) -> None:
    assert interval(low, high) == text
    assert speedup(1.9, low, high) == (text if text == "could not tell" else f"1.90x ({text})")
