"""The loader beside the step that it feeds: what the step takes, and what both make together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from advisor.cache.config import Config
from advisor.cache.record import Choice, Measurement, Record, best_known
from advisor.cache.shown import times
from advisor.report import helping
from advisor.report.data import Table
from advisor.report.helping import Feeding
from advisor.report.text import duration, rate
from advisor.tuners import knobs, worker_limits
from advisor.tuners.knobs import BY_NAME, INPUT, TORCH, WORKERS, described

if TYPE_CHECKING:
    from advisor.tuners.measure.worker.wire import SampleCosts

BY_THEMSELVES = TORCH | {"prefetch_factor": worker_limits.PREFETCH_FACTOR}
"""How workers work that are told nothing."""
KEEPS_UP = 0.95
"""Of the step alone: a loader that gives so much of it does not bound it."""
ORDER = "in_order"
"""The knob that --any-order permits."""
UNTUNED = (
    "The loader is not tuned: --data data.py:make_dataset, or torchvision:FakeData, names what it "
    "loads."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A loader, and what it makes with the step, by the most turns that it had."""

    loader: Config
    together: Measurement

    @property
    def name(self) -> str:
        """'8 loader workers, pin_memory'."""
        said = described(self.loader)
        return "DataLoader default" if said == "torch default" else said

    @property
    def way(self) -> str:
        """How its workers work, '4 batches ahead, pin_memory'; '' where it is as by themselves."""
        return described(self.loader.without(WORKERS), BY_THEMSELVES, nothing="")

    @property
    def workers(self) -> int:
        return knobs.workers(self.loader)


def pairs(record: Record) -> list[Pair]:
    """All that were measured, in the order of their workers; empty where none was."""
    found: dict[Config, Measurement] = {}
    for trial in record.trials:
        loader, seen = _loader(trial.config), trial.measurement
        if trial.stage == INPUT and seen.ok and loader:
            found[loader] = best_known([found.get(loader, seen), seen])
    made = (Pair(loader=loader, together=seen) for loader, seen in found.items())
    return sorted(made, key=lambda one: one.workers)


def step(record: Record) -> Choice | Measurement:
    """The advised step on a batch that lies on the device: of the data, where there is one."""
    own = (t.measurement for t in record.trials if t.stage == INPUT and not _loader(t.config))
    return next((one for one in own if one.ok), record.winner(record.use))


def table(record: Record) -> Table | None:
    """Loaders with what each gives; None where none was measured."""
    found = pairs(record)
    if not found:
        return None
    alone = step(record)
    shown = Table(
        f"The loader beside the advised step, which takes {rate(alone.samples_per_s)} samples/s",
        ("loader", "with the step", "turns", "of the step"),
        right=("with the step", "of the step"),
        whole=("turns",),
        spare=("turns",),
    )
    for one in found:
        both = one.together
        shown.row(
            one.name,
            rate(both.samples_per_s),
            f"{rate(both.low)}-{rate(both.high)}",
            f"{both.samples_per_s / alone.samples_per_s:.0%}",
        )
    return shown


def said(record: Record) -> Iterator[str]:
    """What is chosen of the loader, and what bounds the training then."""
    if record.key.task.command:
        return
    if record.input:
        yield f"loader: {described(record.input)}"
    chosen = _chosen(record)
    if chosen is None:
        if not record.input:
            yield _untuned(record)
        return
    if not record.input:
        yield "loader: DataLoader default, which nothing measured is known to beat"
    elif gain := _gain(record, chosen):
        yield gain
    yield from _of_any_order(record)
    yield _bound(record, chosen)


def _gain(record: Record, chosen: Pair) -> str:
    """How much faster the step is with this loader than with DataLoader's defaults; '' if that was
    not measured."""
    plain = next((one for one in pairs(record) if not one.workers), None)
    if plain is None or not chosen.workers:
        return ""
    theirs = plain.together.samples_per_s
    return (
        f"with the step that loader gives {times(chosen.together.samples_per_s / theirs)} what a "
        f"DataLoader without workers does ({rate(theirs)} samples/s)"
    )


def _of_any_order(record: Record) -> Iterator[str]:
    """What came of the permission that batches may come as their workers finish them."""
    if not record.key.task.any_order or record.input.get(ORDER) is False:
        return
    tried = any(one.loader.get(ORDER) is False for one in pairs(record))
    why = (
        "tried, and not clearly faster" if tried else "not tried, as time ran out or nothing waits"
    )
    if not tried and knobs.workers(record.input) <= 1:
        why = "not tried, as that takes two workers"
    yield f"batches in any order: {why}"


def _untuned(record: Record) -> str:
    failed = (t.measurement.reason for t in record.trials if t.stage == INPUT)
    why = next(filter(None, failed), "the budget left no time for it")
    return f"The loader is not tuned: {why}" if record.key.task.data else UNTUNED


def explained(record: Record, costs: SampleCosts | None, data: str = "") -> Iterator[str]:
    """What bounds the training, what a sample of `data` costs, and what would help, computed from
    that."""
    chosen, own = _chosen(record), record.key.task.data
    if record.key.task.command:
        return
    if chosen is not None:
        yield _bound(record, chosen)
        if costs is None:
            yield "Give --data for what a sample costs, and what would help."
        elif own and data != own:
            yield f"That is of the data of {own}; what follows is of {data}:"
    if costs is None:
        return
    shares = [f"{one.where} {one.seconds / costs.seconds:.0%}" for one in costs.parts]
    small = len([share for share in shares if share.endswith(" 0%")])
    listed = ", ".join(shares[: len(shares) - small])
    yield f"a sample costs {duration(costs.seconds)} of a worker: {listed}"
    if chosen is None:
        yield f"what would help is told once the loader is tuned: advisor tune with --data {data}"
        return
    takes, gives = step(record).samples_per_s, _gives(record, chosen)
    on_gpu, task = record.key.environment.device.kind != "cpu", record.key.task
    if on_gpu and not _keeps_up(record, chosen) and task.dtype == "float32":
        yield from helping.narrower(costs, record.batch * math.prod(task.sample))
    if gives >= KEEPS_UP * takes or _keeps_up(record, chosen):
        return
    needed = math.ceil(takes * costs.seconds)
    batches = costs.samples // record.batch
    if 0 < batches < needed:
        yield (
            f"an epoch has {batches:,} batch{'es' * (batches != 1)}, and work for no more workers: "
            f"by what a sample costs {needed:,} would have to feed the step"
        )
    else:
        yield (
            f"{_with_cores(needed)} would feed the step, by what a sample costs; "
            f"{worker_limits.cores():,} there are"
        )
    yield "what would help changes your code; computed from that, with the workers that there are:"
    yield from helping.lines(Feeding(costs=costs, takes=takes, gives=gives, on_gpu=on_gpu))


def _chosen(record: Record) -> Pair | None:
    """What was measured with the step of the loader that is advised."""
    wanted = knobs.workers(record.input)
    both = [one for one in pairs(record) if one.workers == wanted]
    # What is taken by rule was not measured.
    acting = Config({n: v for n, v in record.input.items() if not BY_NAME[n].by_rule})
    told = acting.changed(BY_THEMSELVES)
    exact = [one for one in both if one.loader.changed(BY_THEMSELVES) == told]
    return next(iter(exact or both), None)


def _bound(record: Record, chosen: Pair) -> str:
    return (
        f"the step can take {rate(step(record).samples_per_s)} samples/s, together they make "
        f"{rate(chosen.together.samples_per_s)}: {_verdict(record, chosen)}"
    )


def _verdict(record: Record, chosen: Pair) -> str:
    if _keeps_up(record, chosen):
        return "the loader keeps up"
    if not chosen.workers and _gives(record, chosen) >= KEEPS_UP * step(record).samples_per_s:
        return "input-bound, as no worker loads beside the step"
    return f"input-bound{_wanted(record)}"


def _keeps_up(record: Record, chosen: Pair) -> bool:
    """Whether the step, with its loader, is as fast as without."""
    return chosen.together.samples_per_s >= KEEPS_UP * step(record).samples_per_s


def _wanted(record: Record) -> str:
    """How many workers would do, by what the fewest give."""
    measured = pairs(record)
    fewest, most = measured[0], measured[-1]
    # Of some data, as of one that is a single batch, more than one have nothing to do.
    if most.workers <= 1 < worker_limits.cores():
        return ""
    one = _gives(record, fewest) / max(1, fewest.workers)
    return f"; some {_with_cores(math.ceil(step(record).samples_per_s / one))} would feed it"


def _gives(record: Record, pair: Pair) -> float:
    """Samples/s of a loader whose step waits: what both make. Without workers, loading and training
    take turns, so their times add up."""
    takes, both = step(record).samples_per_s, pair.together.samples_per_s
    return both if pair.workers or both >= takes else takes * both / (takes - both)


def _with_cores(workers: int) -> str:
    return f"{workers:,} workers with a core each" if workers != 1 else "1 worker with its own core"


def _loader(config: Config) -> Config:
    return config.only(*(name for name in config if name in BY_NAME and _feeds(name)))


def _feeds(name: str) -> bool:
    return BY_NAME[name].stage == INPUT
