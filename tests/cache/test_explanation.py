"""What an explanation says, word for word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from advisor.cache.config import Config
from advisor.cache.explanation import MOST, Explanation, Seen
from advisor.cache.match import Difference, Query
from advisor.cache.record import Record
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
            "seen": (),
            **more,
        }
    )


def numbered(number: int, **task: Any) -> Record:
    key = examples.KEY
    shapes = ((number, *key.task.sample),)
    return examples.record(replace(key, task=replace(key.task, shapes=shapes, **task)))


def seen(
    record: Record,
    store: str = "dir:/a",
    *,
    signed: bool = True,
    apart: tuple[Difference, ...] = (),
) -> Seen:
    return Seen(store=store, record=record, signed=signed, apart=apart)


def test_a_miss() -> None:
    near = numbered(32, deterministic=True)
    fitting = numbered(16)
    edited = Difference(field="code", wanted="edited since", found="as tuned")
    said = explained(
        stores=(("dir:/a", "1 record"), ("redis://b", "did not answer")),
        refused=("1 is damaged", "2 is not signed"),
        seen=(seen(near, apart=(edited,)), seen(fitting, "dir:/c", signed=False)),
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
        f"not served  {fitting.id} model.py:Net (unsigned): it fits, but not what was asked of it "
        "(above), or another was preferred",
        f"not served  {near.id} model.py:Net: code as tuned -> edited since, "
        "deterministic True -> False",
    ]
    assert [(one.id, one.store, one.target, one.signed) for one in said.near_misses] == [
        (fitting.id, "dir:/c", "model.py:Net", False),
        (near.id, "dir:/a", "model.py:Net", True),
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


def test_what_is_served_is_no_near_miss() -> None:
    served, other = numbered(8), numbered(16)
    both = seen(served), seen(other)
    assert [one.id for one in explained(served=served.id, seen=both).near_misses] == [other.id]


def test_not_all_are_listed() -> None:
    many = tuple(seen(numbered(n + 1)) for n in range(MOST + 2))
    lines = str(explained(seen=many)).splitlines()
    assert sum(line.startswith("not served") for line in lines) == MOST
    assert lines[-1] == "            and 2 more; see: advisor show"
    just = str(explained(seen=many[:MOST])).splitlines()
    assert just[-1].startswith("not served")
