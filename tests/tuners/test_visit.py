"""Visits and the final race: warm-up, order and number of measurements."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

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


def visitor(machine: MadeUp, budget_s: float = 1000.0) -> Visitor:
    """Return a Visitor that has measured the baseline."""
    made = Visitor(machine, BASE, Clock(budget_s, now=machine.now), lambda _config: None)
    made.begin()
    machine.blocks.clear()
    return made


def test_config_is_measured_between_blocks_of_the_baseline() -> None:
    machine = MadeUp(BASE)
    visit = visitor(machine).visit(HALF, best=1.0)
    timed = machine.blocks[machine.blocks.index(BASE) :]
    assert timed == [BASE, *[HALF, BASE] * len(visit.turns)]
    assert visit.ok and visit.ratio.low < machine.speedup(HALF) < visit.ratio.high
    measured = visit.measurement(64 * 30)
    assert measured.samples_per_s == pytest.approx(64 * 30 * machine.speedup(HALF), rel=0.02)
    assert measured.low <= measured.samples_per_s <= measured.high
    assert measured.first_step_s == visit.first_s == pytest.approx(0.2)
    assert len(measured.blocks) == len(visit.turns)
    # If the second turn fails, the first one counts only after a timeout.
    second = len(machine.blocks) - len(timed) + 4
    for outcome, turns in (("timed_out", 1), ("crashed", 0)):
        failing = visitor(machine := MadeUp(BASE))
        machine.stops = {second: ConfigFailed(outcome, "it is made to")}
        assert len(failing.visit(HALF, best=1.0).turns) == turns


@pytest.mark.parametrize(
    ("config", "how", "best", "budget_s", "leave_s", "turns"),
    [
        (HALF, {}, 2.0, 1000.0, 0.0, 1),  # hopeless
        (HALF, {"noise": 0.001}, 1.0, 1000.0, 0.0, PAIRS),
        (FAST, {"noise": 0.001}, 1.4, 1000.0, 0.0, PAIRS),
        (HALF, {"noise": 0.01}, 1.43, 1000.0, 0.0, 2 * PAIRS),  # close to the best
        (HALF, {"step_s": 3.0}, 1.0, 1000.0, 0.0, 2),  # slow steps
        (HALF, {"step_s": 5.0}, 1.0, 1000.0, 0.0, 2),
        # The visit leaves `leave_s`; turns before the end of the budget count.
        (HALF, {"noise": 0.01}, 1.43, 30.0, 1.0, 2 * PAIRS),
        (HALF, {"noise": 0.01}, 1.43, 30.0, 29.0, 2),
        (HALF, {"step_s": 1.0}, 1.0, 26.0, 0.0, 2),
    ],
)
def test_number_of_turns_depends_on_the_ratio_and_the_time(
    config: Config, how: dict[str, float], best: float, budget_s: float, leave_s: float, turns: int
) -> None:
    visit = visitor(MadeUp(BASE, **how), budget_s).visit(config, best, leave_s=leave_s)  # type: ignore[arg-type]
    assert visit.ok and len(visit.turns) == turns


@pytest.mark.parametrize(("step_s", "blocks"), [(0.3, PAIRS), (3.0, 2)])
def test_time_of_a_visit_is_estimated(step_s: float, blocks: int) -> None:
    machine, visits = MadeUp(BASE, step_s=step_s, noise=0.0), Visits(SPACE, compares=False)
    clock = Clock(100.0, now=machine.now)
    visits.add(Visitor(machine, BASE, clock, lambda _config: None).begin())
    block_s = visits.baseline.turns[0].beside.seconds
    expected_s = TimeEstimates(SPACE, visits, clock, 0).visit_s(HALF)
    assert expected_s == pytest.approx(2 * (blocks + 1) * block_s, rel=0.1)


class SlowStart(MadeUp):
    """The first `slow_blocks` are slow; the first `compiling_blocks` compile."""

    slow_blocks, compiling_blocks = 0, 0

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        timed = super().block(config, steps, warm=warm, deadline_s=deadline_s)
        number = self.blocks.count(config)
        if config == BASE:
            return timed
        slow = 5.0 if number <= self.slow_blocks else 1.0
        self.time += (slow - 1) * timed.seconds
        compiled = int(number <= self.compiling_blocks)
        peak = 1000 - number  # the first block takes the most memory
        return replace(timed, seconds=slow * timed.seconds, compiled=compiled, peak_bytes=peak)


@pytest.mark.parametrize(("slow_blocks", "compiling_blocks"), [(0, 0), (1, 0), (0, 5), (1, 6)])
def test_config_is_timed_after_it_has_settled(slow_blocks: int, compiling_blocks: int) -> None:
    machine = SlowStart(BASE)
    machine.slow_blocks, machine.compiling_blocks = slow_blocks, compiling_blocks
    visit = visitor(machine).visit(FAST, best=1.0)
    settling = machine.blocks.index(BASE)
    assert settling >= max(slow_blocks, compiling_blocks) + 1
    assert visit.ratio.mean == pytest.approx(machine.speedup(FAST), rel=0.03)
    steps = sum(turn.block.steps for turn in visit.turns)
    assert steps > PAIRS and all(not turn.block.compiled for turn in visit.turns)
    assert visit.measurement(1.0).peak_bytes == 999


def test_config_that_never_settles_is_timed() -> None:
    machine = SlowStart(BASE)
    machine.compiling_blocks = 10**9
    visit = visitor(machine).visit(FAST, best=1.0)
    assert visit.ok and machine.blocks.index(BASE) <= SETTLE_BLOCKS + 1
    noisy = visitor(machine := MadeUp(BASE, noise=0.5))
    noisy._settle(HALF)
    assert machine.blocks.count(HALF) <= SETTLE_BLOCKS + 1


@pytest.mark.parametrize(("stalls", "number"), [(BASE, 1), (BASE, 2), (BASE, 3), (HALF, 4)])
def test_block_that_stalls_does_not_count(stalls: Config, number: int) -> None:
    """Such as one in which the workers of an epoch start."""
    made = visitor(machine := MadeUp(BASE))

    def load(_time: float) -> float:
        made = machine.blocks
        return 100.0 if made[-1] == stalls and made.count(stalls) == number else 1.0

    machine.load = load
    visit = made.visit(HALF, best=1.0)
    assert visit.ok and visit.ratio.mean == pytest.approx(machine.speedup(HALF), rel=0.03)


@pytest.mark.parametrize("outcome", ["failed", "crashed", "out_of_memory", "hangs"])
def test_failed_visit_has_outcome_and_reason(outcome: str) -> None:
    machine = MadeUp(BASE, fails={("compile", "reduce-overhead"): outcome})
    visit = visitor(machine, 60.0).visit(FAST, best=1.0)
    assert visit.outcome == ("timed_out" if outcome == "hangs" else outcome)
    assert not visit.ok and visit.reason and visit.measurement(1.0).reason == visit.reason


def test_config_that_waits_for_data_has_a_speedup_without_waits() -> None:
    machine = MadeUp(BASE, waits_s=lambda _config: 0.05, noise=0.0)
    visit = visitor(machine).visit(FAST, best=1.0)
    assert visit.ratio.mean == pytest.approx(1.0) and visit.waits
    assert visit.fed == pytest.approx(machine.speedup(FAST) * 0.05 * 30)
    assert visit.waited == pytest.approx(1 - (1 / 30 / machine.speedup(FAST)) / 0.05)


class LoadedRunner(MadeUp):
    """Has 16 workers, each of which makes a batch in 16/28 s; all at work slow steps by `slows`."""

    workers, per_s = 16, 28

    def __init__(self, steps_per_s: dict[Config, int], slows: float) -> None:
        super().__init__(BASE)
        self.steps_per_s, self.slows = steps_per_s, slows
        self.ready = deque([0.0] * self.workers)  # when each worker's batch is

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        self.run(config, warm)
        began, waited_s = self.time, self.run(config, steps)
        made = Block(steps=steps, samples=steps, seconds=self.time - began, prefetched=self.workers)
        return replace(made, waited_s=waited_s, loader_load=steps / self.per_s / made.seconds)

    def run(self, config: Config, steps: int) -> float:
        """Run steps. Return the seconds that they waited for batches."""
        waited_s = 0.0
        for _ in range(steps):
            wait = max(0.0, self.ready.popleft() - self.time)
            self.ready.append(self.time + wait + self.workers / self.per_s)
            busy = sum(ready > self.time + wait for ready in self.ready) / self.workers
            self.time += wait + (1 + self.slows * busy) / self.steps_per_s[config]
            waited_s += wait
        return waited_s


def test_prefetched_batches_make_no_config_faster() -> None:
    """Ratios are those of long runs, also if busy workers only slow the steps."""
    for own, fast, slows, ratio in ((27, 60, 0, 28 / 27), (14, 30, 0.5, 13 / 7)):
        visit = visitor(LoadedRunner({BASE: own, FAST: fast}, slows)).visit(FAST, best=1.0)
        assert visit.ratio.mean == pytest.approx(ratio, rel=0.02) and visit.waits == (not slows)


def raced(
    machine: MadeUp, budget_s: float = 1000.0, stops: dict[int, BaseException] | None = None
) -> tuple[Rates, list[str]]:
    """Race three built configs. Return their rates and the errors. `stops`: exceptions by block."""
    visitor = Visitor(machine, BASE, Clock(budget_s, now=machine.now), lambda _config: None)
    for config in (BASE, HALF, FAST):
        visitor.block(config)
    machine.blocks.clear()
    machine.stops = stops or {}
    rates, errors = race(visitor, [BASE, HALF, FAST])
    return rates, [str(exc) for exc in errors.values()]


def rounds_of(order: list[Config]) -> list[list[Config]]:
    return [order[at : at + 3] for at in range(0, len(order), 3)]


@pytest.mark.parametrize(
    ("noise", "rounds"), [(0.0, LOOKS[0]), (0.002, LOOKS[1]), (0.1, LOOKS[-1])]
)
def test_race_alternates_its_order_until_the_ratios_are_known(noise: float, rounds: int) -> None:
    machine = MadeUp(BASE, noise=noise, seed=3)
    rates, _ = raced(machine)
    order = rounds_of(machine.blocks)
    assert len(order) == rounds and {len(one) for one in rates.values()} == {rounds}
    configs = [BASE, HALF, FAST]
    assert all(one == (configs if n % 2 == 0 else configs[::-1]) for n, one in enumerate(order))


def test_drift_of_the_machine_cancels() -> None:
    machine = MadeUp(BASE, noise=0.0, load=lambda time: 1 + time / 100)
    rates, _ = raced(machine)
    assert paired(rates[FAST], rates[BASE]).mean == pytest.approx(machine.speedup(FAST), rel=0.01)


@pytest.mark.parametrize("budget_s", [45.0, 47.0, 60.0])
def test_race_begins_no_round_that_it_cannot_finish(budget_s: float) -> None:
    machine = MadeUp(BASE, noise=0.05)
    rates, errors = raced(machine, budget_s)
    assert not errors and machine.time <= budget_s
    assert len({len(one) for one in rates.values()}) == 1


@pytest.mark.parametrize(
    ("at", "outcome", "remaining", "rounds"),
    [
        (3, "crashed", {BASE, HALF}, LOOKS[-1]),
        (15, "out_of_memory", {BASE, HALF}, LOOKS[-1]),
        (15, "timed_out", {BASE, HALF, FAST}, 4),
        (13, "crashed", {BASE, HALF, FAST}, 4),  # the baseline
        (3, "timed_out", set(), 0),
        (1, "crashed", set(), 0),  # the baseline fails, so there is no race
    ],
)
def test_failed_config_leaves_the_race_and_the_others_continue(
    at: int, outcome: str, remaining: set[Config], rounds: int
) -> None:
    stops = {at: ConfigFailed(outcome, "it is made to")}
    rates, errors = raced(MadeUp(BASE, noise=0.1), stops=stops)
    assert set(rates) == remaining and {len(one) for one in rates.values()} <= {rounds}
    assert len(errors) == (outcome != "timed_out")
