"""What was visited so far, what was compared with fp32, and what leads."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from advisor.cache.config import BATCH, Config, Value
from advisor.cache.record import USES, Trial
from advisor.tuners import knobs
from advisor.tuners.decisions import CLEARLY, GAIN, LEADERS, NOTABLE
from advisor.tuners.length import Length, Pace, first_step_seen
from advisor.tuners.measure.place import Compared
from advisor.tuners.search.space import Space
from advisor.tuners.search.visit import Visit


def score(visit: Visit) -> float:
    """The speed-up of a visit, as if it were fed where it waits for its data."""
    return visit.fed if visit.waits else visit.ratio.mean


class Visits(dict[Config, Visit]):
    """The last visit to each config, in the order of the first ones, and what they tell.

    Args:
        compares: what changes numbers leads only once it was found to train like fp32.
        length: of the job; None for the steady state.

    Attributes:
        trials: of visits and comparisons, as a record keeps them.
        struck: values of knobs that no config may have any more.
        feed: how data are loaded in configs to come.
        codes: what was compiled, or captured, by `knobs.code`.
    """

    def __init__(
        self, space: Space, *, compares: bool = True, length: Length | None = None
    ) -> None:
        super().__init__()
        self._space, self._compares, self._length = space, compares, length
        self._compared: dict[Config, Compared] = {}
        self.trials: list[Trial] = []
        self.struck: set[tuple[str, Value]] = set()
        self.codes: set[Config] = set()
        self.feed = space.default.only(*knobs.FEEDS)

    def add(self, visit: Visit) -> None:
        """Remember a visit."""
        self[visit.config] = visit
        if visit.turns:
            self.codes.add(knobs.code(visit.config))

    @property
    def baseline(self) -> Visit:
        """That of the baseline."""
        return self[self._space.default]

    # What is struck out -------------------------------------------------------------------------

    def changed(self, configs: Iterable[Config]) -> set[tuple[str, Value]]:
        """The values that some configs change."""
        return {pair for one in configs for pair in one.changed(self._space.default).items()}

    def strike_failed(self, config: Config) -> Config:
        """Strike out what of a config has never run: of that the code that is built, else the only
        value, else the number format; returns what that is."""
        new = self.changed([config]) - self.changed(one.config for one in self.values() if one.ok)
        found = {(n, v) for n, v in new if knobs.BY_NAME[n].dear or knobs.BY_NAME[n].captured}
        if not found:
            found = new if len(new) == 1 else {one for one in new if one[0] in knobs.FORMATS}
        self.struck |= found
        return Config(dict(found))

    def allowed(self, config: Config) -> bool:
        """Whether none of its values is struck out."""
        return self.struck.isdisjoint(config.items())

    # What was compared --------------------------------------------------------------------------

    def code(self, config: Config) -> Config:
        """A config at the user's batch and with its loader: what a comparison is of."""
        return _code(config, self._space.default)

    def compared(self, config: Config) -> Compared | None:
        """How a config compares with strict fp32; None where that is not known."""
        return self._compared.get(self.code(config))

    def judge(self, config: Config, compared: Compared) -> None:
        """Remember a comparison, and strike out what a wrong one blames, but what others have shown
        to be right."""
        self._compared[self.code(config)] = compared
        if compared.outcome == "wrong":
            right = self.changed(one for one, seen in self._compared.items() if seen.ok)
            self.struck |= {
                (name, value)
                for name, value in self.changed([config]) - right
                if _blamed(knobs.BY_NAME[name], compared.blames)
            }

    def is_wrong(self, config: Config) -> bool:
        """Whether a comparison has found it wrong."""
        compared = self.compared(config)
        return compared is not None and compared.outcome == "wrong"

    def is_doubtful(self, config: Config) -> bool:
        """Whether a config must be compared with fp32."""
        return self._compares and _doubtful(config, self._space.default)

    def is_safe(self, config: Config) -> bool:
        """Whether it is known to be right."""
        compared = self.compared(config)
        return not self.is_doubtful(config) or (compared is not None and compared.ok)

    # What leads ---------------------------------------------------------------------------------

    def ranked(self, use: str = USES[-1], batch: int | None = None) -> list[Visit]:
        """Visits to what a use can follow, the fastest first, as if all were fed."""
        found = [
            one
            for one in self.values()
            if one.ok
            and batch in (None, one.config.batch)
            and self.allowed(one.config)
            and not self.is_wrong(one.config)
            and _needs(one.config, self._space.default) <= USES.index(use)
        ]
        fed = [one for one in found if one.config.only(*knobs.FEEDS) == self.feed]
        return sorted(fed or found, key=lambda one: -score(one))

    def best(self, use: str = USES[-1], batch: int | None = None) -> Visit:
        """The fastest that a use can follow; the baseline where nothing ran."""
        return next(iter(self.ranked(use, batch)), self.baseline)

    def safe(self, use: str, batch: int) -> list[Visit]:
        """Visits to what a use can follow and is known to be right, the best for the job first; the
        baseline's where there is none."""
        safe = [one for one in self.ranked(use, batch) if self.is_safe(one.config)]
        return sorted(safe, key=lambda one: -self._value(one)) or [self.baseline]

    def leads(self, visit: Visit) -> bool:
        """Whether it is better than the best verified config of some use that can follow it."""
        value, config = self._value(visit), visit.config
        if value < CLEARLY * self._value(self.baseline):
            return False
        uses = [use for use in self._space.uses if knobs.follows(use, config, self._space.default)]
        return any(value > self._value(self.safe(use, config.batch)[0]) for use in uses)

    def leaders(self) -> list[Config]:
        """What races: for each use the best safe config, and those that come near it."""
        found: dict[Config, None] = {}
        own, uses = self._space.batch, self._space.uses
        for use in uses:
            for batch in dict.fromkeys((own, self._free_batch(use))):
                safe = self.safe(use, batch)
                near = [v for v in safe if NOTABLE * self._value(v) >= self._value(safe[0])]
                most = LEADERS if use == uses[0] and batch == own else 1
                found |= dict.fromkeys(v.config for v in near[:most])
        found.pop(self._space.default, None)
        return list(found)

    def _free_batch(self, use: str) -> int:
        """The smallest batch that is about as fast as any."""
        ranked = self.ranked(use)
        near = [v.config.batch for v in ranked if GAIN * score(v) >= score(ranked[0])]
        return min(near, default=self._space.batch)

    def _value(self, visit: Visit) -> float:
        """The speed-up over the job."""
        own = self.baseline
        rate = self.over_job(own.config, own.rate)
        ours = self.over_job(visit.config, score(visit) * own.rate)
        return ours / rate if rate else score(visit)

    def over_job(self, config: Config, rate: float) -> float:
        """Samples/s over the whole job, first step included, from those of the steady state."""
        if self._length is None:
            return rate
        first_s = self.first_s(config)
        pace = Pace(batch=config.batch, first_step_s=first_s, step_s=config.batch / rate)
        return self._length.rate(pace)

    def first_s(self, config: Config) -> float:
        """Seconds of a config's first step where none has compiled its code before."""
        default = self._space.default
        trials = sorted(self.trials, key=lambda trial: trial.config != default)
        return first_step_seen(trials, config, knobs.PAYING)


@functools.lru_cache(maxsize=1024)
def _code(config: Config, default: Config) -> Config:
    return config | default.only(BATCH, *knobs.FEEDS)


@functools.lru_cache(maxsize=1024)
def _needs(config: Config, default: Config) -> int:
    return USES.index(knobs.use_of(config, default))


@functools.lru_cache(maxsize=1024)
def _doubtful(config: Config, default: Config) -> bool:
    return knobs.doubtful(config, default)


def _blamed(knob: knobs.Knob, what: str) -> bool:
    """Whether a knob makes the part of a config that a comparison blames."""
    if what == "code":
        return bool(knob.captured or (knob.model and not knob.layout))
    return bool({"format": knob.autocast, "optimizer": knob.optimizer}.get(what))
