"""explain() and verify(): measure a record's advice again, knob by knob or as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from advisor.arguments import Model, OnEvent, progress_of, split, urls_of
from advisor.cache.config import Config
from advisor.cache.kinds import Duration
from advisor.cache.record import FLAGS, PILOT, USES, Part, Record, Trial
from advisor.cache.records import Records
from advisor.cache.settings import Cache
from advisor.cache.shown import speedup, tells, times
from advisor.cache.task import Task, checked, permissions, permitted
from advisor.command_snippets import about, device_for, is_copy, local_target, staleness
from advisor.errors import UsageError, WorkerError, check_type
from advisor.open_store import open_records
from advisor.persistence import lock_names, measuring
from advisor.resolve.lookups import set_up_logging
from advisor.store import Store
from advisor.tuners import environment
from advisor.tuners.decisions import PAIRS
from advisor.tuners.knobs import BY_NAME, WORKERS, SearchContext, described, needs_comparison
from advisor.tuners.measure.runner import ConfigFailed, Runner
from advisor.tuners.measure.worker.parent import Worker
from advisor.tuners.measure.worker.wire import SampleCosts
from advisor.tuners.search.plan import EXPLAIN, VERIFY, Clock, Plan
from advisor.tuners.search.race import Rates, race
from advisor.tuners.search.ratio import Ratio, paired
from advisor.tuners.search.tuner import measurement_of
from advisor.tuners.search.visit import Visitor
from advisor.tuners.target import parse
from advisor.workload import AnyWorkload, RunWorkload, TargetWorkload

HOLDS, FAILS, INCONCLUSIVE = "holds", "does not hold", "could not tell"  # verdicts of `verify`

CONTRIBUTES = 1.01  # a knob with a smaller ratio, or with 1 in its interval, contributes nothing
KEPT_SPEEDUP = 0.9  # a record holds with at least this share of its speed-up
KEPT_RATE = 0.7  # and of its samples/s, which vary from day to day on one host
WIDE = 0.25  # an interval wider than this share to one side is inconclusive
MAX_SHOWN = 1000  # messages show no larger quotient of an interval's ends
COSTS, COSTS_S = 0.1, 5.0  # time to measure a sample: share of explain's budget, seconds
SIMPLER, SIMPLER_S = 0.3, 4.0  # and to race the advice without its idle knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The result of `explain`. `record.parts`: the contribution of each knob. `dropped`: knobs that
    contributed nothing and have left the advice. `costs`: of a sample, if data was given."""

    record: Record
    dropped: tuple[str, ...]
    costs: SampleCosts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of `verify`.

    Attributes:
        record: the record as stored now, marked stale if it does not hold.
        verdict: 'holds', 'does not hold', or 'could not tell': the machine is too busy, or the
            budget too small; the record is not changed then.
        reason: why the record does not hold, or why advisor could not tell; '' if it holds.
        now: by use, the winner's speed-up with its 95% interval; none if the baseline won.
        samples_per_s: of the baseline and of the winner for `Record.use`, now.
        numerics: how that winner compared with strict fp32 this time, or why it was not compared.
        differs: changes on this machine since the record was measured.
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
    """Measure what each knob of a record's advice contributes, and store the result in the record.

    advisor resets each knob of the winner for `Record.use` alone to the baseline, and measures the
    rest in turn with the advice. Then the knobs that contribute nothing leave the advice (all, or
    else only the least important), if the advice is no slower without them.

    Args:
        key: the record's key, 'ae1bff61eea5@64', or the start of the key.
        what: for the record of a run its command, because a record alone starts nothing. For a
            target its name now; default: its file, if it is under this folder. With the `data` of
            an `advisor.Model`, `explain` also measures what a sample costs.
        map: options of the command, as `Permit.map`.
        budget: wall seconds, or '40s', of all measuring, without the first start.
        store, on_event: as in `advisor.tune`; only 'notice' and 'warning' occur.

    Raises:
        UsageError: no record has this key, the record is of another device, or `what` is needed.
        WorkerError: the advice cannot be measured. Busy: another process measures it. StoreError.
    """
    with _opened("explain", key, what, map, budget, store, on_event) as again:
        seconds = min(COSTS_S, COSTS * again.clock.budget_s)
        costs = cast(Worker, again.runner).costs(seconds) if again.loaded else None
        parts = again.parts()
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

    A record holds if each use's winner is still surely faster than the baseline, has about the
    record's speed-up and samples/s, and still trains like strict fp32. A stale mark is then
    removed. If the intervals are too wide to tell, or the baseline has become slower by the same
    factor, as on a busy host, the record stays unchanged.

    Args and errors as `explain`; no loader is measured.
    """
    with _opened("verify", key, what, map, budget, store, on_event) as again:
        record, base, advised = again.record, again.base, again.advised
        uses = (FLAGS, PILOT) if record.key.task.command else USES
        winners = {use: record.winner(use).config for use in uses}
        how, trial = again.compare(advised)
        outcome = trial.measurement.outcome if trial else ""
        wrong = f"it no longer trains like fp32: {how}" if outcome == "wrong" else ""
        configs = list(dict.fromkeys([base, *winners.values()]))
        rates = again.race(configs, configs)
        now = {use: paired(rates[one], rates[base]) for use, one in winners.items() if one != base}
        verdict, reason = judged(record, now, rates[advised], rates[base], wrong)
        if verdict == INCONCLUSIVE:
            reason += f"; measure on a quieter machine, or with more than {again.clock.budget_s:g}s"
        elif reason != record.stale:
            record = again.revise(dataclasses.replace(record, stale=reason))
        middle = statistics.median_high
        return Verified(
            record=record,
            verdict=verdict,
            reason=reason,
            now=now,
            samples_per_s=(middle(rates[base]), middle(rates[advised])),
            numerics=f"{'' if outcome in ('ok', 'wrong') else 'not '}compared with fp32: {how}",
            differs=tuple(str(one) for one in staleness(record)),
        )


def judged(
    record: Record,
    now: Mapping[str, Ratio],
    rates: Sequence[float],
    base: Sequence[float],
    wrong: str = "",
) -> tuple[str, str]:
    """(Verdict, reason) of a record from the speed-ups `now` of its winners. `rates`, `base`:
    samples/s of each turn of the winner for `Record.use`, and of the baseline. `wrong`: the fault
    that the comparison with strict fp32 found, or ''."""
    then, middle = record.winner(record.use), statistics.median_high(rates)
    kept = KEPT_RATE * then.samples_per_s
    host = record.baseline.samples_per_s / statistics.median_high(base)
    found = [_judged_use(record, use, ratio) for use, ratio in now.items()]
    slower = f"{middle:,.0f} samples/s now, {then.samples_per_s:,.0f} when it was tuned"
    if middle < kept and host >= kept / middle:
        beside = f"the host is {host:.2g}x slower than then, with {record.key.task.baseline} too"
        found.insert(0, (INCONCLUSIVE, f"{slower}: {beside}"))
    elif middle < kept:
        found.append((INCONCLUSIVE if max(rates) >= kept else FAILS, slower))
    found += [(FAILS, wrong)] if wrong else []
    first = (FAILS, INCONCLUSIVE, HOLDS).index  # a fault counts before a doubt
    return min(found, key=lambda one: first(one[0]), default=(HOLDS, ""))


def _judged_use(record: Record, use: str, now: Ratio) -> tuple[str, str]:
    """(Verdict, reason) of the winner for one use."""
    then, baseline = record.winner(use), record.key.task.baseline
    gained = speedup(now.mean, now.low, now.high) if tells(now.low, now.high) else ""
    gained = f"{gained or f'about {times(now.mean)}'} {baseline}"
    which = "" if use == record.use else f"{use}: "
    compared = f"{which}{gained} now, {times(then.speedup)} when it was tuned"
    # Not more than the low end of the record's own interval.
    least = min(KEPT_SPEEDUP * then.speedup, then.speedup_low)
    if now.high < CONTRIBUTES:
        return FAILS, f"{compared}: it is no longer faster"
    if now.mean < least and now.high < then.speedup:
        return FAILS, compared
    if now.low > 1 and (now.low >= least or (now.mean >= least and now.within(WIDE))):
        return HOLDS, ""
    apart = now.high / now.low if now.low else math.inf
    wide = f"{apart:.3g}x" if apart < MAX_SHOWN else f"more than {MAX_SHOWN}x"
    said = f"{compared}: the 95% interval, {wide} from end to end, is too wide to tell"
    return INCONCLUSIVE, said


def is_idle(part: Part) -> bool:
    """Whether a knob contributes nothing; False if its interval is too wide to tell."""
    return tells(part.low, part.high) and (part.low <= 1 or part.ratio < CONTRIBUTES)


class Remeasurement:
    """Measures a record again; `loaded`: its loader too, because its data was named."""

    def __init__(
        self, record: Record, records: Records, runner: Runner, clock: Clock, loaded: bool = False
    ) -> None:
        self.record, self.clock, self.loaded = record, clock, loaded
        self.base, self.advised = record.baseline.config, record.winner(record.use).config
        self._records, self.runner = records, runner
        self._visitor = Visitor(runner, self.base, clock, lambda _config: None)
        self._rates: Rates = {}

    def revise(self, record: Record) -> Record:
        """Store a changed version of the record, and return that version."""
        revised = dataclasses.replace(record, revised=time.time())
        self._records.put(revised, revises=self.record)
        return revised

    def race(self, configs: Sequence[Config], needed: Sequence[Config]) -> Rates:
        """Measure configs in turn, the first as reference. Returns samples/s of each round. Raises
        WorkerError if a config in `needed` no longer runs, or there was no time for it."""
        rates, reasons = race(self._visitor, configs)
        for config in needed:
            if not rates.get(config):
                raise self._lost(config, reasons.get(config))
        return rates

    def _lost(self, config: Config, why: ConfigFailed | None) -> WorkerError:
        named = described(config, self.base, nothing=self.record.key.task.baseline)
        if why is None or why.outcome == "timed_out":
            return WorkerError(f"no time was left to measure {named}; give a larger --budget")
        return WorkerError(f"{named} no longer runs here: {why}; tune again with --force")

    def parts(self) -> list[Part]:
        """The contribution of each knob of the advice and its loader, the largest first."""
        chosen, default = self.advised, self.base
        without = {name: chosen | default.only(name) for name in chosen.changed(default)}
        found: list[Part] = []
        if without:
            self._rates = self.race([chosen, default, *without.values()], [chosen])
            found += parts_of(self._rates, chosen, without, "compute")
        if self.loaded and (fed := self._without_input()):
            whole = chosen | self.record.input
            found += parts_of(self.race([whole, *fed.values()], [whole]), whole, fed, "input")
        return sorted(found, key=lambda part: -part.ratio)

    def _without_input(self) -> dict[str, Config]:
        """By loader knob: the advice without that knob. Without workers, no loader knob is left."""
        fed, device = self.record.input, self.record.key.environment.device.kind
        context = SearchContext(device=device, loaded=True, workers=2, any_order=True)
        return {
            name: self.advised | ({} if name == WORKERS else fed) | {name: values[0]}
            for name in fed
            if (values := BY_NAME[name].values(context))
        }

    def simplified(self, record: Record, idle: Sequence[str]) -> tuple[Record, tuple[str, ...]]:
        """(The record with the knobs `idle` reset to the baseline, or else only the last of them;
        the knobs that were reset). If each simpler config is slower or trains wrong: (record, ()).
        The simpler config takes over the measurements of the advice."""
        self.clock.release()
        for names in dict.fromkeys([tuple(idle), tuple(idle[-1:])]) if idle else ():
            simple = self.advised | self.base.only(*names)
            rates = self._rates
            if simple not in rates:
                rates, _lost = race(self._visitor, [self.base, self.advised, simple])
            turns, advised = (rates.get(one, []) for one in (simple, self.advised))
            if len(turns) < PAIRS or not advised or not paired(turns, advised).level:
                continue
            _how, check = self.compare(simple)
            if check is not None and check.measurement.outcome == "wrong":
                continue
            winners = []
            for one in record.winners:
                choice = dataclasses.replace(one.choice, config=simple, loaded_step_s=0.0)
                choice = record.baseline if simple == self.base else choice
                is_advised = one.choice.config == self.advised
                winners.append(dataclasses.replace(one, choice=choice) if is_advised else one)
            trials = record.trials if check is None else (*record.trials, check)
            return dataclasses.replace(record, winners=tuple(winners), trials=trials), names
        return record, ()

    def compare(self, config: Config) -> tuple[str, Trial | None]:
        """(How a config compares with strict fp32, the trial), or (why it is not compared, None).
        Raises WorkerError if the baseline or the config no longer runs."""
        task = self.record.key.task
        if not needs_comparison(config, self.base):
            return "the advice changes no numbers", None
        if task.mode != "train" or not task.tolerance:
            return "inference" if task.mode != "train" else "it was tuned with --no-verify", None
        for one in (self.base, config):  # so that the compared code is the timed code
            if one not in self._visitor.built:
                try:
                    self._visitor.block(one)
                except ConfigFailed as exc:
                    raise self._lost(one, exc) from exc
        began = self.clock.now()
        compared = self._visitor.compare(config)
        return compared.reason, Trial(
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
    """Generator: yields a Part for each knob, unless the config without it ran less than twice."""
    for name, config in without.items():
        ratio = paired(rates[whole], rates.get(config, []))
        if math.isfinite(ratio.high):
            knob = whole.only(name)
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
    """Context manager: yields the Remeasurement of a started and locked workload. Raises as
    `explain`."""
    set_up_logging()
    check_type("key", key, str, "a record's, as 'ae1bff61eea5@64'")
    options = permissions({"map": map}).get("map", {})
    plan = Plan(budget_s=Duration().checked("budget", budget))
    (model, command), cache = split(what), urls_of(store)
    records, progress = open_records(cache, fallback=True), progress_of(on_event)
    records.first_writable()
    stored = records.one(key)
    record, task = stored.record, stored.record.key.task
    _refuse(record, about(verb, record, cache), model, command)
    workload: AnyWorkload
    if command:
        workload = RunWorkload(command, permitted(task), options=options)
    else:
        # Use no data that only the record names.
        data = checked(Task, {"data": model.data, "data_args": model.data_args})
        own = {"data": "", "data_args": Config(), **data, "device": device_for(record)}
        target = model.target or _own_target(record, trusted=stored.trusted)
        workload = TargetWorkload(dataclasses.replace(task, target=str(target), **own))
    plan = dataclasses.replace(plan, seed=record.provenance.seed)
    with (
        measuring(records, workload.words, lock_names(workload.device)),
        workload.open(records, progress, plan, record) as opened,
    ):
        opened.runner.baseline = record.baseline.config
        reserve_s = min(SIMPLER_S, SIMPLER * plan.seconds) if verb == "explain" else 0.0
        clock = Clock(plan.seconds, reserve_s=reserve_s)
        yield Remeasurement(record, records, opened.runner, clock, bool(model.data))


def _own_target(record: Record, *, trusted: bool) -> str:
    """The target to run if the user names none: the record's own file. If the record is `trusted`
    (the user or their team signed it), also a file with the same name and code, because the record
    may be of another folder, such as that of a server's worker. Raises UsageError if the user must
    name the target, as a record alone imports and builds nothing."""
    here, tuned, why = local_target(record), record.target, "its file is not under this folder"
    spec = None
    with contextlib.suppress(UsageError):
        spec = parse(here)
    if spec is not None and spec.kind == "module":
        why = "a record alone has nothing imported"
    elif arguments := record.key.task.model_args:
        why = f"it is built with {', '.join(arguments)}"
    elif spec is not None:
        own = spec.kind == "torchvision" or spec.origin == tuned.origin
        if own or (trusted and is_copy(spec, tuned)):
            return here
    raise UsageError(f"record {record.id} is of {tuned.name}, and {why}: name it with --target")


def _refuse(record: Record, line: str, model: Model, command: Sequence[str]) -> None:
    """Raise UsageError if the record is of another device, if the record of a run comes without its
    command, or that of a target with one. `line`: the command line to type instead."""
    device, now = record.key.environment.device, environment.detect(device_for(record)).device
    why = ""
    if now != device:
        why = f"is of {device.name}, and this machine has {now.name}: use {device.name}"
    elif record.key.task.command and (model.target is not None or not command):
        why = f"is of a run: give its command, as in: {line}"
    elif command and not record.key.task.command:
        why = f"is of {record.target.name}, which needs no command; run: {line}"
    if why:
        raise UsageError(f"record {record.id} {why}")
