"""explain() and verify(): a record's advice measured again, knob by knob or whole."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.cache.config import Config
from advisor.cache.match import compare
from advisor.cache.record import Choice, Part, Record, Trial
from advisor.cache.records import Records
from advisor.errors import UsageError, WorkerError
from advisor.finding.lookups import set_up_logging
from advisor.opening import Cache, open_records
from advisor.printed import tune_line
from advisor.tuners.search.verdict import RACE_TURN_S
from advisor.tuning import locked

if TYPE_CHECKING:
    from advisor.tuners.measure.worker.parent import Worker
    from advisor.tuners.search.race import Ratio

EXPLAIN_S, VERIFY_S = 60.0, 30.0
LEAST = 1.01
"""A knob that gains less contributes nothing, as does one whose interval holds 1."""
HOLDS = 0.95
"""Of the record's ratio: what may be lost before it no longer holds, where the interval says so."""
NUMERICS_STEPS = 16
DEADLINE_S = 300.0
"""For one measurement: compiling included, without max-autotune."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """`dropped`: knobs that contributed nothing and are back at torch's default in the advice."""

    record: Record
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """`now`: the advice over torch's default, with its 95% interval; `reason`: why it does not
    hold, or ''; `differs`: what has changed on this machine since, as text."""

    record: Record
    now: Ratio
    reason: str
    differs: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.reason


def explain(
    key: str, *, target: str | None = None, budget_s: float = EXPLAIN_S, cache: Cache = None
) -> Explained:
    """Measure what each knob of a record's advice contributes, and keep it in the record.

    Each knob that differs from torch's default is set back alone and measured in turn with the
    advice. Those that contribute nothing are then set back together, if that is no slower.

    Args:
        key: of the record, or the start of it.
        target: where the record's target is now; default: its name, from the current folder.
        budget_s: wall seconds for each of up to three races.

    Raises:
        NoRecord: no record has this key. UsageError: it is not of this target or device.
        WorkerError: it cannot be measured. Busy: it is being measured. StoreError.
    """
    from advisor.tuners.search.race import paired_ratio, race

    records = _records(cache)
    record = records.get(key)
    with _measuring(records, record, target) as worker:
        chosen, default = record.at_batch.config, record.baseline.config
        without = {
            name: chosen.replace(**{name: default[name]})
            for name in chosen
            if chosen[name] != default[name]
        }
        parts: list[Part] = []
        if without:
            rates = race(
                worker,
                [chosen, *without.values()],
                share_s=RACE_TURN_S,
                budget_s=budget_s,
                drop=False,
            )
            _must_have(rates.get(chosen), "the advice")
            for name, config in without.items():
                if rates.get(config):
                    turns = min(len(rates[chosen]), len(rates[config]))
                    ratio = paired_ratio(rates[chosen][:turns], rates[config][:turns])
                    parts.append(_part(name, chosen, ratio, "compute"))
        parts += _input_parts(worker, record, budget_s)
        parts.sort(key=lambda part: -part.ratio)
        idle = [
            next(iter(part.knob))
            for part in parts
            if part.stage == "compute" and (part.low <= 1 or part.ratio < LEAST)
        ]
        explained = dataclasses.replace(record, parts=tuple(parts))
        simpler = _simplified(worker, explained, idle, budget_s) if idle else None
        revised = dataclasses.replace(simpler or explained, revised=time.time())
        records.put(revised, revises=record)
        return Explained(record=revised, dropped=tuple(idle) if simpler else ())


def _part(name: str, chosen: Config, ratio: Ratio, stage: str) -> Part:
    return Part(
        knob=Config({name: chosen[name]}),
        ratio=ratio.mean,
        low=ratio.low,
        high=ratio.high,
        stage=stage,
    )


def _input_parts(worker: Worker, record: Record, budget_s: float) -> list[Part]:
    """The same for the knobs of the input pipeline, through a DataLoader."""
    from advisor.tuners.knobs import INPUT
    from advisor.tuners.search.race import paired_ratio, race

    parts = []
    whole = record.at_batch.config | record.input
    for name, value in record.input.items():
        if not value:
            continue
        bare = whole.replace(**{name: False})
        rates = race(
            worker,
            [whole, bare],
            share_s=RACE_TURN_S,
            budget_s=budget_s / 2,
            stage=INPUT,
            drop=False,
        )
        if rates.get(whole) and rates.get(bare):
            turns = min(len(rates[whole]), len(rates[bare]))
            ratio = paired_ratio(rates[whole][:turns], rates[bare][:turns])
            parts.append(_part(name, whole, ratio, INPUT))
    return parts


def _simplified(worker: Worker, record: Record, idle: list[str], budget_s: float) -> Record | None:
    """The record with these knobs at their default; None where that is slower, or not sound."""
    from advisor.tuners.search.race import CLEARLY, NOISY_TIE, TIE, choice_of, paired_ratio, race

    default, chosen = record.baseline.config, record.at_batch.config
    simple = chosen.replace(**{name: default[name] for name in idle})
    rates = race(
        worker,
        list(dict.fromkeys([default, chosen, simple])),
        share_s=RACE_TURN_S,
        budget_s=budget_s,
        drop=False,
    )
    if not all(rates.get(config) for config in (default, chosen, simple)):
        return None
    against = paired_ratio(rates[simple], rates[chosen])
    tied = against.mean >= TIE or (against.mean >= NOISY_TIE and against.high >= 1)
    peaks = {t.config: t.measurement.peak_bytes for t in record.trials}
    peaks |= {chosen: record.at_batch.peak_bytes}
    baseline = choice_of(default, rates[default], rates[default], peaks)
    choice = choice_of(simple, rates[simple], rates[default], peaks)
    gains = simple == default or (choice.speedup >= CLEARLY and choice.speedup_low > 1)
    if not (tied and gains):
        return None
    check = _numerics(worker, record, simple)
    if check is not None and check.measurement.outcome == "wrong":
        return None
    return dataclasses.replace(
        record,
        baseline=dataclasses.replace(baseline, first_step_s=record.baseline.first_step_s),
        at_batch=baseline if simple == default else _started(record, choice),
        trials=record.trials if check is None else (*record.trials, check),
    )


def _started(record: Record, choice: Choice) -> Choice:
    """With the first step that the advice took in a fresh process: fewer knobs take no longer."""
    return dataclasses.replace(choice, first_step_s=record.at_batch.first_step_s)


def _numerics(worker: Worker, record: Record, config: Config) -> Trial | None:
    """Held against strict fp32, where the record's own advice was."""
    if config == record.baseline.config or not any(t.stage == "numerics" for t in record.trials):
        return None
    began = time.monotonic()
    measured = worker.verify(
        config,
        against=record.baseline.config.replace(precision="fp32"),
        steps=NUMERICS_STEPS,
        tolerance=0.02,
    )
    return Trial(
        number=len(record.trials),
        config=config,
        measurement=measured,
        stage="numerics",
        origin="fp32",
        seconds=time.monotonic() - began,
    )


def verify(
    key: str, *, target: str | None = None, budget_s: float = VERIFY_S, cache: Cache = None
) -> Verified:
    """Measure torch's default and the advice again; a record that no longer holds is marked stale.

    It holds where the advice is still faster than the default, its ratio is not clearly below
    what the record says, and it still trains like strict fp32. A mark that is there is taken away.

    Args and errors as `explain`.
    """
    from advisor.tuners.search.race import paired_ratio, race

    records = _records(cache)
    record = records.get(key)
    with _measuring(records, record, target) as worker:
        chosen, default = record.at_batch.config, record.baseline.config
        rates = race(
            worker,
            list(dict.fromkeys([default, chosen])),
            share_s=RACE_TURN_S,
            budget_s=budget_s,
            drop=False,
        )
        _must_have(rates.get(default), "torch's default")
        _must_have(rates.get(chosen), "the advice")
        now = paired_ratio(rates[chosen], rates[default])
        then = record.at_batch
        reason = ""
        if chosen != default and now.high < HOLDS * then.speedup_low:
            reason = (
                f"{now.mean:.2f}x torch's default now ({now.low:.2f}-{now.high:.2f}), "
                f"{then.speedup:.2f}x when it was tuned"
            )
        elif chosen != default and now.high < 1:
            reason = f"slower than torch's default now: {now.mean:.2f}x"
        check = _numerics(worker, record, chosen)
        if not reason and check is not None and check.measurement.outcome == "wrong":
            reason = f"it no longer trains like fp32: {check.measurement.reason}"
        if reason != record.stale:
            revised = dataclasses.replace(record, stale=reason, revised=time.time())
            records.put(revised, revises=record)
            record = revised
        return Verified(record=record, now=now, reason=reason, differs=_differs(record))


def _must_have(rates: list[float] | None, what: str) -> None:
    if not rates:
        raise WorkerError(f"{what} does not run here any more; tune again with --force")


def _differs(record: Record) -> tuple[str, ...]:
    from advisor.tuners.environment import detect

    here = dataclasses.replace(record.key, environment=detect(_device(record)))
    return tuple(map(str, compare(here, record.key)[1]))


def _records(cache: Cache) -> Records:
    set_up_logging()
    records = open_records(cache, fallback=True)
    records.first_writable()
    return records


def _device(record: Record) -> str:
    from advisor.tuners.environment import default_device

    return "cpu" if record.key.environment.device.kind == "cpu" else default_device()


@contextlib.contextmanager
def _measuring(records: Records, record: Record, target: str | None) -> Iterator[Worker]:
    """A worker that runs the record's own workload, while nobody else measures this key."""
    from advisor.tuners.environment import detect
    from advisor.tuners.measure.worker.parent import Worker
    from advisor.tuners.measure.worker.wire import Job
    from advisor.tuners.target import parse

    key, where = record.key, _device(record)
    here = detect(where).device
    if here != key.environment.device:
        raise UsageError(
            f"record {record.id} is of {key.environment.device.name}; this is {here.name}: "
            "measure it there"
        )
    name = target or record.target.name
    file = name.partition(":")[0]
    if target is None and file.endswith(".py") and not Path(file).is_file():
        raise UsageError(
            f"record {record.id} is of {name}, which is not in this folder; give --target PATH"
        )
    parse(name)
    made = record.provenance
    job = Job(
        target=name,
        arguments=dict(record.target.arguments),
        shape=key.sample.shape,
        dtype=key.sample.dtype,
        vocab=made.vocab,
        batch=record.batch,
        mode=key.mode,
        optimizer=key.optimizer or "sgd",
        deterministic=key.permits.deterministic,
        device=where,
        max_memory=0,
        seed=made.seed,
        mix=tuple(tuple(map(int, shape.split("x"))) for shape in key.mix),
    )
    with (
        locked(records.studies, made.study or record.id),
        Worker(job, deadline_s=DEADLINE_S) as worker,
    ):
        if worker.describe().model != key.model:
            raise UsageError(
                f"{name} has changed since record {record.id} was tuned; run: {tune_line(record)}"
            )
        yield worker
