"""The speeds of the loader and of the step, and which of the two limits the training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from advisor.cache.config import Config
from advisor.cache.record import Measurement, Record
from advisor.cache.shown import times
from advisor.report.data import Table
from advisor.report.text import duration, rate
from advisor.tuners import knobs, worker_limits
from advisor.tuners.knobs import BY_NAME, INPUT, KNOBS, TORCH, described
from advisor.tuners.measure.worker.wire import SampleCosts

LOADER_KNOBS = tuple(knob.name for knob in KNOBS if knob.stage == INPUT)
WORKER_DEFAULTS = TORCH | {"prefetch_factor": worker_limits.PREFETCH_FACTOR}
KEEPS_UP = 0.95  # a loader that delivers this share of the step's own speed does not limit the step
MIN_PART = 0.05  # parts that take a smaller share of a sample's time get no line
UNTUNED = (
    "The loader is not tuned: name its dataset with --data data.py:make_dataset, or "
    "torchvision:FakeData."
)


class Pair(NamedTuple):
    """A loader, and the measured speed of the step with that loader."""

    loader: Config
    together: Measurement

    @property
    def workers(self) -> int:
        return knobs.workers(self.loader)

    def alone(self, step: float) -> float:
        """Samples/s of the loader alone, computed from the step's own `step` samples/s. Without
        workers, loading and training take turns, so their times add up."""
        both = self.together.samples_per_s
        return both if self.workers or both >= step else step * both / (step - both)


def pairs(record: Record) -> list[Pair]:
    """Every loader that was measured, sorted by the number of workers."""
    found: dict[Config, Measurement] = {}
    for loader, seen in _measured(record):
        if loader:
            found[loader] = max(found.get(loader, seen), seen, key=lambda one: len(one.blocks))
    return sorted(itertools.starmap(Pair, found.items()), key=lambda one: one.workers)


def _step(record: Record) -> float:
    """Samples/s of the advised step on a batch that is already on the device."""
    alone = (seen for loader, seen in _measured(record) if not loader)
    return next(alone, record.winner(record.use)).samples_per_s


def _measured(record: Record) -> Iterator[tuple[Config, Measurement]]:
    """Generator: yields each loader, none for the step alone, and its measurement."""
    for trial in record.trials:
        if trial.stage == INPUT and trial.measurement.ok:
            yield trial.config.only(*LOADER_KNOBS), trial.measurement


def _chosen(record: Record) -> Pair | None:
    workers = knobs.workers(record.input)
    same = [one for one in pairs(record) if one.workers == workers]
    # A knob that is set by a rule was not measured.
    measured = Config({n: v for n, v in record.input.items() if not BY_NAME[n].by_rule})
    advised = measured.changed(WORKER_DEFAULTS)
    exact = [one for one in same if one.loader.changed(WORKER_DEFAULTS) == advised]
    return next(iter(exact or same), None)


def table(record: Record) -> Table | None:
    """The speed with each loader; None if none was measured."""
    step = _step(record)
    shown = Table(
        f"The advised step alone makes {rate(step)} samples/s; with each loader:",
        ("loader", "samples/s", "turns", "of the step"),
        right=("samples/s", "of the step"),
        whole=("turns",),
        spare=("turns",),
    )
    for one in pairs(record):
        both = one.together
        shown.row(
            described(one.loader, nothing="DataLoader default"),
            rate(both.samples_per_s),
            f"{rate(both.low)}-{rate(both.high)}",
            f"{both.samples_per_s / step:.0%}",
        )
    return shown if shown.rows else None


def remarks(record: Record) -> Iterator[str]:
    """Which loader was chosen, and whether it limits the training."""
    if record.key.task.command:
        return
    chosen = _chosen(record)
    if record.input:
        yield f"loader: {described(record.input)}"
    elif chosen is None:
        failed = (one.measurement.reason for one in record.trials if one.stage == INPUT)
        why = next(filter(None, failed), "the budget left no time for it")
        yield f"The loader is not tuned: {why}" if record.key.task.data else UNTUNED
    else:
        yield "loader: DataLoader default; nothing measured is clearly faster"
    if chosen is None:
        return
    plain = next((one for one in pairs(record) if not one.workers), None)
    if chosen.workers and plain is not None:
        theirs = plain.together.samples_per_s
        yield (
            f"with that loader the step is {times(chosen.together.samples_per_s / theirs)} as fast "
            f"as with a DataLoader without workers ({rate(theirs)} samples/s)"
        )
    yield _limit(record, chosen)


def explained(record: Record, costs: SampleCosts | None, data: str = "") -> Iterator[str]:
    """What limits the training, what a sample of `data` costs, and what would help."""
    if record.key.task.command:
        return
    chosen, own, step = _chosen(record), record.key.task.data, _step(record)
    if chosen is not None:
        yield _limit(record, chosen)
        if costs is None:
            yield "With --data, advisor also measures what a sample costs."
        elif own and data != own:
            yield f"That is for the data of {own}; the next lines are for {data}:"
    if costs is None:
        return
    shares = [(one, one.seconds / costs.seconds) for one in costs.parts]
    listed = ", ".join(f"{one.where} {share:.0%}" for one, share in shares if share >= 0.005)
    yield f"a sample costs a worker {duration(costs.seconds)}: {listed}"
    if chosen is None:
        yield f"To see what would help, tune the loader first: advisor tune with --data {data}"
    elif max(chosen.alone(step), chosen.together.samples_per_s) < KEEPS_UP * step:
        yield (
            "If one of its parts took no time, for example when cached, the same loader would make:"
        )
        for one, share in shares:
            if share >= MIN_PART:
                most = chosen.alone(step) / (1 - share) if share < 1 else step
                yield f"    without {one.where}: at most {rate(min(step, most))} samples/s"


def _limit(record: Record, chosen: Pair) -> str:
    """Whether the step is as fast with its loader as alone."""
    step, both = _step(record), chosen.together.samples_per_s
    verdict = "the loader keeps up" if both >= KEEPS_UP * step else "input-bound"
    return f"the step alone takes {rate(step)} samples/s, with its loader {rate(both)}: {verdict}"
