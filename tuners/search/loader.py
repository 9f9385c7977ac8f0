"""The loader of a workload's own data: searched for like any config, once its step is chosen."""

from __future__ import annotations

import dataclasses

import optuna

from advisor.cache.config import Config
from advisor.cache.record import LOOP
from advisor.errors import WorkerError
from advisor.tuners import knobs
from advisor.tuners.measure.place import Place
from advisor.tuners.search.clock import Clock
from advisor.tuners.search.plan import Progress
from advisor.tuners.search.space import Space
from advisor.tuners.search.tuner import Found, Scope, Tuner


def tuned_loader(
    place: Place, space: Space, step: Config, found: Found, clock: Clock, progress: Progress
) -> Found:
    """What a search found, with the loader that feeds a step best, in the rest of the budget.

    The baseline is the step fed by torch's own DataLoader.
    """
    inputs = Space({name: (value,) for name, value in step.items()} | space.inputs)
    progress.phase("the loader, with the step that was chosen")
    # Nothing that a loader does changes numbers.
    scope = Scope(
        budget_s=clock.left_s, compares=False, baseline="torch's loader", stage=knobs.INPUT
    )
    study = optuna.create_study(direction="maximize")
    its_clock = Clock(clock.left_s, now=clock.now)
    try:
        fed = Tuner(place, inputs, study, scope, progress, its_clock).run()
    except WorkerError as exc:
        progress.notice(f"the loader is not tuned: {exc}")
        return found
    best = next(one.choice.config for one in fed.winners if one.use == LOOP and not one.free)
    chosen = best.changed(inputs.default)
    if knobs.workers(best):
        rules = (n for n in space.inputs if knobs.BY_NAME[n].by_rule)
        chosen |= Config({name: space.inputs[name][-1] for name in rules})
    before = len(found.trials)
    trials = [dataclasses.replace(one, number=before + one.number) for one in fed.trials]
    return dataclasses.replace(
        found,
        input=Config(chosen),
        trials=(*found.trials, *trials),
        remarks=(*found.remarks, *fed.remarks),
        interrupted=fed.interrupted,
    )
