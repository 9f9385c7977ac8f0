"""The final race: in which order it measures, and when it ends."""

from __future__ import annotations

import pytest

from advisor.cache.config import Config
from advisor.tuners.decisions import LOOKS
from advisor.tuners.measure.runner import ConfigFailed
from advisor.tuners.search.plan import Clock
from advisor.tuners.search.race import Rates, race
from advisor.tuners.search.ratio import paired
from advisor.tuners.search.visit import Visitor
from tests.builders import MadeUp, space

SPACE = space()
BASE = SPACE.default
HALF = BASE.replace(precision="bf16", channels_last=True)
FAST = HALF.replace(compile="reduce-overhead")


def raced(place: MadeUp, budget_s: float = 1000.0) -> tuple[Rates, list[str]]:
    """What a race of three says, all of them built before."""
    visitor = Visitor(place, BASE, Clock(budget_s, now=place.now), lambda _config, _doing: None)
    for config in (BASE, HALF, FAST):
        visitor.block(config)
    place.blocks.clear()
    found, lost = race(visitor, [BASE, HALF, FAST])
    return found, [str(exc) for exc in lost.values()]


def turns(order: list[Config]) -> list[list[Config]]:
    return [order[at : at + 3] for at in range(0, len(order), 3)]


@pytest.mark.parametrize(
    ("noise", "rounds"), [(0.0, LOOKS[0]), (0.002, LOOKS[1]), (0.2, LOOKS[-1])]
)
def test_there_and_back_until_the_ratios_are_known(noise: float, rounds: int) -> None:
    place = MadeUp(BASE, noise=noise, seed=3)
    found, _ = raced(place)
    order = turns(place.blocks)
    assert len(order) == rounds and {len(seen) for seen in found.values()} == {rounds}
    configs = [BASE, HALF, FAST]
    assert all(one == (configs if n % 2 == 0 else configs[::-1]) for n, one in enumerate(order))


def test_the_drift_of_a_machine_cancels() -> None:
    place = MadeUp(BASE, noise=0.0, load=lambda time: 1 + time / 100)
    found, _ = raced(place)
    assert paired(found[FAST], found[BASE]).mean == pytest.approx(place.speedup(FAST), rel=0.01)


@pytest.mark.parametrize("budget_s", [45.0, 47.0, 60.0])
def test_no_round_is_begun_that_the_end_would_cut_off(budget_s: float) -> None:
    place = MadeUp(BASE, noise=0.05)
    found, lost = raced(place, budget_s)
    assert not lost and place.time <= budget_s
    assert len({len(seen) for seen in found.values()}) == 1


class Fails(MadeUp):
    """One config fails after some rounds."""

    def __init__(self, config: Config, outcome: str, blocks: int) -> None:
        super().__init__(BASE, noise=0.1)
        self.culprit, self.outcome, self.left = config, outcome, blocks

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float):  # type: ignore[no-untyped-def]
        if len(self.blocks) >= self.left and config == self.culprit and self.time > 30:
            raise ConfigFailed(self.outcome, "it is made to")
        return super().block(config, steps, warm=warm, deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("culprit", "outcome", "blocks", "left", "rounds"),
    [
        (FAST, "crashed", 0, {BASE, HALF}, LOOKS[-1]),
        (FAST, "out_of_memory", 12, {BASE, HALF}, LOOKS[-1]),
        (FAST, "timed_out", 12, {BASE, HALF, FAST}, 4),
        (BASE, "crashed", 12, {BASE, HALF, FAST}, 4),
        (FAST, "timed_out", 0, set(), 0),
    ],
)
def test_what_fails_is_out_and_what_was_seen_of_the_others_counts(
    culprit: Config, outcome: str, blocks: int, left: set[Config], rounds: int
) -> None:
    found, lost = raced(Fails(culprit, outcome, blocks))
    assert set(found) == left and {len(seen) for seen in found.values()} <= {rounds}
    assert len(lost) == (outcome != "timed_out")


def test_without_the_baseline_there_is_no_race() -> None:
    assert raced(Fails(BASE, "crashed", 0)) == ({}, ["it is made to"])
