"""explain() and verify(): measure a record's advice again, knob by knob or as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from advisor.arguments import Model, OnEvent, split, urls_of
from advisor.cache.config import Config
from advisor.cache.kinds import Seconds
from advisor.cache.match import compare
from advisor.cache.record import FLAGS, PILOT, RACED, Choice, Part, Record, Trial
from advisor.cache.records import Records
from advisor.cache.settings import Cache
from advisor.cache.shown import speedup, tells, times
from advisor.cache.task import Task, checked, permissions, permitted
from advisor.command_snippets import about, is_copy, reach
from advisor.errors import UsageError, WorkerError
from advisor.events import progress_of
from advisor.open_store import open_records
from advisor.persistence import lock_names, measuring
from advisor.resolve.lookups import set_up_logging
from advisor.store import Store
from advisor.tuners import environment
from advisor.tuners.decisions import CLEARLY, PAIRS
from advisor.tuners.knobs import WORKERS, SearchContext, described, needs_comparison
from advisor.tuners.measure.runner import ConfigFailed, Runner
from advisor.tuners.measure.worker.parent import Worker
from advisor.tuners.measure.worker.wire import SampleCosts
from advisor.tuners.search.plan import EXPLAIN, VERIFY, Clock
from advisor.tuners.search.race import Rates, choice_of, race
from advisor.tuners.search.ratio import Ratio, paired
from advisor.tuners.search.space import Space
from advisor.tuners.search.tuner import measurement_of
from advisor.tuners.search.visit import Visitor
from advisor.tuners.target import parse
from advisor.workload import RunWorkload, TargetWorkload, Workload

HOLDS, FAILS, INCONCLUSIVE = "holds", "does not hold", "could not tell"
"""Verdicts of `verify`."""

CONTRIBUTES = 1.01  # a knob that gains less contributes nothing, as one whose interval holds 1
KEPT_SPEEDUP = 0.9  # share of the record's speed-up that must be left for it to hold
KEPT_RATE = 0.7  # the same of its samples/s, which differ on one host from day to day
WIDE = 0.25  # share by which an interval may reach to a side and still tell
MAX_SHOWN = 1000  # ends of an interval that are further apart are not shown
COSTS, COSTS_S = 0.1, 5.0  # share of explain's budget, and seconds at most, for a sample's costs
SIMPLER, SIMPLER_S = 0.3, 4.0  # the same for three turns of the advice without idle knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What each knob of the advice contributes.

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
    with _opened("explain", key, what, map, budget, store, on_event) as again:
        loaded = bool(again.task.data)
        costs = again.costs() if loaded else None
        parts = again.parts(loaded=loaded)
        idle = [next(iter(one.knob)) for one in parts if one.stage == "compute" and is_idle(one)]
        explained = dataclasses.replace(again.record, parts=tuple(parts))
        simpler, dropped = again.simplified(explained, idle)
        return Explained(record=again.revise(simpler), dropped=dropped, costs=costs)


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
    with _opened("verify", key, what, map, budget, store, on_event) as again:
        record = again.record
        base, advised = record.baseline.config, record.winner(record.use).config
        uses = (FLAGS, PILOT) if record.key.task.command else RACED
        winners = {use: record.winner(use).config for use in uses}
        numerics, wrong = again.compared(advised)
        configs = list(dict.fromkeys([base, *winners.values()]))
        rates = again.race(configs, configs)
        now = {use: paired(rates[one], rates[base]) for use, one in winners.items() if one != base}
        verdict, reason = judged(record, now, rates[advised], rates[base], wrong)
        if verdict == INCONCLUSIVE:
            reason += f"; measure on a quieter machine, or with more than {again.clock.budget_s:g}s"
        elif reason != record.stale:
            record = again.revise(dataclasses.replace(record, stale=reason))
        here = dataclasses.replace(record.key, environment=environment.detect(_device(record)))
        middle = statistics.median_high
        return Verified(
            record=record,
            verdict=verdict,
            reason=reason,
            now=now,
            samples_per_s=(middle(rates[base]), middle(rates[advised])),
            numerics=numerics,
            differs=tuple(str(one) for one in compare(here, record.key)[1]),
        )


def judged(
    record: Record,
    now: Mapping[str, Ratio],
    rates: Sequence[float],
    base: Sequence[float],
    wrong: str = "",
) -> tuple[str, str]:
    """(Verdict, reason) of a record, by the speed-ups that its winners have now.

    Args:
        rates, base: samples/s of each turn of the winner for `Record.use`, and of the baseline.
        wrong: what the comparison with strict fp32 found.
    """
    then, middle = record.winner(record.use), statistics.median_high(rates)
    kept = KEPT_RATE * then.samples_per_s
    slower = f"{middle:,.0f} samples/s now, {then.samples_per_s:,.0f} when it was tuned"
    host = record.baseline.samples_per_s / statistics.median_high(base)
    # The baseline is slower by about the same factor.
    busy = record.use in now and middle < kept and host >= kept / middle
    judged_uses = [_judged_use(record, use, ratio) for use, ratio in now.items()]
    faults = [fault for fault, _doubt in judged_uses]
    faults += ["" if busy or max(rates) >= kept else slower, wrong]
    beside = f"the host is {host:.2g}x slower than then, with {record.key.task.baseline} too"
    doubts = [f"{slower}: {beside}" if busy else "", *(doubt for _fault, doubt in judged_uses)]
    doubts += ["" if middle >= kept else slower]
    if fault := next(filter(None, faults), ""):
        return FAILS, fault
    if doubt := next(filter(None, doubts), ""):
        return INCONCLUSIVE, doubt
    return HOLDS, ""


def _judged_use(record: Record, use: str, now: Ratio) -> tuple[str, str]:
    """(Why the winner for a use does not hold, why that cannot be told); at most one of them."""
    then, baseline = record.winner(use), record.key.task.baseline
    gained = f"{speedup(now.mean, now.low, now.high)} {baseline}"
    if not tells(now.low, now.high):
        gained = f"about {times(now.mean)} {baseline}"
    which = "" if use == record.use else f"{use}: "
    compared = f"{which}{gained} now, {times(then.speedup)} when it was tuned"
    # No more than was known of it.
    least = min(KEPT_SPEEDUP * then.speedup, then.speedup_low)
    if now.high < CONTRIBUTES:
        return f"{compared}: it is not faster any more", ""
    if now.mean < least and now.high < then.speedup:
        return compared, ""
    if now.low > 1 and (now.low >= least or (now.mean >= least and now.within(WIDE))):
        return "", ""
    apart = now.high / now.low if now.low else math.inf
    wide = f"{apart:.3g}x" if apart < MAX_SHOWN else f"more than {MAX_SHOWN}x"
    return "", f"{compared}: the 95% interval, {wide} from end to end, is too wide to say"


def is_idle(part: Part) -> bool:
    """Whether a knob contributes nothing, as far as that could be told."""
    return tells(part.low, part.high) and (part.low <= 1 or part.ratio < CONTRIBUTES)


class Remeasurement:
    """A record that is measured again.

    Args:
        task: its task, with the data that the user named.
        clock: of the budget.
    """

    def __init__(
        self, record: Record, task: Task, records: Records, runner: Runner, clock: Clock
    ) -> None:
        self.record, self.task, self.clock = record, task, clock
        self._records, self._runner = records, runner
        self._base, self._advised = record.baseline.config, record.winner(record.use).config
        self._visitor = Visitor(runner, self._base, clock, lambda _config, _doing: None)
        self._rates: Rates = {}

    def revise(self, record: Record) -> Record:
        """Keep a changed version of the record."""
        revised = dataclasses.replace(record, revised=time.time())
        self._records.put(revised, revises=self.record)
        return revised

    def race(self, configs: Sequence[Config], needed: Sequence[Config]) -> Rates:
        """Samples/s of each round of configs measured in turn, the first of them as reference.

        Raises:
            WorkerError: one that is needed does not run any more, or there was no time for it.
        """
        rates, reasons = race(self._visitor, configs)
        for config in needed:
            if not rates.get(config):
                raise self._lost(config, reasons.get(config))
        return rates

    def _lost(self, config: Config, why: ConfigFailed | None) -> WorkerError:
        named = described(config, self._base, nothing=self.record.key.task.baseline)
        if why is None or why.outcome == "timed_out":
            return WorkerError(f"no time was left to measure {named}; give a larger --budget")
        return WorkerError(f"{named} does not run here any more: {why}; tune again with --force")

    def costs(self) -> SampleCosts:
        """What a sample of the data costs a worker of its loader."""
        assert isinstance(self._runner, Worker)  # a run has no data of its own
        return self._runner.costs(min(COSTS_S, COSTS * self.clock.budget_s))

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
            found += parts_of(self._rates, chosen, without, "compute")
        if loaded and (fed := self._without_input()):
            whole = Config(chosen | self.record.input)
            found += parts_of(self.race([whole, *fed.values()], [whole]), whole, fed, "input")
        return sorted(found, key=lambda part: -part.ratio)

    def _without_input(self) -> dict[str, Config]:
        """The advice without each knob of its loader; without workers there are no others."""
        fed, device = self.record.input, self.record.key.environment.device.kind
        context = SearchContext(device=device, loaded=True, workers=2, any_order=True)
        own = Space.of(context).default_input
        return {
            name: Config(self._advised | ({} if name == WORKERS else fed) | {name: own[name]})
            for name in fed
            if name in own
        }

    def simplified(self, record: Record, idle: Sequence[str]) -> tuple[Record, tuple[str, ...]]:
        """The record with these knobs at their default, all or else the one that matters least,
        and which; the record as it was where that is slower, or not sound."""
        self.clock.release()
        for names in dict.fromkeys([tuple(idle), tuple(idle[-1:])]) if idle else ():
            simple = self._advised.replace(**{name: self._base[name] for name in names})
            choice = self._no_slower(simple)
            if choice is None:
                continue
            check = None if self._exempt(simple) else self._compare(simple)
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
        record, base, chosen, rates = self.record, self._base, self._advised, self._rates
        if simple not in rates:
            try:
                rates = self.race([base, chosen, simple], [base, chosen, simple])
            except WorkerError:
                return None
        own = rates.get(base, [])
        if len(own) < PAIRS or not paired(rates[simple], rates[chosen]).level:
            return None
        if simple == base:
            return record.baseline
        peaks = {trial.config: trial.measurement.peak_bytes for trial in record.trials}
        # The record keeps one race: beside the turns of the default that it has.
        held = list(record.baseline.rounds)
        turns = [one / now * then for one, now, then in zip(rates[simple], own, held, strict=False)]
        choice = choice_of(simple, turns, held, peaks)
        if choice.speedup < CLEARLY or choice.speedup_low <= 1:
            return None
        # Fewer knobs take no longer before the first step.
        first_step_s = record.winner(record.use).first_step_s
        return dataclasses.replace(choice, first_step_s=first_step_s)

    def compared(self, config: Config) -> tuple[str, str]:
        """(Whether a config was compared with strict fp32 now, why it no longer holds, or '').

        Raises:
            WorkerError: it does not run any more.
        """
        if why := self._exempt(config):
            return f"not compared with fp32: {why}", ""
        for one in (self._base, config):  # what is compared is the code that was timed
            try:
                self._visitor.block(one)
            except ConfigFailed as exc:
                raise self._lost(one, exc) from exc
        said = self._compare(config).measurement
        wrong = said.outcome == "wrong"
        how = "compared" if said.ok or wrong else "not compared"
        fault = f"it no longer trains like fp32: {said.reason}" if wrong else ""
        return f"{how} with fp32: {said.reason}", fault

    def _exempt(self, config: Config) -> str:
        """Why a config is not compared with strict fp32, or ''."""
        task = self.record.key.task
        if not needs_comparison(config, self._base):
            return "the advice changes no numbers"
        if task.mode != "train":
            return "inference"
        return "" if task.tolerance else "it was tuned with --no-verify"

    def _compare(self, config: Config) -> Trial:
        began = self.clock.now()
        compared = self._visitor.compare(config)
        return Trial(
            number=len(self.record.trials),
            config=config,
            measurement=measurement_of(compared),
            stage="numerics",
            origin="fp32",
            seconds=self.clock.now() - began,
        )


def parts_of(
    rates: Rates, whole: Config, without: Mapping[str, Config], stage: str
) -> Iterator[Part]:
    """What each knob contributes; none of one that fails without it, or was not measured twice."""
    for name, config in without.items():
        ratio = paired(rates[whole], rates.get(config, []))
        if math.isfinite(ratio.high):
            knob = Config({name: whole[name]})
            yield Part(knob=knob, ratio=ratio.mean, low=ratio.low, high=ratio.high, stage=stage)


@contextlib.contextmanager
def _opened(
    verb: str,
    key: str,
    what: str | Model | Sequence[str] | None,
    map: Mapping[str, str] | None,
    budget: float | str,
    store: Store | Cache,
    on_event: OnEvent | None,
) -> Iterator[Remeasurement]:
    """A record at its first steps, while nobody else measures it. Raises as `explain`."""
    set_up_logging()
    budget_s = Seconds().checked("budget", budget)
    (model, command), cache = split(what), urls_of(store)
    records = open_records(cache, fallback=True)
    records.first_writable()
    held = records.one(key)
    record = held.record
    _refuse(record, about(verb, record, cache), model, command)
    data = checked(Task, {"data": model.data, "data_args": model.data_args})
    # No data that only the record names.
    task = dataclasses.replace(record.key.task, **{"data": "", "data_args": Config(), **data})
    workload: Workload
    if command:
        options = permissions({"map": map}).get("map", {})
        workload = RunWorkload(command, permitted(record.key.task), options=options)
    else:
        name = _target(record, model.target, trusted=held.trusted)
        workload = TargetWorkload(dataclasses.replace(task, target=name, device=_device(record)))
    running = workload.reopen(record, records, progress_of(on_event))
    reserve_s = min(SIMPLER_S, SIMPLER * budget_s) if verb == "explain" else 0.0
    with measuring(records, workload.words, lock_names(workload.device)), running as runner:
        clock = Clock(budget_s, reserve_s=reserve_s)
        yield Remeasurement(record, task, records, runner, clock)


def _device(record: Record) -> str:
    return "cpu" if record.key.environment.device.kind == "cpu" else environment.default_device()


def _target(record: Record, named: object, *, trusted: bool) -> str:
    """The target that is run: the one that the user names, else the record's own file.

    Args:
        trusted: the user or their team signed the record. Only then a file with the same name and
            code may stand for one in another folder, as that of a server's worker.

    Raises:
        UsageError: a record alone never has anything imported or built.
    """
    if isinstance(named, str):
        return named
    here, tuned, arguments = reach(record), record.target, record.key.task.model_args
    spec = None
    with contextlib.suppress(UsageError):
        spec = parse(here)
    mine = spec is not None and (
        spec.kind == "torchvision"
        or (spec.kind == "file" and spec.origin == tuned.origin)
        or (spec.kind == "file" and trusted and is_copy(spec, tuned))
    )
    if mine and not arguments:
        return here
    why = "its file is not under this folder"
    if mine:
        why = f"it is built with {', '.join(arguments)}"
    elif spec is not None and spec.kind == "module":
        why = "a record alone has nothing imported"
    raise UsageError(f"record {record.id} is of {tuned.name}, and {why}: name it with --target")


def _refuse(record: Record, line: str, model: Model, command: Sequence[str]) -> None:
    """Raise UsageError if the record is of another device, or of a run without its command, or of a
    target with one; `line`: the command line to type instead."""
    device, now = record.key.environment.device, environment.detect(_device(record)).device
    why = ""
    if now != device:
        why = f"is of {device.name}; this is {now.name}: measure it there"
    elif record.key.task.command and (model.target is not None or not command):
        why = f"is of a run: give its command, as in: {line}"
    elif command and not record.key.task.command:
        why = f"is of {record.target.name}: no command is run for it; run: {line}"
    if why:
        raise UsageError(f"record {record.id} {why}")
