"""A visit and the final race: how configs settle, in which order they are measured, how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.tuners.decisions import LOOKS, PAIRS, SETTLE_BLOCKS
from advisor.tuners.measure.runner import Block, ConfigFailed
from advisor.tuners.search.plan import Clock
from advisor.tuners.search.race import Rates, race
from advisor.tuners.search.ratio import paired
from advisor.tuners.search.visit import Visitor
from advisor.tuners.search.visits import TimeEstimates, Visits
from tests.builders import MadeUp, space

SPACE = space()
BASE = SPACE.default
HALF = BASE.replace(precision="bf16", channels_last=True)
FAST = HALF.replace(compile="reduce-overhead")


def visitor(place: MadeUp, budget_s: float = 1000.0) -> Visitor:
    """One that has measured the baseline."""
    found = Visitor(place, BASE, Clock(budget_s, now=place.now), lambda _config: None)
    found.begin()
    place.blocks.clear()
    return found


def test_a_config_is_measured_between_blocks_of_the_baseline() -> None:
    place = MadeUp(BASE)
    visit = visitor(place).visit(HALF, best=1.0)
    timed = place.blocks[place.blocks.index(BASE) :]
    assert timed == [BASE, *[HALF, BASE] * len(visit.turns)]
    assert visit.ok and visit.ratio.low < place.speedup(HALF) < visit.ratio.high
    measured = visit.measurement(64 * 30)
    assert measured.samples_per_s == pytest.approx(64 * 30 * place.speedup(HALF), rel=0.02)
    assert measured.low <= measured.samples_per_s <= measured.high
    assert measured.first_step_s == visit.first_s == pytest.approx(0.2)
    assert len(measured.blocks) == len(visit.turns)
    # Where it fails in its second turn, the first one counts if only the time was over.
    second = len(place.blocks) - len(timed) + 4
    for outcome, turns in (("timed_out", 1), ("crashed", 0)):
        again = visitor(place := MadeUp(BASE))
        place.stops = {second: ConfigFailed(outcome, "it is made to")}
        assert len(again.visit(HALF, best=1.0).turns) == turns


@pytest.mark.parametrize(
    ("config", "how", "best", "budget_s", "leave_s", "turns"),
    [
        (HALF, {}, 2.0, 1000.0, 0.0, 1),  # hopeless
        (HALF, {"noise": 0.001}, 1.0, 1000.0, 0.0, PAIRS),
        (FAST, {"noise": 0.001}, 1.4, 1000.0, 0.0, PAIRS),
        (HALF, {"noise": 0.01}, 1.43, 1000.0, 0.0, 2 * PAIRS),  # close to the best
        (HALF, {"step_s": 3.0}, 1.0, 1000.0, 0.0, 2),  # slow steps
        (HALF, {"step_s": 5.0}, 1.0, 1000.0, 0.0, 2),
        # What follows has its time, and turns that the end of the budget leaves count.
        (HALF, {"noise": 0.01}, 1.43, 30.0, 1.0, 2 * PAIRS),
        (HALF, {"noise": 0.01}, 1.43, 30.0, 29.0, 2),
        (HALF, {"step_s": 1.0}, 1.0, 26.0, 0.0, 2),
    ],
)
def test_turns(
    config: Config, how: dict[str, float], best: float, budget_s: float, leave_s: float, turns: int
) -> None:
    visit = visitor(MadeUp(BASE, **how), budget_s).visit(config, best, leave_s=leave_s)  # type: ignore[arg-type]
    assert visit.ok and len(visit.turns) == turns


@pytest.mark.parametrize(("step_s", "blocks"), [(0.3, PAIRS), (3.0, 2)])
def test_what_a_visit_will_take(step_s: float, blocks: int) -> None:
    place, visits = MadeUp(BASE, step_s=step_s, noise=0.0), Visits(SPACE, compares=False)
    clock = Clock(100.0, now=place.now)
    visits.add(Visitor(place, BASE, clock, lambda _config: None).begin())
    block_s = visits.baseline.turns[0].beside.seconds
    expected_s = TimeEstimates(SPACE, visits, clock, 0).visit_s(HALF)
    assert expected_s == pytest.approx(2 * (blocks + 1) * block_s, rel=0.1)


class Unsettled(MadeUp):
    """Steps that are slow at first, and compile in some of their blocks."""

    slow_blocks, compiling_blocks = 0, 0

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        found = super().block(config, steps, warm=warm, deadline_s=deadline_s)
        number = self.blocks.count(config)
        if config == BASE:
            return found
        slow = 5.0 if number <= self.slow_blocks else 1.0
        self.time += (slow - 1) * found.seconds
        compiled = int(number <= self.compiling_blocks)
        peak = 1000 - number  # the first block takes the most memory
        return replace(found, seconds=slow * found.seconds, compiled=compiled, peak_bytes=peak)


@pytest.mark.parametrize(("slow_blocks", "compiling_blocks"), [(0, 0), (1, 0), (0, 5), (1, 6)])
def test_a_config_is_timed_once_it_has_settled(slow_blocks: int, compiling_blocks: int) -> None:
    place = Unsettled(BASE)
    place.slow_blocks, place.compiling_blocks = slow_blocks, compiling_blocks
    visit = visitor(place).visit(FAST, best=1.0)
    settling = place.blocks.index(BASE)
    assert settling >= max(slow_blocks, compiling_blocks) + 1
    assert visit.ratio.mean == pytest.approx(place.speedup(FAST), rel=0.03)
    steps = sum(turn.block.steps for turn in visit.turns)
    assert steps > PAIRS and all(not turn.block.compiled for turn in visit.turns)
    assert visit.measurement(1.0).peak_bytes == 999


def test_a_config_that_never_settles_is_timed_all_the_same() -> None:
    place = Unsettled(BASE)
    place.compiling_blocks = 10**9
    visit = visitor(place).visit(FAST, best=1.0)
    assert visit.ok and place.blocks.index(BASE) <= SETTLE_BLOCKS + 1
    rough = visitor(place := MadeUp(BASE, noise=0.5))
    rough._settle(HALF)
    assert place.blocks.count(HALF) <= SETTLE_BLOCKS + 1


@pytest.mark.parametrize("outcome", ["failed", "crashed", "out_of_memory", "hangs"])
def test_a_config_that_fails_says_why(outcome: str) -> None:
    place = MadeUp(BASE)
    place.fails[("compile", "reduce-overhead")] = outcome
    visit = visitor(place, 60.0).visit(FAST, best=1.0)
    assert visit.outcome == ("timed_out" if outcome == "hangs" else outcome)
    assert not visit.ok and visit.reason and visit.measurement(1.0).reason == visit.reason


def test_a_config_that_waits_for_data_is_known_by_what_it_would_do_if_fed() -> None:
    place = MadeUp(BASE, waits_s=lambda _config: 0.05, noise=0.0)
    one = visitor(place)
    visit = one.visit(FAST, best=1.0)
    assert visit.ratio.mean == pytest.approx(1.0) and visit.waits
    assert visit.fed == pytest.approx(place.speedup(FAST) * 0.05 * 30)
    assert visit.waited == pytest.approx(1 - (1 / 30 / place.speedup(FAST)) / 0.05)


class Queued:
    """A run whose loader makes a batch in 1/28 s, and keeps up to 16 ready."""

    baseline = BASE
    every_s, most = 1 / 28, 16

    time, ready = 0.0, 16.0

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        """As `Runner.block`."""
        step_s = 1 / 27 if config == BASE else 1 / 60
        self._steps(step_s, warm)
        began = self.time
        waited_s = self._steps(step_s, steps)
        seconds = self.time - began
        return Block(steps=steps, samples=steps, seconds=seconds, waited_s=waited_s, prefetched=16)

    def _steps(self, step_s: float, steps: int) -> float:
        """The seconds that they wait for batches."""
        waited_s = 0.0
        for _ in range(steps):
            wait = max(0.0, 1 - self.ready) * self.every_s
            self.ready = min(self.most, self.ready + (wait + step_s) / self.every_s) - 1
            self.time += wait + step_s
            waited_s += wait
        return waited_s


def test_batches_that_lie_ready_make_no_config_faster() -> None:
    place: Any = Queued()
    one = Visitor(place, BASE, Clock(100.0, now=lambda: place.time), lambda config: None)
    one.begin()
    visit = one.visit(FAST, best=1.0)
    assert visit.ratio.mean == pytest.approx(28 / 27, rel=0.02) and visit.waits


def raced(
    place: MadeUp, budget_s: float = 1000.0, stops: dict[int, BaseException] | None = None
) -> tuple[Rates, list[str]]:
    """What a race of three says, all of them built before; what is raised at blocks of it."""
    visitor = Visitor(place, BASE, Clock(budget_s, now=place.now), lambda _config: None)
    for config in (BASE, HALF, FAST):
        visitor.block(config)
    place.blocks.clear()
    place.stops = stops or {}
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


@pytest.mark.parametrize(
    ("at", "outcome", "left", "rounds"),
    [
        (3, "crashed", {BASE, HALF}, LOOKS[-1]),
        (15, "out_of_memory", {BASE, HALF}, LOOKS[-1]),
        (15, "timed_out", {BASE, HALF, FAST}, 4),
        (13, "crashed", {BASE, HALF, FAST}, 4),  # the baseline
        (3, "timed_out", set(), 0),
        (1, "crashed", set(), 0),  # without the baseline there is no race
    ],
)
def test_what_fails_is_out_and_what_was_seen_of_the_others_counts(
    at: int, outcome: str, left: set[Config], rounds: int
) -> None:
    stops = {at: ConfigFailed(outcome, "it is made to")}
    found, lost = raced(MadeUp(BASE, noise=0.1), stops=stops)
    assert set(found) == left and {len(seen) for seen in found.values()} <= {rounds}
    assert len(lost) == (outcome != "timed_out")
