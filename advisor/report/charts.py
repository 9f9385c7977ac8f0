"""The numbers of each chart of a record; who draws them is elsewhere."""

from __future__ import annotations

import sys

from advisor.cache.record import Record
from advisor.cache.shown import size, times
from advisor.report import feeding
from advisor.report.data import Comparison, Curve, Curves, Estimate, Timeline, Tried
from advisor.report.tables import called, part_name, raced
from advisor.report.text import rate


def race(record: Record) -> Comparison | None:
    """What was raced against torch's default; None where that raced alone."""
    names = {choice.config: name for name, choice in record.choices.items()}
    default = record.baseline.config
    rows = tuple(
        Estimate(
            f"{names.get(choice.config, 'not chosen')}: {called(record, choice.config)}, "
            f"batch {choice.batch}",
            choice.speedup,
            choice.speedup_low,
            choice.speedup_high,
        )
        for choice in raced(record)
        if choice.config != default
    )
    if not rows:
        return None
    baseline = record.key.task.baseline
    axis = f"samples/s over those of {baseline} at your batch (95% interval)"
    return _compared(f"What was raced, over {baseline}", axis, rows)


def parts(record: Record) -> Comparison:
    """What each knob contributes, of a record that was explained."""
    axis = "samples/s of the advice over those without it (95% interval)"
    rows = tuple(Estimate(part_name(one), one.ratio, one.low, one.high) for one in record.parts)
    return _compared("What each knob contributes", axis, rows)


def _compared(title: str, axis: str, rows: tuple[Estimate, ...]) -> Comparison:
    return Comparison(title=title, axis=axis, rows=rows, text=times, reference=1.0)


def inputs(record: Record) -> Comparison | None:
    """The step alone, and with each loader that fed it; None where none did."""
    found = ((one.name, one.together) for one in feeding.pairs(record))
    fed = [Estimate(name, one.samples_per_s, one.low, one.high) for name, one in found]
    if not fed:
        return None
    step = feeding.step(record)
    alone = Estimate("on the device already", step.samples_per_s, step.low, step.high)
    rows = (alone, *fed)
    title, axis = "The step alone, and with its loader", "samples/s (slowest to fastest turn)"
    return Comparison(title=title, axis=axis, rows=rows, text=rate)


def loaders(record: Record) -> Curves | None:
    """What loaders give with the step by their workers, in each way in which workers were told to
    work; None where no two numbers of workers were measured."""
    found: dict[str, dict[int, float]] = {}
    for one in feeding.pairs(record):
        label = ", ".join(filter(None, ["with the step", one.way]))
        found.setdefault(label, {})[one.workers] = one.together.samples_per_s
    if not any(len(points) > 1 for points in found.values()):
        return None
    curves = (Curve(label, tuple(sorted(points.items()))) for label, points in found.items())
    return Curves(
        title="Samples/s by loader workers",
        curves=tuple(curves),
        level=feeding.step(record).samples_per_s,
    )


def memory(record: Record) -> Comparison | None:
    """The peak of each config that was raced; None where none is known."""
    known = [choice for choice in raced(record) if choice.peak_bytes]
    if not known:
        return None
    # Round numbers of this unit are round to a reader.
    unit = 2**30 if max(choice.peak_bytes for choice in known) >= 2**30 else 2**20
    rows = [(f"{called(record, one.config)}, batch {one.batch}", one.peak_bytes) for one in known]
    return Comparison(
        title="Peak memory of what was raced",
        axis="peak memory",
        rows=tuple(Estimate(label, *[peak / unit] * 3) for label, peak in rows),
        text=lambda units: size(round(units * unit)) if units else "0",
    )


def timeline(record: Record) -> Timeline | None:
    """Each trial of the search when it ended; None where there is none."""
    ended, best, points = 0.0, 0.0, []
    for trial in sorted(record.trials, key=lambda trial: trial.number):
        ended = min(ended + trial.seconds, sys.float_info.max)
        if trial.stage != "compute":
            continue
        measured, at_batch = trial.measurement, trial.config.batch == record.batch
        reached = measured.samples_per_s if measured.ok else 0.0
        leads = at_batch and reached > best
        best = max(best, reached) if at_batch else best
        what = called(record, trial.config)
        points.append(
            Tried(
                label=f"{trial.number}: {what}, batch {trial.config.batch}",
                at_s=ended,
                samples_per_s=reached,
                at_batch=at_batch,
                leads=leads,
            )
        )
    if not points:
        return None
    return Timeline(title="Samples/s of each trial over time", points=tuple(points))
