from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cache.config import Config
from advisor.cache.key import fingerprint
from advisor.errors import UsageError

values = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
configs = st.dictionaries(st.text(max_size=8), values, max_size=6).map(Config)


@given(configs)
def test_order_does_not_count(config: Config) -> None:
    turned = Config(dict(reversed(list(config.items()))))
    assert turned == config
    assert hash(turned) == hash(config)
    assert turned.digest == config.digest == fingerprint(config)[:12]
    assert list(config) == sorted(config)


@given(configs)
def test_survives_pickle(config: Config) -> None:
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert hash(again) == hash(config)


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


@pytest.mark.parametrize("wrong", [{1: 2}, {"a": [1]}, {"a": float("nan")}, {"a": b""}])
def test_refuses(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="expected"):
        Config(wrong)
