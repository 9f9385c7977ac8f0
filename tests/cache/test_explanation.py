"""What an explanation says, word for word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from advisor.cache.config import Config
from advisor.cache.explanation import MAX_LISTED, Explanation, NearMiss
from advisor.cache.match import Difference, Query
from tests.cache import examples

QUERY = Query(
    environment=examples.ENVIRONMENT,
    given={
        "shapes": ((8, 3, 256, 256),),
        "mode": "train",
        "deterministic": False,
        "model_args": Config(a=1, b="x"),
    },
    model=examples.KEY.model,
)


def explained(query: Query = QUERY, **more: Any) -> Explanation:
    return Explanation(
        **{
            "target": "model.py:Net",
            "query": query,
            "stores": (),
            "served": "",
            "status": "miss",
            "reason": "nothing there",
            "refused": (),
            "near_misses": (),
            **more,
        }
    )


def near(number: int, *differs: Difference, signed: bool = True) -> NearMiss:
    return NearMiss(
        id=f"{number}", target="model.py:Net", store="dir:/a", signed=signed, differs=differs
    )


EDITED = Difference(field="code", wanted="edited since", found="as tuned")
STRICT = Difference(field="deterministic", wanted=False, found=True)


def test_a_miss() -> None:
    said = explained(
        stores=(("dir:/a", "1 record"), ("redis://b", "did not answer")),
        refused=("1 is damaged", "2 is not signed"),
        near_misses=(near(16, signed=False), near(32, EDITED, STRICT)),
    )
    assert str(said).splitlines() == [
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
        "not served  16 model.py:Net (unsigned): it fits, but not what was asked of it (above), or "
        "another was preferred",
        "not served  32 model.py:Net: code as tuned -> edited since, deterministic True -> False",
    ]


def test_what_is_not_known_is_left_out() -> None:
    software = replace(examples.SOFTWARE, driver="", cuda="")
    environment = replace(examples.ENVIRONMENT, software=software)
    said = str(explained(Query(environment=environment), target="", status="exact"))
    assert said.splitlines() == [
        "looked for  what was tuned for this script",
        "  device        NVIDIA H200",
        "  cuDNN         91900",
        "  torch         2.11.0",
        "exact       nothing there",
    ]


def test_not_all_are_listed() -> None:
    many = tuple(near(number) for number in range(MAX_LISTED + 2))
    lines = str(explained(near_misses=many)).splitlines()
    assert sum(line.startswith("not served") for line in lines) == MAX_LISTED
    assert lines[-1] == "            and 2 more; see: advisor show"
    just = str(explained(near_misses=many[:MAX_LISTED])).splitlines()
    assert just[-1].startswith("not served")
