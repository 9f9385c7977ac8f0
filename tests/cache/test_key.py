from __future__ import annotations

import dataclasses

import pytest

from advisor.cache.key import PLACE, VARIANT, Sample, fields, fingerprint
from tests.cache.examples import KEY, changed


def leaves(owner: object, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]
        value = getattr(owner, field.name)
        name = f"{prefix}{field.name}"
        found |= leaves(value, f"{name}.") if dataclasses.is_dataclass(value) else {name}
    return found


def another(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, tuple):
        return value[1:] or ("other",)
    return f"{value}+"


def test_every_field_has_its_place() -> None:
    assert leaves(KEY) == {*PLACE, *VARIANT}
    assert len({*PLACE, *VARIANT}) == len(PLACE) + len(VARIANT)


@pytest.mark.parametrize("name", [*PLACE, *VARIANT])
def test_every_field_counts(name: str) -> None:
    other = changed(KEY, name, another(fields(KEY)[name]))
    assert other.digest != KEY.digest
    assert other.id == other.digest[:12]


def test_order_of_precisions_does_not_count() -> None:
    turned = changed(KEY, "permits.precisions", KEY.permits.precisions[::-1])
    assert turned.digest == KEY.digest


def test_digest_stays_the_same_between_versions() -> None:
    assert KEY.digest == "5b369c5646176d3bd0a1992c1c4433e0e498d18617229c57770546b569db9986"


def test_fingerprint() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": (2,), "a": 1})
    assert len({fingerprint(v) for v in (1, 1.0, True, "1", b"1", None, [1])}) == 7
    with pytest.raises(TypeError):
        fingerprint({1, 2})


def test_sample() -> None:
    assert str(KEY.sample) == "3x256x256 float32"
    with pytest.raises(ValueError, match="at least 1"):
        Sample(shape=(0, 3), dtype="float32")


def test_a_mix_of_shapes_is_another_key() -> None:
    mixed = dataclasses.replace(KEY, mix=("64x3x256x256", "17x3x256x256"))
    assert mixed.digest != KEY.digest
    assert fields(mixed)["mix"] == mixed.mix and fields(KEY)["mix"] == ()
