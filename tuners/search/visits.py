"""The visits of a search, their leaders, and time estimates for further visits."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from advisor.cache.config import BATCH, Config, Value
from advisor.cache.record import USES, Trial
from advisor.tuners import decisions as limits
from advisor.tuners import knobs
from advisor.tuners.length import Length, Pace, first_step_seen
from advisor.tuners.measure.runner import UNVERIFIED, Compared
from advisor.tuners.search.plan import Clock
from advisor.tuners.search.space import Space
from advisor.tuners.search.visit import Visit


def score(visit: Visit) -> float:
    """The speed-up of a visit; if it waits for data, its speed-up without waiting."""
    return visit.fed if visit.waits else visit.ratio.mean


class Visits(dict[Config, Visit]):
    """The last visit to each config, in the order of first visits, and what follows from them.

    Args:
        compares: a config that changes numbers leads only after it passed the comparison with fp32.
        length: of the job; None for the steady state.
    """

    def __init__(
        self, space: Space, *, compares: bool = True, length: Length | None = None
    ) -> None:
        super().__init__()
        self._space, self._compares, self._length = space, compares, length
        self._own = space.default.only(BATCH, *knobs.INPUT_PIPELINE)
        self._compared: dict[Config, Compared] = {}
        self.trials: list[Trial] = []  # of visits and comparisons, as a record keeps them
        self.ruled_out: set[tuple[str, Value]] = set()  # values that no config may have any more
        self.codes: set[Config] = set()  # `knobs.code` of configs that were compiled or captured
        self.feed = space.default.only(*knobs.INPUT_PIPELINE)  # how the next configs load data

    def add(self, visit: Visit) -> None:
        self[visit.config] = visit
        if visit.turns:
            self.codes.add(knobs.code(visit.config))

    def add_trial(self, trial: Trial) -> None:
        """Keep a trial. If it failed, earlier trials of its config do not count any more."""
        if trial.measurement.outcome not in ("ok", "timed_out"):
            tried = (trial.config, trial.stage)
            self.trials = [one for one in self.trials if (one.config, one.stage) != tried]
        self.trials.append(trial)

    @property
    def baseline(self) -> Visit:
        return self[self._space.default]

    # What is ruled out -------------------------------------------------------------------------

    def changed(self, configs: Iterable[Config]) -> set[tuple[str, Value]]:
        """The values that some configs change."""
        return {pair for one in configs for pair in one.changed(self._space.default).items()}

    def rule_out_failed(self) -> list[tuple[Config, str]]:
        """Rule out the values that made a config fail: of those that never ran, the ones that build
        code, else the only one. Returns what is new, and why it failed."""
        ruled_out = []
        ran = self.changed(one.config for one in self.values() if one.ok)
        for one in self.values():
            new = self.changed([one.config]) - ran if one.failed else set()
            rows = ((knobs.BY_NAME[name], (name, value)) for name, value in new)
            built = {pair for knob, pair in rows if knob.compile_s or knob.captured}
            if found := (built or (new if len(new) == 1 else set())) - self.ruled_out:
                self.ruled_out |= found
                ruled_out.append((Config(dict(found)), one.reason))
        return ruled_out

    def allowed(self, config: Config) -> bool:
        return self.ruled_out.isdisjoint(config.items())

    # What was compared --------------------------------------------------------------------------

    def code(self, config: Config) -> Config:
        """The config for the comparison: at the user's batch, with the user's loader."""
        return config | self._own

    def compared(self, config: Config) -> Compared | None:
        return self._compared.get(self.code(config))

    def add_comparison(self, config: Config, compared: Compared) -> None:
        """Remember a comparison. If it failed, rule out the values that it blames and that no other
        comparison has shown to be right."""
        self._compared[self.code(config)] = compared
        if compared.outcome == "wrong":
            right = self.changed(one for one, seen in self._compared.items() if seen.ok)
            new = self.changed([config]) - right
            blamed = {one for one in new if _blamed(knobs.BY_NAME[one[0]], compared.blames)}
            if not blamed and compared.blames == "code":
                blamed = {one for one in new if one[0] in knobs.LAYOUTS}
            self.ruled_out |= blamed

    def is_right(self, config: Config) -> bool:
        """Whether a config has no value that is ruled out, and did not fail its comparison: being
        UNVERIFIED is no failure."""
        compared = self.compared(config)
        failed = compared is not None and not compared.ok and compared.outcome != UNVERIFIED
        return self.allowed(config) and not failed

    def needs_comparison(self, config: Config) -> bool:
        return self._compares and _needs_comparison(config, self._space.default)

    def is_safe(self, config: Config) -> bool:
        compared = self.compared(config)
        return not self.needs_comparison(config) or (compared is not None and compared.ok)

    # What leads ---------------------------------------------------------------------------------

    def ranked(self, use: str = USES[-1], batch: int | None = None) -> list[Visit]:
        """Visits to configs that a use can follow, the fastest first."""
        found = [
            one
            for one in self.values()
            if one.ok
            and batch in (None, one.config.batch)
            and self.is_right(one.config)
            and _follows(use, one.config, self._space.default)
        ]
        fed = [one for one in found if one.config.only(*knobs.INPUT_PIPELINE) == self.feed]
        return sorted(fed or found, key=lambda one: -score(one))

    def best(self, use: str = USES[-1], batch: int | None = None) -> Visit:
        """The fastest visit to a config that a use can follow; the baseline if there is none."""
        return next(iter(self.ranked(use, batch)), self.baseline)

    def safe(self, use: str, batch: int) -> list[Visit]:
        """The safe visits in `ranked`, the best for the job first; the baseline if none is safe."""
        safe = [one for one in self.ranked(use, batch) if self.is_safe(one.config)]
        return sorted(safe, key=lambda one: -self._value(one)) or [self.baseline]

    def leads(self, visit: Visit) -> bool:
        value, config = self._value(visit), visit.config
        if value < limits.CLEARLY * self._value(self.baseline):
            return False
        uses = (use for use in self._space.uses if _follows(use, config, self._space.default))
        return any(value > self._value(self.safe(use, config.batch)[0]) for use in uses)

    def leaders(self) -> list[Config]:
        """The configs to race: for each use the best safe config, and those that come near it."""
        found: dict[Config, None] = {}
        own, uses = self._space.batch, self._space.uses
        for use in uses:
            for batch in dict.fromkeys((own, self._free_batch(use))):
                safe = self.safe(use, batch)
                near = [v for v in safe if limits.NOTABLE * self._value(v) >= self._value(safe[0])]
                most = limits.LEADERS if use == uses[0] and batch == own else 1
                # A ratio that is too noisy to tell does not put out the best clear one.
                clear = [one for one in safe if one.ratio.faster]
                # If the best config waits for data, another may deliver more.
                fastest = max(safe, key=lambda one: one.ratio.mean) if safe[0].waits else safe[0]
                found |= dict.fromkeys(one.config for one in (*near[:most], *clear[:1], fastest))
        found.pop(self._space.default, None)
        return list(found)

    def _free_batch(self, use: str) -> int:
        """The smallest batch that is about as fast as any."""
        ranked = self.ranked(use)
        near = [v.config.batch for v in ranked if limits.GAIN * score(v) >= score(ranked[0])]
        return min(near, default=self._space.batch)

    def _value(self, visit: Visit) -> float:
        own = self.baseline
        rate = self.over_job(own.config, own.rate)
        ours = self.over_job(visit.config, score(visit) * own.rate)
        return ours / rate if rate else score(visit)

    def over_job(self, config: Config, rate: float) -> float:
        """Samples/s over the whole job, first step included, from steady samples/s."""
        if self._length is None:
            return rate
        first_s = self.first_s(config)
        pace = Pace(batch=config.batch, first_step_s=first_s, step_s=config.batch / rate)
        return self._length.rate(pace)

    def first_s(self, config: Config) -> float:
        trials = sorted(self.trials, key=lambda one: one.config != self._space.default)
        return first_step_seen(trials, config, knobs.FIRST_STEP_COSTS)


class TimeEstimates:
    """Expected seconds, from the visits so far. `modules`: their number in the model."""

    def __init__(self, space: Space, visits: Visits, clock: Clock, modules: int) -> None:
        self._space, self._visits, self._clock, self._modules = space, visits, clock, modules
        self._first_s: float | None = None  # seconds of the last comparison of a new format
        self._later_s: dict[Config, float] = {}  # of the next comparison, by number format

    def visit_s(self, config: Config, turn_s: float = limits.TURN_S) -> float:
        """Seconds of a visit: building, settling for about a turn, the turns with a block of the
        baseline each, and the comparison."""
        turn_s = max([turn_s, *(turn.beside.seconds for turn in self._visits.baseline.turns)])
        turns = limits.PAIRS if limits.PAIRS * turn_s < 2 * limits.SLOW_TURN_S else 2
        timing_s = 2 * (turns + 1) * turn_s
        return self.build_s(config) + timing_s + self.comparison_s(config)

    def comparison_s(self, config: Config) -> float:
        """Seconds of the comparison with fp32: as the last comparison took, or for the first as
        timing the baseline took; 0 if a config is not compared."""
        if not self._visits.needs_comparison(config):
            return 0.0
        own = self._visits.baseline
        first_s = own.seconds - own.first_s if self._first_s is None else self._first_s
        return self._later_s.get(config.only(*knobs.FORMATS), first_s)

    def add_comparison(self, config: Config, seconds: float) -> None:
        """Learn from a comparison. The first one in a number format also makes the passes of fp32
        and of the format alone, about as slow as the baseline; later ones only the config's."""
        formats, visit = config.only(*knobs.FORMATS), self._visits.get(config)
        new = formats not in self._later_s
        if new:
            self._first_s = seconds
        if new and visit is not None and visit.ok:
            seconds *= visit.step_s / (visit.step_s + self._visits.baseline.step_s)
        self._later_s[formats] = seconds

    def build_s(self, config: Config) -> float:
        """Seconds until a config's first step is done: as the slowest of its kind so far."""
        if not self._space.expensive_values(config) or knobs.code(config) in self._visits.codes:
            return 0.0
        return self._seen_s(config) or self._guessed_s(config)

    def fits(self, config: Config, needs_s: float) -> bool:
        """Whether there is time for a visit, and for the race after it. The first config of a kind
        that compiles may be tried with less time: it gains the most."""
        guessed = self.build_s(config) and not self._seen_s(config)
        return (limits.LIKELY if guessed else 1.0) * needs_s <= self.left_s

    @property
    def left_s(self) -> float:
        """Seconds that are left before the final race, if there is one."""
        leaders = self._visits.leaders()
        return self._clock.left_s - (self.race_s(leaders) if leaders else 0.0)

    def race_s(self, leaders: Iterable[Config], rounds: int | None = None) -> float:
        """Seconds of `rounds` rounds of the final race; by default, those that time is kept for."""
        own, visits = self._visits.baseline, map(self._visits.get, leaders)
        if rounds is None:
            slow = own.step_s * limits.PAIRS > limits.SLOW_TURN_S
            rounds = limits.LOOKS[0 if slow else 1]
        took = [max((t.own_s for t in v.turns), default=limits.TURN_S) for v in visits if v]
        return rounds * (sum(took) + max(turn.beside.seconds for turn in own.turns))

    def _seen_s(self, config: Config) -> float:
        """Seconds of the slowest build of this config's kind so far; 0 if there was none."""
        guessed_s = self._guessed_s(config)
        ran = [v for v in self._visits.values() if v.ok and self._space.expensive_values(v.config)]
        alike = (v.first_s for v in ran if self._guessed_s(v.config) == guessed_s)
        return max(alike, default=0.0)

    def _guessed_s(self, config: Config) -> float:
        values = self._space.expensive_values(config)
        known = ((knobs.BY_NAME[name].compile_s, value) for name, value in values)
        return max(seconds(value, self._modules) for seconds, value in known if seconds)


_follows = functools.lru_cache(maxsize=4096)(knobs.follows)
_needs_comparison = functools.lru_cache(maxsize=1024)(knobs.needs_comparison)


def _blamed(knob: knobs.Knob, what: str) -> bool:
    """Whether a knob decides the thing that a failed comparison blames: code, format, optimizer."""
    if what == "code":
        return bool(knob.captured or knob.blocks or (knob.model and not knob.layout))
    return bool({"format": knob.autocast, "optimizer": knob.optimizer}.get(what))
