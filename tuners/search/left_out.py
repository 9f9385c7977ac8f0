"""What compiles and was left out for want of time, and the budget that would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.cache.record import Trial
from advisor.tuners import knobs
from advisor.tuners.search.space import Space
from advisor.tuners.search.times import Times


def without_answer(space: Space, trials: Sequence[Trial]) -> list[Trial]:
    """Of each value of a dear knob that no trial has measured the first that ran out of time."""
    seen = {pair for t in trials if t.measurement.ok for pair in space.dear_in(t.config)}
    found: list[Trial] = []
    for trial in trials:
        pairs = space.dear_in(trial.config)
        if trial.measurement.outcome == "timed_out" and pairs - seen:
            found.append(trial)
            seen |= pairs
    return found


def timed_out(
    space: Space, trials: Sequence[Trial], times: Times, kept: float, baseline: str
) -> Iterator[str]:
    """A line for each of these. `kept`: share of the search that is kept for what compiles."""
    for trial in without_answer(space, trials):
        yield (
            f"{knobs.described(trial.config, space.default, nothing=baseline)} was not measured: "
            f"{trial.measurement.reason}; a budget of {times.longer(trial.seconds, kept)} gives "
            "it longer"
        )


def not_begun(
    space: Space, trials: Sequence[Trial], times: Times, kept: float, had_s: float
) -> Iterator[str]:
    """A line where nothing was begun that compiles, as the search had no more than so many seconds
    for it."""
    needs_s = min((times.needs_s({n: v}) for n, v in space.dear_values), default=0.0)
    if needs_s <= had_s or any(space.is_dear(trial.config) for trial in trials):
        return
    yield (
        f"nothing was compiled: that needs {needs_s:.0f} s, and the search had {had_s:.0f} s left; "
        f"a budget of {times.advised(needs_s, kept, trials[0].seconds)} would do"
    )
