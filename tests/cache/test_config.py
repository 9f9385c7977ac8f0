from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cache.config import Config
from advisor.cache.key import fingerprint
from advisor.errors import UsageError


def configs_of(words: st.SearchStrategy[str]) -> st.SearchStrategy[Config]:
    """Configs with these names and strings."""
    numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    values = st.none() | st.booleans() | numbers | words
    return st.dictionaries(words, values, max_size=6).map(Config)


@given(configs_of(st.text(max_size=8)))
def test_neither_order_nor_pickle_changes_it(config: Config) -> None:
    turned = Config(dict(reversed(list(config.items()))))
    again = pickle.loads(pickle.dumps(config))
    assert turned == again == config
    assert hash(turned) == hash(again) == hash(config)
    assert turned.digest == config.digest == fingerprint(config)[:12]
    assert list(config) == sorted(config)


def test_types_count() -> None:
    several = {Config(a=value) for value in (True, 1, 1.0, "1")}
    assert len(several) == len({one.digest for one in several}) == 4
    default = Config(a=1, b=True, c="x", batch_size=8)
    assert Config(a=1, b=True, c="y", batch_size=64).changed(default) == Config(c="y")
    assert Config(a=True, b=1, d=None).changed(default) == Config(a=True, b=1, d=None)


def test_changes() -> None:
    config = Config({"precision": "bf16"}, batch_size=64)
    assert repr(config) == "Config(batch_size=64, precision='bf16')"
    assert config.replace(batch_size=32) == config.at(32) == Config(batch_size=32, precision="bf16")
    assert config.without("batch_size", "absent") == config.knobs == Config(precision="bf16")
    assert config | Config(pin_memory=True) == config.replace(pin_memory=True)
    assert (config.batch, config.knobs.batch) == (64, 0)
    assert Config(batch_size="64").batch == Config(batch_size=True).batch == 0


@pytest.mark.parametrize("wrong", [b"", 2**64, -(2**63) - 1, float("inf"), [1]])
def test_says_what_it_refuses(wrong: Any) -> None:
    expected = "str, int of at most 64 bits, finite float, bool or None"
    with pytest.raises(UsageError) as refused:
        Config(a=wrong)
    assert str(refused.value) == f"config value a={wrong!r}: expected {expected}"
    with pytest.raises(UsageError, match="config name 1: expected a str"):
        Config({1: 2})  # type: ignore[dict-item]


def test_as_attributes() -> None:
    config = Config(b=1, a=2)
    assert (config.a, config["b"], len(config), len(Config())) == (2, 1, 2, 0)
    for one, has in ((config, "a, b"), (Config(), "nothing")):
        with pytest.raises(AttributeError) as missing:
            _ = one.c
        assert str(missing.value) == f"config has no 'c'; it has {has}"
    with pytest.raises(AttributeError):
        _ = Config(_hidden=1)._hidden
    assert config != {"a": 2, "b": 1}
