"""Times two running commands in turn, and says whether the second is faster than the first."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from typing import NamedTuple

from advisor.tuners import knobs
from advisor.tuners.act.pilot.protocol import BlockRequest
from advisor.tuners.decisions import CLEARLY, LOOKS, NOTABLE, SETTLE_BLOCKS, TURN_S
from advisor.tuners.measure.run.session import PilotSession
from advisor.tuners.measure.runner import Block
from advisor.tuners.search.plan import Clock
from advisor.tuners.search.ratio import Noise, Ratio, ratio_of
from advisor.tuners.search.visit import turn_steps

FASTER, SLOWER, SAME, COULD_NOT_TELL = "faster", "slower", "same within 1%", "could not tell"
FIRST_START = 2 / 3
"""Share of the budget after which a difference ends the first start, and a second one is to
confirm it: two starts of one script may differ, as memory and threads lie elsewhere."""

Sides = tuple[PilotSession, PilotSession]


class LossesCompared(NamedTuple):
    """Means and standard deviations of both commands' finite losses over the same steps. `differ`:
    by more than 1% and twice the noise, or one has more that are not finite."""

    means: tuple[float, float]
    spreads: tuple[float, float]
    steps: int
    differ: bool


class InTurn:
    """Times two commands in turn, during one or more starts of both."""

    def __init__(self) -> None:
        self._logs: list[list[float]] = []  # by start, turn: log of the second command's speed-up
        self._losses: tuple[list[float], list[float]] = ([], [])  # of the first start
        self.blocks: tuple[list[Block], list[Block]] = ([], [])  # timed, two for each turn

    @property
    def ratio(self) -> Ratio:
        """The speed of the second command over that of the first."""
        noise = Noise.of([1 / block.step_s for block in self.blocks[0]])
        return ratio_of(list(itertools.chain(*self._logs)), noise)

    @property
    def verdict(self) -> str:
        """A difference counts if two starts agree on it."""
        found, starts = _verdict(self.ratio), [_verdict(ratio_of(logs)) for logs in self._logs]
        return found if found == SAME or starts[:2] == 2 * [found] else COULD_NOT_TELL

    @property
    def unconfirmed(self) -> bool:
        """Whether a second start could confirm a difference."""
        return self.verdict != _verdict(self.ratio) and len(self._logs) == 1

    @property
    def doubt(self) -> str:
        """Why the verdict is 'could not tell', and what to do."""
        why = "the interval is too wide"
        if _verdict(self.ratio) != COULD_NOT_TELL:
            if len(self._logs) == 1:
                return "no time was left to confirm it in a second start; give a larger --budget"
            why = "the second start does not confirm it"
        return f"{why}; give a larger --budget, or use a quieter machine"

    def measure(self, sides: Sides, clock: Clock) -> None:
        """Take turns until the verdict is known, or another start must confirm it, or no time is
        left. Raises as `PilotSession.block`; the turns so far count."""
        self._logs.append(logs := [])
        steps, late = self._settle(sides, clock), False
        warm = max(1, steps // 8)
        while clock.left_s > 4 * steps * min((b.step_s for b in self.blocks[0][-2:]), default=0):
            turn = [self._block(sides, at, steps, warm, clock) for at in (0, 1, 1, 0)]
            # Use up the batches that workers made ready while the command waited.
            warm = max(warm, min(max(one.leftover for one in turn), 2 * steps))
            a, b, b2, a2 = (math.log(one.step_s) for one in turn)
            logs.append((a - b - b2 + a2) / 2)
            self.blocks[0].extend(turn[::3])
            self.blocks[1].extend(turn[1:3])
            first = self.unconfirmed
            known = self.ratio.within(CLEARLY - 1) if first else self.verdict != COULD_NOT_TELL
            late, was_late = clock.spent_s >= FIRST_START * clock.budget_s, late
            if (known and len(logs) in LOOKS[1:]) or (first and late and not was_late):
                break

    def losses(self) -> LossesCompared | None:
        both = list(zip(*self._losses, strict=False))
        finite = [pair for pair in both if all(map(math.isfinite, pair))]
        if len(finite) < LOOKS[1]:
            return None  # too few tell nothing
        a, b = zip(*finite, strict=True)
        apart = [ours - theirs for ours, theirs in finite]
        # From step to step, so that falling losses are no noise (von Neumann, 1941).
        noise = math.sqrt(statistics.fmean((y - x) ** 2 for x, y in itertools.pairwise(apart)) / 2)
        lost = [sum(not math.isfinite(pair[at]) for pair in both) for at in (0, 1)]
        means = (statistics.fmean(a), statistics.fmean(b))
        beyond = abs(means[0] - means[1]) > max((CLEARLY - 1) * abs(means[0]), 2 * noise)
        spreads, differ = (statistics.stdev(a), statistics.stdev(b)), beyond or lost[0] != lost[1]
        return LossesCompared(means, spreads, len(finite), differ)

    def _settle(self, sides: Sides, clock: Clock) -> int:
        """Train until the steps of both take equally long; return the steps of a block."""
        last, steps = [1.0, 1.0], 1
        for _ in range(SETTLE_BLOCKS):
            blocks = [self._block(sides, at, steps, 1, clock) for at in (0, 1)]
            before, last = last, [one.step_s for one in blocks]
            alike = all(abs(x / y - 1) < NOTABLE - 1 for x, y in zip(before, last, strict=True))
            if alike and not any(one.compiled for one in blocks):
                break
            steps = turn_steps(max(last), TURN_S / 2)
        steps = turn_steps(max(last), TURN_S)
        return steps + -steps % max(1, *(knobs.workers(one.seen.own) for one in sides))

    def _block(self, sides: Sides, at: int, steps: int, warm: int, clock: Clock) -> Block:
        self.at = at  # the side that trains
        own = sides[at].seen.own.at(sides[at].seen.shape[0])
        request = BlockRequest(config=own, own=own, steps=steps, warm=warm, losses=True)
        block = sides[at].block(request, time.monotonic() + clock.deadline_s)
        self._losses[at].extend(block.losses if len(self._logs) == 1 else ())
        return block


def _verdict(ratio: Ratio) -> str:
    if ratio.low >= 1 / CLEARLY and ratio.high <= CLEARLY:
        return SAME
    inverse = Ratio(mean=1 / ratio.mean, low=1 / ratio.high, high=1 / max(ratio.low, 1e-12))
    return FASTER if ratio.faster else SLOWER if inverse.faster else COULD_NOT_TELL
