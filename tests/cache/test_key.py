"""Configs and keys: equality, digests, and digests that are stable between versions."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cache import codec, key
from advisor.cache.codec import decode, encode, make_envelope, to_plain
from advisor.cache.config import Config
from advisor.cache.key import PLACE, VARIANT, fields, fingerprint
from advisor.cache.match import compared
from advisor.cache.name import Name
from advisor.cache.records import Records
from advisor.cache.stores import ByteStore
from advisor.errors import UsageError
from tests.cache.examples import KEY, TASK, changed, record


def other_value(name: str) -> object:
    """A different valid value for a field of KEY."""
    odd: dict[str, object] = {"dtype": "int64", "mode": "infer", "optimizer": "adamw"}
    odd |= {"tolerance": 0.5, "allow": ("bf16-reduce",)}
    value = odd.get(name, fields(KEY)[name])
    if name in odd:
        return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, tuple):
        return value[1:] or ("other",)
    return (4,) if value is None else f"{value}+"


def test_every_key_field_is_listed_once() -> None:
    assert sorted(fields(KEY)) == sorted([*PLACE, *VARIANT])


def test_which_fields_change_the_digest() -> None:
    def digest(**changes: Any) -> str:
        return replace(KEY, task=replace(TASK, **changes)).digest

    same = digest(target="elsewhere.py:Net"), digest(device="cuda:1"), digest(model_args=Config())
    assert {*same, digest(shapes=((32, 3, 256, 256),))} == {KEY.digest}
    mixes = [((batch, 3, 16, 16), (8, 3, 8, 8)) for batch in (4, 5)]
    assert len({digest(shapes=mix) for mix in mixes}) == 2
    # The digest is stable between versions.
    assert KEY.digest == "166ed09f4c3a2cd425641517862c23dbc6adfc7099cce6919ce184d8caff8efa"


def test_fingerprint() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": (2,), "a": 1})
    assert len({fingerprint(v) for v in (1, 1.0, True, "1", b"1", None, [1])}) == 7
    assert fingerprint("not UTF-8: \udcff") != fingerprint("not UTF-8: ")
    with pytest.raises(TypeError):
        fingerprint({1, 2})


NEWER = changed(KEY, "script", "amp")


@pytest.fixture
def added_field(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(key, "ADDED", {"script": ""})
        key._digest.cache_clear()
        yield
    key._digest.cache_clear()


def old_fields() -> dict[str, Any]:
    """KEY's fields as an older version stored them, without `script`."""
    found: dict[str, Any] = json.loads(json.dumps(to_plain(key.fields(KEY))))
    del found["script"]
    return found


@pytest.mark.usefixtures("added_field")
def test_an_added_field_at_its_default_keeps_the_digest() -> None:
    assert KEY.digest == key.fingerprint(key.as_fields(old_fields())) != NEWER.digest
    assert key.terms_of(old_fields()) == key.terms_of(key.fields(KEY))
    known = key.completed(key.as_fields(old_fields()))
    assert compared(key.fields(KEY), known) == ("exact", ())
    assert list(map(str, compared(key.fields(NEWER), known)[1])) == ["script none -> amp"]


@pytest.mark.usefixtures("added_field")
def test_a_record_without_the_added_field_is_read(store: ByteStore) -> None:
    content = to_plain(record())
    del content["key"]["task"]["script"], content["key"]["interconnect"]
    data = make_envelope(msgpack.packb(content))
    records = Records(store)
    store.put(Name.of(record(), data).text, data)
    assert records.all() == [record()] and not records.damaged
    records.put(record(NEWER))
    assert {one.key.task.script for one in records.all()} == {"", "amp"}


def test_a_record_with_an_unknown_key_field_is_refused(store: ByteStore) -> None:
    """Other records in the store are still read."""
    content = to_plain(record())
    content["key"]["task"]["flavour"] = "sour"
    data = make_envelope(msgpack.packb(content))
    records = Records(store)
    store.put(Name.of(record(NEWER), data).text, data)
    records.put(record())
    assert records.all() == [record()] and len(records.damaged) == 1


def test_a_newer_format_reads_the_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(record())
    monkeypatch.setattr(codec, "FORMAT", codec.FORMAT + 1)
    assert decode(data) == record()


def configs_with(words: st.SearchStrategy[str]) -> st.SearchStrategy[Config]:
    """A strategy for configs whose names and strings come from `words`."""
    numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    values = st.none() | st.booleans() | numbers | words
    return st.dictionaries(words, values, max_size=6).map(Config)


@given(configs_with(st.text(max_size=8)))
def test_order_and_pickling_do_not_change_a_config(config: Config) -> None:
    turned = Config(dict(reversed(list(config.items()))))
    again = pickle.loads(pickle.dumps(config))
    assert turned == again == config
    assert hash(turned) == hash(again) == hash(config)
    assert turned.digest == config.digest == fingerprint(config)[:12]
    assert list(config) == sorted(config)


def test_configs_compare_values_and_types() -> None:
    several = {Config(a=value) for value in (True, 1, 1.0, "1")}
    assert len(several) == len({one.digest for one in several}) == 4
    default = Config(a=1, b=True, c="x", batch_size=8)
    assert Config(a=1, b=True, c="y", batch_size=64).changed(default) == Config(c="y")
    assert Config(a=True, b=1, d=None).changed(default) == Config(a=True, b=1, d=None)
    config = Config({"precision": "bf16"}, batch_size=64)
    assert repr(config) == "Config(batch_size=64, precision='bf16')"
    assert config.replace(batch_size=32) == config.at(32) == Config(batch_size=32, precision="bf16")
    assert config.without("batch_size", "absent") == config.knobs == Config(precision="bf16")
    assert config | Config(pin_memory=True) == config.replace(pin_memory=True)
    assert (config.batch, config.knobs.batch) == (64, 0)
    assert Config(batch_size="64").batch == Config(batch_size=True).batch == 0
    assert config != {"batch_size": 64, "precision": "bf16"}


def test_invalid_values_and_missing_names_raise_errors() -> None:
    expected = "str, int of at most 64 bits, finite float, bool or None"
    for wrong in (b"", 2**64, -(2**63) - 1, float("inf"), [1]):
        with pytest.raises(UsageError) as refused:
            Config(a=wrong)  # type: ignore[arg-type]
        assert str(refused.value) == f"config value a={wrong!r}: expected {expected}"
    with pytest.raises(UsageError, match="config name 1: expected a str"):
        Config({1: 2})  # type: ignore[dict-item]
    config = Config(b=1, a=2)
    assert (config.a, config["b"], len(config), len(Config())) == (2, 1, 2, 0)
    for one, has in ((config, "a, b"), (Config(), "nothing")):
        with pytest.raises(AttributeError) as missing:
            _ = one.c
        assert str(missing.value) == f"config has no 'c'; it has {has}"
    with pytest.raises(AttributeError):
        _ = Config(_hidden=1)._hidden
