from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.cache.config import Config
from advisor.cache.key import PLACE, VARIANT, fields, fingerprint
from tests.cache.examples import KEY, TASK, changed


def another(name: str) -> object:
    """Another value for a field of KEY, inside its domain."""
    odd = {"dtype": "int64", "mode": "infer", "optimizer": "adamw", "tolerance": 0.5}
    value = fields(KEY)[name]
    if name in odd:
        return odd[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, tuple):
        return value[1:] or ("other",)
    return (4,) if value is None else f"{value}+"


def test_every_field_has_its_place() -> None:
    assert set(fields(KEY)) == {*PLACE, *VARIANT}
    assert len({*PLACE, *VARIANT}) == len(PLACE) + len(VARIANT)


@pytest.mark.parametrize("name", [*PLACE, *VARIANT])
def test_every_field_counts(name: str) -> None:
    other = changed(KEY, name, another(name))
    assert other.digest != KEY.digest
    assert other.id == other.digest[:12]


@pytest.mark.parametrize(
    "task",
    [
        replace(TASK, target="elsewhere.py:Net"),
        replace(TASK, device="cuda:1"),
        replace(TASK, model_args=Config()),
        replace(TASK, shapes=((32, 3, 256, 256),)),
    ],
)
def test_how_it_is_called_where_it_runs_and_the_batch_do_not_count(task: object) -> None:
    assert replace(KEY, task=task).digest == KEY.digest  # type: ignore[arg-type]


def test_each_batch_of_a_mix_counts() -> None:
    mix = replace(KEY, task=replace(TASK, shapes=((4, 3, 16, 16), (8, 3, 8, 8))))
    other = replace(KEY, task=replace(TASK, shapes=((5, 3, 16, 16), (8, 3, 8, 8))))
    assert mix.digest != other.digest


def test_digest_stays_the_same_between_versions() -> None:
    assert KEY.digest == "166ed09f4c3a2cd425641517862c23dbc6adfc7099cce6919ce184d8caff8efa"


def test_fingerprint() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": (2,), "a": 1})
    assert len({fingerprint(v) for v in (1, 1.0, True, "1", b"1", None, [1])}) == 7
    with pytest.raises(TypeError):
        fingerprint({1, 2})
