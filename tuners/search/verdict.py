"""From what the search tried to what is advised: the race, the comparison with fp32, the input
pipeline and the first steps."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from advisor.cache.config import Config
from advisor.cache.record import Choice, Measurement, Trial
from advisor.tuners.length import Length, Pace, break_even
from advisor.tuners.search.plan import Plan, Progress

if TYPE_CHECKING:
    from advisor.tuners.measure.first_step import Starts
    from advisor.tuners.search.race import Verdict
    from advisor.tuners.search.space import Space
    from advisor.tuners.search.study import Search

VERIFY = 0.1
"""Share of the budget for holding the chosen configs against fp32, each."""
RACE = 0.6
"""Share of what the search leaves for the race, building its finalists included."""
INPUT = 0.1
"""Share of the budget for the input pipeline."""
RACE_TURN_S = 0.3
"""Timed seconds of one turn: the more turns, the better a drifting machine cancels out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The fields of a record that the search and the race decide; see `Record`."""

    baseline: Choice
    at_batch: Choice
    free: Choice | None
    input: Config
    trials: tuple[Trial, ...]
    raced: tuple[Choice, ...]


def decide(worker: Any, space: Space, search: Search, plan: Plan, progress: Progress) -> Decided:
    """Race the finalists, and let nothing through that does not train like strict fp32.

    Raises:
        WorkerError: torch's default did not finish the race.
    """
    from advisor.tuners.measure.first_step import Starts
    from advisor.tuners.search import race as choose

    trials = search.trials
    left = plan.budget_s - search.spent_s
    progress.phase("the finalists and torch's default, measured in turn")
    rates = choose.race(
        worker,
        _affordable(choose.finalists(space, trials), search, RACE * left),
        share_s=RACE_TURN_S,
        budget_s=RACE * left,
    )
    peaks = {t.config: t.measurement.peak_bytes for t in trials}
    step_s = search.known(space.default).measurement.step_s
    starts = Starts(
        worker,
        trials,
        process_s=plan.process_s,
        left_s=lambda: plan.budget_s - search.spent_s,
    )
    if plan.length is not None:
        progress.phase("first steps, each in a fresh process")
        starts.measure(space.default, _worthwhile(space, rates, starts))
    verdict, extra = _verified(worker, space, rates, peaks, plan, step_s, starts, progress)
    for check in extra:
        if check.measurement.outcome == "wrong":
            trials = [_struck_out(trial, check) for trial in trials]
    extra = [dataclasses.replace(c, number=len(trials) + n) for n, c in enumerate(extra)]
    chosen_input = space.default_input
    rebuilt_s = starts.seen(verdict.at_batch.config)
    if len(chosen_input) and plan.budget_s - search.spent_s < rebuilt_s:
        progress.notice("the input pipeline is not measured: the budget is spent")
    elif len(chosen_input):
        progress.phase("the input pipeline, through a DataLoader")
        chosen_input, seen = choose.choose_input(
            worker,
            space,
            verdict.at_batch.config,
            share_s=RACE_TURN_S,
            budget_s=INPUT * plan.budget_s,
        )
        extra += _input_trials(seen, len(trials) + len(extra))
    extra += _reference(worker, space, len(trials) + len(extra))
    struck = {t.config.without("batch_size") for t in extra if t.measurement.outcome == "wrong"}
    rates = {c: seen for c, seen in rates.items() if c.without("batch_size") not in struck}
    if plan.length is None:
        progress.phase("first steps, each in a fresh process")
    free = [] if verdict.free is None else [verdict.free.config]
    chosen = [verdict.at_batch.config, *_worthwhile(space, rates, starts), *free]
    starts.measure(space.default, chosen)

    def started(choice: Choice) -> Choice:
        return dataclasses.replace(choice, first_step_s=starts.fresh.get(choice.config, 0.0))

    return Decided(
        baseline=started(verdict.baseline),
        at_batch=started(verdict.at_batch),
        free=None if verdict.free is None else started(verdict.free),
        input=chosen_input,
        trials=(*trials, *extra),
        raced=tuple(map(started, choose.raced(space, rates, peaks).values())),
    )


def _verified(
    worker: Any,
    space: Space,
    rates: dict[Config, list[float]],
    peaks: dict[Config, int],
    plan: Plan,
    step_s: float,
    starts: Starts,
    progress: Progress,
) -> tuple[Verdict, list[Trial]]:
    """The verdict, in which every choice but the default trains like strict fp32."""
    from advisor.tuners.measure.numerics import steps_within
    from advisor.tuners.search import race as choose

    steps = steps_within(VERIFY * plan.budget_s, step_s) if plan.tolerance else 0
    checks: dict[Config, Trial] = {}
    while True:
        verdict = choose.decide(space, rates, peaks, _weigh(space, plan.length, starts))
        chosen = [c.config for c in (verdict.at_batch, verdict.free) if c is not None]
        chosen += _worthwhile(space, rates, starts)
        # The batch size changes no number format: what holds at the user's holds at another.
        doubtful = {c.replace(batch_size=space.batches[0]) for c in chosen} - {space.default}
        doubtful -= set(checks)
        if plan.tolerance is None or not doubtful:
            return verdict, list(checks.values())
        if not steps:
            progress.notice("not compared with fp32: a step takes too long for this budget")
            return verdict, []
        if not checks:
            progress.phase("what was chosen, against strict fp32")
        for config in sorted(doubtful, key=repr):
            began = time.monotonic()
            fp32 = space.default.replace(precision="fp32")
            measured = worker.verify(config, against=fp32, steps=steps, tolerance=plan.tolerance)
            checks[config] = Trial(
                number=0,
                config=config,
                measurement=measured,
                stage="numerics",
                origin="fp32",
                seconds=time.monotonic() - began,
            )
            changed = ", ".join(f"{k}={v}" for k, v in space.changed(config).items())
            if measured.outcome != "wrong" and not measured.ok:
                progress.notice(f"not compared with fp32: {changed}: {measured.reason}")
            if measured.outcome == "wrong":
                progress.notice(f"struck out: {changed}: {measured.reason}")
                knobs = config.without("batch_size")
                rates = {c: r for c, r in rates.items() if c.without("batch_size") != knobs}


def _weigh(
    space: Space, length: Length | None, starts: Starts
) -> Callable[[Config, float], float] | None:
    """Samples/s over the job, from a config and its steady samples/s; None in the steady state."""
    if length is None:
        return None
    asked = length

    def weigh(config: Config, rate: float) -> float:
        return asked.rate(_pace(space, config, rate, starts))

    return weigh


def _worthwhile(space: Space, rates: dict[Config, list[float]], starts: Starts) -> list[Config]:
    """What was raced at the user's batch and is the best for some length of job."""
    raced = [c for c in rates if c["batch_size"] == space.batches[0]]
    paces = [_pace(space, c, statistics.median(rates[c]), starts) for c in raced]
    return [raced[i] for _, i in break_even(paces)]


def _pace(space: Space, config: Config, rate: float, starts: Starts) -> Pace:
    batch = int(config["batch_size"] or 1)
    return Pace(batch=batch, first_step_s=starts.of(config, space.default), step_s=batch / rate)


def _struck_out(trial: Trial, check: Trial) -> Trial:
    """A trial of the knobs that failed the comparison with fp32, marked as wrong."""
    if trial.config.without("batch_size") != check.config.without("batch_size"):
        return trial
    wrong = Measurement(outcome="wrong", reason=check.measurement.reason)
    return dataclasses.replace(trial, measurement=wrong)


def _affordable(finalists: list[Config], search: Search, budget_s: float) -> list[Config]:
    """The default, the first leader, and the others for which the least race leaves time."""
    from advisor.tuners.search.race import MIN_ROUNDS

    taken: list[Config] = []
    for config in finalists:
        measured = search.known(config).measurement
        # Built and warmed up; then one warm and one timed step a turn at least.
        step_s = measured.step_s
        turns_s = MIN_ROUNDS * max(RACE_TURN_S, 2 * step_s)
        budget_s -= measured.first_step_s + 4 * step_s + turns_s
        if len(taken) < 2 or budget_s >= 0:
            taken.append(config)
    return taken


def _input_trials(seen: dict[Config, list[float]], number: int) -> list[Trial]:
    found: list[Trial] = []
    for config, rates in seen.items():
        batch = int(config["batch_size"] or 1)
        middle = sorted(rates)[len(rates) // 2] if rates else 0.0
        measured = (
            Measurement(
                outcome="ok",
                samples_per_s=middle,
                low=min(rates),
                high=max(rates),
                step_s=batch / middle,
                blocks=tuple(batch / rate for rate in rates),
            )
            if rates
            else Measurement(outcome="failed", reason="it failed in the input race")
        )
        found.append(
            Trial(
                number=number + len(found),
                config=config,
                measurement=measured,
                stage="input",
                origin="race",
                seconds=0.0,
            )
        )
    return found


def _reference(worker: Any, space: Space, number: int) -> list[Trial]:
    """Strict fp32, measured to compare with; advised only where it is permitted."""
    if "tf32" not in space.choices["precision"] or "fp32" in space.choices["precision"]:
        return []
    config = space.default.replace(precision="fp32")
    began = time.monotonic()
    measured = worker.measure(config, seconds=0.5)
    return [
        Trial(
            number=number,
            config=config,
            measurement=measured,
            stage="compute",
            origin="reference",
            seconds=time.monotonic() - began,
        )
    ]
