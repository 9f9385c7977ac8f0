"""The workloads that advisor measures: a model on made-up data, or a command that trains."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from advisor.bootstrap import INJECTED
from advisor.cache.config import BATCH, Config, Value
from advisor.cache.key import Device, Environment, Key, fingerprint
from advisor.cache.match import compare
from advisor.cache.record import PILOT, Record, Target
from advisor.cache.records import Records
from advisor.cache.shown import size
from advisor.cache.stores.filesystem import make_folder
from advisor.cache.task import Task
from advisor.command_snippets import tune_again
from advisor.errors import StoreError, TargetError, UsageError
from advisor.tuners import environment, fp8, worker_limits
from advisor.tuners.act.pilot.parts import size_of
from advisor.tuners.act.pilot.protocol import KEEP_CHECKPOINTS
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.knobs import (
    BF16_REDUCE,
    BY_NAME,
    COMPILE,
    FORMATS,
    INPUT_PIPELINE,
    OFFLOAD,
    SAVING,
    SearchContext,
    described,
    needs_comparison,
)
from advisor.tuners.measure.run import run as runs
from advisor.tuners.measure.run.guarded_process import measurable
from advisor.tuners.measure.runner import Runner
from advisor.tuners.measure.worker import parent
from advisor.tuners.measure.worker.wire import CHANGED, DataFacts, Facts, WorkerJob
from advisor.tuners.search.plan import Plan, Progress
from advisor.tuners.search.space import Space, ladder
from advisor.tuners.target import parse

DATA_S = 60.0  # timeout to create a dataset, in seconds; twice the budget if that is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWorkload:
    """A workload that has made its first steps. `seen`: of a run. `online`: the run continues after
    the search. `frees_batch`: a run of which other batches are measured too."""

    runner: Runner
    facts: Facts
    key: Key
    target: Target
    seen: ScriptFacts | None = None
    online: bool = False
    frees_batch: runs.Run | None = None

    @property
    def task(self) -> Task:
        return self.key.task


class TargetWorkload:
    """A model on made-up data, in a worker process. The caller locks `words` and `device` while it
    measures."""

    def __init__(self, task: Task) -> None:
        self._spec = parse(task.target)
        if task.data:
            parse(task.data, role="data")
        self.words, self.device = (task.target,), task.device or environment.default_device()
        self._task, self._environment = task, environment.detect(self.device)

    @contextlib.contextmanager
    def open(
        self, records: Records, progress: Progress, plan: Plan, record: Record | None = None
    ) -> Iterator[OpenWorkload]:
        """Context manager: starts the workload, waits for its first steps, and ends the process.
        Raises UsageError unless the workload is the one of `record`."""
        known = () if record is None else (record.key.model, record.key.hooks)
        job = WorkerJob(task=self._task, device=self.device, seed=plan.seed, known=known)
        with parent.Worker(job, deadline_s=max(30.0, plan.seconds)) as worker:
            try:
                facts = worker.describe()
            except TargetError as exc:
                if record is None or CHANGED not in str(exc):
                    raise
                raise UsageError(f"record {record.id}: {exc}; run: {tune_again(record)}") from exc
            expected = environment.device_uuid(self.device)
            if facts.device_uuid and expected and facts.device_uuid.lower() != expected.lower():
                raise UsageError(
                    f"device {self.device!r}: the driver and CUDA number the GPUs differently; set "
                    "CUDA_DEVICE_ORDER=PCI_BUS_ID, in training too"
                )
            key = _key(self._task, self._environment, facts, facts.hooks)
            target = Target(name=facts.name, origin=self._spec.origin, code=facts.code)
            yield OpenWorkload(runner=worker, facts=facts, key=key, target=target)

    def space(self, opened: OpenWorkload, plan: Plan, progress: Progress) -> Space:
        """The search space; its default becomes the runner's baseline."""
        task, context = self._task, _search_context(opened, plan)
        if task.data:
            most_s = min(parent.LOAD_S, max(DATA_S, 2 * plan.seconds))
            progress.notice(
                f"data {task.data!r}: creating the dataset and a batch; advisor gives up after "
                f"{most_s:g} s"
            )
            data = cast(parent.Worker, opened.runner).describe_data(most_s)
            workers, by_name, lines = loader_limits(data)
            for line in lines:
                progress.notice(line)
            limits: dict[str, Any] = {"loaded": True, "workers": workers, "by_name": by_name}
            context = dataclasses.replace(context, any_order=task.any_order, **limits)
        space = Space.of(context)
        opened.runner.baseline = space.default
        return space


class RunWorkload:
    """The user's own command, with a pilot inside. Its methods are those of TargetWorkload.

    Args:
        permitted: fields of a Task that limit the changes.
        options: options of the command, by the knob that they set; default: those in `permitted`.
        show: called in another thread with each piece of the command's output.
        attached: a running script to tune; then no command is started.
        limited: raise UsageError if the command trains on the CPU and does not run out of memory.
    """

    def __init__(
        self,
        command: Sequence[str],
        permitted: Mapping[str, Any],
        *,
        options: Mapping[str, Value] | None = None,
        show: Callable[[str], None] | None = None,
        attached: runs.AttachedRun | None = None,
        limited: bool = False,
    ) -> None:
        self.words, self.permitted = tuple(command), dict(permitted)
        self.device: str | None = None
        self._options = self.permitted.get("map") if options is None else options
        self._show, self._attached, self._limited = show, attached, limited
        self.saves = False  # memory, from the first start on
        self.frees_batch = False  # other batches are measured too

    def _start(self, records: Records, progress: Progress) -> runs.Run:
        """A run that `describe` will start. Reports at once what the run will do to files."""
        if self._attached is not None:
            return self._attached
        measurable(self.words)
        log = new_log(records, self.words)
        saved = "are saved" if os.environ.get(KEEP_CHECKPOINTS) else "go to a scratch folder"
        progress.notice(
            f"starts the command and ends it when done; its checkpoints {saved}; reports to "
            "wandb, comet, mlflow and similar are off; other files are written as usual"
        )
        if self._show is None:
            progress.notice(f"output of the command: {log}")
        return runs.Run(
            self.words,
            injected=INJECTED,
            log=log,
            show=self._show,
            options=self._options,
            max_memory=self.permitted.get("max_memory", 0),
            saves=self.saves,
        )

    @contextlib.contextmanager
    def open(
        self, records: Records, progress: Progress, plan: Plan, record: Record | None = None
    ) -> Iterator[OpenWorkload]:
        with self._start(records, progress) as run:
            seen = run.describe()
            task = seen.task(self.words, self.permitted)
            key = _key(task, environment.detect(seen.device), seen)
            _check_limit(key.environment.device, self.permitted.get("max_memory", 0))
            if self._limited and key.environment.device.kind == "cpu" and OFFLOAD not in seen.own:
                raise UsageError(
                    "the command trains on the CPU and fits; for a faster config: advisor tune"
                )
            if OFFLOAD in seen.own:
                how = described(seen.own.only(*SAVING), Config())
                progress.notice(
                    f"your unmodified script runs out of memory; with {how} it trains, and that is "
                    "the baseline"
                )
                if run.refusal:
                    progress.notice(f"its blocks are not checkpointed: {run.refusal}")
            if record is not None and (other := _other_run(record, key, seen, run)):
                raise UsageError(f"record {record.id} is not of this run: {other}")
            facts = _facts_of_run(seen, key)
            left = max(0, facts.memory_bytes - size_of(seen.memory, "others"))
            run.memory = self.permitted.get("max_memory") or left
            run.tolerance = task.tolerance if task.mode == "train" else 0.0
            yield OpenWorkload(
                runner=run,
                facts=facts,
                key=key,
                target=Target(name=task.target, origin=""),
                seen=seen,
                online=self._attached is not None,
                frees_batch=run if self.frees_batch else None,
            )

    def space(self, opened: OpenWorkload, plan: Plan, progress: Progress) -> Space:
        run, seen = cast(runs.Run, opened.runner), cast(ScriptFacts, opened.seen)
        for line in seen.lines():
            progress.notice(line)
        mapped = run.command.names
        feeds = bool(set(INPUT_PIPELINE) & set(mapped))
        context = dataclasses.replace(
            _search_context(opened, plan),
            use=PILOT,
            workers=seen.room if feeds else seen.workers,
            mapped=mapped,
            varies=seen.varies,
            wrapped=tuple({*seen.wrapped} - ({BF16_REDUCE} if not opened.task.allow else set())),
            sharded=seen.sharded,
            own=seen.own,
            # The pilot does not change workers that the script itself starts by an option.
            kept=(*seen.kept, *INPUT_PIPELINE) if feeds else seen.kept,
        )
        if BATCH not in mapped:
            context = dataclasses.replace(context, batches=(opened.task.batch,))
        space = Space.of(context)
        if opened.online:
            # CUDA graphs fail if a script reads their outputs too late.
            space.leave_out(lambda name, value: value in BY_NAME[name].graphs)
            if seen.processes > 1 and opened.task.tolerance:  # nothing can be compared
                own = space.default
                space.leave_out(lambda n, v: needs_comparison(own.replace(**{n: v}), own))
        run.baseline = space.default
        _try_options(run, space)
        return space


AnyWorkload = TargetWorkload | RunWorkload


def _check_limit(device: Device, most_bytes: int) -> None:
    """Raise UsageError if a run's memory cannot be limited to `most_bytes`; 0: no limit."""
    if most_bytes and device.kind != "cuda":
        raise UsageError(
            f"memory {size(most_bytes)}: the command trains on the CPU, whose memory advisor does "
            "not limit; leave it out"
        )
    if most_bytes > (has := device.memory_gib * 2**30):
        raise UsageError(f"memory {size(most_bytes)}: more than the {size(has)} of {device.name}")


def _key(task: Task, where: Environment, seen: Facts | ScriptFacts, hooks: str = "") -> Key:
    return Key(
        environment=where,
        model=seen.model,
        hooks=hooks,
        task=task,
        libraries=seen.libraries,
        threads=seen.threads if where.device.kind == "cpu" else 0,
        interconnect=seen.interconnect if isinstance(seen, ScriptFacts) else "",
    )


def _other_run(record: Record, key: Key, seen: ScriptFacts, run: runs.Run) -> str:
    """Why a record is not of this run, or why this run cannot use its loader settings (which are
    not part of the key); else ''."""
    kind, differs = compare(key, record.key)
    if key.task.batch != record.batch:
        return f"batch {record.batch} -> {key.task.batch}"
    if kind == "miss":
        return "; ".join(map(str, differs))
    feeds = record.winner(record.use).config.changed(record.baseline.config).only(*INPUT_PIPELINE)
    if not feeds.without(*run.command.names) or seen.workers:
        return ""
    why = "; ".join(seen.lines()) or "its steps are fed by no DataLoader"
    return f"the record has {described(feeds, Config())}, not possible in this run ({why})"


def _facts_of_run(seen: ScriptFacts, key: Key) -> Facts:
    names, device = (one.name for one in dataclasses.fields(Facts)), key.environment.device
    return Facts(
        name=key.task.target,
        hooks="",
        code="",
        device_uuid=environment.device_uuid(seen.device),
        # A CPU shares the host's memory.
        memory_bytes=device.memory_gib * 2**30 if device.kind != "cpu" else 0,
        peak_bytes=0,
        step_s=0.0,
        **{name: getattr(seen, name) for name in names if hasattr(seen, name)},
    )


def new_log(records: Records, command: tuple[str, ...]) -> Path:
    """The path of a new log for a command's output. Removes the command's older log. Raises
    StoreError if the folder cannot be created."""
    folder = records.studies.parent / "runs"
    try:
        make_folder(folder)
    except OSError as exc:
        raise StoreError(f"{folder}: {exc.strerror}; give another folder as --cache") from exc
    file = folder / f"{fingerprint([str(Path.cwd()), *command])[:12]}.log"
    file.unlink(missing_ok=True)
    return file


def without_own(
    opened: OpenWorkload, default: Config, names: Sequence[str] = (*FORMATS, COMPILE)
) -> list[Config]:
    """The baseline without the script's own autocast, and without its own compilation, to measure
    their cost; [] for an online run. `names`: the knobs that are undone."""
    seen = opened.seen
    if seen is None or opened.online:
        return []
    return [
        default.replace(**{name: BY_NAME[name].default})
        for name in names
        if name in seen.kept and (own := seen.own.get(name)) is not None
        if own in BY_NAME[name].autocast or name not in FORMATS
    ]


def _try_options(run: runs.Run, space: Space) -> None:
    """Raise UsageError if an option of the command does not set the knob that --map names."""
    for name in run.command.names:
        if name not in space.choices:
            raise UsageError(f"map: {name}: no DataLoader feeds the steps of this run")
        others = space.choices[name][1:]
        # Workers may never be needed: their option is tried only if the command lacks it.
        if others and (name == BATCH or not run.command.given(name)):
            run.try_option(name, others[0])


def _search_context(opened: OpenWorkload, plan: Plan) -> SearchContext:
    task, facts, much = opened.task, opened.facts, plan.much
    device = opened.key.environment.device
    return SearchContext(
        device=device.kind,
        capability=device.compute_capability,
        cpu_bf16=environment.cpu_has_bf16(),
        cores=device.multiprocessors,
        threads=facts.threads,
        threads_set=environment.threads_set(),
        dimensions=len(task.shapes[0]),
        convolves=facts.convolves,
        repeats=facts.repeats,
        training=task.mode == "train",
        fp8=facts.wide > 0 and fp8.installed(),
        batches=_batches(task, facts, device.memory_gib * 2**30),
        deterministic=task.deterministic,
        precisions=task.precisions,
        full=much.full,
        compiles=task.compile,
        quick=much.quick,
        step_graph=task.step_graph,
    )


def _batches(task: Task, facts: Facts, memory_bytes: int) -> tuple[int, ...]:
    """Batch sizes to try, the user's first."""
    if task.batches is not None:
        return (task.batch, *task.batches)
    per_sample = max(1.0, facts.peak_bytes / task.batch)
    if facts.memory_bytes:
        # Reduced precision may need only half of the default's memory.
        memory = task.max_memory or facts.memory_bytes
        return ladder(task.batch, fits=int(2 * memory / per_sample))
    memory = min(task.max_memory or memory_bytes, memory_bytes) // 2
    return ladder(task.batch, fits=min(4 * task.batch, int(memory / per_sample)))


def loader_limits(data: DataFacts) -> tuple[int, bool, list[str]]:
    """(The most workers for a loader of the data, whether they must share memory by name, lines
    that say why)."""
    of = f"data {data.name!r}:"
    if data.held_open:
        held = data.held_open[0]
        what = "a connection" if held.startswith("socket:") else held
        line = (
            f"{of} it holds {what} open, which forked workers would share: no worker is tried. "
            "Open it in __getitem__ or __iter__ instead"
        )
        return 0, False, [line]
    most, lines = min(worker_limits.cores(), worker_limits.MAX_WORKERS), []
    if not data.shared_out and most > 1:
        most = 1
        lines.append(
            f"{of} an IterableDataset that each worker would read as a whole: advisor tries at "
            "most one worker. To try more, divide it by torch.utils.data.get_worker_info()"
        )
    by_name = not worker_limits.has_files(data.tensors, most)
    if by_name:
        lines.append(
            f"{of} {data.tensors:,} tensors of a batch would each be an open file, more than the "
            "limit (ulimit -n): workers share memory by name instead, which set_flags() sets up"
        )
    reason = ""
    if 0 < data.batches < most:
        most = data.batches
        batches = f"{most} batch{'es' * (most != 1)}"
        lines.append(f"{of} its epoch has {batches}: {_workers(most)}, as more would get no batch")
    tensors = 0 if by_name else data.tensors
    while most and (why := worker_limits.shortage(data.batch_bytes, tensors, most)):
        most, reason = most - 1, why
    if reason:
        lines.append(f"{of} {_workers(most)}: {reason}")
    return most, by_name, lines


def _workers(most: int) -> str:
    return f"{most} worker{'s' * (most != 1)} at most"
