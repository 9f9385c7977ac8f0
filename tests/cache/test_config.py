from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cache.config import Config
from advisor.cache.key import fingerprint
from advisor.errors import UsageError


def configs_of(words: st.SearchStrategy[str]) -> st.SearchStrategy[Config]:
    """Configs with these names and strings."""
    values = (
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | words
    )
    return st.dictionaries(words, values, max_size=6).map(Config)


configs = configs_of(st.text(max_size=8))


@given(configs)
def test_neither_order_nor_pickle_changes_it(config: Config) -> None:
    turned = Config(dict(reversed(list(config.items()))))
    again = pickle.loads(pickle.dumps(config))
    assert turned == again == config
    assert hash(turned) == hash(again) == hash(config)
    assert turned.digest == config.digest == fingerprint(config)[:12]
    assert list(config) == sorted(config)


@pytest.mark.parametrize("other", [1, 1.0, "1"])
def test_types_count(other: int | float | str) -> None:
    assert Config(a=True) != Config(a=other)
    assert Config(a=True).digest != Config(a=other).digest


def test_changes() -> None:
    config = Config({"precision": "bf16"}, batch_size=64)
    assert repr(config) == "Config(batch_size=64, precision='bf16')"
    assert config.replace(batch_size=32) == Config(batch_size=32, precision="bf16")
    assert config.without("batch_size", "absent") == Config(precision="bf16")
    assert config | Config(pin_memory=True) == config.replace(pin_memory=True)
    assert len(config.digest) == 12


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({1: 2}, "config name 1: expected a str"),
        ({"a": b""}, "config value a=b'': expected str, int, float, bool or None"),
        ({"a": 2**64}, f"config value a={2**64}: expected a number of at most 64 bits"),
        (
            {"a": -(2**63) - 1},
            f"config value a={-(2**63) - 1}: expected a number of at most 64 bits",
        ),
        ({"a": float("inf")}, "config value a=inf: expected a finite number"),
    ],
)
def test_says_what_it_refuses(wrong: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        Config(wrong)
    assert str(refused.value) == said


def test_batch() -> None:
    config = Config(batch_size=64, precision="bf16")
    assert (config.batch, config.at(8).batch, config.knobs.batch) == (64, 8, 0)
    assert config.at(8) == Config(batch_size=8, precision="bf16")
    assert config.knobs == Config(precision="bf16")
    assert Config(batch_size="64").batch == Config(batch_size=True).batch == 0


def test_what_changed() -> None:
    default = Config(a=1, b=True, c="x", batch_size=8)
    assert Config(a=1, b=True, c="y", batch_size=64).changed(default) == Config(c="y")
    assert Config(a=True, b=1, d=None).changed(default) == Config(a=True, b=1, d=None)
    assert default.changed(default) == Config()


def test_as_attributes() -> None:
    config = Config(b=1, a=2)
    assert (config.a, config["b"]) == (2, 1)
    with pytest.raises(AttributeError) as missing:
        _ = config.c
    assert str(missing.value) == "config has no 'c'; it has a, b"
    with pytest.raises(AttributeError) as missing:
        _ = Config().c
    assert str(missing.value) == "config has no 'c'; it has nothing"
    with pytest.raises(AttributeError):
        _ = Config(_hidden=1)._hidden
    assert config != {"a": 2, "b": 1}
    assert (len(config), len(Config())) == (2, 0)
