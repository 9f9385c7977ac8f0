"""tune(): measure configs, choose the winners and store the record."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import advisor
from advisor.arguments import Budget, Model, OnEvent, Permit, progress_of, split, urls_of
from advisor.cache.config import Config
from advisor.cache.key import fingerprint
from advisor.cache.kinds import Shape
from advisor.cache.match import SimilarRecord, compare
from advisor.cache.name import command_digest
from advisor.cache.record import CUT_SHORT, LOOP, WITHIN, Choice, Provenance, Record
from advisor.cache.records import Records
from advisor.cache.settings import max_artifacts
from advisor.cache.task import Task, permissions
from advisor.errors import UsageError, WorkerError, check_type
from advisor.open_store import Cache, open_records
from advisor.persistence import check_writable, keep, keep_artifacts, lock_names, locked, measuring
from advisor.resolve.answer import advises, is_clear, length_of
from advisor.resolve.lookups import set_up_logging
from advisor.store import Store
from advisor.tuners import environment, fp8
from advisor.tuners.decisions import WORTH
from advisor.tuners.knobs import OFFLOAD
from advisor.tuners.measure.run import rank_shares
from advisor.tuners.measure.run.run import Run
from advisor.tuners.measure.run.session import ran_out_of_memory
from advisor.tuners.scratch import ScratchFolder
from advisor.tuners.search.batch_sizes import OTHER_BATCH, BatchSizes
from advisor.tuners.search.journal import open_study
from advisor.tuners.search.plan import Clock, Plan, Progress, suffices
from advisor.tuners.search.race import SearchResult
from advisor.tuners.search.space import Space
from advisor.tuners.search.tuner import NUMERICS, SearchOptions, Tuner, tuned_loader
from advisor.unchanged import CommandCall, too_little
from advisor.workload import AnyWorkload, OpenWorkload, RunWorkload, TargetWorkload, without_own

LOADER_S, LOADER_SHARE = 25.0, 0.25
"""Seconds reserved to tune a workload's loader (two turns of a second for some ten settings), or to
measure a run's other batches, and the largest share of the budget for it."""
PROFILE_S = 10.0
"""Seconds that a look at the ranks of a job may take after the search, besides its steps: a GPU's
profiler takes some to start."""
MAX_TRIED_FIRST = 2  # the most configs of similar records that are tried first


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The result of `tune`.

    Attributes:
        known: the record existed already; nothing was measured.
        finished: a config was compared with the baseline, or no config is left to compare. If
            False, time ran out first; the same call continues.
        interrupted: by Ctrl-C; the record has the best config so far.
        earlier: `record` is an earlier one, because this tuning was cut short or too noisy.
        remarks: lines on faster configs that are not advised, and on limits of the measurement.
    """

    record: Record
    known: bool
    finished: bool
    interrupted: bool = False
    earlier: bool = False
    remarks: tuple[str, ...] = ()


def tune(
    what: str | Model | Sequence[str],
    *,
    shape: Shape | Sequence[Shape] | None = None,
    permit: Permit = Permit(),
    budget: Budget = Budget(),
    store: Store | Cache = None,
    on_event: OnEvent | None = None,
) -> Tuned:
    """Find the fastest safe config by measuring, and store it as a record. To continue an
    interrupted call, repeat it.

        advisor.tune(["torchrun", "--nproc-per-node", "4", "train.py"])
        advisor.tune(advisor.Model("gpt.py:GPT", dtype="int64", vocab=50257), shape="8x1024")

    Args:
        what: a command as a list of its words, which is started once and unmodified; or a target:
            model.py, model.py:Net, package.module:factory, torchvision:NAME, or an
            `advisor.Model`, which also says how the model is trained.
        shape: shape of one batch of a target; the first number is your batch size. A list of two
            to eight shapes if the job's inputs alternate between them. Not for a command.
        permit: what the tuning may change.
        budget: how long it measures.
        store: an `advisor.Store`, a store's URL, or several: the record goes to the first that can
            be written. Default: $ADVISOR_CACHE, else [tool.advisor] cache in pyproject.toml, else
            the user's cache folder.
        on_event: called in this thread with a dictionary for each 'event': 'trial' (`number`,
            `config`, `outcome`, `samples_per_s`, `ratio` to the baseline with its 95% interval
            `low` to `high`, the `best` config so far, and `left_s` of the budget), 'phase',
            'notice' or 'warning' (`text`).

    Raises:
        UsageError: an argument is wrong, or there is no such program.
        TargetFailed: the user's code raised, or no training step was seen in the command.
        WorkerError: the baseline cannot be measured. StoreError: the store cannot be written.
        Busy: another process measures this workload, or uses this device.
    """
    check_type("permit", permit, Permit)
    check_type("budget", budget, Budget, "advisor.Budget(...), such as Budget(time='5m')")
    plan, (model, command) = Plan.of(budget.given), split(what)
    given = {"shape": shape} | permit.given
    if not command and model.target is None:
        raise UsageError("target None: expected a name, such as model.py:Net")
    workload: AnyWorkload
    if command:
        workload = RunWorkload(command, permissions(given))
    else:
        workload = TargetWorkload(Task.of(str(model.target), model.given | given))
    return tuned(workload, plan, cache=urls_of(store), progress=progress_of(on_event))


def tuned(workload: AnyWorkload, plan: Plan, *, cache: Cache, progress: Progress) -> Tuned:
    """As `tune`, with a checked workload and plan."""
    set_up_logging()
    records = open_records(cache, fallback=True)
    with measuring(records, workload.words, lock_names(workload.device)):
        if not isinstance(workload, RunWorkload):
            return measured(workload, plan, records, progress)
        asked = workload.permitted | ({"frees_batch": True} if workload.frees_batch else {})
        call = CommandCall(records, workload.words, asked, plan)
        if not plan.force and (known := call.known()) is not None:
            return Tuned(record=known, known=True, finished=True)
        try:
            found = measured(workload, plan, records, progress)
        except WorkerError as exc:
            if workload.saves or not ran_out_of_memory(exc.__cause__):
                raise
            progress.notice("memory ran out after the first steps: again, with the least memory")
            workload.saves = True
            found = measured(workload, plan, records, progress)
        if found.finished and not found.earlier:
            call.remember(found.record)
        return found


def measured(workload: AnyWorkload, plan: Plan, records: Records, progress: Progress) -> Tuned:
    """As `tuned`; the caller holds the locks. Measures nothing if a record answers already."""
    max_artifacts()  # raises on a wrong ADVISOR_MAX_ARTIFACTS before anything is measured
    check_writable(records, progress)
    with workload.open(records, progress, plan) as opened:
        space = workload.space(opened, plan, progress)
        return Tuning(opened, space, plan, records, progress).run()


@dataclass(frozen=True, slots=True)
class Tuning:
    """One tuning of an open workload."""

    opened: OpenWorkload
    space: Space
    plan: Plan
    records: Records
    progress: Progress

    @property
    def task(self) -> Task:
        return self.opened.task

    def run(self) -> Tuned:
        """Search and store the record, unless a record answers already."""
        key, id = self.opened.key, f"{self.opened.key.id}@{self.task.batch}"
        similar = self.records.similar(key, self.opened.facts.family)
        for fault in self.records.unreachable:
            self.progress.notice(f"{fault}; the tuning ignores this store's records")
        own = [one.record for one in similar if one.record.id == id and self._is_alike(one.record)]
        known = max(own, key=self._standing, default=None)
        if known is not None and not self.plan.force:
            if not (why := self._why_again(known)):
                return Tuned(record=self._named(known), known=True, finished=True)
            self.progress.notice(why)
        if "fp8" in self.task.precisions:
            self.progress.notice(self._of_fp8())
        fresh = self.plan.force or (known is not None and known.stale != "")
        replaces = fresh or (known is not None and not known.compares)
        exact = [one for one in own if compare(key, one.key) == ("exact", ())]
        # Made-up data and a run have different studies under one key.
        study = f"{id}-{fingerprint([self.task.baseline, self.space.digest])[:12]}"
        with locked(self.records.studies, study), ScratchFolder() as folder:
            later = self.space.inputs or self.opened.frees_batch
            later_s = min(LOADER_S, LOADER_SHARE * self.plan.seconds) if later else 0.0
            clock = Clock(self.plan.seconds, reserve_s=later_s)
            found = self.search(self._first_guesses(similar), study, fresh, clock, folder)
            return self._kept(found, self._record(found, study, clock), exact, replaces)

    def _is_alike(self, known: Record) -> bool:
        """Whether a record of this key was measured alike: on made-up data, or as a run. With
        `map`, the runs must also have the same command."""
        then, now = known.key.task, self.task
        if now.map:
            return command_digest(then.command) == command_digest(now.command)
        return bool(then.command) == bool(now.command)

    def _standing(self, one: Record) -> tuple[bool, ...]:
        """Sort key of the records that may answer this call."""
        enough = suffices(one.provenance.effort, self.plan.effort)
        return not one.stale, one.compares, enough, one.target == self.opened.target

    def _why_again(self, known: Record) -> str:
        """Why a record does not answer this call, and what the call does; '' if it answers."""
        task, then = self.task, known.key.task
        loaders = [(one.data, one.data_args, one.any_order) for one in (task, then)]
        if not known.stale:
            if not known.compares and self.space.is_choice:
                return f"only {task.baseline} was measured so far: continuing"
            if task.data and loaders[0] != loaders[1]:
                return "already tuned without this data; now tuning its loader"
            if more := set(task.map) - set(then.map):
                return f"already tuned without --map {', '.join(sorted(more))}; now tuning it"
        if why := too_little(known, self.plan):
            return why
        if self.opened.frees_batch and all(one.stage != OTHER_BATCH for one in known.trials):
            return "already tuned without other batches; now measuring them"
        if length_of(known) != self.plan.length(task.batch):
            return "already tuned for a job of another length; choosing again"
        return ""

    def _named(self, record: Record) -> Record:
        """The record under this call's target. If the same model was tuned under another name or
        with other code, store the record under this one too."""
        target, task = self.opened.target, self.task
        if task.command:
            if record.target != target:
                self.progress.notice(f"tuned before as {record.target.name}, which trains the same")
            return record
        if (record.target, record.key.task.model_args) == (target, task.model_args):
            return record
        named_task = dataclasses.replace(
            record.key.task, target=task.target, model_args=task.model_args
        )
        key = dataclasses.replace(record.key, task=named_task)
        # Of several versions under one name, the last revised counts.
        named = dataclasses.replace(record, key=key, target=target, revised=time.time())
        self.records.put(named, revises=record)
        if (record.target.name, record.target.origin) == (target.name, target.origin):
            self.progress.notice(f"the edited code of {target.name} computes the same")
        else:
            self.progress.notice(f"tuned as {record.target.name}; now known as {target.name} too")
        return named

    def _of_fp8(self) -> str:
        """A line that says whether the tuning may try fp8, or why not."""
        wide, device = self.opened.facts.wide, self.opened.key.environment.device
        why = fp8.lacking(device.compute_capability, wide)
        if self.task.command or self.task.mode != "train":
            why = "no layer of a run is replaced" if self.task.command else "it is for training"
        if why:
            return f"fp8 is not tried: {why}"
        return f"{wide} linear layer{'s' * (wide != 1)} may be tried in fp8. {fp8.CAVEAT}"

    def search(
        self, first: Sequence[Config], name: str, fresh: bool, clock: Clock, folder: Path
    ) -> SearchResult:
        """The result of the study `name`. `first`: tried first; `folder`: for compiled code."""
        plan, task, space, runner = self.plan, self.task, self.space, self.opened.runner
        if plan.seconds < 12 * (step_s := self.opened.facts.step_s):
            raise UsageError(
                f"budget {plan.seconds:g}s is too small for one trial and torch's default: a step "
                f"takes {step_s:.2g} s; give at least {max(30.0, 60 * step_s):.0f}s"
            )
        study, damage = open_study(self.records.studies, name, fresh=fresh)
        if damage:
            self.progress.notice(damage)
        options = SearchOptions(
            compares=task.mode == "train" and task.tolerance > 0,
            real=self.opened.online,
            baseline=task.baseline,
            trials=plan.trials,
            # The rest of an online run must repay a compilation. Assume that the rest is as long
            # as the tuning, and that compiled code saves a third of it.
            most_s=WORTH * plan.seconds if self.opened.online else math.inf,
            first=first,
            seed=plan.seed,
            length=plan.length(task.batch),
            modules=self.opened.facts.modules,
            folder=folder if max_artifacts() else None,
            without=without_own(self.opened, space.default),
        )
        tuner = Tuner(runner, space, study, options, self.progress, clock)
        self._tell_start(tuner.known)
        found = tuner.run()
        if not found.interrupted and (limited := self._limited(found.baseline, clock)):
            found = dataclasses.replace(found, remarks=(*found.remarks, limited))
        if space.inputs and not found.interrupted:
            clock.release()
            step = next(w.choice.config for w in found.winners if w.use == LOOP and not w.free)
            found = tuned_loader(runner, space, step, found, clock, self.progress)
        if (run := self.opened.frees_batch) and self.opened.seen and not found.interrupted:
            clock.release()
            self.progress.phase("other batches, on a recorded step")
            found = BatchSizes(run, self.opened.seen, clock).add_to(found)
        return found

    def _limited(self, own: Choice, clock: Clock) -> str:
        """What limits a job of several ranks; '' for others. Last: a profiler may change steps."""
        run, step_s = self.opened.runner, own.batch / own.samples_per_s
        if not isinstance(run, Run) or (ranks := self.opened.task.processes) < 2:
            return ""
        seconds = max(clock.deadline_s, PROFILE_S + 2 * rank_shares.PROFILED_STEPS * step_s)
        untold = f"what limits the {ranks} ranks: not measured; `advisor explain -- COMMAND` tells"
        return rank_shares.line(run.rank_steps(step_s, deadline_s=seconds)) or untold

    def _first_guesses(self, similar: Sequence[SimilarRecord]) -> list[Config]:
        """Winners of similar records: stale ones, of other shapes or devices, of one family."""
        chosen: dict[Config, SimilarRecord] = {}
        for one in similar:
            default = one.record.baseline.config.knobs
            for winner in reversed(one.record.winners):
                config = winner.choice.config.knobs
                changes = config != default and self.space.near(config) != self.space.default
                if changes and len(chosen) < MAX_TRIED_FIRST:
                    chosen.setdefault(config, one)
        others = (one for one in chosen.values() if one.record.key.id != self.opened.key.id)
        for record_id, what in dict.fromkeys((one.record.id, one.what) for one in others):
            self.progress.notice(f"tried first: the advice of record {record_id} ({what})")
        return list(chosen)

    def _tell_start(self, resumed: int) -> None:
        facts, task, device = self.opened.facts, self.task, self.opened.key.environment.device
        self.progress.phase(
            f"{facts.name}: {facts.parameters:,} parameters, {task.inputs}, batch {task.batch}, "
            f"{task.mode}, on {device.name}"
        )
        if resumed:
            configs = f"{resumed} config{'s' * (resumed != 1)}"
            self.progress.phase(f"continuing an earlier tuning, which measured {configs}")
        self.progress.phase(f"budget {self.plan.seconds:g}s; Ctrl-C keeps the best config so far")
        if line := environment.bf16_notice(device.kind, task.precisions):
            self.progress.notice(line)

    def _kept(
        self, found: SearchResult, record: Record, known: Sequence[Record], replaces: bool
    ) -> Tuned:
        """Store the record, unless it is uncertain and a clear one is `known`; or, if it advises
        nothing, any that does. `replaces`: remove earlier versions, whatever their effort."""
        remarks, none = found.remarks, not advises(record)
        held = (one for one in known if not one.stale and not is_clear(record))
        stays = [one for one in held if is_clear(one) or (none and advises(one))]
        earlier = max(stays, key=lambda one: one.provenance.created, default=None)
        if earlier is not None:
            remarks += (
                "This tuning was cut short, raced nothing or was too noisy to tell: the earlier "
                "record stays in use, and is shown here.",
            )
            record = self._named(earlier)
        else:
            store = keep(self.records, record, replaces, self.progress)
            keep_artifacts(self.records, record, found.artifacts, store, self.progress)
        return Tuned(
            record=record,
            known=False,
            finished=record.compares or not self.space.is_choice or found.exhausted,
            interrupted=found.interrupted,
            earlier=earlier is not None,
            remarks=remarks,
        )

    def _record(self, found: SearchResult, study: str, clock: Clock) -> Record:
        plan, facts, seen = self.plan, self.opened.facts, self.opened.seen
        # The speed-up that the unmodified script would have if it had enough memory.
        more = {"unmodified": found.unmodified} if OFFLOAD in self.space.choices else {}
        effort = plan.effort if found.complete else CUT_SHORT
        cost = getattr(self.opened.runner, "counted", Config())
        made = Provenance(
            created=time.time(),
            seconds=clock.spent_s,
            trials=sum(one.stage not in (NUMERICS, OTHER_BATCH) for one in found.trials),
            advisor=advisor.__version__,
            device_uuid=facts.device_uuid,
            host_cpu=environment.host_cpu(),
            seed=plan.seed,
            study=study,
            budget_s=plan.seconds,
            modules=facts.modules,
            parameters=facts.parameters,
            effort=WITHIN if self.opened.online else effort,
            steps=plan.steps or 0,
            duration_s=plan.duration_s or 0.0,
        )
        return Record(
            key=self.opened.key,
            target=self.opened.target,
            baseline=found.baseline,
            winners=found.winners,
            input=found.input,
            trials=found.trials,
            raced=found.raced,
            provenance=made,
            family=facts.family,
            memory=Config(seen.memory if seen else {}, **more),
            cost=cost.replace(price=plan.price or 0.0) if cost else cost,
        )
