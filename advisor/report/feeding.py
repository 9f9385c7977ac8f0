"""The loader beside the step that it feeds: what each gives alone, and both together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from advisor.cache.config import Config
from advisor.cache.record import Choice, Measurement, Record, best_known
from advisor.cache.shown import size, times
from advisor.report import helping
from advisor.report.data import Table
from advisor.report.helping import Feeding
from advisor.report.text import duration, rate
from advisor.tuners import knobs, room
from advisor.tuners.knobs import BY_NAME, INPUT, LOADER, TORCH, WORKERS, described

if TYPE_CHECKING:
    from advisor.tuners.measure.worker.wire import Costs

BY_THEMSELVES = TORCH | {"prefetch_factor": room.AHEAD}
"""How workers work that are told nothing."""
KEEPS_UP = 0.95
"""Of the step alone: a loader that gives so much of it does not bound it."""
ENOUGH = 0.9
"""Of the slower of the two: a pair that makes less is held back by neither."""
ORDER = "in_order"
"""The knob that --any-order permits."""
UNTUNED = (
    "The loader is not tuned: --data data.py:make_dataset, or torchvision:FakeData, names what it "
    "loads."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A loader: by itself, and with the step, by the most turns that it had; None where that was
    not measured."""

    loader: Config
    alone: Measurement | None
    together: Measurement | None

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
    found: dict[Config, dict[str, Measurement]] = {}
    for trial in record.trials:
        loader = _loader(trial.config)
        if trial.stage in (INPUT, LOADER) and trial.measurement.ok and loader:
            known, seen = found.setdefault(loader, {}), trial.measurement
            known[trial.stage] = best_known([known.get(trial.stage, seen), seen])
    made = (
        Pair(loader=loader, alone=seen.get(LOADER), together=seen.get(INPUT))
        for loader, seen in found.items()
    )
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
        ("loader", "alone", "with the step", "turns", "of the step", "start", "memory"),
        right=("alone", "with the step", "of the step", "start", "memory"),
        whole=("turns",),
        spare=("turns", "start", "memory"),
    )
    for one in found:
        by_itself, both = one.alone, one.together
        shown.row(
            one.name,
            rate(by_itself.samples_per_s) if by_itself else "",
            rate(both.samples_per_s) if both else "",
            f"{rate(both.low)}-{rate(both.high)}" if both else "",
            f"{both.samples_per_s / alone.samples_per_s:.0%}" if both else "",
            duration(by_itself.first_step_s) if by_itself else "",
            size(by_itself.peak_bytes) if by_itself else "",
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
    """What the loader gives over a DataLoader that is told nothing, both with the step; else by
    themselves; '' where neither was measured."""
    plain = next((one for one in pairs(record) if not one.workers), None)
    if plain is None or not chosen.workers:
        return ""
    for how, ours, theirs in (
        ("with the step", chosen.together, plain.together),
        ("by itself", chosen.alone, plain.alone),
    ):
        if ours and theirs:
            ratio = ours.samples_per_s / theirs.samples_per_s
            return (
                f"{how} that loader gives {times(ratio)} what a DataLoader without workers does "
                f"({rate(theirs.samples_per_s)} samples/s)"
            )
    return ""


def _of_any_order(record: Record) -> Iterator[str]:
    """What came of the permission that batches may come as their workers finish them."""
    if not record.key.task.any_order or record.input.get(ORDER) is False:
        return
    tried = any(one.together for one in pairs(record) if one.loader.get(ORDER) is False)
    why = (
        "tried, and not clearly faster" if tried else "not tried, as time ran out or nothing waits"
    )
    if not tried and knobs.workers(record.input) <= 1:
        why = "not tried, as that takes two workers"
    yield f"batches in any order: {why}"


def _untuned(record: Record) -> str:
    failed = (t.measurement.reason for t in record.trials if t.stage in (INPUT, LOADER))
    why = next(filter(None, failed), "the budget left no time for it")
    return f"The loader is not tuned: {why}" if record.key.task.data else UNTUNED


def explained(record: Record, costs: Costs | None, data: str = "") -> Iterator[str]:
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
    takes, gives = step(record).samples_per_s, _alone(record, chosen.workers)
    on_gpu, task = record.key.environment.device.kind != "cpu", record.key.task
    if on_gpu and not _keeps_up(record, chosen) and task.dtype == "float32":
        yield from helping.narrower(costs, record.batch * math.prod(task.sample))
    if not gives or gives >= KEEPS_UP * takes or _keeps_up(record, chosen):
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
            f"{room.cores():,} there are"
        )
    yield "what would help changes your code; computed from that, with the workers that there are:"
    yield from helping.lines(Feeding(costs=costs, takes=takes, gives=gives, on_gpu=on_gpu))


def _chosen(record: Record) -> Pair | None:
    """What was measured with the step of the loader that is advised."""
    wanted = knobs.workers(record.input)
    both = [one for one in pairs(record) if one.together and one.workers == wanted]
    # What is taken by rule was not measured.
    acting = Config({n: v for n, v in record.input.items() if not BY_NAME[n].by_rule})
    told = acting.changed(BY_THEMSELVES)
    exact = [one for one in both if one.loader.changed(BY_THEMSELVES) == told]
    return next(iter(exact or both), None)


def _bound(record: Record, chosen: Pair) -> str:
    assert chosen.together is not None
    takes, gives = step(record).samples_per_s, _alone(record, chosen.workers)
    said = [f"the step can take {rate(takes)} samples/s"]
    if gives:
        said.append(f"the loader gives {rate(gives)} with {_workers(chosen.workers)}")
    said.append(f"together they make {rate(chosen.together.samples_per_s)}")
    return f"{', '.join(said)}: {_verdict(record, chosen, takes, gives)}"


def _verdict(record: Record, chosen: Pair, takes: float, gives: float) -> str:
    """Of what step and loader take and give by themselves, against what both make together."""
    if _keeps_up(record, chosen):
        return "the loader keeps up"
    wanted = _wanted(record, takes) if gives < KEEPS_UP * takes else ""
    # Without a worker one waits for the other, in turn.
    most = min(takes, gives) if chosen.workers else takes * gives / (takes + gives)
    both = chosen.together.samples_per_s if chosen.together else 0.0
    if both < ENOUGH * most and (chosen.workers or gives >= KEEPS_UP * takes):
        lost = "they compete for the same cores"
        if record.key.environment.device.kind != "cpu":
            lost = "they compete for this host, or handing batches over takes the rest"
        return f"input-bound{wanted}; {lost}" if wanted else lost
    if chosen.workers and gives >= KEEPS_UP * takes:
        return "the loader nearly keeps up"
    if wanted or chosen.workers:
        return f"input-bound{wanted}"
    return "input-bound, as no worker loads beside the step"


def _keeps_up(record: Record, chosen: Pair) -> bool:
    """Whether the step, with its loader, is as fast as without."""
    both = chosen.together.samples_per_s if chosen.together else 0.0
    return both >= KEEPS_UP * step(record).samples_per_s


def _wanted(record: Record, takes: float) -> str:
    """How many workers would do, by what one gives."""
    one, most = _alone(record, 1) or _alone(record, 0), max(p.workers for p in pairs(record))
    # Of some data, as of one that is a single batch, more than one have nothing to do.
    if not one or (most <= 1 < room.cores()):
        return ""
    return f"; some {_with_cores(math.ceil(takes / one))} would feed it"


def _alone(record: Record, workers: int) -> float:
    rates = (p.alone.samples_per_s for p in pairs(record) if p.alone and p.workers == workers)
    return max(rates, default=0.0)


def _with_cores(workers: int) -> str:
    return f"{workers:,} workers with a core each" if workers != 1 else "1 worker with its own core"


def _workers(number: int) -> str:
    return f"{number} worker{'s' * (number != 1)}" if number else "no worker"


def _loader(config: Config) -> Config:
    return config.only(*(name for name in config if name in BY_NAME and _feeds(name)))


def _feeds(name: str) -> bool:
    return BY_NAME[name].stage == INPUT
