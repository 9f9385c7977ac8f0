"""The numbers of each chart of a record; templates and matplotlib draw them."""

from __future__ import annotations

import sys

from advisor.cache.record import Record
from advisor.report.data import Comparison, Estimate, Timeline, Tried
from advisor.report.tables import called, part_name, raced


def race(record: Record) -> Comparison | None:
    """The configs of the race; None if the baseline raced alone."""
    names = {choice.config: name for name, choice in record.choices.items()}
    rows = tuple(
        Estimate(
            f"{names.get(choice.config, 'not chosen')}: {called(record, choice.config)}, "
            f"batch {choice.batch}",
            choice.speedup,
            choice.speedup_low,
            choice.speedup_high,
        )
        for choice in raced(record)
        if choice.config != record.baseline.config
    )
    baseline = record.key.task.baseline
    axis = f"speed-up over {baseline}, with its 95% interval"
    return Comparison("The final race", axis, rows) if rows else None


def parts(record: Record) -> Comparison | None:
    """What each knob contributes; None before `advisor explain`."""
    rows = tuple(Estimate(part_name(one), one.ratio, one.low, one.high) for one in record.parts)
    axis = "speed-up over the advice without this knob, with its 95% interval"
    return Comparison("What each knob contributes", axis, rows) if rows else None


def timeline(record: Record) -> Timeline | None:
    """Each trial of the search when it ended; None if there is none."""
    ended, best, points = 0.0, 0.0, []
    for trial in sorted(record.trials, key=lambda trial: trial.number):
        ended = min(ended + trial.seconds, sys.float_info.max)
        if trial.stage != "compute":
            continue
        measured, at_batch = trial.measurement, trial.config.batch == record.batch
        reached = measured.samples_per_s if measured.ok else 0.0
        points.append(
            Tried(
                label=f"{trial.number}: {called(record, trial.config)}, batch {trial.config.batch}",
                at_s=ended,
                samples_per_s=reached,
                at_batch=at_batch,
                leads=at_batch and reached > best,
            )
        )
        best = max(best, reached) if at_batch else best
    return Timeline("Samples/s of each trial over time", tuple(points)) if points else None
