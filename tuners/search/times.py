"""How long a trial may take, and what there is time for."""

from __future__ import annotations

from collections.abc import Mapping

from advisor.cache.config import Config, Value
from advisor.tuners import knobs
from advisor.tuners.search.ahead import Builds
from advisor.tuners.search.plan import SEARCH, Clock
from advisor.tuners.search.space import Space

AHEAD_SHARE = 0.9
"""Of what the search may take, what building several configs at once may; measuring them has the
rest."""
ALONE, EACH = 1.5, 0.25
"""Of the seconds that a trial of a dear knob must have, what building takes in processes of their
own, and for each of them more: on 16 cores beside an H200 two of MobileNetV3 took 67 to 87 s, where
one in the worker takes 55, four of ResNet-50 more than 52, where one takes 35."""
DEAR_SHARE = 2 / 3
"""Of the search time left, what one value of a dear knob may take before it is given up."""
DEAR_LEAST_S, AMPLE = 45.0, 1.25
"""Compiling ResNet-50 takes up to 32 s on an H200 (FACTS): no deadline is shorter than this, nor
than so many times what the trial must have, unless the budget is."""
TRIAL_SHARE, TRIAL_LEAST_S = 1 / 3, 30.0
"""Of the budget, what any other trial may take; at least so many seconds, unless it has fewer."""
LONGER = 1.5
"""A trial that ran out of time is tried again by a later run that can give it so much more."""
RACED, HALF = 0.25, 0.5
"""Kept of what is left where the same search tries it again, in as much time as it had at least, as
what it compiled before is found; and of what the plan has after a search, where there is something
else to race."""
MORE = 1.1
"""As many times as long is longer."""


class Times:
    """The time of a search, as its trials may have it.

    Args:
        clock: of the whole tuning.
        builds: what is built ahead is measured in a few seconds.

    Attributes:
        kept_s: of the search's time what no trial may have now, for what comes after them.
        last_s: what the one trial has after which nothing is tried; 0 before that.
    """

    def __init__(self, clock: Clock, space: Space, builds: Builds) -> None:
        self._clock, self._space, self._builds = clock, space, builds
        self._part = clock.search()
        self.kept_s = 0.0
        self.last_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the search is to end; below 0 afterwards."""
        return self._part.left_s

    def reach_s(self, left_s: float) -> float:
        """What a trial may take that is begun with so much of the search left."""
        # What it takes beyond the search's end the race is short of.
        return left_s + (self._clock.left_s - left_s) / 4 + self._clock.slack_s / 4

    def spare_s(self, *, leads: bool) -> float:
        """What of all that is left may go to one more trial; `leads`: there is something to race
        beside the default."""
        left_s = max(0.0, self._clock.left_s)
        after_s = HALF * (1 - SEARCH) * self._clock.budget_s if leads else 0.0
        return left_s - max(RACED * left_s, after_s)

    def left_for(self, config: Config) -> float:
        """Seconds of the search that may be spent on a config now. What is built is measured."""
        left_s = self.left_s
        return (self.reach_s(left_s) if self._builds.built(config) else left_s) - self.kept_s

    def limit_s(self, config: Config) -> float:
        """Seconds until a trial is given up: one that hangs does not take the others' time."""
        if self.last_s:
            return self.last_s
        if config == self._space.default:
            return self._clock.left_s + self._clock.slack_s / 2
        if self._builds.built(config):
            own = max(TRIAL_LEAST_S, self._builds.first_step_s(config))
            return min(own, self.reach_s(self.left_s))
        if self._space.is_dear(config):
            needs_s = AMPLE * self.needs_s(config)
            own = max(DEAR_LEAST_S, needs_s, DEAR_SHARE * self.left_s)
        else:
            own = max(TRIAL_LEAST_S, TRIAL_SHARE * self._clock.budget_s)
        return min(own, self.reach_s(max(0.0, self.left_s)))

    def needs_s(self, values: Mapping[str, Value]) -> float:
        """Seconds that a trial of these values of knobs must have."""
        space = self._space
        rows = ((knobs.BY_NAME[name].dear, value) for name, value in space.dear_in(values))
        return max((needs(value, space.modules) for needs, value in rows if needs), default=0.0)

    def advised(self, needs_s: float, kept: float, before_s: float) -> str:
        """The budget whose search can give a trial so many seconds, where this share of what is
        left of it after so many is kept for that: '180s'."""
        share = kept * SEARCH + (1 - SEARCH) / 4  # as reach_s has it
        return self._clock.advised((needs_s + kept * before_s) / share)

    def longer(self, seconds: float, kept: float) -> str:
        """The budget whose search gives what compiles first longer than that: '180s'."""
        return self._clock.advised(MORE * seconds / (DEAR_SHARE * kept * SEARCH))

    def suffice(self, config: Config) -> bool:
        """Whether a trial has what it needs of a dear knob, beside what is kept."""
        built = self._builds.built(config)
        needs_s = self._builds.expected_s(config) if built else self.needs_s(config)
        return needs_s <= self.limit_s(config) - self.kept_s

    def hold(self, count: int, needs_s: float) -> bool:
        """Whether so many configs that need as long can be tried, one after the other."""
        return count * needs_s <= self.reach_s(self.left_s)

    @property
    def ahead_s(self) -> float:
        """Seconds that may be spent on building configs at once."""
        return AHEAD_SHARE * self.reach_s(self.left_s)

    def at_once(self, needs_s: float) -> int:
        """How many configs that need as long may be built at once: 1 where there is time for no
        more than one after the other."""
        return max(1, int((self.ahead_s / needs_s - ALONE) / EACH))
