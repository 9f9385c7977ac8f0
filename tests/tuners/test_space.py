"""The search space: its configs, and values that exclude each other."""

from __future__ import annotations

from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.tuners.search.space import Space, ladder
from tests import builders


@pytest.mark.parametrize(
    ("changes", "combines"),
    [
        ({}, True),
        ({"precision": "bf16", "fused_optimizer": True}, True),
        ({"precision": "fp16", "fused_optimizer": True}, False),
        ({"compile": "blocks", "step_graph": True}, True),
        ({"compile": "reduce-overhead", "step_graph": True}, False),
    ],
)
def test_conflicting_values_are_not_combined(changes: dict[str, Any], combines: bool) -> None:
    space = builders.space(use="capture", batches=(32, 64), repeats=True, varies=True)
    config = space.default.replace(**changes)
    assert space.holds(config) is combines
    assert (config in set(space.configs(32))) is combines


def small(**more: tuple[Any, ...]) -> Space:
    choices: dict[str, tuple[Any, ...]] = {
        "fused_optimizer": (False, True),
        "precision": ("default", "tf32", "fp16"),
        "batch_size": (4,),
        "threads": (),
        "compile": ("none", "default"),
    }
    return Space(choices | more)


def test_space_lists_checks_and_combines_configs() -> None:
    space = small()
    configs = list(space.configs(4))
    # 10 of 12 combinations: a fused optimizer and fp16 exclude each other.
    assert len(configs) == len(set(configs)) == 10 and all(map(space.holds, configs))
    assert sum(bool(space.expensive_values(one)) for one in configs) == 5
    invalid: list[dict[str, Any]] = [{"more": 1}, {"fused_optimizer": 1}, {"batch_size": 8}]
    assert not any(space.holds(space.default.replace(**one)) for one in invalid)
    assert not space.holds(space.default.without("precision"))
    offered = [("fused_optimizer", True), ("fused_optimizer", 1), ("threads", 1)]
    assert [space.offers(*one) for one in offered] == [True, False, False]
    near = space.near({"fused_optimizer": True, "precision": "q", "more": 1, "batch_size": 64})
    assert near == space.default.replace(fused_optimizer=True)
    # Setting a knob resets conflicting knobs.
    assert space.combined(near, "precision", "fp16") == space.default.replace(precision="fp16")
    assert space.combined(near, "precision", "tf32") == near.replace(precision="tf32")
    assert space.combined(space.default, "fused_optimizer", True) == near


def test_digest_depends_on_the_choices_only() -> None:
    assert len(small().digest) == 12
    assert small().digest == Space(small().choices, {"pin_memory": (False, True)}).digest
    assert small().digest != Space({"channels_last": (False, True)}).digest
    levels = Space({"threads": (0, 1)}), Space({"threads": (False, True)})
    assert levels[0].digest != levels[1].digest


def test_ladder_doubles_the_batch_as_far_as_it_fits() -> None:
    ladders = [ladder(4, fits=fits) for fits in (3, 4, 16, 31)]
    assert ladders == [(4,), (4,), (4, 8, 16), (4, 8, 16)]
    assert ladder(1, fits=10**6) == tuple(2**power for power in range(9))


def test_configs_keep_fixed_loader_settings() -> None:
    space = builders.space(workers=4, batches=(32,))
    loader = Config(num_workers=4, prefetch_factor=2, pin_memory=True)
    fixed = set(space.configs(32, loader))
    expected = {config for config in space.configs(32) if config.only(*loader) == loader}
    assert fixed == expected and fixed
