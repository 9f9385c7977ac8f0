"""tune(): measure, choose and remember."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import advisor
from advisor.cache.arguments import (
    MODES,
    Shapes,
    check,
    check_length,
    check_number,
    mix_of,
    parse_bytes,
    parse_shapes,
)
from advisor.cache.config import Config, Value
from advisor.cache.key import Key, Permits, Sample
from advisor.cache.match import Kin, kin
from advisor.cache.record import Provenance, Record, Target
from advisor.cache.records import Records
from advisor.cache.stores import Remote
from advisor.cache.stores.filesystem import make_folder
from advisor.errors import (
    Busy,
    StoreDamaged,
    StoreError,
    UsageError,
)
from advisor.finding.horizon import length_of
from advisor.finding.lookups import set_up_logging
from advisor.opening import Cache, open_records
from advisor.tuners.length import Length
from advisor.tuners.search.effort import DEFAULT, EFFORTS, suffices
from advisor.tuners.search.plan import Plan, Progress
from advisor.tuners.search.verdict import decide

if TYPE_CHECKING:
    from advisor.tuners.measure.worker.wire import Facts
    from advisor.tuners.search.space import Space
    from advisor.tuners.search.study import Search

LEAST_S = 3.0
"""A smaller budget is refused: the turns of a race between two configs alone take two seconds."""
MOST_S = 30 * 86400.0
MOST_KIN = 2
"""Configs of near records that are tried first."""
RESERVED = 0.4
"""Share of the budget kept for the final race and the input pipeline."""
DEAR_SHARE = 2 / 3
"""Of the search time left, what one value of a dear knob may take before it is given up."""
DEAR_LEAST_S = 45.0
"""Compiling ResNet-50 takes up to 32 s on an H200 (FACTS): no deadline is shorter than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What `tune` found. `known`: it was there already and nothing was measured."""

    record: Record
    known: bool


def tune(
    target: str,
    shape: Shapes,
    *,
    dtype: str = "float32",
    vocab: int = 1000,
    mode: str = "train",
    device: str | None = None,
    optimizer: str = "sgd",
    model_args: Mapping[str, Value] | None = None,
    effort: str = DEFAULT,
    budget_s: float | None = None,
    trials: int | None = None,
    steps: int | None = None,
    duration_s: float | None = None,
    precisions: Sequence[str] | None = None,
    deterministic: bool = False,
    max_memory: int | str | None = None,
    batches: Sequence[int] | None = None,
    fixed_batch: bool = False,
    compile: bool = True,
    step_graph: bool = True,
    verify: bool = True,
    tolerance: float = 0.02,
    force: bool = False,
    cache: Cache = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tuned:
    """Measure, choose and remember; goes on where an interrupted call of the same kind stopped.

    Args:
        target: model.py, model.py:Net, package.module:factory or torchvision:NAME.
        shape: of one batch; the first number is the user's batch. A list of two to eight for a job
            whose inputs alternate between them: they are measured as one mix, at these batches.
        dtype: of the input. `vocab` bounds integer inputs.
        mode: 'train' or 'infer'.
        device: 'cuda:0' or 'cpu'; default: the first CUDA device, else the CPU.
        optimizer: 'sgd' or 'adamw', for mode 'train'.
        model_args: keyword arguments of the factory.
        effort: 'quick' (a minute, nothing compiled), 'normal' (five) or 'exhaustive' (an hour: also
            what is known to be bad, as cuDNN off, or takes minutes, as max-autotune).
        budget_s: wall seconds, worker start not counted; default: the effort's.
        trials: search trials at most.
        steps: of the job that the advice is for, at the user's batch; `duration_s`: its seconds
            instead. What is paid before the first step is counted in. Default: the steady state.
        precisions: those permitted; default: default, tf32, bf16, fp16.
        deterministic: only deterministic configs.
        max_memory: bytes or '40GiB': the limit within which configs must run.
        batches: batch sizes to try beside the user's; `fixed_batch` for none.
        compile: try torch.compile on the leaders.
        step_graph: try one CUDA graph over the whole step, for scripts that use advice.capture.
        verify: hold what is about to become advice against strict fp32 (training only).
        tolerance: distance of its loss curve that is always allowed, as a fraction of fp32's loss.
        force: measure again although the key is tuned.
        cache: store URL, or several: the record goes to the first that can be written. Default:
            $ADVISOR_CACHE, else [tool.advisor] cache in pyproject.toml, else the user's folder.
        seed: of all randomness.

    Raises:
        UsageError: an argument is wrong. TargetFailed: the user's code raised.
        WorkerError: torch's default cannot be measured. StoreError: the store cannot be written.
        Busy: another process tunes the same key.
    """
    set_up_logging()
    progress = progress or Progress()
    # What can be refused without torch, which takes seconds to import, is refused first.
    shapes = parse_shapes(shape)
    shape = shapes[0]
    if len(shapes) > 1 and batches:
        raise UsageError("batches: a mix of shapes is tuned at the batches given; leave them out")
    check("mode", mode, MODES)
    for batch in batches or ():
        check_number("batch", batch)
    if trials is not None:
        check_number("trials", trials)
    check_number("vocab", vocab)
    check_number("seed", seed, least=0)
    check("effort", effort, tuple(EFFORTS))
    check_length(steps, duration_s)
    length = None
    if steps or duration_s:
        length = Length(batch=shape[0], steps=steps or 0, seconds=duration_s or 0.0)
    much = EFFORTS[effort]
    budget_s = much.budget_s if budget_s is None else budget_s
    if not LEAST_S <= budget_s <= MOST_S:
        raise UsageError(
            f"budget {budget_s:g}s: expected from {LEAST_S:g}s, which is the shortest race, to 30 "
            "days; give at least 30s"
        )
    if not 0 < tolerance < 1:
        raise UsageError(f"tolerance {tolerance:g}: expected a fraction such as 0.02")
    limit = parse_bytes(max_memory)
    arguments = Config(dict(model_args or {}))
    records = open_records(cache, fallback=True)

    from advisor.tuners.environment import cpu_has_bf16, default_device, detect, host_cpu
    from advisor.tuners.knobs import PERMITTED, PRECISIONS, Situation
    from advisor.tuners.measure.worker.parent import Worker
    from advisor.tuners.measure.worker.wire import Job
    from advisor.tuners.measure.workload import DTYPES, OPTIMIZERS
    from advisor.tuners.search.space import Space
    from advisor.tuners.target import parse

    check("optimizer", optimizer, tuple(OPTIMIZERS))
    check("dtype", dtype, DTYPES)
    for precision in precisions or ():
        check("precision", precision, PRECISIONS)
    spec = parse(target)
    where = device or default_device()
    environment = detect(where)
    _check_writable(records, progress)
    permits = Permits(
        deterministic=deterministic,
        precisions=tuple(p for p in PRECISIONS if p in (precisions or PERMITTED)),
    )
    job = Job(
        target=target,
        arguments=dict(arguments),
        shape=tuple(shape[1:]),
        dtype=dtype,
        vocab=vocab,
        batch=shape[0],
        mode=mode,
        optimizer=optimizer,
        deterministic=deterministic,
        device=where,
        max_memory=limit,
        seed=seed,
        mix=shapes if len(shapes) > 1 else (),
    )
    with Worker(job, deadline_s=max(30.0, budget_s / 3)) as worker:
        began = time.monotonic()
        facts = worker.describe()
        process_s = time.monotonic() - began
        _same_device(where, facts.device_uuid)
        key = Key(
            environment=environment,
            model=facts.model,
            sample=Sample(shape=job.shape, dtype=dtype),
            mode=mode,
            optimizer=optimizer if mode == "train" else "",
            world_size=1,
            permits=permits,
            mix=mix_of(shapes),
        )
        named = Target(name=facts.name, origin=spec.origin, arguments=arguments)
        akin = records.all()  # of other models too: what is near is worth trying first
        for fault in records.unreachable:
            progress.notice(f"{fault}; its records are not looked at")
        known = sorted(
            (r for r in akin if r.id == key.id),
            key=lambda r: (r.batch != shape[0], r.target.name != facts.name),
        )
        if known and not force and known[0].batch == shape[0] and _within(known[0], limit):
            if known[0].stale:
                progress.notice(f"marked stale ({known[0].stale}); measured again")
                force = True
            elif not suffices(known[0].provenance.effort, effort):
                progress.notice(
                    f"tuned with --effort {known[0].provenance.effort}; goes on with {effort}"
                )
            elif length_of(known[0]) == length:
                return Tuned(record=known[0], known=True)
            else:
                progress.notice("tuned for a job of another length; the choice is made again")
        here = Situation(
            device=environment.device.kind,
            capability=environment.device.compute_capability,
            cpu_bf16=cpu_has_bf16(),
            cores=environment.device.multiprocessors,
            threads=facts.threads,
            dimensions=len(shape),
            convolves=facts.convolves,
            training=mode == "train",
            batches=_batches(facts, environment.device.memory_gib, job, batches, fixed_batch),
            deterministic=deterministic,
            precisions=permits.precisions,
            full=much.full,
            compilers=(
                _compilers(environment.device.kind, much.full)
                if compile and much.compiles and not deterministic
                else ()
            ),
            step_graph=step_graph,
        )
        return Tuned(
            record=_tune(
                worker,
                Space.of(here),
                key,
                named,
                facts,
                records,
                _first_guesses(key, facts.family, akin, progress),
                Plan(
                    effort=effort,
                    length=length,
                    process_s=process_s,
                    memory=min(limit or facts.memory_bytes, facts.memory_bytes or limit),
                    budget_s=budget_s,
                    trials=trials,
                    seed=seed,
                    force=force,
                    host_cpu=host_cpu(),
                    vocab=vocab,
                    tolerance=tolerance if verify and mode == "train" else None,
                ),
                progress,
            ),
            known=False,
        )


def _tune(
    worker: Any,
    space: Space,
    key: Key,
    target: Target,
    facts: Facts,
    records: Records,
    first: Sequence[Config],
    plan: Plan,
    progress: Progress,
) -> Record:
    from advisor.tuners.search.study import Search, open_study

    budget_s = plan.budget_s
    if budget_s < 12 * facts.step_s:
        raise UsageError(
            f"budget {budget_s:g}s is too small for one trial beside torch's default: a step takes "
            f"{facts.step_s:.2g} s; give at least {max(30.0, 60 * facts.step_s):.0f}s"
        )
    user = space.batches[0]
    began = time.monotonic()
    name = f"{key.id}-{user}-{space.digest}"
    folder = records.studies
    with locked(folder, name):
        study = open_study(folder, name, fresh=plan.force)
        search = Search(
            worker,
            space,
            study,
            share_s=min(2.0, max(0.3, budget_s / 120)),
            budget_s=budget_s * (1 - RESERVED),
            limit=plan.trials,
            seed=plan.seed,
            memory=plan.memory,
            first=[near for config in first if (near := _offered(space, config))],
            on_trial=lambda trial: progress.tried(trial, search.spent_s),
        )
        progress.started(facts, key, space, len(search.trials))
        worker.limit = lambda config: _dear_limit(space, config, search)
        trials = search.run()
        worker.limit = lambda _config: None
        if len(trials) == 1 and plan.trials != 1 and space.is_choice:
            raise UsageError(
                f"budget {budget_s:g}s is too small: measuring torch's default alone took "
                f"{search.spent_s:.0f} s of it; give at least {5 * search.spent_s:.0f}s"
            )
        decided = decide(worker, space, search, plan, progress)
        record = Record(
            key=key,
            target=target,
            batch=user,
            baseline=decided.baseline,
            at_batch=decided.at_batch,
            free=decided.free,
            input=decided.input,
            trials=decided.trials,
            raced=decided.raced,
            provenance=Provenance(
                created=time.time(),
                seconds=time.monotonic() - began,
                trials=len(trials),
                advisor=advisor.__version__,
                device_uuid=facts.device_uuid,
                host_cpu=plan.host_cpu,
                seed=plan.seed,
                study=name,
                budget_s=budget_s,
                modules=facts.modules,
                parameters=facts.parameters,
                vocab=plan.vocab,
                effort=plan.effort,
                steps=plan.length.steps if plan.length else 0,
                duration_s=plan.length.seconds if plan.length else 0.0,
            ),
            family=facts.family,
        )
        _keep(records, record, plan, progress)
    return record


def _keep(records: Records, record: Record, plan: Plan, progress: Progress) -> None:
    """Put it where it can be put, and say where that is if it is not where it should be.

    What is measured anew on purpose counts there, also where there was a record of more effort.
    """
    before = records.versions(record) if plan.force else []
    kept = records.put(record)
    records.remove((store, name) for store, name in before if store is kept)
    passed_over = records.stores[: records.stores.index(kept)]
    for store, fault in zip(passed_over, records.unreachable, strict=True):
        if isinstance(store, Remote):
            progress.warning(
                f"{fault}; the record is kept in {kept.url}. To push it later: "
                f"advisor sync {shlex.quote(kept.url)} {shlex.quote(store.url)}"
            )


def _first_guesses(
    key: Key, family: str, records: Sequence[Record], progress: Progress
) -> list[Config]:
    """What was best for the nearest records: stale ones, other shapes and devices, the family."""
    chosen: dict[Config, Kin] = {}
    for one in kin(key, family, records):
        default = one.record.baseline.config.without("batch_size")
        for choice in filter(None, (one.record.at_batch, one.record.free)):
            config = choice.config.without("batch_size")
            if config != default and len(chosen) < MOST_KIN:
                chosen.setdefault(config, one)
    near = ((o.record.id, o.what) for o in chosen.values() if o.record.id != key.id)
    for record_id, what in dict.fromkeys(near):
        progress.notice(f"tried first: the advice of record {record_id} ({what})")
    return list(chosen)


def _offered(space: Space, config: Config) -> Config | None:
    """A config of elsewhere in this space, at the user's batch; None if nothing of it is here."""
    known = {name: v for name, v in config.items() if v in space.choices.get(name, ())}
    found = space.default | known | {"batch_size": space.batches[0]}
    return found if space.holds(found) and found != space.default else None


def _within(record: Record, limit: int) -> bool:
    """Whether the advice of a record keeps to a memory limit; 0 is none."""
    chosen = [record.at_batch] if record.free is None else [record.at_batch, record.free]
    return limit == 0 or all(choice.peak_bytes <= limit for choice in chosen)


def forget(records: Records, record: Record) -> None:
    """Remove a record and the studies behind it, so that tuning again measures again.

    Raises:
        Busy: another process tunes the same key. StoreError: the store cannot be written.
    """
    for study in records.studies.glob(f"{record.id}-*.journal"):
        with locked(study.parent, study.stem):
            study.unlink(missing_ok=True)
    records.delete(record)


def _dear_limit(space: Space, config: Config, search: Search) -> float | None:
    """A dear knob's own deadline, so that one value that hangs does not take the others' time."""
    if all(config.get(name) == space.default[name] for name in space.dear):
        return None
    return max(DEAR_LEAST_S, DEAR_SHARE * search.left_s)


def _check_writable(records: Records, progress: Progress) -> None:
    """Before anything is measured: some store takes the record. A damaged one is moved aside.

    Raises:
        StoreError: none can be written.
    """
    failed: StoreError | None = None
    for store in records.stores:
        try:
            store.check_writable()
        except StoreDamaged as exc:
            aside = store.set_aside()
            progress.notice(
                f"the store was damaged ({exc}); it is now in {aside}, a new one is begun"
            )
            return
        except StoreError as exc:
            failed = failed or exc
        else:
            return
    if failed is not None:
        raise failed


def _same_device(where: str, seen: str) -> None:
    """The device that was measured must be the one that the key names."""
    from advisor.tuners.environment import device_uuid

    named = device_uuid(where)
    if seen and named and seen.lower() != named.lower():
        raise UsageError(
            f"device {where!r}: the driver's order of the GPUs is not CUDA's here; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, in training too"
        )


def _compilers(kind: str, full: bool) -> tuple[str, ...]:
    """The ways to compile that work here: Triton comes with CUDA; the CPU needs a C++ compiler."""
    from advisor.tuners.knobs import COMPILE_MODES, COMPILE_MODES_FULL

    if kind == "cuda":
        return COMPILE_MODES_FULL if full else COMPILE_MODES
    return ("default",) if shutil.which(os.environ.get("CXX", "g++")) else ()


def _batches(
    facts: Facts, memory_gib: int, job: Any, asked: Sequence[int] | None, fixed: bool
) -> tuple[int, ...]:
    from advisor.tuners.search.space import ladder

    if fixed or job.mix:
        return (job.batch,)
    if asked is not None:
        return (job.batch, *sorted(set(asked) - {job.batch}))
    per_sample = max(1.0, facts.peak_bytes / job.batch)
    if facts.memory_bytes:
        # Reduced precision needs down to half of the default's memory.
        memory = job.max_memory or facts.memory_bytes
        return ladder(job.batch, fits=int(2 * memory / per_sample))
    memory = min(job.max_memory or memory_gib * 2**30, memory_gib * 2**30) // 2
    return ladder(job.batch, fits=min(4 * job.batch, int(memory / per_sample)))


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """While no other process measures the study `name`.

    Raises:
        Busy: one does. StoreError: the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / f"{name}.lock")
    try:
        make_folder(folder)
        lock.acquire(timeout=0)
    except Timeout as exc:
        raise Busy("another advisor tune measures this very key now; wait for it") from exc
    except OSError as exc:
        raise StoreError(
            f"cache {folder.parent}: {exc.strerror or exc}; point --cache or ADVISOR_CACHE to "
            "another folder"
        ) from exc
    try:
        yield
    finally:
        lock.release()
