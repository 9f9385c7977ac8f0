"""One visit to a config: switch, settle, and measure it between blocks of the baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.tuners import decisions as limits
from advisor.tuners import knobs
from advisor.tuners.measure.runner import Block, Compared, ConfigFailed, Runner
from advisor.tuners.search.plan import Clock
from advisor.tuners.search.ratio import LEVEL, UNKNOWN_RATIO, UNMEASURED, Noise, Ratio, ratio_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTurn:
    """One block of a config between two blocks of the baseline; `beside` is the later one."""

    block: Block
    beside: Block
    ratio: float  # the config's samples/s over the mean of both blocks of the baseline
    fed: float  # the same ratio if the config had not waited for data
    own_s: float = 0.0  # seconds of the config's block, including the switch to the config


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The result of a visit; `outcome` and `reason` are those of `Measurement`."""

    config: Config
    outcome: str = "ok"
    reason: str = ""
    first_s: float = 0.0  # seconds until its first step was done
    turns: tuple[PairedTurn, ...] = ()
    ratio: Ratio = UNKNOWN_RATIO  # over the baseline
    peak_bytes: int = 0  # also of untimed steps: a CUDA graph takes its memory when it is recorded
    seconds: float = 0.0  # of the whole visit

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def failed(self) -> bool:
        """Whether an error was the reason, and not time, memory or numbers."""
        return self.outcome in ("failed", "crashed")

    @property
    def fed(self) -> float:
        """The config's speed-up if its steps had not waited for data; 0 if it failed."""
        if not self.turns:
            return self.ratio.mean if self.ok else 0.0
        return self.unstarved_ratio().mean

    def unstarved_ratio(self, noise: Noise = UNMEASURED) -> Ratio:
        return ratio_of([math.log(turn.fed) for turn in self.turns], noise)

    @property
    def rate(self) -> float:
        return statistics.median(t.block.rate for t in self.turns) if self.turns else 0.0

    @property
    def step_s(self) -> float:
        return statistics.median(t.block.step_s for t in self.turns) if self.turns else 0.0

    @property
    def waited(self) -> float:
        if not self.turns:
            return 0.0
        return statistics.median(turn.block.waited_share for turn in self.turns)

    @property
    def waits(self) -> bool:
        """Whether another loader may gain something."""
        return self.waited > limits.GAIN - 1

    def measurement(self, own: float) -> Measurement:
        """The measurement for a record, scaled to a baseline of `own` samples/s, so that the speeds
        of two trials have the ratio of their turns."""
        if not self.turns:
            return Measurement(outcome=self.outcome, reason=self.reason)
        blocks = [turn.block for turn in self.turns]
        rates = [block.rate for block in blocks]
        scale = self.ratio.mean * own / self.rate
        return Measurement(
            outcome="ok",
            samples_per_s=scale * self.rate,
            low=scale * min(rates),
            high=scale * max(rates),
            step_s=self.step_s / scale,
            gpu_s=statistics.median(block.gpu_s / block.steps for block in blocks),
            first_step_s=self.first_s,
            peak_bytes=self.peak_bytes,
            steps=sum(block.steps for block in blocks),
            blocks=tuple(block.step_s / scale for block in blocks),
            waited=self.waited,
        )


class Visitor:
    """Visits configs, one after the other; `own` is the baseline. `compiling` is called with each
    config that is compiled."""

    def __init__(
        self, runner: Runner, own: Config, clock: Clock, compiling: Callable[[Config], None]
    ) -> None:
        self._runner, self.own, self.clock, self._compiling = runner, own, clock, compiling
        self.baseline: list[Block] = []  # its blocks, in order
        self._current: Config | None = None
        self._settled: dict[Config, float] = {}
        self._left: dict[Config | None, int] = {}
        self._peaks: dict[Config, int] = {}  # bytes
        self._energy: dict[Config, list[Block]] = {}  # all timed blocks

    @property
    def noise(self) -> Noise:
        return Noise.of([block.rate for block in self.baseline])

    @property
    def built(self) -> list[Config]:
        return list(self._settled)

    def begin(self) -> Visit:
        began = self.clock.now()
        first_s = self._settle(self.own)
        before, after = self._beside(), self._beside()
        turn = PairedTurn(block=before, beside=after, ratio=1.0, fed=before.fed_rate / before.rate)
        return Visit(
            config=self.own,
            first_s=first_s,
            turns=(turn,),
            ratio=LEVEL,
            peak_bytes=self._peaks[self.own],
            seconds=self.clock.now() - began,
        )

    def visit(
        self, config: Config, best: float, seconds: float = limits.TURN_S, leave_s: float = 0.0
    ) -> Visit:
        """Measure a config in blocks of about `seconds` between blocks of the baseline. A config
        clearly below `best`, the highest ratio so far, gets fewer turns. Two turns are enough if
        less than `leave_s` is left of the budget, because later work needs that time."""
        began, first_s = self.clock.now(), 0.0
        turns: list[PairedTurn] = []
        outcome, reason = "ok", ""
        try:
            first_s = self._settle(config)
            timed_from = self.clock.now()
            before = self._beside(seconds)
            while not self._enough(turns, best, timed_from, leave_s):
                turn = self._turn(config, before, seconds)
                turns.append(turn)
                before = turn.beside
        except ConfigFailed as exc:
            if not turns or exc.outcome != "timed_out":
                outcome, reason, turns = exc.outcome, str(exc), []
        return Visit(
            config=config,
            outcome=outcome,
            reason=reason,
            first_s=first_s,
            turns=tuple(turns),
            ratio=self._ratio(turns),
            peak_bytes=self._peaks.get(config, 0),
            seconds=self.clock.now() - began,
        )

    def block(self, config: Config, seconds: float = limits.TURN_S) -> Block:
        """One timed block in which nothing was compiled; raises as `Runner.block`. A block that is
        much slower than the last one is measured again: another such block would count."""
        if config not in self._settled:
            self._settle(config)
        for _ in range(limits.SETTLE_BLOCKS):
            block = self._block(config, self._steps(config, seconds))
            stalled = block.step_s > limits.RESOLVABLE * self._settled[config]
            self._settled[config] = block.step_s
            if not (block.compiled or stalled):
                break
        self._energy.setdefault(config, []).append(block)
        return block

    def joules(self, config: Config) -> float:
        """Joules of a sample over all timed blocks of a config; 0 if they are not known."""
        blocks = self._energy.get(config, [])
        return sum(one.joules for one in blocks) / max(1, sum(one.samples for one in blocks))

    def compare(self, config: Config) -> Compared:
        self._current = None
        return self._runner.compare(config, deadline_s=self.clock.deadline_s)

    def forget(self, config: Config) -> None:
        if self._settled.pop(config, None) is not None:
            self._runner.forget(config)

    def _turn(self, config: Config, before: Block, seconds: float) -> PairedTurn:
        began = self.clock.now()
        block = self.block(config, seconds)
        own_s = self.clock.now() - began
        after = self._beside(seconds)
        return PairedTurn(
            own_s=own_s,
            block=block,
            beside=after,
            ratio=block.rate / math.sqrt(before.rate * after.rate),
            fed=block.fed_rate / math.sqrt(before.rate * after.rate),
        )

    def _beside(self, seconds: float = limits.TURN_S) -> Block:
        """A block of the baseline."""
        self.baseline.append(self.block(self.own, seconds))
        return self.baseline[-1]

    def _settle(self, config: Config) -> float:
        """Run a config until its steps take equally long; returns `first_s`."""
        if knobs.compiles(config):
            self._compiling(config)
        block = self._block(config, 1)
        first_s = block.first_s or block.seconds
        began, made = self.clock.now(), 1
        for _ in range(limits.SETTLE_BLOCKS):
            before = block.step_s
            block = self._block(config, turn_steps(before, limits.TURN_S / 2))
            made += block.steps
            # The mode reduce-overhead records its graphs in three steps.
            alike = abs(block.step_s / before - 1) < limits.NOTABLE - 1 and made > limits.PAIRS
            late = self.clock.now() - began >= limits.SETTLE_BLOCKS * limits.TURN_S
            if not block.compiled and (alike or late):
                break
        self._settled[config] = block.step_s
        return first_s

    def _steps(self, config: Config, seconds: float) -> int:
        # Workers deliver in turn, so a block has a whole number of rounds of all workers.
        workers = max(1, knobs.workers(config))
        steps = turn_steps(self._settled[config], seconds)
        return steps if steps < 2 * workers else math.ceil(steps / workers) * workers

    def _block(self, config: Config, steps: int) -> Block:
        # First use up ready batches, or let workers replace those that the config before used up.
        last, self._current = self._current, None
        warm = max(1, *(self._left.get(one, 0) for one in (config, last))) if config != last else 0
        block = self._runner.block(config, steps, warm=warm, deadline_s=self.clock.deadline_s)
        self._current = config
        self._peaks[config] = max(block.peak_bytes, self._peaks.get(config, 0))
        self._left[config] = min(block.leftover, turn_steps(block.step_s, limits.SLOW_TURN_S))
        return block

    def _enough(
        self, turns: list[PairedTurn], best: float, timed_from: float, leave_s: float
    ) -> bool:
        """Whether these turns tell how a config compares with the best, or no time is left."""
        if not turns:
            return False
        # A config that waits for its data may lead once it is fed.
        if max(max(turn.ratio, turn.fed) for turn in turns) < limits.HOPELESS * best:
            return True
        took_s = self.clock.now() - timed_from
        slow = took_s >= 2 * 2 * limits.SLOW_TURN_S or self.clock.left_s <= leave_s
        if len(turns) < (2 if slow else limits.PAIRS):
            return False
        ratio = self._ratio(turns)
        undecided = ratio.low < best < ratio.high or ratio.low < 1 < ratio.high
        return slow or len(turns) >= 2 * limits.PAIRS or not undecided

    def _ratio(self, turns: list[PairedTurn]) -> Ratio:
        return ratio_of([math.log(turn.ratio) for turn in turns], self.noise)


def turn_steps(step_s: float, seconds: float) -> int:
    """Steps of a block of about `seconds`: at least PAIRS, if these fit into SLOW_TURN_S."""
    step_s = max(step_s, 1e-7)
    most = max(1, min(limits.PAIRS, int(limits.SLOW_TURN_S / step_s)))
    return max(most, math.ceil(seconds / step_s))
