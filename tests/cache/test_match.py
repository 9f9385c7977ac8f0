from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.cache.key import PLACE, VARIANT, fields
from advisor.cache.match import Query, best, compare
from tests.cache.examples import ENVIRONMENT, KEY, changed, record
from tests.cache.test_key import another

OPEN = Query(environment=ENVIRONMENT, mode="train", world_size=1)


@pytest.mark.parametrize("name", [*PLACE, *VARIANT])
def test_each_field(name: str) -> None:
    kind, differs = compare(KEY, changed(KEY, name, another(fields(KEY)[name])))
    assert kind == ("miss" if name in PLACE else "compatible")
    assert [difference.field for difference in differs] == [name]


def test_the_same() -> None:
    assert compare(KEY, KEY) == ("exact", ())
    assert compare(OPEN, KEY) == ("exact", ())


@pytest.mark.parametrize(
    ("query", "kind", "says"),
    [
        (replace(OPEN, model=KEY.model, shape=(3, 256, 256), dtype="float32"), "exact", []),
        (replace(OPEN, precisions=("bf16", "tf32", "default")), "exact", []),
        (replace(OPEN, shape=(3, 8, 8)), "miss", ["shape 3x256x256 -> 3x8x8"]),
        (replace(OPEN, deterministic=True), "miss", ["deterministic False -> True"]),
        (
            replace(OPEN, precisions=("default",), optimizer="adamw"),
            "miss",
            ["optimizer sgd -> adamw", "precisions bf16+default+tf32 -> default"],
        ),
        (replace(OPEN, model="cd" * 32), "miss", ["model abababababab -> cdcdcdcdcdcd"]),
        (replace(OPEN, world_size=8), "compatible", ["world_size 1 -> 8"]),
    ],
)
def test_queries(query: Query, kind: str, says: list[str]) -> None:
    found, differs = compare(query, KEY)
    assert found == kind
    assert [str(difference) for difference in differs] == says


def test_of_another_device_only_the_name_is_said() -> None:
    other = changed(KEY, "environment.device.memory_gib", 80)
    other = changed(other, "environment.device.name", "NVIDIA A100")
    other = changed(other, "environment.device.capability", "8.0")
    _, differs = compare(KEY, other)
    assert list(map(str, differs)) == ["device name NVIDIA A100 -> NVIDIA H200"]
    _, differs = compare(KEY, changed(other, "environment.device.kind", "cpu"))
    assert list(map(str, differs)) == ["device name NVIDIA A100 -> NVIDIA H200"]


def test_best() -> None:
    driver = changed(KEY, "environment.software.driver", "590.2")
    nothing = changed(changed(KEY, "mode", "infer"), "optimizer", "")
    exact, older = record(created=2.0), record(created=1.0)
    stale = record(key=driver, created=9.0)
    far = record(key=nothing, created=10.0)

    match = best(KEY, [older, far, stale, exact])
    assert (match.kind, match.record, match.differs) == ("exact", exact, ())

    match = best(KEY, [far, stale, record(key=driver, created=3.0)])
    assert (match.kind, match.record) == ("compatible", stale)
    assert list(map(str, match.differs)) == ["driver 590.2 -> 580.1"]

    near = record(key=changed(KEY, "mode", "infer"), created=0.0)
    match = best(KEY, [far, near])
    assert (match.kind, match.record) == ("miss", None)
    assert list(map(str, match.differs)) == ["mode infer -> train"]

    match = best(KEY, [])
    assert (match.kind, match.record, match.differs) == ("miss", None, ())
