"""explain() and verify(): a record's advice measured again, knob by knob or whole."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from advisor.arguments import Model, OnEvent, split, urls_of
from advisor.cache.config import Config, Value
from advisor.cache.kinds import Seconds
from advisor.cache.match import Difference, compare
from advisor.cache.record import (
    FLAGS,
    PILOT,
    RACED,
    Choice,
    Part,
    Record,
    Trial,
)
from advisor.cache.records import Records
from advisor.cache.settings import Cache
from advisor.cache.shown import speedup, tells, times
from advisor.cache.task import Task, checked, permissions, permitted
from advisor.errors import TargetError, UsageError, WorkerError
from advisor.events import progress_of
from advisor.finding.lookups import set_up_logging
from advisor.keeping import lock_names, measuring
from advisor.opening import open_records
from advisor.printed import about, is_copy, reach, tune_again
from advisor.tuners.search.plan import EXPLAIN, VERIFY, Progress
from advisor.tuning import begun, key_of, memory_of

if TYPE_CHECKING:
    from advisor.store import Store
    from advisor.tuners.act.pilot.script_facts import ScriptFacts
    from advisor.tuners.measure.runner import ConfigFailed, Runner
    from advisor.tuners.measure.worker.wire import SampleCosts
    from advisor.tuners.search.plan import Clock
    from advisor.tuners.search.race import Rates
    from advisor.tuners.search.ratio import Ratio

HOLDS, FAILS, UNTOLD = "holds", "does not hold", "could not tell"
"""What `verify` may find."""

LEAST = 1.01
"""A knob that gains less contributes nothing, as does one whose interval holds 1."""
KEPT = 0.9
"""Of the record's speed-up: what must be left for it to hold."""
KEPT_ABSOLUTE = 0.7
"""Of the record's samples/s: the rest is what one host differs by from day to day."""
WIDE = 0.25
"""Of a speed-up: an interval that goes further to a side cannot tell whether it holds."""
MOST_APART = 1000
"""Ends of an interval: further apart they are not told."""
COSTS, COSTS_S = 0.1, 5.0
"""Of explain's budget, at most so many seconds: what a sample costs."""
SIMPLER, SIMPLER_S = 0.3, 4.0
"""The same for the advice without what contributes nothing: three turns of three configs, 0.3 s
each, and what switching takes."""
DEADLINE_S = 300.0
"""For one measurement: compiling included, without max-autotune."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What each knob of the advice contributes, and what a sample costs.

    Attributes:
        record: with its parts.
        dropped: knobs that contributed nothing and are as in the baseline again in the advice.
        costs: what a sample of the data costs a loader's worker; None where no data was given.
    """

    record: Record
    dropped: tuple[str, ...]
    costs: SampleCosts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was measured again.

    Attributes:
        record: as it is kept now: marked stale where it does not hold.
        verdict: 'holds', 'does not hold', or 'could not tell', where the machine is too busy or
            the budget too small to say; a mark that the record has stays as it is then.
        reason: why it does not hold, or cannot be told and what to do; '' where it holds.
        now: each use's winner over the baseline, with its 95% interval; empty where all are the
            baseline.
        samples_per_s: of the baseline and of the winner for `Record.use`, now.
        numerics: whether that winner was compared with strict fp32 this time, and how that ended,
            or why it was not.
        differs: what has changed on this machine since, as text.
    """

    record: Record
    verdict: str
    reason: str
    now: Mapping[str, Ratio]
    samples_per_s: tuple[float, float]
    numerics: str
    differs: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether it surely does."""
        return self.verdict == HOLDS


def explain(
    key: str,
    what: str | Model | Sequence[str] | None = None,
    *,
    map: Mapping[str, str] | None = None,
    budget: float | str = EXPLAIN,
    store: Store | Cache = None,
    on_event: OnEvent | None = None,
) -> Explained:
    """Measure what each knob of a record's advice contributes, and keep it in the record.

    Each knob of the winner for `Record.use` that differs from the baseline is set back alone and
    measured in turn with the advice. Those that contribute nothing are then set back together, or
    else one by one, where that is no slower.

    Args:
        key: of the record, 'ae1bff61eea5@64', or the start of it.
        what: of the record of a run, its command, as `advisor.tune` took it: nothing that a record
            names is started. Of a target, where that is now; default: its file, if it is under this
            folder. With the `data` of an `advisor.Model` also what a sample costs.
        map: options of the command, as `Permit.map`.
        budget: wall seconds, or '40s', of all measuring; the first start is not counted.
        store: an `advisor.Store`, a store's URL, or several.
        on_event: called with each 'notice' and 'warning', as by `advisor.tune`.

    Raises:
        UsageError: no record has this key, it is not of this device, or its target or its command
            must be given.
        WorkerError: it cannot be measured. Busy: it is being measured. StoreError.
    """
    budget_s = Seconds().checked("budget", budget)
    subject = _subject("explain", key, what, map, store, on_event)
    record, task = subject.record, subject.task
    with subject.measured(budget_s, kept_s=min(SIMPLER_S, SIMPLER * budget_s)) as again:
        costs = again.costs(min(COSTS_S, COSTS * budget_s)) if task.data else None
        parts = again.parts(loaded=bool(task.data))
        idle = [next(iter(part.knob)) for part in parts if part.stage == "compute" and _idle(part)]
        explained = dataclasses.replace(record, parts=tuple(parts))
        simpler, dropped = again.simplified(explained, idle)
        revised = dataclasses.replace(simpler, revised=time.time())
        subject.records.put(revised, revises=record)
        return Explained(record=revised, dropped=dropped, costs=costs)


def verify(
    key: str,
    what: str | Model | Sequence[str] | None = None,
    *,
    map: Mapping[str, str] | None = None,
    budget: float | str = VERIFY,
    store: Store | Cache = None,
    on_event: OnEvent | None = None,
) -> Verified:
    """Measure the baseline and the advice again; a record that no longer holds is marked stale.

    It holds where each use's winner is still surely faster than the baseline, its speed-up and its
    samples/s are about what the record says, and it still trains like strict fp32. A mark that is
    there is taken away then. Where the intervals are too wide to say, or the baseline has become
    slower by the same factor, as on a busy host, nothing is changed.

    Args and errors as `explain`; no loader is measured.
    """
    from advisor.tuners.search.ratio import paired

    budget_s = Seconds().checked("budget", budget)
    subject = _subject("verify", key, what, map, store, on_event)
    record = subject.record
    with subject.measured(budget_s) as again:
        base, advised = record.baseline.config, record.winner(record.use).config
        winners = {use: record.winner(use).config for use in _uses(record)}
        numerics, wrong = again.compared(advised)
        configs = list(dict.fromkeys([base, *winners.values()]))
        rates = again.race(configs, configs)
        now = {
            use: paired(rates[config], rates[base])
            for use, config in winners.items()
            if config != base
        }
        verdict, reason = judged(record, now, rates[advised], rates[base], wrong)
        if verdict == UNTOLD:
            reason += f"; measure on a quieter machine, or with more than {budget_s:g}s"
        if verdict != UNTOLD and reason != record.stale:
            revised = dataclasses.replace(record, stale=reason, revised=time.time())
            subject.records.put(revised, revises=record)
            record = revised
        return Verified(
            record=record,
            verdict=verdict,
            reason=reason,
            now=now,
            samples_per_s=(
                statistics.median_high(rates[base]),
                statistics.median_high(rates[advised]),
            ),
            numerics=numerics,
            differs=_differs(record),
        )


def _uses(record: Record) -> Sequence[str]:
    """Those whose winners are measured again."""
    return (FLAGS, PILOT) if record.key.task.command else RACED


def judged(
    record: Record,
    now: Mapping[str, Ratio],
    rates: Sequence[float],
    base: Sequence[float],
    wrong: str = "",
) -> tuple[str, str]:
    """(Verdict, reason) of a record's winners, by the speed-ups that they have now.

    `rates`, `base`: samples/s of each turn of the winner for `Record.use`, of the baseline;
    `wrong`: what the comparison with strict fp32 found.
    """
    then, middle = record.winner(record.use), statistics.median_high(rates)
    faults = [_fault(record, use, ratio) for use, ratio in now.items()]
    busy = _busy(record, rates, base) if record.use in now else ""
    faults += [wrong] if busy else [_slower(then, max(rates), middle), wrong]
    doubts = [busy, *(_doubt(record, use, ratio) for use, ratio in now.items())]
    doubts += [_slower(then, middle, middle)]
    if fault := next(filter(None, faults), ""):
        return FAILS, fault
    if doubt := next(filter(None, doubts), ""):
        return UNTOLD, doubt
    return HOLDS, ""


def _fault(record: Record, use: str, now: Ratio) -> str:
    """Why a winner surely does not hold, or ''."""
    if now.high < LEAST:
        return f"{_compared(record, use, now)}: it is not faster any more"
    then = record.winner(use)
    if now.mean < _least(then) and now.high < then.speedup:
        return _compared(record, use, now)
    return ""


def _least(then: Choice) -> float:
    """What must be left of a speed-up for it to hold; no more than was known of it."""
    return min(KEPT * then.speedup, then.speedup_low)


def _doubt(record: Record, use: str, now: Ratio) -> str:
    """Why it cannot be told whether a winner holds, or ''."""
    least = _least(record.winner(use))
    if now.low > 1 and (now.low >= least or (now.mean >= least and now.within(WIDE))):
        return ""
    apart = now.high / now.low if now.low else math.inf
    wide = f"{apart:.3g}x" if apart < MOST_APART else f"more than {MOST_APART}x"
    return (
        f"{_compared(record, use, now)}: the 95% interval, {wide} from end to end, is too wide to "
        "say"
    )


def _compared(record: Record, use: str, now: Ratio) -> str:
    what, baseline = "" if use == record.use else f"{use}: ", record.key.task.baseline
    gained = f"{speedup(now.mean, now.low, now.high)} {baseline}"
    if not tells(now.low, now.high):
        gained = f"about {times(now.mean)} {baseline}"
    return f"{what}{gained} now, {times(record.winner(use).speedup)} when it was tuned"


def _slower(then: Choice, rate: float, middle: float) -> str:
    """What is to be said where this rate is much less than the record's, else ''."""
    if rate >= KEPT_ABSOLUTE * then.samples_per_s:
        return ""
    return f"{middle:,.0f} samples/s now, {then.samples_per_s:,.0f} when it was tuned"


def _busy(record: Record, rates: Sequence[float], base: Sequence[float]) -> str:
    """What is to be said where the winner is much slower than its record, and the baseline by
    about the same factor: it is the host that is slower; else ''."""
    then, default = record.winner(record.use), record.baseline
    middle, beside = statistics.median_high(rates), statistics.median_high(base)
    ours, theirs = then.samples_per_s / middle, default.samples_per_s / beside
    if ours * KEPT_ABSOLUTE < 1 or theirs < KEPT_ABSOLUTE * ours:
        return ""
    return (
        f"{_slower(then, middle, middle)}: the host is {theirs:.2g}x slower than then, with "
        f"{record.key.task.baseline} too"
    )


def _idle(part: Part) -> bool:
    """Whether a knob contributes nothing, as far as that could be told."""
    return tells(part.low, part.high) and (part.low <= 1 or part.ratio < LEAST)


class _Again:
    """A record measured again at a place, within a budget.

    Args:
        clock: of that budget.
    """

    def __init__(self, record: Record, place: Runner, clock: Clock) -> None:
        from advisor.tuners.search.visit import Visitor

        self._record, self._place, self._clock = record, place, clock
        self._base, self._advised = record.baseline.config, record.winner(record.use).config
        self._visitor = Visitor(place, self._base, clock, lambda _config, _doing: None)
        self._rates: Rates = {}

    def race(self, configs: Sequence[Config], needed: Sequence[Config]) -> Rates:
        """Samples/s of each round of configs measured in turn, the first of them as reference.

        Raises:
            WorkerError: one that is needed does not run any more, or there was no time for it.
        """
        from advisor.tuners.search.race import race

        rates, reasons = race(self._visitor, configs)
        for config in needed:
            if not rates.get(config):
                raise self._lost(config, reasons.get(config))
        return rates

    def _lost(self, config: Config, why: ConfigFailed | None) -> WorkerError:
        from advisor.tuners.knobs import described

        named = described(config, self._base, nothing=self._record.key.task.baseline)
        if why is None or why.outcome == "timed_out":
            return WorkerError(f"no time was left to measure {named}; give a larger --budget")
        return WorkerError(f"{named} does not run here any more: {why}; tune again with --force")

    def costs(self, seconds: float) -> SampleCosts:
        """What a sample of the data costs a worker of its loader."""
        from advisor.tuners.measure.worker.parent import Worker

        assert isinstance(self._place, Worker)  # a run has no data of its own
        return self._place.costs(seconds)

    def parts(self, *, loaded: bool = False) -> list[Part]:
        """What each knob of the advice contributes, the most first; those of the loader where its
        data is `loaded`."""
        chosen, default = self._advised, self._base
        without = {
            name: chosen.replace(**{name: default[name]}) for name in chosen.changed(default)
        }
        found: list[Part] = []
        if without:
            self._rates = self.race([chosen, default, *without.values()], [chosen])
            found += _parts(self._rates, chosen, without, "compute")
        if loaded and (fed := self._without_input()):
            whole = Config(chosen | self._record.input)
            found += _parts(self.race([whole, *fed.values()], [whole]), whole, fed, "input")
        return sorted(found, key=lambda part: -part.ratio)

    def _without_input(self) -> dict[str, Config]:
        """The advice without each knob of its loader; without workers there are no others."""
        from advisor.tuners.knobs import WORKERS, SearchContext
        from advisor.tuners.search.space import Space

        record = self._record
        device = record.key.environment.device.kind
        own = Space.of(
            SearchContext(device=device, loaded=True, workers=2, any_order=True)
        ).default_input
        return {
            name: Config(
                self._advised
                | ({name: own[name]} if name == WORKERS else {**record.input, name: own[name]})
            )
            for name in record.input
            if name in own
        }

    def simplified(self, record: Record, idle: Sequence[str]) -> tuple[Record, tuple[str, ...]]:
        """The record with these knobs at their default, all or else the one that matters least,
        and which; the record as it was where that is slower, or not sound."""
        self._clock.release()
        for names in dict.fromkeys([tuple(idle), tuple(idle[-1:])]) if idle else ():
            simple = self._advised.replace(**{name: self._base[name] for name in names})
            choice = self._no_slower(simple)
            if choice is None:
                continue
            check = self.numerics(simple)
            if check is not None and check.measurement.outcome == "wrong":
                continue
            winners = tuple(
                dataclasses.replace(one, choice=choice)
                if one.choice.config == self._advised
                else one
                for one in record.winners
            )
            trials = record.trials if check is None else (*record.trials, check)
            return dataclasses.replace(record, winners=winners, trials=trials), names
        return record, ()

    def _no_slower(self, simple: Config) -> Choice | None:
        """The choice of a simpler config that is as fast as the advice; None if it is slower."""
        from advisor.tuners.decisions import CLEARLY, PAIRS
        from advisor.tuners.search.race import choice_of
        from advisor.tuners.search.ratio import paired

        record, base, chosen = self._record, self._base, self._advised
        rates = self._rates
        if simple not in rates:
            try:
                rates = self.race([base, chosen, simple], [base, chosen, simple])
            except WorkerError:
                return None
        if base not in rates or len(rates[base]) < PAIRS:
            return None
        peaks = {trial.config: trial.measurement.peak_bytes for trial in record.trials}
        ours, own = rates[simple], rates[base]
        if not paired(ours, rates[chosen]).level:
            return None
        if simple == base:
            return record.baseline
        # The record keeps one race: beside the turns of the default that it has.
        held = list(record.baseline.rounds)
        then = [one / now * old for one, now, old in zip(ours, own, held, strict=False)]
        choice = choice_of(simple, then, held, peaks)
        if choice.speedup < CLEARLY or choice.speedup_low <= 1:
            return None
        # Fewer knobs take no longer before the first step.
        first_step_s = record.winner(record.use).first_step_s
        return dataclasses.replace(choice, first_step_s=first_step_s)

    def compared(self, config: Config) -> tuple[str, str]:
        """(Whether a config was held against strict fp32 now, why it no longer holds, or '').

        Raises:
            WorkerError: it does not run any more.
        """
        from advisor.tuners.measure.runner import ConfigFailed

        if why := self._exempt(config):
            return f"not compared with fp32: {why}", ""
        for one in (self._base, config):  # what is compared is the code that was timed
            try:
                self._visitor.block(one)
            except ConfigFailed as exc:
                raise self._lost(one, exc) from exc
        check = self.numerics(config)
        assert check is not None
        said = check.measurement
        if said.outcome == "wrong":
            wrong = f"it no longer trains like fp32: {said.reason}"
            return f"compared with fp32: {said.reason}", wrong
        how = "compared" if said.ok else "not compared"
        return f"{how} with fp32: {said.reason}", ""

    def _exempt(self, config: Config) -> str:
        """Why a config is not held against strict fp32, or ''."""
        from advisor.tuners.knobs import needs_comparison

        task = self._record.key.task
        if not needs_comparison(config, self._base):
            return "the advice changes no numbers"
        if task.mode != "train":
            return "inference"
        return "" if task.tolerance else "it was tuned with --no-verify"

    def numerics(self, config: Config) -> Trial | None:
        """Held against strict fp32, where a change of numbers asks for it and the task permits."""
        from advisor.tuners.search.tuner import measurement_of

        if self._exempt(config):
            return None
        began = self._clock.now()
        compared = self._visitor.compare(config)
        return Trial(
            number=len(self._record.trials),
            config=config,
            measurement=measurement_of(compared),
            stage="numerics",
            origin="fp32",
            seconds=self._clock.now() - began,
        )


def _parts(
    rates: Rates, whole: Config, without: Mapping[str, Config], stage: str
) -> Iterator[Part]:
    """What each knob contributes; none of one that fails without it, or was not measured twice."""
    from advisor.tuners.search.ratio import paired

    for name, config in without.items():
        ratio = paired(rates[whole], rates.get(config, []))
        if math.isfinite(ratio.high):
            yield Part(
                knob=Config({name: whole[name]}),
                ratio=ratio.mean,
                low=ratio.low,
                high=ratio.high,
                stage=stage,
            )


def _loaded(record: Record, model: Model) -> Task:
    """The record's task with the data that is named, and none that only the record names.

    Raises:
        UsageError: there is no such data.
    """
    from advisor.tuners.target import parse

    given = checked(Task, {"data": model.data, "data_args": model.data_args})
    if model.data:
        parse(model.data, role="data")
    return dataclasses.replace(record.key.task, **{"data": "", "data_args": Config(), **given})


def _differs(record: Record) -> tuple[str, ...]:
    from advisor.tuners.environment import detect

    here = dataclasses.replace(record.key, environment=detect(_device(record)))
    return tuple(map(str, compare(here, record.key)[1]))


def _device(record: Record) -> str:
    from advisor.tuners.environment import default_device

    return "cpu" if record.key.environment.device.kind == "cpu" else default_device()


def _target(record: Record, named: str | None, *, trusted: bool) -> str:
    """What is run: what the user names, else what the record is of where that is plainly meant.

    Args:
        trusted: the user or their team signed the record. Only then a file with the same name and
            code stands for one of another folder, as a server's worker has it.

    Raises:
        UsageError: a record alone never has anything imported or built.
    """
    from advisor.tuners.target import parse

    task = record.key.task
    if named is not None:
        parse(named)
        return named
    here = reach(record)
    spec = None
    with contextlib.suppress(UsageError):
        spec = parse(here)
    tuned = record.target
    mine = spec is not None and (
        spec.kind == "torchvision"
        or (spec.kind == "file" and spec.origin == tuned.origin)
        or (spec.kind == "file" and trusted and is_copy(spec, tuned))
    )
    if mine and not task.model_args:
        return here
    what = "its file is not under this folder"
    if mine:
        what = f"it is built with {', '.join(task.model_args)}"
    elif spec is not None and spec.kind == "module":
        what = "a record alone has nothing imported"
    raise UsageError(
        f"record {record.id} is of {record.target.name}, and {what}: name it with --target"
    )


def _refuse(record: Record, line: str, target: str | None, command: Sequence[str]) -> None:
    """Of a run its command must be given, of a target none can be. `line`: as it would be typed.

    Raises:
        UsageError: it is not so, or this is another device.
    """
    from advisor.tuners.environment import detect

    now = detect(_device(record)).device
    if now != record.key.environment.device:
        raise UsageError(
            f"record {record.id} is of {record.key.environment.device.name}; this is {now.name}: "
            "measure it there"
        )
    if record.key.task.command and (target is not None or not command):
        raise UsageError(f"record {record.id} is of a run: give its command, as in: {line}")
    if command and not record.key.task.command:
        raise UsageError(
            f"record {record.id} is of {record.target.name}: no command is run for it; run: {line}"
        )


def _refuse_fed_otherwise(record: Record, seen: ScriptFacts, mapped: Sequence[str]) -> None:
    """Refuse a run whose loader, no part of its key, cannot work as the record's did.

    Raises:
        UsageError: it cannot.
    """
    from advisor.tuners.knobs import INPUT_PIPELINE, described

    feeds = record.winner(record.use).config.changed(record.baseline.config).only(*INPUT_PIPELINE)
    if feeds.without(*mapped) and not seen.workers:
        why = "; ".join(seen.lines()) or "its steps are fed by no DataLoader"
        raise UsageError(
            f"record {record.id} is of another run than this: it has {described(feeds, Config())}, "
            f"which this one is not given ({why})"
        )


def _subject(
    verb: str,
    key: str,
    what: str | Model | Sequence[str] | None,
    map: Mapping[str, str] | None,
    store: Store | Cache,
    on_event: OnEvent | None,
) -> _Subject:
    """The record of a key and what is run for it. Raises as `explain`."""
    set_up_logging()
    (model, command), cache = split(what), urls_of(store)
    records = open_records(cache, fallback=True)
    records.first_writable()
    held = records.one(key)
    record, trusted = held.record, held.trusted
    target = cast(str | None, model.target)
    _refuse(record, about(verb, record, cache), target, command)
    return _Subject(
        records=records,
        record=record,
        trusted=trusted,
        target=target,
        command=command,
        options=permissions({"map": map}).get("map"),
        progress=progress_of(on_event),
        task=_loaded(record, model),
    )


@dataclass(frozen=True, slots=True)
class _Subject:
    """A record, and what is run for it: a target with its data in `task`, or a command with its
    `options`. `progress` is told of the latter's side effects."""

    records: Records
    record: Record
    trusted: bool
    target: str | None
    command: Sequence[str]
    options: Mapping[str, Value] | None
    progress: Progress
    task: Task

    @contextlib.contextmanager
    def measured(self, budget_s: float, kept_s: float = 0.0) -> Iterator[_Again]:
        """It runs, while nobody else measures it, or on its device.

        Args:
            kept_s: of the budget, what is kept until `_Again.simplified`.
        """
        from advisor.tuners.search.plan import Clock

        record = self.record
        what = self.command or [_target(record, self.target, trusted=self.trusted)]
        running = self._run() if self.command else self._worker()
        devices = lock_names(None if self.command else _device(record))
        with measuring(self.records, what, devices), running as place:
            yield _Again(record, place, Clock(budget_s, reserve_s=kept_s))

    @contextlib.contextmanager
    def _run(self) -> Iterator[Runner]:
        """The command at its first steps."""
        record = self.record
        with begun(
            self.command,
            self.records,
            self.progress,
            options=self.options,
        ) as run:
            seen = run.describe()
            key = key_of(seen, self.command, permitted(record.key.task))
            kind, differs = compare(key, record.key)
            if key.task.batch != record.batch:
                differs += (Difference(field="batch", wanted=key.task.batch, found=record.batch),)
            if kind == "miss" or key.task.batch != record.batch:
                listed = ", ".join(map(str, differs))
                raise UsageError(f"record {record.id} is of another run than this: {listed}")
            _refuse_fed_otherwise(record, seen, run.command.names)
            run.baseline, run.memory = record.baseline.config, memory_of(key.environment.device)
            run.tolerance = record.key.task.tolerance
            yield run

    @contextlib.contextmanager
    def _worker(self) -> Iterator[Runner]:
        """The record's own workload in a worker."""
        from advisor.tuners.measure.worker.parent import Worker
        from advisor.tuners.measure.worker.wire import CHANGED, WorkerJob

        record, device = self.record, _device(self.record)
        name = _target(record, self.target, trusted=self.trusted)
        task = dataclasses.replace(self.task, target=name, device=device)
        known = record.key.model, record.key.hooks
        job = WorkerJob(task=task, device=device, seed=record.provenance.seed, known=known)
        with Worker(job, deadline_s=DEADLINE_S) as worker:
            try:
                worker.describe()
            except TargetError as exc:
                if CHANGED not in str(exc):
                    raise
                raise UsageError(f"record {record.id}: {exc}; run: {tune_again(record)}") from exc
            worker.baseline = record.baseline.config
            yield worker
