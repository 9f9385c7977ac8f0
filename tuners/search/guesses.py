"""The configs to try first, and why. FACTS: good first guesses beat a clever sampler."""

from __future__ import annotations

from advisor.cache.config import Config, Value
from advisor.tuners.search.space import Space

GUESSES: tuple[tuple[dict[str, Value], str], ...] = (
    ({"precision": "tf32", "channels_last": True}, "convolutions without layout changes"),
    (
        {"precision": "bf16", "channels_last": True},
        "half the traffic, matrix units at full rate; the usual guide, without algorithm search",
    ),
    (
        {"precision": "bf16", "channels_last": True, "step_graph": True},
        "the same as one launch a step, where the host is the limit",
    ),
    (
        {"precision": "tf32", "step_graph": True},
        "small nets gain severalfold from one launch a step, and lose by casts",
    ),
    (
        {"precision": "fp16", "channels_last": True},
        "fp16: as fast as bf16 where the GPU is the limit, sometimes faster",
    ),
    ({"precision": "tf32"}, "TF32 matrix products: nearly free on Ampere and later"),
    ({"precision": "bf16"}, "half precision alone, where the layout is in the way"),
    ({"step_graph": True}, "one launch a step alone, numerics untouched"),
    ({"channels_last": True}, "layout alone, numerics untouched"),
    (
        {"precision": "bf16", "channels_last": True, "fused_optimizer": True},
        "fewer kernel launches, for steps bound by the host",
    ),
    ({"precision": "tf32", "channels_last": True, "fused_optimizer": True}, "the same in TF32"),
    ({"fused_optimizer": True}, "fewer kernel launches alone"),
)
"""Knobs left out keep torch's default; what the space does not offer is skipped."""


def first(space: Space) -> list[Config]:
    """The guesses that fit the space, at the user's batch, most valuable first.

    Without convolutions a step is mostly matrix products, which half precision doubles: bf16 first.
    """
    ordered = [changes for changes, _why in GUESSES]
    if not _convolves(space):
        ordered.sort(key=lambda changes: changes.get("precision") != "bf16")
    found = [space.default.replace(**_offered(space, changes)) for changes in ordered]
    threads = [
        space.default.replace(threads=value) for value in space.choices.get("threads", ())[1:]
    ]
    return _new(space, [*found, *threads])


def searched(space: Space, leader: Config) -> list[Config]:
    """The dear guess: cudnn.benchmark on the leader, 10-27 s before the first step."""
    if len(space.choices.get("cudnn_benchmark", ())) < 2:
        return []
    return _new(space, [leader.replace(cudnn_benchmark=True)])


def at_large_batch(space: Space, leader: Config, batch: int) -> list[Config]:
    """What may lead where the device is the limit instead of the host.

    Convolutions gain most in fp16, as cuDNN has more kernels for it; other models in bf16, which
    needs no scaling. Where the first guess is no gain at all, torch's default goes first.
    """
    half: list[dict[str, Value]] = [
        {"precision": precision, "channels_last": True, "fused_optimizer": False}
        for precision in (("fp16", "bf16") if _convolves(space) else ("bf16", "fp16"))
    ]
    found = [space.default.replace(**_offered(space, changes)) for changes in half]
    found = [leader, *found] if leader == space.default else [*found, leader]
    return [c for c in (config.replace(batch_size=batch) for config in found) if space.holds(c)]


def _convolves(space: Space) -> bool:
    return len(space.choices.get("channels_last", ())) > 1


def _new(space: Space, configs: list[Config]) -> list[Config]:
    return [c for c in dict.fromkeys(configs) if space.holds(c) and c != space.default]


def _offered(space: Space, changes: dict[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in changes.items() if value in space.choices.get(name, ())}
