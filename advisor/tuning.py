"""tune(): measure, choose and remember."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import advisor
from advisor.arguments import Budget, Model, OnEvent, Permit, check_type, split, urls_of
from advisor.cache.config import BATCH, Config, Value
from advisor.cache.key import Device, Environment, Key, fingerprint
from advisor.cache.kinds import Shape
from advisor.cache.match import SimilarRecord
from advisor.cache.name import command_digest
from advisor.cache.record import INTERRUPTED, LOOP, PILOT, WITHIN, Provenance, Record, Target
from advisor.cache.records import Records
from advisor.cache.settings import max_artifacts
from advisor.cache.stores.filesystem import make_folder
from advisor.cache.task import Task, permissions
from advisor.errors import StoreError, UsageError
from advisor.events import progress_of
from advisor.finding.horizon import length_of
from advisor.finding.lookups import set_up_logging
from advisor.keeping import (
    check_writable,
    keep,
    keep_artifacts,
    lock_names,
    locked,
    measuring,
)
from advisor.opening import Cache, open_records
from advisor.tuners.act.pilot.protocol import KEEP_CHECKPOINTS
from advisor.tuners.scratch import ScratchFolder
from advisor.tuners.search.plan import Clock, Plan, Progress, suffices
from advisor.unchanged import CommandCall, larger

if TYPE_CHECKING:
    from advisor.store import Store
    from advisor.tuners.act.pilot.script_facts import ScriptFacts
    from advisor.tuners.knobs import SearchContext
    from advisor.tuners.measure.run.run import Run
    from advisor.tuners.measure.runner import Runner
    from advisor.tuners.measure.worker.parent import Worker
    from advisor.tuners.measure.worker.wire import DataFacts, Facts
    from advisor.tuners.search.race import SearchResult
    from advisor.tuners.search.space import Space
    from advisor.tuners.search.tuner import SearchOptions, Tuner

LOADER_S, LOADER_SHARE = 25.0, 0.25
"""Kept for the loader of a workload's own data: two turns of a second for some ten settings; and no
more than this share of the budget."""
DATA_LEAST_S = 60.0
"""A dataset is made in so many seconds, or twice the budget if that is more."""
LOOPS = (LOOP, False)
MOST_KIN = 2
"""Configs of near records that are tried first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What `tune` found.

    Attributes:
        known: it was there already and nothing was measured.
        finished: something was measured beside the baseline, or there is nothing else to measure.
            If not, time ran out before it, and the same call goes on.
        interrupted: by Ctrl-C; the record has the best so far.
        remarks: lines on what was faster and is not advised, and on what limits the rest.
    """

    record: Record
    known: bool
    finished: bool
    interrupted: bool = False
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
    if command:
        permitted = permissions({"shape": shape} | permit.given)
        return measured_run(command, permitted, plan, cache=cache, progress=progress)
    if model.target is None:
        raise UsageError("target None: expected its name, as model.py:Net")
    task = Task.of(str(model.target), {"shape": shape} | model.given | permit.given)
    return measured(task, plan, cache=cache, progress=progress)


def measured(
    task: Task, plan: Plan, *, cache: Cache = None, progress: Progress | None = None
) -> Tuned:
    """As `tune` of a target, from a task and a plan that were checked."""
    set_up_logging()
    # What can be refused without torch, which takes seconds to import, is refused before.
    records = open_records(cache, fallback=True)
    tuning = _OfTarget(task, plan, records, progress or Progress())
    with measuring(records, [task.target], lock_names(tuning.device)):
        return tuning.run()


def measured_run(
    command: Sequence[str],
    permitted: Mapping[str, Any],
    plan: Plan,
    *,
    cache: Cache = None,
    progress: Progress | None = None,
    show: Callable[[str], None] | None = None,
) -> Tuned:
    """As `tune` of a command, from permissions and a plan that were checked.

    Args:
        show: called with what the command prints, as it comes, from another thread.
    """
    set_up_logging()
    records = open_records(cache, fallback=True)
    tuning = OfRun(command, permitted, plan, records, progress or Progress(), show)
    asked = CommandCall(records, tuple(command), permitted, plan)
    with measuring(records, command, lock_names()):
        if not plan.force and (known := asked.known()) is not None:
            return Tuned(record=known, known=True, finished=True)
        before = asked.state()
        tuned = tuning.run()
        if tuned.finished:
            asked.remember(tuned.record, before)
        return tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is tuned, where its configs are visited, and what its loader loads."""

    place: Runner
    facts: Facts
    key: Key
    target: Target
    space: Space
    data: DataFacts | None = None

    @property
    def task(self) -> Task:
        return self.key.task

    @property
    def study(self) -> str:
        """The name of its study: what made-up data gave is no trial of a run."""
        digest = fingerprint([self.task.baseline, self.space.digest])[:12]
        return f"{self.key.id}@{self.task.batch}-{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """What earlier calls left to this one.

    Attributes:
        known: a record that answers already.
        fresh: what was tried before is left alone.
        unfinished: a call ended before it had measured anything; this one has its own time.
    """

    known: Record | None = None
    fresh: bool = False
    unfinished: bool = False


class _Tuning(ABC):
    """One call of tune(), whatever it is that is tuned."""

    def __init__(self, plan: Plan, records: Records, progress: Progress) -> None:
        self._plan = plan
        self._records, self._progress = records, progress

    @abstractmethod
    def _subject(self) -> AbstractContextManager[Subject]:
        """What is tuned, once it has run a step; what measures it ends with the context."""

    def run(self) -> Tuned:
        max_artifacts()  # where it is none, that is said before anything is measured
        check_writable(self._records, self._progress)
        with self._subject() as subject:
            akin = self._records.similar(subject.key, subject.facts.family)
            for fault in self._records.unreachable:
                self._progress.notice(f"{fault}; its records are not looked at")
            before = _Before(fresh=True) if self._plan.force else self._before(subject, akin)
            if before.known is not None:
                known = self._known(before.known, subject)
                return Tuned(record=known, known=True, finished=True)
            if "fp8" in subject.task.precisions:
                self._progress.notice(_of_fp8(subject))
            near = _first_guesses(subject, akin, self._progress)
            record, found = self._tune(subject, near, before)
            return Tuned(
                record=record,
                known=False,
                finished=record.compares or not subject.space.is_choice,
                interrupted=found.interrupted,
                remarks=found.remarks,
            )

    @abstractmethod
    def _answers(self, record: Record, subject: Subject) -> bool:
        """Whether a record of the same key and batch was measured as this call would measure it."""

    @abstractmethod
    def _known(self, record: Record, subject: Subject) -> Record:
        """What is given of a record that answers and may have been tuned under another name."""

    def _before(self, subject: Subject, akin: Sequence[SimilarRecord]) -> _Before:
        """What the record of this very task, if there is one, means for this call."""
        plan, key = self._plan, subject.key
        own = f"{key.id}@{key.task.batch}"
        of_key = [one.record for one in akin if one.record.id == own]
        found = [one for one in of_key if self._answers(one, subject)]
        if not found:
            return _Before()

        def standing(one: Record) -> tuple[bool, ...]:
            enough = suffices(one.provenance.effort, plan.effort)
            return not one.stale, one.compares, enough, one.target == subject.target

        known = max(found, key=standing)
        if known.stale:
            self._progress.notice(f"marked stale ({known.stale}); measured again")
            return _Before(fresh=True)
        if not known.compares and subject.space.is_choice:
            self._progress.notice(f"nothing was measured beside {key.task.baseline} yet; goes on")
            return _Before(unfinished=True)
        if key.task.data and _loaded(key.task) != _loaded(known.key.task):
            self._progress.notice("tuned without this data; goes on with its loader")
            return _Before()
        if more := set(key.task.map) - set(known.key.task.map):
            self._progress.notice(f"tuned without --map {', '.join(sorted(more))}; goes on with it")
            return _Before()
        if not suffices(known.provenance.effort, plan.effort):
            self._progress.notice(
                f"tuned {known.provenance.how}; goes on with --effort {plan.effort}"
            )
        elif larger(plan, known.provenance):
            budgets = known.provenance.budget_s, plan.seconds
            self._progress.notice("tuned with --budget {:g}s; goes on with {:g}s".format(*budgets))
        elif length_of(known) == plan.length(key.task.batch):
            return _Before(known=known)
        else:
            self._progress.notice("tuned for a job of another length; the choice is made again")
        return _Before()

    def _tune(
        self, subject: Subject, near: Sequence[Config], before: _Before
    ) -> tuple[Record, SearchResult]:
        """Search and remember; nobody else measures this key meanwhile."""
        from advisor.tuners.environment import bf16_notice
        from advisor.tuners.search.journal import open_study
        from advisor.tuners.search.tuner import Tuner

        facts, studies = subject.facts, self._records.studies
        self._refuse_too_small(facts)
        name = subject.study
        with locked(studies, name), ScratchFolder() as folder:
            study, damage = open_study(studies, name, fresh=before.fresh)
            if damage:
                self._progress.notice(damage)
            scope = self._scope(subject, near, folder)
            seconds = self._plan.seconds
            later_s = min(LOADER_S, LOADER_SHARE * seconds) if subject.space.inputs else 0.0
            clock = Clock(seconds, reserve_s=later_s)
            tuner = Tuner(subject.place, subject.space, study, scope, self._progress, clock)
            self._progress.started(facts, subject.key, subject.space, tuner.known)
            if said := bf16_notice(subject.key.environment.device.kind, subject.task.precisions):
                self._progress.notice(said)
            found = tuner.run()
            if subject.space.inputs and not found.interrupted:
                found = self._with_loader(subject, found, tuner)
            made = self._provenance(facts, name, len(found.trials), tuner.clock.spent_s)
            if not found.complete and made.effort != WITHIN:
                made = dataclasses.replace(made, effort=INTERRUPTED)
            record = _record(subject, found, made)
            anew = before.fresh or before.unfinished
            store = keep(self._records, record, anew, self._progress)
            keep_artifacts(self._records, record, found.artifacts, store, self._progress)
        return record, found

    def _scope(self, subject: Subject, near: Sequence[Config], folder: Path) -> SearchOptions:
        from advisor.tuners.search.tuner import SearchOptions

        plan = self._plan
        return SearchOptions(
            compares=_tolerance(subject.task) > 0,
            baseline=subject.task.baseline,
            trials=plan.trials,
            first=near,
            seed=plan.seed,
            length=plan.length(subject.task.batch),
            modules=subject.facts.modules,
            folder=folder if max_artifacts() else None,
            without=self._without(subject.space),
        )

    def _with_loader(self, subject: Subject, found: SearchResult, tuner: Tuner) -> SearchResult:
        """The loader that feeds the loop's winner, searched for in the same way."""
        from advisor.tuners.search.tuner import tuned_loader

        tuner.clock.release()
        step = next(one.choice.config for one in found.winners if (one.use, one.free) == LOOPS)
        return tuned_loader(subject.place, subject.space, step, found, tuner.clock, self._progress)

    def _without(self, space: Space) -> list[Config]:
        """The baseline without what is measured to tell what it costs; nothing by default."""
        del space
        return []

    def _provenance(self, facts: Facts, study: str, trials: int, seconds: float) -> Provenance:
        from advisor.tuners.environment import host_cpu

        plan = self._plan
        return Provenance(
            created=time.time(),
            seconds=seconds,
            trials=trials,
            advisor=advisor.__version__,
            device_uuid=facts.device_uuid,
            host_cpu=host_cpu(),
            seed=plan.seed,
            study=study,
            budget_s=plan.seconds,
            modules=facts.modules,
            parameters=facts.parameters,
            effort=plan.effort,
            steps=plan.steps or 0,
            duration_s=plan.duration_s or 0.0,
        )

    def _refuse_too_small(self, facts: Facts) -> None:
        if self._plan.seconds < 12 * facts.step_s:
            raise UsageError(
                f"budget {self._plan.seconds:g}s is too small for one trial beside torch's "
                f"default: a step takes {facts.step_s:.2g} s; give at least "
                f"{max(30.0, 60 * facts.step_s):.0f}s"
            )


class _OfTarget(_Tuning):
    """A model on made-up data, in a worker."""

    def __init__(self, task: Task, plan: Plan, records: Records, progress: Progress) -> None:
        from advisor.tuners.environment import default_device, detect
        from advisor.tuners.target import parse

        super().__init__(plan, records, progress)
        self._spec = parse(task.target)
        if task.data:
            parse(task.data, role="data")
        self.device = task.device or default_device()
        self._environment = detect(self.device)
        self._task = task

    @contextlib.contextmanager
    def _subject(self) -> Iterator[Subject]:
        from advisor.tuners.measure.worker.parent import LOAD_S
        from advisor.tuners.search.space import Space

        with self._worker() as worker:
            facts = worker.describe()
            _same_device(self.device, facts.device_uuid)
            key = Key(
                environment=self._environment,
                model=facts.model,
                hooks=facts.hooks,
                task=self._task,
                libraries=facts.libraries,
                threads=facts.threads if self.device == "cpu" else 0,
            )
            batches = _batches(self._task, facts, self._environment.device.memory_gib)
            situation = _situation(key, self._plan, facts, batches)
            data = None
            if self._task.data:
                most_s = min(LOAD_S, max(DATA_LEAST_S, 2 * self._plan.seconds))
                with self._progress.making(self._task.data, most_s):
                    data = worker.describe_data(most_s)
                situation, data = self._fed(situation, data)
            space = Space.of(situation)
            worker.baseline = space.default
            yield Subject(
                place=worker,
                facts=facts,
                key=key,
                target=Target(name=facts.name, origin=self._spec.origin, code=facts.code),
                space=space,
                data=data,
            )

    def _fed(self, situation: SearchContext, data: DataFacts) -> tuple[SearchContext, DataFacts]:
        """What the loader of the data may have, said where that is less than the host has."""
        workers, by_name, lines = loader_limits(data)
        for line in lines:
            self._progress.notice(line)
        situation = dataclasses.replace(
            situation,
            loaded=True,
            workers=workers,
            by_name=by_name,
            any_order=self._task.any_order,
        )
        return situation, dataclasses.replace(data, tensors=0) if by_name else data

    def _worker(self) -> Worker:
        from advisor.tuners.measure.worker.parent import Worker
        from advisor.tuners.measure.worker.wire import WorkerJob

        job = WorkerJob(task=self._task, device=self.device, seed=self._plan.seed)
        return Worker(job, deadline_s=max(30.0, self._plan.seconds))

    def _answers(self, record: Record, subject: Subject) -> bool:
        return not record.key.task.command

    def _known(self, record: Record, subject: Subject) -> Record:
        """The record under the name that it was asked for by, as apply() finds it by that: another
        name, or other code, of what is the same model and the same task."""
        target, asked = subject.target, subject.task
        if (record.target, record.key.task.model_args) == (target, asked.model_args):
            return record
        task = dataclasses.replace(
            record.key.task, target=asked.target, model_args=asked.model_args
        )
        key = dataclasses.replace(record.key, task=task)
        # Of several versions under one name the one that was revised last counts.
        named = dataclasses.replace(record, key=key, target=target, revised=time.time())
        self._records.put(named, revises=record)
        if (record.target.name, record.target.origin) == (target.name, target.origin):
            self._progress.notice(f"what was edited in {target.name} computes the same")
        else:
            self._progress.notice(f"tuned as {record.target.name}; now known as {target.name} too")
        return named


class OfRun(_Tuning):
    """A command as it is, with a pilot inside."""

    def __init__(
        self,
        command: Sequence[str],
        permitted: Mapping[str, Any],
        plan: Plan,
        records: Records,
        progress: Progress,
        show: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(plan, records, progress)
        self._command, self._permitted, self._show = tuple(command), dict(permitted), show

    @contextlib.contextmanager
    def _subject(self) -> Iterator[Subject]:
        from advisor.tuners import knobs

        with self.begun() as run:
            self._seen = seen = run.describe()
            for line in seen.lines():
                self._progress.notice(line)
            key = key_of(seen, self._command, self._permitted)
            task = key.task
            facts = _facts(seen, task, key.environment)
            batches: tuple[int, ...] = (task.batch,)
            if BATCH in run.command.names:
                batches = _batches(task, facts, key.environment.device.memory_gib)
            fed_by_option = bool(set(knobs.INPUT_PIPELINE) & set(run.command.names))
            situation = dataclasses.replace(
                _situation(key, self._plan, facts, batches),
                use=PILOT,
                workers=seen.room if fed_by_option else seen.workers,
                mapped=run.command.names,
                varies=seen.varies,
                own=seen.own,
                # Workers that the script starts itself are none of the pilot's.
                kept=(*seen.kept, *knobs.INPUT_PIPELINE) if fed_by_option else seen.kept,
            )
            space = self.space(situation)
            run.baseline, run.memory = space.default, facts.memory_bytes
            run.tolerance = _tolerance(task)
            self._try_options(run, space)
            yield Subject(
                place=run,
                facts=facts,
                key=key,
                target=Target(name=task.target, origin=""),
                space=space,
            )

    def _answers(self, record: Record, subject: Subject) -> bool:
        """What is put into the words of a command is known of that command alone."""
        command = record.key.task.command
        alike = not subject.task.map or command_digest(command) == command_digest(self._command)
        return bool(command) and alike

    def _known(self, record: Record, subject: Subject) -> Record:
        """The record as it is: what another command gave is told as that one's. Whoever runs this
        one finds it by the model."""
        from advisor.tuners.knobs import WORKERS, described, workers

        if record.target != subject.target:
            self._progress.notice(f"tuned as {record.target.name}, which trains the same")
        then, now = (
            described(Config({WORKERS: workers(config)}), Config())
            for config in (record.baseline.config, self._seen.own)
        )
        if then != now:
            self._progress.notice(
                f"that is over {then} of the script's own, and it has {now} now: what the advice "
                "gains over these is not known; --force measures it"
            )
        return record

    def _without(self, space: Space) -> list[Config]:
        """The script without its own autocast, and without its own compilation."""
        from advisor.tuners.knobs import BY_NAME, COMPILE, FORMATS

        found = []
        for name in (*FORMATS, COMPILE):
            knob, own = BY_NAME[name], self._seen.own.get(name)
            half = own in knob.autocast
            if name in self._seen.kept and own is not None and (half or name == COMPILE):
                found.append(space.default.replace(**{name: knob.default}))
        return found

    def _try_options(self, run: Run, space: Space) -> None:
        """See that options set what they are to, before anything is measured for it.

        Raises:
            UsageError: one does not.
        """
        for name in run.command.names:
            if name not in space.choices:
                raise UsageError(f"map: {name}: the steps are fed by no DataLoader here")
            others = space.choices[name][1:]
            # One that the command gives itself is taken; that of workers may never be needed.
            if others and (name == BATCH or not run.command.given(name)):
                run.try_option(name, others[0])

    def begun(self) -> Run:
        """What is measured, once it is entered."""
        return begun(
            self._command,
            self._records,
            self._progress,
            options=self._permitted.get("map"),
            show=self._show,
        )

    def space(self, situation: SearchContext) -> Space:
        """What may be tried."""
        from advisor.tuners.search.space import Space

        return Space.of(situation)


def begun(
    command: Sequence[str],
    records: Records,
    progress: Progress,
    *,
    options: Mapping[str, Value] | None = None,
    show: Callable[[str], None] | None = None,
) -> Run:
    """A command that is measured once this is entered; what becomes of it is said before.

    Args:
        options: as `Run` takes them.
    """
    from advisor.piloting import INJECTED
    from advisor.tuners.measure.run.guarded_process import measurable
    from advisor.tuners.measure.run.run import Run

    measurable(command)
    log = _log_of(records, tuple(command))
    saved = "are saved" if os.environ.get(KEEP_CHECKPOINTS) else "go to a scratch folder"
    progress.notice(
        f"starts the command and ends it; checkpoints {saved}, reports to wandb, "
        "comet, mlflow and their like are off, other files are written"
    )
    if show is None:
        progress.notice(f"its output: {log}")
    return Run(command, injected=INJECTED, log=log, show=show, options=options)


def key_of(seen: ScriptFacts, command: Sequence[str], permitted: Mapping[str, Any]) -> Key:
    """The key of a run, by what is seen of it and what its user permits."""
    from advisor.tuners.environment import detect

    return Key(
        environment=detect(seen.device),
        model=seen.model,
        task=seen.task(command, dict(permitted)),
        libraries=seen.libraries,
        threads=seen.threads if seen.device == "cpu" else 0,
    )


def _facts(seen: ScriptFacts, task: Task, environment: Environment) -> Facts:
    from advisor.tuners.environment import device_uuid
    from advisor.tuners.measure.worker.wire import Facts

    return Facts(
        name=task.target,
        model=seen.model,
        hooks="",
        code="",
        libraries=seen.libraries,
        family=seen.family,
        modules=seen.modules,
        parameters=seen.parameters,
        convolves=seen.convolves,
        repeats=seen.repeats,
        threads=seen.threads,
        device_uuid=device_uuid(seen.device),
        memory_bytes=memory_of(environment.device),
        peak_bytes=0,
        step_s=0.0,
    )


def memory_of(device: Device) -> int:
    """Bytes of a device's own memory; 0 of a CPU's, which is everybody's."""
    return device.memory_gib * 2**30 if device.kind != "cpu" else 0


def _log_of(records: Records, command: tuple[str, ...]) -> Path:
    """Where what a command prints goes, begun anew. Raises StoreError if there is no such place."""
    folder = records.studies.parent / "runs"
    try:
        make_folder(folder)
    except OSError as exc:
        raise StoreError(f"{folder}: {exc.strerror}; set ADVISOR_CACHE to another folder") from exc
    file = folder / f"{fingerprint(list(command))[:12]}.log"
    file.unlink(missing_ok=True)
    return file


def _situation(key: Key, plan: Plan, facts: Facts, batches: tuple[int, ...]) -> SearchContext:
    """What decides which values make sense here."""
    from advisor.tuners import fp8
    from advisor.tuners.environment import cpu_has_bf16, threads_set
    from advisor.tuners.knobs import SearchContext

    task, device, much = key.task, key.environment.device, plan.much
    return SearchContext(
        device=device.kind,
        capability=device.compute_capability,
        cpu_bf16=cpu_has_bf16(),
        cores=device.multiprocessors,
        threads=facts.threads,
        threads_set=threads_set(),
        dimensions=len(task.shapes[0]),
        convolves=facts.convolves,
        repeats=facts.repeats,
        training=task.mode == "train",
        fp8=facts.wide > 0 and fp8.installed(),
        batches=batches,
        deterministic=task.deterministic,
        precisions=task.precisions,
        full=much.full,
        compiles=task.compile,
        quick=much.quick,
        step_graph=task.step_graph,
    )


def _of_fp8(subject: Subject) -> str:
    """Whether fp8, where it is permitted, is tried, or why not."""
    from advisor.tuners import fp8

    task, wide = subject.task, subject.facts.wide
    why = fp8.lacking(subject.key.environment.device.compute_capability, wide)
    if task.command or task.mode != "train":
        why = "no layer of a run is replaced" if task.command else "it is for training"
    if why:
        return f"fp8 is not tried: {why}"
    return f"{wide} linear layer{'s' * (wide != 1)} may be tried in fp8. {fp8.CAVEAT}"


def _loaded(task: Task) -> tuple[object, ...]:
    """What a task says of its loader."""
    return task.data, task.data_args, task.any_order


def loader_limits(data: DataFacts) -> tuple[int, bool, list[str]]:
    """Workers that a loader of the data may have here, whether they share memory by its name, and
    what must be said of that."""
    from advisor.tuners import worker_limits

    of = f"data {data.name!r}:"
    if data.held_open:
        held = data.held_open[0]
        what = "a connection" if held.startswith("socket:") else held
        return (
            0,
            False,
            [
                f"{of} it holds {what} open, which forked workers would share: no worker is tried. "
                "Open it in __getitem__ or __iter__, where it is not open yet"
            ],
        )
    most, lines = min(worker_limits.cores(), worker_limits.MAX_WORKERS), []
    if not data.shared_out and most > 1:
        most = 1
        lines.append(
            f"{of} an IterableDataset that each worker would read as a whole: one worker at most "
            "is tried. Share it out by torch.utils.data.get_worker_info() to have more"
        )
    tensors, lacking = data.tensors, ""
    by_name = not worker_limits.has_files(tensors, most)
    if by_name:
        tensors = 0
        lines.append(
            f"{of} {data.tensors:,} tensors of a batch are files for workers to hand over, more "
            "than this process may open (ulimit -n): they share memory by name, as set_flags() says"
        )
    if 0 < data.batches < most:
        most = data.batches
        lines.append(
            f"{of} its epoch has {most} batch{'es' * (most != 1)}: {most} "
            f"worker{'s' * (most != 1)} at most, as others would have none"
        )
    while most and (why := worker_limits.shortage(data.batch_bytes, tensors, most)):
        most, lacking = most - 1, why
    if lacking:
        lines.append(f"{of} {most} worker{'s' * (most != 1)} at most: {lacking}")
    return most, by_name, lines


def _tolerance(task: Task) -> float:
    """Of the comparison with fp32; 0 for none."""
    return task.tolerance if task.mode == "train" else 0.0


def _record(subject: Subject, decided: SearchResult, made: Provenance) -> Record:
    return Record(
        key=subject.key,
        target=subject.target,
        baseline=decided.baseline,
        winners=decided.winners,
        input=decided.input,
        trials=decided.trials,
        raced=decided.raced,
        provenance=made,
        family=subject.facts.family,
    )


def _first_guesses(
    subject: Subject, akin: Sequence[SimilarRecord], progress: Progress
) -> list[Config]:
    """What was best for the nearest records: stale ones, other shapes and devices, the family."""
    chosen: dict[Config, SimilarRecord] = {}
    key = subject.key
    for one in akin:
        default = one.record.baseline.config.knobs
        for winner in reversed(one.record.winners):
            config = winner.choice.config.knobs
            if config != default and len(chosen) < MOST_KIN:
                chosen.setdefault(config, one)
    near = ((o.record.id, o.what) for o in chosen.values() if o.record.key.id != key.id)
    for record_id, what in dict.fromkeys(near):
        progress.notice(f"tried first: the advice of record {record_id} ({what})")
    return list(chosen)


def _same_device(where: str, seen: str) -> None:
    """The device that was measured must be the one that the key names."""
    from advisor.tuners.environment import device_uuid

    named = device_uuid(where)
    if seen and named and seen.lower() != named.lower():
        raise UsageError(
            f"device {where!r}: the driver's order of the GPUs is not CUDA's here; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, in training too"
        )


def _batches(task: Task, facts: Facts, memory_gib: int) -> tuple[int, ...]:
    """Batch sizes to try, the user's first."""
    from advisor.tuners.search.space import ladder

    if task.batches is not None:
        return (task.batch, *task.batches)
    per_sample = max(1.0, facts.peak_bytes / task.batch)
    if facts.memory_bytes:
        # Reduced precision needs down to half of the default's memory.
        memory = task.max_memory or facts.memory_bytes
        return ladder(task.batch, fits=int(2 * memory / per_sample))
    memory = min(task.max_memory or memory_gib * 2**30, memory_gib * 2**30) // 2
    return ladder(task.batch, fits=min(4 * task.batch, int(memory / per_sample)))
