"""The configs to try first. FACTS: good first guesses beat a clever sampler."""

from __future__ import annotations

from collections.abc import Iterable

from advisor.cache.config import BATCH, Config, Value
from advisor.tuners import knobs
from advisor.tuners.search.space import Space


def first(space: Space) -> list[Config]:
    """The guesses that fit the space, at the user's batch, most valuable first: the recipes, then
    each value of a knob alone.

    Without convolutions a step is mostly matrix products, which half precision doubles: it goes
    first.
    """
    recipes = [changes for changes, _why in knobs.RECIPES]
    if not knobs.convolving(space.choices):
        plain = _own(knobs.HALF[-1])
        recipes.sort(key=lambda changes: not plain <= changes.items())
    alone = [
        space.default.replace(**{knob.name: value})
        for knob in knobs.KNOBS
        if knob.guess == "alone" and knob.name != BATCH
        for value in space.choices.get(knob.name, ())[1:]
    ]
    return _new(space, [*(space.near(changes) for changes in recipes), *alone])


def on_leader(space: Space, leader: Config) -> list[Config]:
    """What is tried on what leads by then, as a search for algorithms: it takes its time."""
    return _new(
        space,
        (
            leader.replace(**{knob.name: value})
            for knob in knobs.KNOBS
            if knob.guess == "leader"
            for value in space.choices.get(knob.name, ())[1:]
        ),
    )


def at_large_batch(space: Space, leader: Config, batch: int) -> list[Config]:
    """What may lead where the device is the limit instead of the host: half precision, and the
    leader, first where it is torch's default, as then the first guess is no gain at all."""
    half = knobs.HALF if knobs.convolving(space.choices) else tuple(reversed(knobs.HALF))
    found = [space.near(changes, batch) for changes in half]
    leader = leader.at(batch)
    found = [leader, *found] if leader == space.default.at(batch) else [*found, leader]
    return [config for config in dict.fromkeys(found) if space.holds(config)]


def _own(half: dict[str, Value]) -> set[tuple[str, Value]]:
    """What of one half precision's recipe the other one has not."""
    return set(half.items()) - {
        pair for other in knobs.HALF if other is not half for pair in other.items()
    }


def _new(space: Space, configs: Iterable[Config]) -> list[Config]:
    return [c for c in dict.fromkeys(configs) if space.holds(c) and c != space.default]
