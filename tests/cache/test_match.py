from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.cache.config import Config
from advisor.cache.key import PLACE, VARIANT
from advisor.cache.match import Query, best, compare, find_similar
from advisor.cache.reader import RecordFilter
from advisor.cache.task import PERMITTED
from tests.cache.examples import ENVIRONMENT, KEY, changed, record
from tests.cache.test_key import other_value

ANY = Query(environment=ENVIRONMENT)


def query_with(**given: object) -> Query:
    return replace(ANY, given=given)


@pytest.mark.parametrize("name", [*PLACE, *VARIANT])
def test_each_key_field_decides_between_miss_and_compatible(name: str) -> None:
    other = changed(KEY, name, other_value(name))
    assert other.digest != KEY.digest and other.id == other.digest[:12]
    kind, differs = compare(KEY, other)
    assert kind == ("miss" if name in PLACE else "compatible")
    assert [difference.field for difference in differs] == [name]


@pytest.mark.parametrize(
    ("query", "kind", "says"),
    [
        (replace(query_with(shapes=((8, 3, 256, 256),)), model=KEY.model), "exact", []),
        (ANY, "exact", []),
        (query_with(precisions=("default", "tf32", "bf16")), "exact", []),
        (query_with(shapes=((64, 3, 8, 8),)), "miss", ["shapes 3x256x256 -> 3x8x8"]),
        (
            query_with(shapes=((64, 3, 8, 8), (8, 3, 4, 4))),
            "miss",
            ["shapes 3x256x256 -> 64x3x8x8+8x3x4x4"],
        ),
        (query_with(deterministic=True), "miss", ["deterministic False -> True"]),
        (
            query_with(precisions=("default",), optimizer="adamw"),
            "miss",
            ["optimizer sgd -> adamw", "precisions default+tf32+bf16 -> default"],
        ),
        (replace(ANY, model="cd" * 32), "miss", ["model abababababab -> cdcdcdcdcdcd"]),
        (replace(ANY, threads=8), "compatible", ["threads 0 -> 8"]),
        (
            replace(ANY, interconnect="2 per host, PCIe"),  # KEY does not say, as old records
            "compatible",
            ["interconnect none -> 2 per host, PCIe"],
        ),
        (query_with(device="cuda:3", model_args=Config(a=1)), "exact", []),
    ],
)
def test_queries_match_exactly_compatibly_or_not(query: Query, kind: str, says: list[str]) -> None:
    found, differs = compare(query, KEY)
    assert found == kind
    assert [str(difference) for difference in differs] == says


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_another_device_is_reported_by_name_only(kind: str) -> None:
    other = changed(changed(KEY, "device.memory_gib", 80), "device.capability", "8.0")
    other = changed(changed(other, "device.name", "NVIDIA A100"), "device.kind", kind)
    _, differs = compare(KEY, other)
    assert list(map(str, differs)) == ["device name NVIDIA A100 -> NVIDIA H200"]


def test_a_record_of_another_interconnect_is_stale() -> None:
    """It is served only if there is none of this interconnect, and names the difference."""
    here, there = (record(key=changed(KEY, "interconnect", f"2 per host, {n}")) for n in "ab")
    assert len({here.id, there.id, record().id}) == 3
    query = replace(ANY, interconnect="2 per host, a")
    assert (best(query, [there, here]).kind, best(query, [there, here]).record) == ("exact", here)
    found = best(query, [there])
    assert (found.kind, found.record) == ("compatible", there)
    assert [*map(str, found.differs)] == ["interconnect 2 per host, b -> 2 per host, a"]


WANTED = replace(ANY, model=KEY.model, given={"mode": "train", "optimizer": "sgd"})


def test_best_prefers_the_closest_then_the_newest_record() -> None:
    driver = changed(KEY, "software.driver", "590.2")
    nothing = changed(changed(KEY, "mode", "infer"), "optimizer", "adamw")
    exact, older = record(created=2.0), record(created=1.0)
    stale = record(key=driver, created=9.0)
    far = record(key=nothing, created=10.0)
    near = record(key=changed(KEY, "mode", "infer"), created=0.0)
    for found, kind, chosen, differs in (
        ([older, far, stale, exact], "exact", exact, []),
        ([far, stale, record(key=driver, created=3.0)], "compatible", stale, ["driver"]),
        ([far, near], "miss", near, ["mode"]),
        ([], "miss", None, []),
    ):
        match = best(WANTED, found)
        assert (match.kind, match.record, match.fits) == (kind, chosen, kind != "miss")
        assert [one.field.rpartition(".")[2] for one in match.differs] == differs


WEAKER: dict[str, object] = {
    "max_memory": 2**30,
    "batches": (8,),
    "step_graph": False,
    "tolerance": 0.1,
    "precisions": ("default",),
}
STRICTER: dict[str, object] = {"compile": False, "deterministic": True, "optimizer": "adamw"}


@pytest.mark.parametrize(
    "query",
    [*({name: value} for name, value in (WEAKER | STRICTER).items()), WEAKER | {"compile": False}],
)
def test_a_record_with_wider_permissions_fits(query: dict[str, object]) -> None:
    """A miss lists only the fields that prevent a match."""
    made, differs = record(), sorted(query.keys() & STRICTER)
    match = best(query_with(**query), [made])
    assert match.record is made and match.fits == (not differs)
    assert [one.field for one in match.differs] == differs


def test_a_record_with_equal_permissions_is_preferred() -> None:
    made = record(changed(KEY, "precisions", ("default", "tf32")), created=1.0)
    query = query_with(precisions=("default", "tf32"))
    assert best(query, [record(created=2.0), made]).record is made


@pytest.mark.parametrize(("name", "value"), (WEAKER | {**STRICTER, "vocab": 9}).items())
def test_an_open_query_prefers_default_permissions(name: str, value: object) -> None:
    """A newer record with narrower permissions does not hide it."""
    usual = record(changed(KEY, "precisions", PERMITTED), created=1.0)
    narrow = record(changed(usual.key, name, value), created=2.0)
    assert best(ANY, [narrow, usual]).record is usual
    assert best(ANY, [narrow]).record is narrow


def test_a_library_of_another_version_makes_a_record_stale() -> None:
    import importlib.metadata

    here = importlib.metadata.version("pytest")
    assert compare(ANY, replace(KEY, libraries=(f"pytest=={here}",)))[0] == "exact"
    kind, differs = compare(ANY, replace(KEY, libraries=("pytest==0.1", "no-such-thing==2")))
    assert kind == "compatible"
    assert str(differs[0]) == (
        f"libraries pytest==0.1+no-such-thing==2 -> pytest=={here}+no-such-thing==none"
    )


def test_find_similar_orders_by_similarity() -> None:
    """First the same model: identical, other software, sample, options; then its family."""
    other = changed(KEY, "model", "cd" * 32)
    known = [
        record(key=KEY),
        record(key=changed(KEY, "software.torch", "2.6.0")),
        record(key=changed(KEY, "shapes", (3, 224, 224))),
        record(key=changed(KEY, "shapes", (3, 8, 8))),
        record(key=changed(KEY, "optimizer", "adamw")),
        record(key=changed(KEY, "device.name", "NVIDIA H100")),
        replace(record(key=other), family="f0"),
        replace(record(key=changed(other, "shapes", (3, 8, 8))), family="f0"),
    ]
    elsewhere = changed(KEY, "device.capability", "8.0")
    strangers = [replace(record(key=other), family="f1"), record(key=elsewhere)]
    wanted = RecordFilter(similar_to=KEY, family="f0")
    found = find_similar(KEY, filter(wanted.matches, [*strangers, *reversed(known)]))
    assert [one.record for one in found] == known
    assert [one.what for one in found] == [
        "the same, measured before",
        "the same model, torch 2.6.0 -> 2.11.0",
        "the same model, shapes 3x224x224 -> 3x256x256",
        "the same model, shapes 3x8x8 -> 3x256x256",
        "the same model, optimizer adamw -> sgd",
        "the same model, device name NVIDIA H100 -> NVIDIA H200",
        "a model of the same family",
        "a model of the same family, shapes 3x8x8 -> 3x256x256",
    ]
    assert find_similar(KEY, filter(RecordFilter(similar_to=KEY).matches, strangers)) == []


@pytest.mark.parametrize(
    ("want", "have", "kind"),
    [
        (((3, 1, 1), "0 3x?x? float32"), ((3, 8, 9), ""), "compatible"),
        (((3, 8, 9), ""), ((3, 1, 1), "0 3x?x? float32"), "compatible"),
        (((3, 8, 1), "0 3x8x? float32"), ((3, 1, 9), "0 3x?x9 float32"), "compatible"),
        (((3, 8, 1), "0 3x8x? float32"), ((3, 1, 1), "0 3x?x? float32"), "compatible"),
        (((3, 1, 1), "0 3x?x? float32"), ((3, 1, 1), "0 3x?x? float32"), "exact"),
        (((3, 1, 1), "0 3x?x? float32"), ((4, 8, 9), ""), "miss"),
        (((3, 1, 1), "0 3x?x? float32"), ((3, 8), ""), "miss"),
        (((3, 8, 9), ""), ((3, 8, 8), ""), "miss"),
        (((5,), "mask ? bool"), ((5,), "mask 5 bool"), "compatible"),
        (((5,), "mask ? bool"), ((6,), "mask 5 bool"), "miss"),
        (((5,), "mask ? bool"), ((5,), "mask 5 int64"), "miss"),
        (((5,), "mask ? bool"), ((5,), "mask 5 bool; more 5 bool"), "miss"),
        (((5,), "mask ? bool; 2 micro-batches"), ((5,), "mask 5 bool"), "miss"),
        (
            ((1,), "x ? int64; mask ? bool; 2 micro-batches; sgd, adam"),
            ((7,), "mask 7 bool; 2 micro-batches; sgd, adam"),
            "compatible",
        ),
    ],
)
def test_unknown_sizes_match_any_size(
    want: tuple[tuple[int, ...], str], have: tuple[tuple[int, ...], str], kind: str
) -> None:
    shapes, others = have
    key = changed(changed(KEY, "shapes", ((4, *shapes),)), "others", others)
    shapes, others = want
    query = query_with(shapes=((8, *shapes),), others=others)
    found, differs = compare(query, key)
    assert found == kind
    assert bool(differs) is (kind == "miss")
    assert best(query, [record(key=key)]).kind == kind
