"""tune(): measure, choose and remember."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import advisor
from advisor.arguments import Budget, Model, OnEvent, Permit, check_type, split, urls_of
from advisor.cache.config import Config
from advisor.cache.key import fingerprint
from advisor.cache.kinds import Shape
from advisor.cache.match import SimilarRecord, compare
from advisor.cache.name import command_digest
from advisor.cache.record import INTERRUPTED, LOOP, WITHIN, Provenance, Record
from advisor.cache.records import Records
from advisor.cache.settings import max_artifacts
from advisor.cache.task import Task, permissions
from advisor.errors import UsageError
from advisor.events import progress_of
from advisor.open_store import Cache, open_records
from advisor.persistence import check_writable, keep, keep_artifacts, lock_names, locked, measuring
from advisor.resolve.answer import unverified
from advisor.resolve.doubt import doubtful
from advisor.resolve.job_length import length_of
from advisor.resolve.lookups import set_up_logging
from advisor.store import Store
from advisor.tuners import environment, fp8
from advisor.tuners.decisions import WORTH
from advisor.tuners.doubt import unsteady
from advisor.tuners.scratch import ScratchFolder
from advisor.tuners.search.journal import open_study
from advisor.tuners.search.plan import Clock, Plan, Progress, suffices
from advisor.tuners.search.race import SearchResult
from advisor.tuners.search.tuner import SearchOptions, Tuner, tuned_loader
from advisor.unchanged import CommandCall, larger
from advisor.workload import OpenWorkload, RunWorkload, TargetWorkload, Workload

LOADER_S, LOADER_SHARE = 25.0, 0.25
"""Kept for the loader of a workload's own data: two turns of a second for some ten settings; and no
more than this share of the budget."""
MAX_SIMILAR = 2
"""Configs of similar records that are tried first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What `tune` found.

    Attributes:
        known: it was there already and nothing was measured.
        finished: something was measured beside the baseline, or there is nothing else to measure.
            If not, time ran out before it, and the same call goes on.
        interrupted: by Ctrl-C; the record has the best so far.
        earlier: the record is an earlier one: what was measured now was cut short or too noisy to
            replace it.
        remarks: lines on what was faster and is not advised, and on what limits the rest.
        short: one of them names the budget that an untried config needs.
    """

    record: Record
    known: bool
    finished: bool
    interrupted: bool = False
    earlier: bool = False
    remarks: tuple[str, ...] = ()
    short: bool = False


def tune(
    what: str | Model | Sequence[str],
    *,
    shape: Shape | Sequence[Shape] | None = None,
    permit: Permit = Permit(),
    budget: Budget = Budget(),
    store: Store | Cache = None,
    on_event: OnEvent | None = None,
) -> Tuned:
    """Find the fastest safe config by measuring, and remember it.

    A call that was interrupted is continued by the same call.

        advisor.tune(["torchrun", "--nproc-per-node", "4", "train.py"])
        advisor.tune(advisor.Model("gpt.py:GPT", dtype="int64", vocab=50257), shape="8x1024")

    Args:
        what: a command as a list of its words, which is started once and unmodified; or a target:
            model.py, model.py:Net, package.module:factory, torchvision:NAME, or an
            `advisor.Model` of one that also says how it is trained.
        shape: of one batch of a target; the first number is your batch. A list of two to eight for
            a job whose inputs alternate between them: they are measured as one mix. A command
            shows its shapes itself.
        permit: what may be changed.
        budget: how much is measured.
        store: an `advisor.Store`, a store's URL, or several: the record goes to the first that can
            be written. Default: $ADVISOR_CACHE, else [tool.advisor] cache in pyproject.toml, else
            the user's cache folder.
        on_event: called in this thread with a dictionary for each event. Its 'event' is 'trial'
            (with `number`, `config`, `outcome`, `samples_per_s`, `ratio` to the baseline with its
            95% interval `low` to `high`, the `best` config so far, and `left_s` of the budget), or
            'phase', 'notice' or 'warning' (with `text`).

    Raises:
        UsageError: an argument is wrong, or there is no such program.
        TargetFailed: the user's code raised, or no training step was seen in the command.
        WorkerError: the baseline cannot be measured. StoreError: the store cannot be written.
        Busy: another process measures the same, or on this device.
    """
    check_type("permit", permit, Permit)
    check_type("budget", budget, Budget)
    plan, cache, progress = Plan.of(budget.given), urls_of(store), progress_of(on_event)
    model, command = split(what)
    given = {"shape": shape} | permit.given
    if not command and model.target is None:
        raise UsageError("target None: expected its name, as model.py:Net")
    workload: Workload
    if command:
        workload = RunWorkload(command, permissions(given))
    else:
        workload = TargetWorkload(Task.of(str(model.target), model.given | given))
    return tuned(workload, plan, cache=cache, progress=progress)


def tuned(
    workload: Workload, plan: Plan, *, cache: Cache = None, progress: Progress | None = None
) -> Tuned:
    """As `tune`, for a workload and a plan that were checked."""
    set_up_logging()
    records = open_records(cache, fallback=True)
    tuning = Tuning(workload, plan, records, progress or Progress())
    with measuring(records, workload.words, lock_names(workload.device)):
        if not isinstance(workload, RunWorkload):
            return tuning.run()
        call = CommandCall(records, workload.words, workload.permitted, plan)
        if not plan.force and (known := call.known()) is not None:
            return Tuned(record=known, known=True, finished=True)
        before = call.state()
        found = tuning.run()
        if found.finished and not found.earlier:
            call.remember(found.record, before)
        return found


class _Earlier(NamedTuple):
    """What earlier calls left to this one.

    Attributes:
        answer: a record that answers already: nothing is measured.
        clear: one that this call must not replace by a less certain result.
        fresh: its study is not continued.
        replaced: the new record replaces it, whatever its effort.
    """

    answer: Record | None = None
    clear: Record | None = None
    fresh: bool = False
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Tuning:
    """One tuning of a workload."""

    workload: Workload
    plan: Plan
    records: Records
    progress: Progress

    def run(self) -> Tuned:
        """Open the workload, and search unless a record answers already."""
        max_artifacts()  # a wrong value is reported before anything is measured
        check_writable(self.records, self.progress)
        with self.workload.open(self.plan, self.records, self.progress) as opened:
            similar = self.records.similar(opened.key, opened.facts.family)
            for fault in self.records.unreachable:
                self.progress.notice(f"{fault}; its records are not looked at")
            earlier = self._earlier(opened, similar)
            if earlier.answer is not None:
                known = self._named(earlier.answer, opened)
                return Tuned(record=known, known=True, finished=True)
            if "fp8" in opened.task.precisions:
                self.progress.notice(_of_fp8(opened))
            first = _first_guesses(opened, similar, self.progress)
            return self.search(opened, first, earlier)

    def _earlier(self, opened: OpenWorkload, similar: Sequence[SimilarRecord]) -> _Earlier:
        """What the records of this very task mean for this call."""
        plan, own = self.plan, f"{opened.key.id}@{opened.task.batch}"
        found = [
            one.record
            for one in similar
            if one.record.id == own and _measured_alike(one.record.key.task, opened.task)
        ]
        if not found:
            return _Earlier(fresh=plan.force, replaced=plan.force)
        exact = [one for one in found if compare(opened.key, one.key) == ("exact", ())]
        clear = max(filter(is_clear, exact), key=lambda one: one.provenance.created, default=None)
        if plan.force:
            return _Earlier(clear=clear, fresh=True, replaced=True)

        def standing(one: Record) -> tuple[bool, ...]:
            enough = suffices(one.provenance.effort, plan.effort)
            return not one.stale, one.compares, enough, one.target == opened.target

        known = max(found, key=standing)
        if known.stale:
            self.progress.notice(f"marked stale ({known.stale}); measured again")
            return _Earlier(clear=clear, fresh=True, replaced=True)
        if not known.compares and opened.space.is_choice:
            self.progress.notice(f"nothing was measured beside {opened.task.baseline} yet; goes on")
            return _Earlier(replaced=True)
        if goes_on := self._why_not_enough(known, opened.task):
            self.progress.notice(goes_on)
            return _Earlier(clear=clear)
        return _Earlier(answer=known)

    def _why_not_enough(self, known: Record, task: Task) -> str:
        """What this call has to measure beyond a record; '' for nothing."""
        plan, then, made = self.plan, known.key.task, known.provenance
        if task.data and _loader_of(task) != _loader_of(then):
            return "tuned without this data; goes on with its loader"
        if more := set(task.map) - set(then.map):
            return f"tuned without --map {', '.join(sorted(more))}; goes on with it"
        if not suffices(made.effort, plan.effort):
            return f"tuned {made.how}; goes on with --effort {plan.effort}"
        if larger(plan, made):
            return f"tuned with --budget {made.budget_s:g}s; goes on with {plan.seconds:g}s"
        if length_of(known) != plan.length(task.batch):
            return "tuned for a job of another length; the choice is made again"
        return ""

    def _named(self, record: Record, opened: OpenWorkload) -> Record:
        """A record that answers, under the name that was asked for: another name, or other code, of
        the same model and task."""
        target, task = opened.target, opened.task
        if task.command:
            if record.target != target:
                self.progress.notice(f"tuned as {record.target.name}, which trains the same")
            return record
        if (record.target, record.key.task.model_args) == (target, task.model_args):
            return record
        named_task = dataclasses.replace(
            record.key.task, target=task.target, model_args=task.model_args
        )
        key = dataclasses.replace(record.key, task=named_task)
        # Of several versions under one name the one that was revised last counts.
        named = dataclasses.replace(record, key=key, target=target, revised=time.time())
        self.records.put(named, revises=record)
        if (record.target.name, record.target.origin) == (target.name, target.origin):
            self.progress.notice(f"what was edited in {target.name} computes the same")
        else:
            self.progress.notice(f"tuned as {record.target.name}; now known as {target.name} too")
        return named

    def search(self, opened: OpenWorkload, first: Sequence[Config], earlier: _Earlier) -> Tuned:
        """Search and remember; nobody else measures this key meanwhile."""
        facts, studies, seconds = opened.facts, self.records.studies, self.plan.seconds
        self._refuse_small_budget(facts.step_s)
        name = study_name(opened)
        with locked(studies, name), ScratchFolder() as folder:
            study, damage = open_study(studies, name, fresh=earlier.fresh)
            if damage:
                self.progress.notice(damage)
            options = self._options(opened, first, folder)
            loader_s = min(LOADER_S, LOADER_SHARE * seconds) if opened.space.inputs else 0.0
            clock = Clock(seconds, reserve_s=loader_s)
            tuner = Tuner(opened.runner, opened.space, study, options, self.progress, clock)
            self.progress.started(facts, opened.key, opened.space, tuner.known)
            device = opened.key.environment.device
            if line := environment.bf16_notice(device.kind, opened.task.precisions):
                self.progress.notice(line)
            found = tuner.run()
            if opened.space.inputs and not found.interrupted:
                found = self._with_loader(opened, found, tuner)
            record = self._record(opened, found, name, clock.spent_s)
            return self._kept(opened, record, found, earlier)

    def _kept(
        self, opened: OpenWorkload, record: Record, found: SearchResult, earlier: _Earlier
    ) -> Tuned:
        """What is remembered: an uncertain result never replaces a clear earlier one."""
        remarks = found.remarks
        replaces = earlier.clear is None or is_clear(record)
        if earlier.clear is not None and not replaces:
            why = "was too noisy to tell" if record.compares else "had no time to race anything"
            if record.provenance.effort == INTERRUPTED:
                why = "was cut short"
            on = "" if self.plan.force else "; the same command goes on"
            remarks += (
                f"This tuning {why}: the earlier record stays in use, and is shown here{on}.",
            )
            record = self._named(earlier.clear, opened)
        else:
            anew = earlier.fresh or earlier.replaced
            store = keep(self.records, record, anew, self.progress)
            keep_artifacts(self.records, record, found.artifacts, store, self.progress)
        return Tuned(
            record=record,
            known=False,
            finished=record.compares or not opened.space.is_choice,
            interrupted=found.interrupted,
            earlier=not replaces,
            remarks=remarks,
            short=found.short,
        )

    def _options(
        self, opened: OpenWorkload, first: Sequence[Config], folder: Path
    ) -> SearchOptions:
        plan, task = self.plan, opened.task
        return SearchOptions(
            compares=task.mode == "train" and task.tolerance > 0,
            baseline=task.baseline,
            trials=plan.trials,
            # The rest of an online run has to pay for it. It is taken to last as long again as it
            # may be tuned, and what compiles to save a third of that.
            most_s=WORTH * plan.seconds if opened.online else math.inf,
            first=first,
            seed=plan.seed,
            length=plan.length(task.batch),
            modules=opened.facts.modules,
            folder=folder if max_artifacts() else None,
            without=opened.without,
        )

    def _with_loader(self, opened: OpenWorkload, found: SearchResult, tuner: Tuner) -> SearchResult:
        """The loader that feeds the loop's winner, searched for in the same way."""
        tuner.clock.release()
        step = next(w.choice.config for w in found.winners if w.use == LOOP and not w.free)
        return tuned_loader(opened.runner, opened.space, step, found, tuner.clock, self.progress)

    def _record(
        self, opened: OpenWorkload, found: SearchResult, study: str, seconds: float
    ) -> Record:
        plan, facts = self.plan, opened.facts
        effort = plan.effort if found.complete else INTERRUPTED
        made = Provenance(
            created=time.time(),
            seconds=seconds,
            trials=len(found.trials),
            advisor=advisor.__version__,
            device_uuid=facts.device_uuid,
            host_cpu=environment.host_cpu(),
            seed=plan.seed,
            study=study,
            budget_s=plan.seconds,
            modules=facts.modules,
            parameters=facts.parameters,
            effort=WITHIN if opened.online else effort,
            steps=plan.steps or 0,
            duration_s=plan.duration_s or 0.0,
        )
        return Record(
            key=opened.key,
            target=opened.target,
            baseline=found.baseline,
            winners=found.winners,
            input=found.input,
            trials=found.trials,
            raced=found.raced,
            provenance=made,
            family=facts.family,
        )

    def _refuse_small_budget(self, step_s: float) -> None:
        if self.plan.seconds < 12 * step_s:
            raise UsageError(
                f"budget {self.plan.seconds:g}s is too small for one trial beside torch's "
                f"default: a step takes {step_s:.2g} s; give at least "
                f"{max(30.0, 60 * step_s):.0f}s"
            )


def is_clear(record: Record) -> bool:
    """Whether a tuning was not cut short, was quiet enough to tell what gains, and verified it."""
    best, own = record.winner(record.use), record.baseline
    if record.stale or not record.compares or record.provenance.effort == INTERRUPTED:
        return False
    if best.config == own.config and unsteady(own.rounds):
        return False
    return not doubtful(record) and not unverified(record, best.config)


def study_name(opened: OpenWorkload) -> str:
    """Not the same for made-up data and for a run, which may share a key."""
    digest = fingerprint([opened.task.baseline, opened.space.digest])[:12]
    return f"{opened.key.id}@{opened.task.batch}-{digest}"


def _measured_alike(then: Task, now: Task) -> bool:
    """Whether a record of the same key was measured as this task is: as a run, or on made-up data.
    What options of a command gave is known of that command alone."""
    if not now.command or not then.command:
        return not now.command and not then.command
    return not now.map or command_digest(then.command) == command_digest(now.command)


def _loader_of(task: Task) -> tuple[object, ...]:
    return task.data, task.data_args, task.any_order


def _of_fp8(opened: OpenWorkload) -> str:
    """Whether fp8, where it is permitted, is tried, or why not."""
    task, wide = opened.task, opened.facts.wide
    why = fp8.lacking(opened.key.environment.device.compute_capability, wide)
    if task.command or task.mode != "train":
        why = "no layer of a run is replaced" if task.command else "it is for training"
    if why:
        return f"fp8 is not tried: {why}"
    return f"{wide} linear layer{'s' * (wide != 1)} may be tried in fp8. {fp8.CAVEAT}"


def _first_guesses(
    opened: OpenWorkload, similar: Sequence[SimilarRecord], progress: Progress
) -> list[Config]:
    """What was best for the nearest records: stale ones, other shapes and devices, the family."""
    chosen: dict[Config, SimilarRecord] = {}
    for one in similar:
        default = one.record.baseline.config.knobs
        for winner in reversed(one.record.winners):
            config = winner.choice.config.knobs
            if config != default and len(chosen) < MAX_SIMILAR:
                chosen.setdefault(config, one)
    others = (one for one in chosen.values() if one.record.key.id != opened.key.id)
    for record_id, what in dict.fromkeys((one.record.id, one.what) for one in others):
        progress.notice(f"tried first: the advice of record {record_id} ({what})")
    return list(chosen)
