"""What a visit and the final race are expected to take, and what there is time for."""

from __future__ import annotations

from collections.abc import Iterable

from advisor.cache.config import Config
from advisor.tuners import knobs
from advisor.tuners.decisions import LIKELY, LOOKS, PAIRS, SLOW_TURN_S, TURN_S
from advisor.tuners.search.plan import Clock
from advisor.tuners.search.space import Space
from advisor.tuners.search.visits import Visits


class Costs:
    """Expected seconds, from what the visits so far took.

    Args:
        modules: in the model.

    Attributes:
        compared_s: what the last comparison took; None before the first.
    """

    def __init__(self, space: Space, visits: Visits, clock: Clock, modules: int) -> None:
        self._space, self._visits, self._clock, self._modules = space, visits, clock, modules
        self.compared_s: float | None = None

    def visit_s(self, config: Config, turn_s: float = TURN_S) -> float:
        """Building, settling for about as long as one turn, the turns, each with a block of the
        baseline, and the comparison."""
        turn_s = max([turn_s, *(turn.beside.seconds for turn in self._visits.baseline.turns)])
        turns = PAIRS if PAIRS * turn_s < 2 * SLOW_TURN_S else 2
        timing_s = 2 * (turns + 1) * turn_s
        return self.build_s(config) + timing_s + self.comparison_s(config)

    def comparison_s(self, config: Config) -> float:
        """The comparison with fp32, the first as long as it took to time the baseline; 0 where
        nothing is compared."""
        if not self._visits.is_doubtful(config):
            return 0.0
        own = self._visits.baseline
        return own.seconds - own.first_s if self.compared_s is None else self.compared_s

    def build_s(self, config: Config) -> float:
        """Until a config's first step is done: as long as the slowest of its kind took."""
        if not self._space.is_dear(config) or knobs.code(config) in self._visits.codes:
            return 0.0
        return self._seen_s(config) or self._guessed_s(config)

    def fits(self, config: Config, needs_s: float) -> bool:
        """Whether there is time for a visit, and for the race after it. What compiles may be tried
        with less time before one of its kind was seen: it gains the most."""
        guessed = self.build_s(config) and not self._seen_s(config)
        return (LIKELY if guessed else 1.0) * needs_s <= self.left_s

    @property
    def left_s(self) -> float:
        """Seconds that are left before the final race, if there is one."""
        leaders = self._visits.leaders()
        return self._clock.left_s - (self.race_s(leaders) if leaders else 0.0)

    def race_s(self, leaders: Iterable[Config], rounds: int | None = None) -> float:
        """So many rounds of the final race, there and back; by default those for which time is
        kept."""
        own, visits = self._visits.baseline, map(self._visits.get, leaders)
        if rounds is None:
            rounds = LOOKS[0] if own.step_s * PAIRS > SLOW_TURN_S else LOOKS[1]
        took = [max((t.own_s for t in v.turns), default=TURN_S) for v in visits if v]
        return rounds * (sum(took) + max(turn.beside.seconds for turn in own.turns))

    def _seen_s(self, config: Config) -> float:
        """The longest that building something of its kind has taken; 0 before one was seen."""
        ran = [v for v in self._visits.values() if v.ok and self._space.is_dear(v.config)]
        guessed_s = self._guessed_s(config)
        alike = [v.first_s for v in ran if self._guessed_s(v.config) == guessed_s]
        return max(alike, default=0.0)

    def _guessed_s(self, config: Config) -> float:
        rows = ((knobs.BY_NAME[n].dear, value) for n, value in self._space.dear_in(config))
        return max(seconds(value, self._modules) for seconds, value in rows if seconds)
