"""The loader of a workload's own data: searched for like any config, once its step is chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import optuna

from advisor.cache.config import Config, Value
from advisor.cache.record import LOOP, Trial
from advisor.errors import WorkerError
from advisor.tuners import knobs
from advisor.tuners.measure.place import Block, Compared, Place
from advisor.tuners.search.clock import Clock
from advisor.tuners.search.plan import Progress
from advisor.tuners.search.space import Space
from advisor.tuners.search.tuner import Found, Scope, Tuner


class _Fed:
    """A place whose baseline is another one."""

    def __init__(self, place: Place, baseline: Config) -> None:
        self._place, self.baseline = place, baseline

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        """As `Place.block`."""
        return self._place.block(config, steps, warm=warm, deadline_s=deadline_s)

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        """Nothing that a loader does changes numbers."""
        return Compared("ok", "the loader changes no numbers")

    def forget(self, config: Config) -> None:
        """The step is the same for all of them."""

    def save(self, config: Config, file: Path) -> None:
        """As `Place.save`."""
        self._place.save(config, file)


def tuned_loader(
    place: Place, space: Space, step: Config, found: Found, clock: Clock, progress: Progress
) -> Found:
    """What a search found, with the loader that feeds a step best, in the rest of the budget.

    The baseline is the step fed by torch's own DataLoader.
    """
    choices: Mapping[str, tuple[Value, ...]] = {
        **{name: (value,) for name, value in step.items()},
        **space.inputs,
    }
    inputs = Space(choices)
    progress.phase("the loader, with the step that was chosen")
    scope = Scope(
        budget_s=clock.left_s, compares=False, baseline="torch's loader", stage=knobs.INPUT
    )
    study = optuna.create_study(direction="maximize")
    try:
        its_clock = Clock(clock.left_s, now=clock.now)
        tuner = Tuner(_Fed(place, inputs.default), inputs, study, scope, progress, its_clock)
        fed = tuner.run()
    except WorkerError as exc:
        progress.notice(f"the loader is not tuned: {exc}")
        return found
    best = next(one.choice.config for one in fed.winners if one.use == LOOP and not one.free)
    chosen = best.changed(inputs.default)
    if knobs.workers(best):
        rules = (n for n in space.inputs if knobs.BY_NAME[n].by_rule)
        chosen |= Config({name: space.inputs[name][-1] for name in rules})
    return dataclasses.replace(
        found,
        input=Config(chosen),
        trials=(*found.trials, *(_after(found, trial) for trial in fed.trials)),
        remarks=(*found.remarks, *fed.remarks),
        interrupted=fed.interrupted,
    )


def _after(found: Found, trial: Trial) -> Trial:
    """A trial, numbered after those of the step."""
    return dataclasses.replace(trial, number=len(found.trials) + trial.number)
