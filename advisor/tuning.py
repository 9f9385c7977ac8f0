"""tune(): measure configs, choose the winners and store the record."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import advisor
from advisor.arguments import Budget, Model, OnEvent, Permit, progress_of, split, urls_of
from advisor.cache.config import Config
from advisor.cache.key import fingerprint
from advisor.cache.kinds import Shape
from advisor.cache.match import SimilarRecord, compare
from advisor.cache.name import command_digest
from advisor.cache.record import INTERRUPTED, LOOP, WITHIN, Provenance, Record
from advisor.cache.records import Records
from advisor.cache.settings import max_artifacts
from advisor.cache.task import Task, permissions
from advisor.errors import UsageError, check_type
from advisor.open_store import Cache, open_records
from advisor.persistence import check_writable, keep, keep_artifacts, lock_names, locked, measuring
from advisor.resolve.answer import is_clear, length_of
from advisor.resolve.lookups import set_up_logging
from advisor.store import Store
from advisor.tuners import environment, fp8
from advisor.tuners.decisions import WORTH
from advisor.tuners.scratch import ScratchFolder
from advisor.tuners.search.journal import open_study
from advisor.tuners.search.plan import Clock, Plan, Progress, suffices
from advisor.tuners.search.race import SearchResult
from advisor.tuners.search.tuner import SearchOptions, Tuner, tuned_loader
from advisor.unchanged import CommandCall, larger
from advisor.workload import OpenWorkload, RunWorkload, TargetWorkload, Workload

LOADER_S, LOADER_SHARE = 25.0, 0.25
"""Seconds reserved to tune a workload's loader (two turns of a second for some ten settings), and
the largest share of the budget for it."""
MAX_SIMILAR = 2
"""The most configs of similar records that are tried first."""


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
    check_type("budget", budget, Budget)
    plan, (model, command) = Plan.of(budget.given), split(what)
    given = {"shape": shape} | permit.given
    if not command and model.target is None:
        raise UsageError("target None: expected a name, such as model.py:Net")
    workload: Workload = (
        RunWorkload(command, permissions(given))
        if command
        else TargetWorkload(Task.of(str(model.target), model.given | given))
    )
    return tuned(workload, plan, cache=urls_of(store), progress=progress_of(on_event))


def tuned(
    workload: Workload, plan: Plan, *, cache: Cache = None, progress: Progress | None = None
) -> Tuned:
    """As `tune`, with a checked workload and plan."""
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
    """How the records of earlier calls affect this one."""

    answer: Record | None = None  # this record already answers the call: nothing is measured
    clear: Record | None = None  # this record must not be replaced by a less certain one
    fresh: bool = False  # start a new study
    replaced: bool = False  # replace older records, whatever their effort


@dataclass(frozen=True, slots=True)
class Tuning:
    workload: Workload
    plan: Plan
    records: Records
    progress: Progress

    def run(self) -> Tuned:
        """Open the workload, and search unless a record answers already."""
        max_artifacts()  # raises on a wrong ADVISOR_MAX_ARTIFACTS before anything is measured
        check_writable(self.records, self.progress)
        with self.workload.open(self.plan, self.records, self.progress) as opened:
            similar = self.records.similar(opened.key, opened.facts.family)
            for fault in self.records.unreachable:
                self.progress.notice(f"{fault}; the tuning ignores this store's records")
            earlier = self._earlier(opened, similar)
            if earlier.answer is not None:
                known = self._named(earlier.answer, opened)
                return Tuned(record=known, known=True, finished=True)
            if "fp8" in opened.task.precisions:
                self.progress.notice(_of_fp8(opened))
            first = _first_guesses(opened, similar, self.progress)
            return self.search(opened, first, earlier)

    def _earlier(self, opened: OpenWorkload, similar: Sequence[SimilarRecord]) -> _Earlier:
        """Decide how the existing records of this task affect this call."""
        plan, own = self.plan, f"{opened.key.id}@{opened.task.batch}"
        found = [
            one.record
            for one in similar
            if one.record.id == own and _measured_alike(one.record.key.task, opened.task)
        ]
        exact = [one for one in found if compare(opened.key, one.key) == ("exact", ())]
        clear = max(filter(is_clear, exact), key=lambda one: one.provenance.created, default=None)
        if plan.force or not found:
            return _Earlier(clear=clear, fresh=plan.force, replaced=plan.force)

        def standing(one: Record) -> tuple[bool, ...]:
            enough = suffices(one.provenance.effort, plan.effort)
            return not one.stale, one.compares, enough, one.target == opened.target

        known = max(found, key=standing)
        if known.stale:
            self.progress.notice(f"the record is marked stale ({known.stale}): measuring again")
            return _Earlier(clear=clear, fresh=True, replaced=True)
        if not known.compares and opened.space.is_choice:
            self.progress.notice(f"only {opened.task.baseline} was measured so far: continuing")
            return _Earlier(replaced=True)
        if lacks := self._lacks(known, opened.task):
            self.progress.notice(f"already tuned {lacks}")
            return _Earlier(clear=clear)
        return _Earlier(answer=known)

    def _lacks(self, known: Record, task: Task) -> str:
        """Why a record does not answer this call, and what the call does; '' if it answers."""
        plan, then, made = self.plan, known.key.task, known.provenance
        loaders = [(one.data, one.data_args, one.any_order) for one in (task, then)]
        if task.data and loaders[0] != loaders[1]:
            return "without this data; now tuning its loader"
        if more := set(task.map) - set(then.map):
            return f"without --map {', '.join(sorted(more))}; now tuning it"
        if not suffices(made.effort, plan.effort):
            return f"{made.how}; continuing with --effort {plan.effort}"
        if larger(plan, made):
            return f"with --budget {made.budget_s:g}s; continuing with {plan.seconds:g}s"
        if length_of(known) != plan.length(task.batch):
            return "for a job of another length; choosing again"
        return ""

    def _named(self, record: Record, opened: OpenWorkload) -> Record:
        """The record under this call's target. If the same model was tuned under another name or
        with other code, store the record under this one too."""
        target, task = opened.target, opened.task
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

    def search(self, opened: OpenWorkload, first: Sequence[Config], earlier: _Earlier) -> Tuned:
        """Search and store the result, while holding the lock of this key."""
        studies, seconds, step_s = self.records.studies, self.plan.seconds, opened.facts.step_s
        if seconds < 12 * step_s:
            raise UsageError(
                f"budget {seconds:g}s is too small for one trial and torch's default: a step "
                f"takes {step_s:.2g} s; give at least {max(30.0, 60 * step_s):.0f}s"
            )
        name = study_name(opened)
        with locked(studies, name), ScratchFolder() as folder:
            study, damage = open_study(studies, name, fresh=earlier.fresh)
            if damage:
                self.progress.notice(damage)
            options = self._options(opened, first, folder)
            loader_s = min(LOADER_S, LOADER_SHARE * seconds) if opened.space.inputs else 0.0
            clock = Clock(seconds, reserve_s=loader_s)
            tuner = Tuner(opened.runner, opened.space, study, options, self.progress, clock)
            self._tell_start(opened, tuner.known)
            found = tuner.run()
            if opened.space.inputs and not found.interrupted:
                clock.release()
                step = next(w.choice.config for w in found.winners if w.use == LOOP and not w.free)
                found = tuned_loader(opened.runner, opened.space, step, found, clock, self.progress)
            return self._kept(opened, self._record(opened, found, name, clock), found, earlier)

    def _tell_start(self, opened: OpenWorkload, resumed: int) -> None:
        facts, task, device = opened.facts, opened.task, opened.key.environment.device
        self.progress.phase(
            f"{facts.name}: {facts.parameters:,} parameters, {task.inputs}, batch {task.batch}, "
            f"{task.mode}, on {device.name}"
        )
        if resumed:
            configs = f"{resumed} config{'s' * (resumed != 1)}"
            self.progress.phase(f"continuing an earlier tuning, which measured {configs}")
        keeps = "Ctrl-C keeps the best config so far"
        self.progress.phase(f"budget {self.plan.seconds:g}s; {keeps}")
        if line := environment.bf16_notice(device.kind, task.precisions):
            self.progress.notice(line)

    def _kept(
        self, opened: OpenWorkload, record: Record, found: SearchResult, earlier: _Earlier
    ) -> Tuned:
        """Store the record, unless it is uncertain and a clear earlier record exists."""
        remarks, clear = found.remarks, None if is_clear(record) else earlier.clear
        if clear is not None:
            remarks += (
                "This tuning was cut short, raced nothing or was too noisy to tell: the earlier "
                "record stays in use, and is shown here.",
            )
            record = self._named(clear, opened)
        else:
            store = keep(self.records, record, earlier.replaced, self.progress)
            keep_artifacts(self.records, record, found.artifacts, store, self.progress)
        return Tuned(
            record=record,
            known=False,
            finished=record.compares or not opened.space.is_choice,
            interrupted=found.interrupted,
            earlier=clear is not None,
            remarks=remarks,
        )

    def _options(
        self, opened: OpenWorkload, first: Sequence[Config], folder: Path
    ) -> SearchOptions:
        plan, task = self.plan, opened.task
        return SearchOptions(
            compares=task.mode == "train" and task.tolerance > 0,
            baseline=task.baseline,
            trials=plan.trials,
            # The rest of an online run must repay a compilation. Assume that the rest is as long
            # as the tuning, and that compiled code saves a third of it.
            most_s=WORTH * plan.seconds if opened.online else math.inf,
            first=first,
            seed=plan.seed,
            length=plan.length(task.batch),
            modules=opened.facts.modules,
            folder=folder if max_artifacts() else None,
            without=opened.without,
        )

    def _record(
        self, opened: OpenWorkload, found: SearchResult, study: str, clock: Clock
    ) -> Record:
        plan, facts = self.plan, opened.facts
        effort = plan.effort if found.complete else INTERRUPTED
        made = Provenance(
            created=time.time(),
            seconds=clock.spent_s,
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


def study_name(opened: OpenWorkload) -> str:
    """The name of the study. Made-up data and a run have different studies under one key."""
    digest = fingerprint([opened.task.baseline, opened.space.digest])[:12]
    return f"{opened.key.id}@{opened.task.batch}-{digest}"


def _measured_alike(then: Task, now: Task) -> bool:
    """Whether two tasks with one key are measured alike: both on made-up data, or both as runs.
    With `map`, the runs must also have the same command."""
    if not now.command or not then.command:
        return not now.command and not then.command
    return not now.map or command_digest(then.command) == command_digest(now.command)


def _of_fp8(opened: OpenWorkload) -> str:
    """A line that says whether the tuning may try fp8, or why not."""
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
    """The winners of similar records: stale ones, of other shapes or devices, of one family."""
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
