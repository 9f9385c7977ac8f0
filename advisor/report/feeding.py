"""The loader beside the step: how fast each is, and what limits the training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from advisor.cache.config import Config
from advisor.cache.record import Choice, Measurement, Record, best_known
from advisor.cache.shown import times
from advisor.report.data import Table
from advisor.report.text import duration, rate
from advisor.tuners import knobs, worker_limits
from advisor.tuners.knobs import BY_NAME, INPUT, TORCH, described

if TYPE_CHECKING:
    from advisor.tuners.measure.worker.wire import SampleCosts

WORKER_DEFAULTS = TORCH | {"prefetch_factor": worker_limits.PREFETCH_FACTOR}
KEEPS_UP = 0.95
"""A loader that delivers this share of the step's own speed does not limit it."""
LEAST = 0.05
"""Share of a sample's time from which a part is worth a line."""
UNTUNED = (
    "The loader is not tuned: --data data.py:make_dataset, or torchvision:FakeData, names what it "
    "loads."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A loader, and the speed of the step with it."""

    loader: Config
    together: Measurement

    @property
    def name(self) -> str:
        """'8 loader workers, pin_memory'."""
        said = described(self.loader)
        return "DataLoader default" if said == "torch default" else said

    @property
    def workers(self) -> int:
        return knobs.workers(self.loader)


def pairs(record: Record) -> list[Pair]:
    """Every loader that was measured, by its number of workers."""
    found: dict[Config, Measurement] = {}
    for trial in record.trials:
        loader, seen = _loader(trial.config), trial.measurement
        if trial.stage == INPUT and seen.ok and loader:
            found[loader] = best_known([found.get(loader, seen), seen])
    made = (Pair(loader=loader, together=seen) for loader, seen in found.items())
    return sorted(made, key=lambda one: one.workers)


def _loader(config: Config) -> Config:
    known = (name for name in config if name in BY_NAME)
    return config.only(*(name for name in known if BY_NAME[name].stage == INPUT))


def step(record: Record) -> Choice | Measurement:
    """The advised step on a batch that is already on the device."""
    own = (t.measurement for t in record.trials if t.stage == INPUT and not _loader(t.config))
    return next((one for one in own if one.ok), record.winner(record.use))


def table(record: Record) -> Table | None:
    """The speed with each loader; None if none was measured."""
    found = pairs(record)
    if not found:
        return None
    alone = step(record).samples_per_s
    shown = Table(
        f"The advised step takes {rate(alone)} samples/s; with each loader it makes",
        ("loader", "samples/s", "turns", "of the step"),
        right=("samples/s", "of the step"),
        whole=("turns",),
        spare=("turns",),
    )
    for one in found:
        both = one.together
        turns = f"{rate(both.low)}-{rate(both.high)}"
        share = f"{both.samples_per_s / alone:.0%}"
        shown.row(one.name, rate(both.samples_per_s), turns, share)
    return shown


def remarks(record: Record) -> Iterator[str]:
    """Which loader was chosen, and whether it limits the training."""
    if record.key.task.command:
        return
    chosen = _chosen(record)
    if record.input:
        yield f"loader: {described(record.input)}"
    elif chosen is None:
        yield _untuned(record)
    else:
        yield "loader: DataLoader default; nothing measured is clearly faster"
    if chosen is not None:
        yield from _gain(record, chosen)
        yield _limit(record, chosen)


def _untuned(record: Record) -> str:
    failed = (t.measurement.reason for t in record.trials if t.stage == INPUT)
    why = next(filter(None, failed), "the budget left no time for it")
    return f"The loader is not tuned: {why}" if record.key.task.data else UNTUNED


def _gain(record: Record, chosen: Pair) -> Iterator[str]:
    """How much faster the step is than with a DataLoader without workers."""
    plain = next((one for one in pairs(record) if not one.workers), None)
    if record.input and chosen.workers and plain is not None:
        theirs = plain.together.samples_per_s
        yield (
            f"with that loader the step is {times(chosen.together.samples_per_s / theirs)} as fast "
            f"as with a DataLoader without workers ({rate(theirs)} samples/s)"
        )


def explained(record: Record, costs: SampleCosts | None, data: str = "") -> Iterator[str]:
    """What limits the training, what a sample of `data` costs, and what would help."""
    chosen, own = _chosen(record), record.key.task.data
    if record.key.task.command:
        return
    if chosen is not None:
        yield _limit(record, chosen)
        if costs is None:
            yield "With --data, advisor also measures what a sample costs."
        elif own and data != own:
            yield f"That is for the data of {own}; what follows is for {data}:"
    if costs is None:
        return
    shares = [(one.where, one.seconds / costs.seconds) for one in costs.parts]
    listed = ", ".join(f"{where} {share:.0%}" for where, share in shares if share >= 0.005)
    yield f"a sample costs a worker {duration(costs.seconds)}: {listed}"
    if chosen is None:
        yield f"To see what would help, tune the loader first: advisor tune with --data {data}"
    elif not _keeps_up(record, chosen) and _speed(record, chosen) < KEEPS_UP * _takes(record):
        yield from _parts(record, chosen, costs)


def _parts(record: Record, chosen: Pair, costs: SampleCosts) -> Iterator[str]:
    """The loader's speed without each part that costs much."""
    yield "Without one of its parts, for example cached or on the GPU, the same loader would make:"
    gives, takes = _speed(record, chosen), _takes(record)
    for one in costs.parts:
        if one.seconds >= LEAST * costs.seconds:
            left_s = costs.seconds - one.seconds
            most = min(takes, gives * costs.seconds / left_s) if left_s else takes
            yield f"    without {one.where}: at most {rate(most)} samples/s"


def _takes(record: Record) -> float:
    return step(record).samples_per_s


def _chosen(record: Record) -> Pair | None:
    """The measurement of the advised loader."""
    wanted = knobs.workers(record.input)
    both = [one for one in pairs(record) if one.workers == wanted]
    # A knob that is set by a rule was not measured.
    measured = Config({n: v for n, v in record.input.items() if not BY_NAME[n].by_rule})
    advised = measured.changed(WORKER_DEFAULTS)
    exact = [one for one in both if one.loader.changed(WORKER_DEFAULTS) == advised]
    return next(iter(exact or both), None)


def _limit(record: Record, chosen: Pair) -> str:
    alone, both = rate(_takes(record)), rate(chosen.together.samples_per_s)
    said = f"the step alone takes {alone} samples/s, with its loader {both}"
    if _keeps_up(record, chosen):
        return f"{said}: the loader keeps up"
    if not chosen.workers and _speed(record, chosen) >= KEEPS_UP * _takes(record):
        return f"{said}: input-bound, because no worker loads during the step"
    return f"{said}: input-bound{_wanted(record)}"


def _keeps_up(record: Record, chosen: Pair) -> bool:
    """Whether the step is as fast with its loader as alone."""
    return chosen.together.samples_per_s >= KEEPS_UP * _takes(record)


def _wanted(record: Record) -> str:
    """How many workers would be enough, estimated from the fewest that were measured."""
    measured = pairs(record)
    fewest, most = measured[0], measured[-1]
    # Data of a single batch has no work for a second worker.
    if most.workers <= 1 < worker_limits.cores():
        return ""
    one = _speed(record, fewest) / max(1, fewest.workers)
    needed = math.ceil(_takes(record) / one)
    cores = f"{needed:,} workers with a core each" if needed != 1 else "1 worker with its own core"
    return f"; about {cores} would feed it, and this machine has {worker_limits.cores():,}"


def _speed(record: Record, pair: Pair) -> float:
    """Samples/s of a loader alone. Without workers, loading and training take turns, so their times
    add up."""
    takes, both = _takes(record), pair.together.samples_per_s
    return both if pair.workers or both >= takes else takes * both / (takes - both)
