"""How a run loads its data while configs are tried: as what would lead, were it fed, is fed best.

What waits for its data hides what else would gain: the loader comes before all else, and again as
soon as something computes so much faster that it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from advisor.cache.config import Config, Value
from advisor.cache.record import Measurement, Trial
from advisor.tuners import knobs
from advisor.tuners.search.space import Space

WAITS = 0.03
"""Share of its time that a run waits for its data, from which loading it otherwise is tried."""
GAIN = 1.03
"""Less is not worth more workers."""


class Feeding:
    """The loader of a run, as its space offers it.

    Args:
        measure: tries a config, once; None where it is not to be tried.

    Attributes:
        given: what configs that are tried from here on have of it; nothing where there is no
            choice.
    """

    def __init__(self, space: Space, measure: Callable[[Config], Trial | None]) -> None:
        self._space, self._measure = space, measure
        self.given = space.default.only(*knobs.FEEDS)
        self._vain: set[tuple[str, Value]] = set()
        """Values with which something waited that others, or none, fed better."""

    def feed(self, trials: Iterable[Trial]) -> None:
        """Where what would be the fastest at the user's batch, if it were fed, waits for its data,
        load it otherwise, as long as that gains."""
        mine = [t for t in trials if t.measurement.ok and t.config.batch == self._space.batch]
        best = max(mine, key=lambda trial: _if_fed(trial.measurement))
        for name in self.given:
            values = sorted(self._space.choices[name], key=_number)
            held = values.index(best.config[name])
            more = self._along(best, name, values[held + 1 :])
            best = self._along(best, name, values[:held][::-1]) if more is best else more
        self.given = best.config.only(*knobs.FEEDS)

    def _along(self, best: Trial, name: str, values: Sequence[Value]) -> Trial:
        """The best with one value of a knob after the other, until one gains nothing."""
        for at, value in enumerate(values):
            config = self._with(best.config, name, value)
            if best.measurement.waited < WAITS or not self._space.holds(config):
                break
            if (name, value) in self._vain:
                continue
            tried = self._measure(config)
            if tried is None or not tried.measurement.ok:
                break
            if tried.measurement.samples_per_s < GAIN * best.measurement.samples_per_s:
                if tried.measurement.waited >= WAITS:  # no other is fed by these either
                    self._vain |= {(name, further) for further in values[at:]}
                break
            self._vain.add((name, best.config[name]))
            best = tried
        return best

    def _with(self, config: Config, name: str, value: Value) -> Config:
        """What workers load is pinned where that is offered: a copy of what is not waits for the
        step before."""
        config = self._space.combined(config, name, value)
        if name == knobs.WORKERS and value:
            pinned = (n for n in self.given if knobs.BY_NAME[n].non_blocking is not None)
            return config.replace(**{n: self._space.choices[n][-1] for n in pinned})
        return config


def _if_fed(measured: Measurement) -> float:
    """Samples/s, had it not waited for its data."""
    return measured.samples_per_s / max(1 - measured.waited, 1e-3)


def _number(value: Value) -> int:
    assert isinstance(value, int)
    return value
