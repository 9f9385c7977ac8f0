"""What dear knobs are tried on, in which order, and what of it is built together."""

from __future__ import annotations

import dataclasses
from typing import Any

from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.cache.task import PRECISIONS
from advisor.tuners import knobs
from advisor.tuners.search.ahead import order, together
from advisor.tuners.search.leaders import Leaders
from advisor.tuners.search.space import Space

HERE = knobs.Situation(device="cuda", capability=(9, 0), compiles=True, batches=(64, 512))
SPACE = Space.of(HERE)
DEFAULT = SPACE.default
BF16, TF32, FP16 = (DEFAULT.replace(precision=p) for p in ("bf16", "tf32", "fp16"))
GRAPHED, COMPILED = BF16.replace(step_graph=True), BF16.replace(compile="default")


def leaders(*rates: tuple[Config, float], space: Space = SPACE) -> Leaders:
    """Of trials with so many samples/s; at 0 one failed."""
    trials = [
        Trial(
            number=number,
            config=config,
            measurement=Measurement(
                outcome="ok" if rate else "failed",
                samples_per_s=rate,
                step_s=config.batch / rate if rate else 0.0,
            ),
            stage="compute",
            origin="guess",
            seconds=1.0,
        )
        for number, (config, rate) in enumerate(((DEFAULT, 1000.0), *rates))
    ]
    return Leaders.among(space, trials)


def test_what_leads_at_a_large_batch_is_compiled_first_what_needs_a_scaler_last() -> None:
    """At a small batch the host hides what half precision gains."""
    rates = ((TF32, 1500.0), (BF16, 1200.0), (FP16, 1600.0), (BF16.at(512), 4500.0))
    found = leaders(*rates, (FP16.at(512), 5000.0)).found(["pilot", "loop"])
    assert found == [BF16, TF32, FP16]
    alone = Space({name: v[:1] if name == "batch_size" else v for name, v in SPACE.choices.items()})
    assert leaders((TF32, 1500.0), (BF16, 1200.0), space=alone).found(["pilot"])[0] == BF16


def test_what_one_graph_shows_counts_where_no_other_batch_does() -> None:
    alone = Space({name: v[:1] if name == "batch_size" else v for name, v in SPACE.choices.items()})
    last = BF16.replace(channels_last=True)
    rates = ((BF16, 1250.0), (last, 1200.0), (last.replace(step_graph=True), 4000.0))
    assert leaders(*rates, space=alone).found(["pilot"]) == [last, BF16]


def test_what_is_far_slower_where_the_device_is_the_limit_is_behind() -> None:
    table = leaders(
        *((TF32, 1500.0), (BF16, 1200.0), (FP16, 1100.0)),
        *((TF32.at(512), 2000.0), (BF16.at(512), 4500.0), (FP16.at(512), 0.0)),
    )
    assert table.is_behind(TF32, BF16) and not table.is_behind(BF16, TF32)
    assert not table.is_behind(FP16, BF16), "at their own batch alone both are the host's"


def test_steps_are_short_where_one_graph_is_faster_or_they_take_milliseconds() -> None:
    assert leaders((BF16, 1200.0), (GRAPHED, 2000.0)).is_short(BF16)
    assert not leaders((BF16, 1200.0), (GRAPHED, 1210.0)).is_short(BF16)
    assert not leaders((BF16, 1200.0)).is_short(BF16)
    assert leaders((BF16, 64 / 0.004)).is_short(BF16)


def test_the_batch_that_leads_is_that_of_what_is_not_compiled() -> None:
    table = leaders((BF16.at(512), 2000.0), (COMPILED, 3000.0), (GRAPHED, 1800.0))
    assert table.batch == 512
    both = [COMPILED, COMPILED.replace(step_graph=True), COMPILED.replace(precision="fp16")]
    table = leaders((both[0], 3000.0), (both[1], 4000.0), (both[2], 3500.0))
    assert table.of_each_use(both) == [both[1], both[2], both[0]]


def test_fp8_is_tried_compiled_where_it_is_offered() -> None:
    def tried(**more: Any) -> list[bool]:
        space = Space.of(dataclasses.replace(HERE, precisions=PRECISIONS, **more))
        leader = space.default.replace(precision="bf16")
        listed = [c for part in order(space, [leader], [], lambda _config: False) for c in part]
        assert all(c["compile"] == "default" for c in listed if c["precision"] == "fp8")
        return [bool(c["step_graph"]) for c in listed if c["precision"] == "fp8"]

    assert tried(fp8=True) == [False, True]
    assert tried() == []


def test_the_same_code_is_built_once_and_what_takes_minutes_with_its_like() -> None:
    full = Space.of(dataclasses.replace(HERE, full=True))
    dear = [("compile", value) for value in full.choices["compile"][1:]]
    leader = full.default.replace(precision="bf16")
    listed = [c for part in order(full, [leader], dear, lambda _config: True) for c in part]
    graphed = [config["compile"] for config in listed if config["step_graph"]]
    assert graphed == ["default", *knobs.INDUCTOR]
    listed = [listed[0], *(config for config in listed if not config["step_graph"])]

    def needs_s(config: Config) -> float:
        needed = knobs.BY_NAME["compile"].dear
        assert needed is not None
        return needed(config["compile"], full.modules)

    groups = [[config["compile"] for config in group] for group in together(listed, 4, needs_s)]
    autotuned = [mode for mode in knobs.COMPILE_MODES_FULL if mode.startswith("max-autotune")]
    assert groups == [
        ["default", "reduce-overhead", "default", "combo_kernels", "cudagraphs"],
        ["coordinate_descent_tuning"],
        autotuned,
    ]
    alone = together(listed[:3], 1, needs_s)
    assert [len({*map(knobs.code, filter(knobs.compiles, group))}) for group in alone] == [1, 1]


def test_a_large_model_takes_longer_to_compile() -> None:
    needed = knobs.BY_NAME["compile"].dear
    assert needed is not None
    resnet50, efficientnet_v2_s = needed("default", 151), needed("default", 714)
    assert efficientnet_v2_s > 2 * resnet50
    assert needed("cudagraphs", 714) == needed("cudagraphs", 151) < resnet50
