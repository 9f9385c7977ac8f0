"""The public functions; the only place where stores and studies meet."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import advisor
from advisor.cache.config import Config, Value
from advisor.cache.key import Key, Permits, Sample
from advisor.cache.match import Difference, Match, Query, best, compare
from advisor.cache.record import Choice, Measurement, Provenance, Record, Target, Trial
from advisor.cache.store import Records, Store, open_store
from advisor.errors import (
    AdvisorError,
    AdvisorWarning,
    Busy,
    NoRecord,
    StoreDamaged,
    UsageError,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from advisor.tuners.advice import Advice
    from advisor.tuners.space import Space
    from advisor.tuners.worker.wire import Facts

_log = logging.getLogger("advisor")

MODES = ("train", "infer")
BUDGET_S = 180.0
LEAST_S = 3.0
"""A smaller budget is refused: the turns of a race between two configs alone take two seconds."""
RESERVED = 0.4
"""Share of the budget kept for the final race and the input pipeline."""
RACE_TURN_S = 0.3
"""Timed seconds of one turn: the more turns, the better a drifting machine cancels out."""


def apply(
    target: str | nn.Module | None = None,
    *,
    shape: Sequence[int] | str | None = None,
    batch: int | str | None = None,
    dtype: str | torch.dtype | None = None,
    mode: str = "train",
    device: str | torch.device | None = None,
    optimizer: str | None = None,
    model_args: Mapping[str, Value] | None = None,
    deterministic: bool | None = None,
    precisions: Sequence[str] | None = None,
    max_memory: int | str | None = None,
    cache: str | None = None,
    strict: bool = False,
) -> Advice:
    """Set the process-wide flags that were found best, and return the advice for the rest.

    Never breaks a run: without a fitting record the advice changes nothing, and one
    AdvisorWarning says why. Creates no CUDA context and starts no process.

    Args:
        target: as given to `advisor tune`, or the model itself; None for what was tuned for the
            running script or a module beside it.
        shape: of one batch, (64, 3, 256, 256) or '64x3x256x256'; its first number is the batch.
        batch: another batch size than shape's, or 'free' for the best one that was found
            (`advice.batch_size` says which).
        dtype: of the input, e.g. 'int64'; default: whatever was tuned.
        mode: 'train' or 'infer'.
        device: 'cuda:0', 'cpu', ...; default: this rank's CUDA device, else the CPU.
        optimizer: 'sgd' or 'adamw'; default: whatever was tuned.
        model_args: what `--model-arg` gave; default: whatever was tuned.
        deterministic: only deterministic configs; implied where the process already asks
            PyTorch for deterministic algorithms.
        precisions: only these precisions.
        max_memory: bytes, or '20GiB': only configs whose measured peak is at most this.
        cache: store URL; default: $ADVISOR_CACHE, else the user's cache folder.
        strict: raise instead of warning.

    Raises:
        AdvisorError: with strict=True, why there is no advice.
    """
    advice = lookup(
        target,
        shape=shape,
        batch=batch,
        dtype=dtype,
        mode=mode,
        device=device,
        optimizer=optimizer,
        model_args=model_args,
        deterministic=deterministic,
        precisions=precisions,
        max_memory=max_memory,
        cache=cache,
        strict=strict,
    )
    advice.set_flags()
    return advice


def lookup(
    target: str | nn.Module | None = None,
    *,
    shape: Sequence[int] | str | None = None,
    batch: int | str | None = None,
    dtype: str | torch.dtype | None = None,
    mode: str = "train",
    device: str | torch.device | None = None,
    optimizer: str | None = None,
    model_args: Mapping[str, Value] | None = None,
    deterministic: bool | None = None,
    precisions: Sequence[str] | None = None,
    max_memory: int | str | None = None,
    cache: str | None = None,
    strict: bool = False,
) -> Advice:
    """As `apply`, without touching any flag of the process."""
    from advisor.tuners.advice import Advice

    _set_up_logging()
    known = _known_batch(shape, batch)
    if os.environ.get("ADVISOR_DISABLE", "") not in ("", "0"):
        return Advice(
            Config(),
            device=_device(device),
            batch_size=known,
            status="disabled",
            reason="ADVISOR_DISABLE is set",
        )
    try:
        asked = _Asked.of(target, shape, batch, dtype, mode, device, optimizer, precisions)
        query = asked.query(_fingerprint(target), deterministic)
        match = _find(Records(open_store(cache)), target, query, model_args)
        if match.record is None:
            raise NoRecord(_why_missed(target, asked.shape, match, query))
        record = match.record
        limits = _Limits(
            batch=known, max_memory=parse_bytes(max_memory), precisions=asked.precisions
        )
        config, reason = _answer(record, limits, free=batch == "free")
    except AdvisorError as exc:
        if strict:
            raise
        _warn(f"{exc}. Training goes on with torch's defaults")
        return Advice(
            Config(),
            device=_device(device),
            batch_size=known,
            status="miss",
            reason=str(exc),
        )
    # Every record is of one process: that a job has more is no reason to measure again.
    changed = [d for d in match.differs if d.field != "world_size"]
    if len(changed) < len(match.differs):
        reason += f"; measured in one process, this job has {query.world_size}"
    if changed:
        listed = ", ".join(map(str, changed))
        reason += f"; measured elsewhere: {listed}"
        _warn(
            f"{record.target.name} was tuned under other conditions ({listed}); its advice is "
            f"used and may be out of date. To measure again: {tune_line(record)}"
        )
    status = "stale" if changed else "exact"
    _log.info("record %s (%s): %s", record.id, status, reason)
    size = config["batch_size"]
    assert isinstance(size, int)
    return Advice(
        config,
        device=asked.device,
        batch_size=size,
        status=status,
        reason=reason,
        record=record,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a script asks for, checked."""

    shape: tuple[int, ...] | None
    dtype: str | None
    mode: str
    device: str
    optimizer: str | None
    precisions: tuple[str, ...] | None

    @classmethod
    def of(
        cls,
        target: object,
        shape: Sequence[int] | str | None,
        batch: int | str | None,
        dtype: str | torch.dtype | None,
        mode: str,
        device: str | torch.device | None,
        optimizer: str | None,
        precisions: Sequence[str] | None,
    ) -> _Asked:
        from torch import nn

        from advisor.tuners.environment import default_device
        from advisor.tuners.knobs import PRECISIONS
        from advisor.tuners.workload import DTYPES, OPTIMIZERS

        if not isinstance(target, str | nn.Module | None):
            raise UsageError(f"target {target!r}: expected a target's name or an nn.Module")
        if batch not in (None, "free") and _known_batch(None, batch) is None:
            raise UsageError(f"batch {batch!r}: expected a number of at least 1, or 'free'")
        kind = None if dtype is None else str(dtype).removeprefix("torch.")
        _check("mode", mode, MODES)
        if kind is not None:
            _check("dtype", kind, DTYPES)
        if optimizer is not None:
            _check("optimizer", optimizer, tuple(OPTIMIZERS))
        if isinstance(precisions, str):
            precisions = precisions.split(",")
        for precision in precisions or ():
            _check("precision", precision, PRECISIONS)
        return cls(
            shape=None if shape is None else parse_shape(shape),
            dtype=kind,
            mode=mode,
            device=default_device() if device is None else str(device),
            optimizer=optimizer,
            precisions=None if precisions is None else tuple(precisions),
        )

    def query(self, model: str | None, deterministic: bool | None) -> Query:
        from advisor.tuners.environment import detect

        world_size = os.environ.get("WORLD_SIZE", "")
        return Query(
            environment=detect(self.device),
            model=model,
            shape=None if self.shape is None else self.shape[1:],
            dtype=self.dtype,
            mode=self.mode,
            optimizer=self.optimizer,
            world_size=int(world_size) if world_size.isdigit() else 1,
            deterministic=True if deterministic is None and _is_deterministic() else deterministic,
            precisions=self.precisions,
        )


def parse_shape(shape: Sequence[int] | str) -> tuple[int, ...]:
    """(64, 3, 256, 256) of itself or of '64x3x256x256': a batch and a sample.

    Raises:
        UsageError: it is no such shape.
    """
    parts = shape.lower().split("x") if isinstance(shape, str) else shape
    try:
        numbers = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) < 2 or min(numbers) < 1:
        raise UsageError(
            f"shape {shape!r}: expected a batch and a sample, each number at least 1, "
            "e.g. 64x3x256x256"
        )
    return numbers


def _known_batch(shape: Sequence[int] | str | None, batch: int | str | None) -> int | None:
    """The batch size that the script itself names, None where it leaves it open or is wrong."""
    if batch is None and shape is not None:
        with contextlib.suppress(UsageError):
            return parse_shape(shape)[0]
    return batch if isinstance(batch, int) and batch >= 1 else None


def _device(asked: str | torch.device | None) -> str:
    """Where training goes on without advice: the device asked for, if PyTorch knows it."""
    import torch

    from advisor.tuners.environment import default_device

    if asked is not None:
        with contextlib.suppress(RuntimeError):
            return str(torch.device(asked))
    return default_device()


def _fingerprint(target: str | nn.Module | None) -> str | None:
    if target is None or isinstance(target, str):
        return None
    from advisor.tuners import fingerprint

    return fingerprint.of_model(target)


def _is_deterministic() -> bool:
    """The user has already asked PyTorch for determinism: that is not for advice to undo."""
    import torch

    return bool(torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic)


def _find(
    records: Records, target: object, query: Query, arguments: Mapping[str, Value] | None
) -> Match:
    """The best match among the records of a target, whatever their keys."""
    if isinstance(target, str):
        found = _of_target(records, target)
    elif target is None:
        found = _of_script(records)
    else:
        found = records.find(model=query.model)
    if arguments is not None:
        found = [record for record in found if record.target.arguments == Config(arguments)]
    # As asked; else a record of more precisions, whose trials in these are the answer. Where
    # determinism is not asked for, a record without it comes first.
    loose = dataclasses.replace(query, precisions=None)
    if query.deterministic is None:
        query = dataclasses.replace(query, deterministic=False)
    match = next(
        (m for q in (query, loose) if (m := best(q, found)).record is not None), best(loose, found)
    )
    if match.record is None or not isinstance(target, str | None):
        return match
    # Several targets or samples fit: which one is meant is not for a cache to guess.
    rivals: dict[object, Record] = {}
    for record in found:
        if best(loose, [record]).record is not None:
            rivals[record.target, record.key.sample] = record
    if len(rivals) > 1:
        listed = "; ".join(
            f"{record.target.name} {record.key.sample}" for record in rivals.values()
        )
        raise NoRecord(f"several records fit: {listed}. Name one in apply(target, shape=...)")
    return match


def _of_target(records: Records, text: str) -> list[Record]:
    from advisor.tuners.target import parse

    base = _script().parent if _script() is not None else None
    try:
        spec = parse(text)
    except UsageError:
        if base is None:
            raise
        spec = parse(text, base=base)  # beside the script, wherever it was started from
    if spec.attribute:
        found = records.find(target=spec.name)
    else:
        found = [r for r in records.all() if r.target.name.split(":")[0] == spec.name]
    # The very file first; another of the same name where it has moved (another mount, a copy).
    return [r for r in found if r.target.origin == spec.origin] or found


def _script() -> Path:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if file else Path.cwd() / "(no script)"


def _of_script(records: Records) -> list[Record]:
    from advisor.tuners.target import origin_of

    script = _script()
    mine = {origin_of(script)}
    if script.parent.is_dir():
        mine |= {origin_of(path) for path in script.parent.glob("*.py")}
    return [record for record in records.all() if record.target.origin in mine]


def _why_missed(target: object, shape: Sequence[int] | None, match: Match, query: Query) -> str:
    name = target if isinstance(target, str) else "TARGET"
    if target is None:
        what = f"nothing was tuned for {_script().name} or a module beside it"
    elif isinstance(target, str):
        what = f"{target} was not tuned for this"
    else:
        what = f"this {type(target).__name__} was not tuned for this"
    what += f" on {query.environment.device.name}"
    if match.differs:
        what += f" (the nearest record differs in {', '.join(map(str, match.differs))})"
    size = "x".join(map(str, shape)) if shape else "BATCHxSAMPLE"
    return f"{what}; run: advisor tune {name} --shape {size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """What a script asks of the config it is given."""

    batch: int | None
    max_memory: int
    precisions: tuple[str, ...] | None

    def allow(self, config: Config, peak_bytes: int) -> bool:
        if self.max_memory and peak_bytes > self.max_memory:
            return False
        # torch's own precision is what a script has without advice: always allowed.
        precision = config.get("precision", "default")
        return self.precisions is None or precision in ("default", *self.precisions)

    def __str__(self) -> str:
        memory = f" within {self.max_memory / 2**30:.3g} GiB" if self.max_memory else ""
        return f"batch {self.batch}{memory}"


def _answer(record: Record, limits: _Limits, *, free: bool) -> tuple[Config, str]:
    """A config of the record within the limits, and what it is.

    Raises:
        NoRecord: no measured trial satisfies them.
    """
    choice = (record.free or record.at_batch) if free else record.at_batch
    if free or limits.batch is None:
        limits = dataclasses.replace(limits, batch=choice.batch if free else record.batch)
    if limits.batch == choice.batch and limits.allow(choice.config, choice.peak_bytes):
        return (
            Config(choice.config | record.input),
            f"{choice.speedup:.2f}x torch's default at batch {record.batch}",
        )
    return _from_trials(record, limits)


def _from_trials(record: Record, limits: _Limits) -> tuple[Config, str]:
    fitting = [
        trial
        for trial in record.trials
        if trial.stage == "compute"
        and trial.measurement.ok
        and trial.origin != "reference"
        and trial.config["batch_size"] == limits.batch
        and limits.allow(trial.config, trial.measurement.peak_bytes)
    ]
    default = record.baseline.config.replace(batch_size=limits.batch)
    reference = next((t.measurement for t in record.trials if t.config == default), None)
    if not fitting or reference is None or not reference.ok:
        measured = sorted({int(t.config["batch_size"] or 0) for t in record.trials})
        raise NoRecord(
            f"{record.target.name} was not measured at {limits} beside torch's default (batches "
            f"measured: {', '.join(map(str, measured))}); run: advisor tune {record.target.name} "
            f"--shape {'x'.join(map(str, (limits.batch, *record.key.sample.shape)))}"
        )
    trial = max(fitting, key=lambda t: t.measurement.samples_per_s)
    # Single measurements, not a race: only a difference beyond their own spread counts.
    if trial.measurement.low <= 1.03 * reference.high and any(t.config == default for t in fitting):
        return (
            Config(default | record.input),
            f"torch's default: nothing measured beats it at {limits}",
        )
    speedup = trial.measurement.samples_per_s / reference.samples_per_s
    return (
        Config(trial.config | record.input),
        f"{speedup:.2f}x torch's default at batch {limits.batch}, each measured once",
    )


def _warn(message: str) -> None:
    """One warning for a whole job: rank 0 speaks for all. It names the user's own line."""
    if os.environ.get("RANK", "0") != "0":
        _log.debug(message)
        return
    level, frame = 1, sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] == "advisor":
        level, frame = level + 1, frame.f_back
    warnings.warn(f"advisor: {message}", AdvisorWarning, stacklevel=level)


def _set_up_logging() -> None:
    level = os.environ.get("ADVISOR_LOG", "")
    if level and not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("advisor %(levelname)s %(message)s"))
        _log.addHandler(handler)
        named = logging.getLevelNamesMapping().get(level.upper())
        _log.setLevel(named if named is not None else logging.INFO)


def parse_bytes(text: int | str | None) -> int:
    """'20GiB', '512MB' or a number of bytes; 0 for None.

    Raises:
        UsageError: it is no size.
    """
    if text is None:
        return 0
    units = {"": 1, "b": 1}
    for power, prefix in enumerate("kmgt", start=1):
        units |= {f"{prefix}ib": 1024**power, f"{prefix}b": 1000**power, prefix: 1024**power}
    value = str(text).strip().lower()
    number = value.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = value[len(number) :].strip()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError(f"memory size {text!r}: expected a positive size such as 40GiB or 512MiB")
    return size


def script_line(record: Record) -> str:
    """The line that applies a record in a script."""
    key = record.key
    shape = ", ".join(map(str, (record.batch, *key.sample.shape)))
    extra = "" if key.mode == "train" else f', mode="{key.mode}"'
    if key.permits.deterministic:
        extra += ", deterministic=True"
    return f'advice = advisor.apply("{record.target.name}", shape=({shape}){extra})'


def tune_line(record: Record) -> str:
    """The command that measures a record again."""
    from advisor.tuners.knobs import PERMITTED

    key = record.key
    options = [f"--shape {'x'.join(map(str, (record.batch, *key.sample.shape)))}"]
    options += [f"--model-arg {name}={value}" for name, value in record.target.arguments.items()]
    if key.sample.dtype != "float32":
        options.append(f"--dtype {key.sample.dtype}")
    if key.mode != "train":
        options.append(f"--mode {key.mode}")
    elif key.optimizer != "sgd":
        options.append(f"--optimizer {key.optimizer}")
    if key.permits.deterministic:
        options.append("--deterministic")
    if set(key.permits.precisions) != set(PERMITTED):
        options.append(f"--precisions {','.join(key.permits.precisions)}")
    return f"advisor tune {record.target.name} {' '.join(options)}"


class Progress:
    """What `tune` reports while it works; every method may be overridden."""

    def started(self, facts: Facts, key: Key, space: Space, resumed: int) -> None:
        """The workload runs; the search begins."""

    def tried(self, trial: Trial, spent_s: float) -> None:
        """A trial is over."""

    def phase(self, what: str) -> None:
        """Another part of the work begins."""

    def notice(self, text: str) -> None:
        """Something the user should know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What `tune` found. `known`: it was there already and nothing was measured."""

    record: Record
    known: bool


def tune(
    target: str,
    shape: Sequence[int] | str,
    *,
    dtype: str = "float32",
    vocab: int = 1000,
    mode: str = "train",
    device: str | None = None,
    optimizer: str = "sgd",
    model_args: Mapping[str, Value] | None = None,
    budget_s: float = BUDGET_S,
    trials: int | None = None,
    precisions: Sequence[str] | None = None,
    deterministic: bool = False,
    max_memory: int | str | None = None,
    batches: Sequence[int] | None = None,
    fixed_batch: bool = False,
    full_space: bool = False,
    force: bool = False,
    cache: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tuned:
    """Measure, choose and remember; goes on where an interrupted call of the same kind stopped.

    Args:
        target: model.py, model.py:Net, package.module:factory or torchvision:NAME.
        shape: of one batch; the first number is the user's batch.
        dtype: of the input. `vocab` bounds integer inputs.
        mode: 'train' or 'infer'.
        device: 'cuda:0' or 'cpu'; default: the first CUDA device, else the CPU.
        optimizer: 'sgd' or 'adamw', for mode 'train'.
        model_args: keyword arguments of the factory.
        budget_s: wall seconds, worker start not counted.
        trials: search trials at most.
        precisions: those permitted; default: default, tf32, bf16, fp16.
        deterministic: only deterministic configs.
        max_memory: bytes or '40GiB': the limit within which configs must run.
        batches: batch sizes to try beside the user's; `fixed_batch` for none.
        full_space: also what is known to be bad (cuDNN off).
        force: measure again although the key is tuned.
        cache: store URL; default: $ADVISOR_CACHE, else the user's cache folder.
        seed: of all randomness.

    Raises:
        UsageError: an argument is wrong. TargetFailed: the user's code raised.
        WorkerError: torch's default cannot be measured. StoreError: the store cannot be written.
        Busy: another process tunes the same key.
    """
    from advisor.tuners.environment import cpu_has_bf16, default_device, detect, host_cpu
    from advisor.tuners.knobs import PERMITTED, PRECISIONS, Situation
    from advisor.tuners.space import Space
    from advisor.tuners.target import parse
    from advisor.tuners.worker.parent import Worker
    from advisor.tuners.worker.wire import Job
    from advisor.tuners.workload import DTYPES, OPTIMIZERS

    _set_up_logging()
    progress = progress or Progress()
    shape = parse_shape(shape)
    _check("mode", mode, MODES)
    _check("optimizer", optimizer, tuple(OPTIMIZERS))
    _check("dtype", dtype, DTYPES)
    for precision in precisions or ():
        _check("precision", precision, PRECISIONS)
    for batch in batches or ():
        if batch < 1:
            raise UsageError(f"batch {batch}: expected at least 1")
    if trials is not None and trials < 1:
        raise UsageError(f"trials {trials}: expected at least 1")
    if vocab < 1:
        raise UsageError(f"vocab {vocab}: expected at least 1")
    limit = parse_bytes(max_memory)
    spec = parse(target)
    where = device or default_device()
    environment = detect(where)
    store = _writable(cache, progress)
    arguments = Config(dict(model_args or {}))
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
    )
    with Worker(job, deadline_s=max(30.0, budget_s / 3)) as worker:
        facts = worker.describe()
        _same_device(where, facts.device_uuid)
        key = Key(
            environment=environment,
            model=facts.model,
            sample=Sample(shape=job.shape, dtype=dtype),
            mode=mode,
            optimizer=optimizer if mode == "train" else "",
            world_size=1,
            permits=permits,
        )
        named = Target(name=facts.name, origin=spec.origin, arguments=arguments)
        records = Records(store)
        known = [r for r in records.find(model=facts.model) if r.id == key.id]
        if known and not force and known[0].batch == shape[0]:
            return Tuned(record=known[0], known=True)
        here = Situation(
            device=environment.device.kind,
            capability=_capability(environment.device.capability),
            cpu_bf16=cpu_has_bf16(),
            cores=environment.device.multiprocessors,
            threads=facts.threads,
            dimensions=len(shape),
            convolves=facts.convolves,
            training=mode == "train",
            batches=_batches(facts, environment.device.memory_gib, job, batches, fixed_batch),
            deterministic=deterministic,
            precisions=permits.precisions,
            full=full_space,
        )
        return Tuned(
            record=_tune(
                worker,
                Space.of(here),
                key,
                named,
                facts,
                records,
                _Effort(
                    budget_s=budget_s, trials=trials, seed=seed, force=force, host_cpu=host_cpu()
                ),
                progress,
            ),
            known=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effort:
    budget_s: float
    trials: int | None
    seed: int
    force: bool
    host_cpu: str


def _tune(
    worker: Any,
    space: Space,
    key: Key,
    target: Target,
    facts: Facts,
    records: Records,
    effort: _Effort,
    progress: Progress,
) -> Record:
    from advisor.tuners import choose
    from advisor.tuners.study import Search, open_study

    budget_s = effort.budget_s
    if budget_s < max(LEAST_S, 12 * facts.step_s):
        raise UsageError(
            f"budget {budget_s:g}s is too small for one trial beside torch's default: a step takes "
            f"{facts.step_s:.2g} s; give at least {max(30.0, 60 * facts.step_s):.0f}s"
        )
    user = space.batches[0]
    began = time.monotonic()
    name = f"{key.id}-{user}-{space.digest}"
    folder = records.store.studies
    with _locked(folder, name):
        study = open_study(folder, name, fresh=effort.force)
        nearly = best(_query(key), [r for r in records.find(model=key.model)])
        search = Search(
            worker,
            space,
            study,
            share_s=min(2.0, max(0.3, budget_s / 120)),
            budget_s=budget_s * (1 - RESERVED),
            limit=effort.trials,
            seed=effort.seed,
            first=(nearly.record.at_batch.config,) if nearly.record else (),
            on_trial=lambda trial: progress.tried(trial, search.spent_s),
        )
        progress.started(facts, key, space, len(search.trials))
        trials = search.run()
        if len(trials) == 1 and effort.trials != 1 and space.is_choice:
            raise UsageError(
                f"budget {budget_s:g}s is too small: measuring torch's default alone took "
                f"{search.spent_s:.0f} s of it; give at least {5 * search.spent_s:.0f}s"
            )
        left = budget_s - search.spent_s
        progress.phase("the finalists and torch's default, measured in turn")
        # A finalist is built and warmed up, then runs one warm and one timed step a turn at least.
        step_s = search.known(space.default).measurement.step_s
        finalist_s = 4 * step_s + choose.MIN_ROUNDS * max(RACE_TURN_S, 2 * step_s)
        most = max(1, int(0.7 * left / finalist_s) - 1)
        rates = choose.race(
            worker,
            choose.finalists(space, trials, most),
            share_s=RACE_TURN_S,
            budget_s=0.7 * left,
        )
        peaks = {t.config: t.measurement.peak_bytes for t in trials}
        verdict = choose.decide(space, rates, peaks)
        extra: list[Trial] = []
        chosen_input = space.default_input
        if len(chosen_input):
            progress.phase("the input pipeline, through a DataLoader")
            chosen_input, seen = choose.choose_input(
                worker,
                space,
                verdict.at_batch.config,
                share_s=RACE_TURN_S,
                budget_s=0.1 * budget_s,
            )
            extra += _input_trials(seen, len(trials))
        extra += _reference(worker, space, len(trials) + len(extra))
        record = Record(
            key=key,
            target=target,
            batch=user,
            baseline=verdict.baseline,
            at_batch=verdict.at_batch,
            free=verdict.free,
            input=chosen_input,
            trials=(*trials, *extra),
            provenance=Provenance(
                created=time.time(),
                seconds=time.monotonic() - began,
                trials=len(trials),
                advisor=advisor.__version__,
                device_uuid=facts.device_uuid,
                host_cpu=effort.host_cpu,
                seed=effort.seed,
                study=name,
                budget_s=budget_s,
                modules=facts.modules,
                parameters=facts.parameters,
            ),
        )
        records.put(record)
    return record


def _input_trials(seen: dict[Config, list[float]], number: int) -> list[Trial]:
    found: list[Trial] = []
    for config, rates in seen.items():
        batch = int(config["batch_size"] or 1)
        middle = sorted(rates)[len(rates) // 2] if rates else 0.0
        measured = (
            Measurement(
                outcome="ok",
                samples_per_s=middle,
                low=min(rates),
                high=max(rates),
                step_s=batch / middle,
                blocks=tuple(batch / rate for rate in rates),
            )
            if rates
            else Measurement(outcome="failed", reason="it failed in the input race")
        )
        found.append(
            Trial(
                number=number + len(found),
                config=config,
                measurement=measured,
                stage="input",
                origin="race",
                seconds=0.0,
            )
        )
    return found


def _reference(worker: Any, space: Space, number: int) -> list[Trial]:
    """Strict fp32, measured to compare with; advised only where it is permitted."""
    if "tf32" not in space.choices["precision"] or "fp32" in space.choices["precision"]:
        return []
    config = space.default.replace(precision="fp32")
    began = time.monotonic()
    measured = worker.measure(config, seconds=0.5)
    return [
        Trial(
            number=number,
            config=config,
            measurement=measured,
            stage="compute",
            origin="reference",
            seconds=time.monotonic() - began,
        )
    ]


def _check(what: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{what} {value!r}: expected one of {', '.join(allowed)}")


def _capability(text: str) -> tuple[int, int]:
    major, dot, minor = text.partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() else (0, 0)


def _writable(cache: str | None, progress: Progress) -> Store:
    """The store, moved aside first where it is damaged."""
    store = open_store(cache)
    try:
        store.check_writable()
    except StoreDamaged as exc:
        aside = store.set_aside()
        progress.notice(f"the store was damaged ({exc}); it is now in {aside}, a new one is begun")
    return store


def _same_device(where: str, seen: str) -> None:
    """The device that was measured must be the one that the key names."""
    from advisor.tuners.environment import device_uuid

    named = device_uuid(where)
    if seen and named and seen.lower() != named.lower():
        raise UsageError(
            f"device {where!r}: the driver's order of the GPUs is not CUDA's here; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, in training too"
        )


def _batches(
    facts: Facts, memory_gib: int, job: Any, asked: Sequence[int] | None, fixed: bool
) -> tuple[int, ...]:
    from advisor.tuners.space import ladder

    if fixed:
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


def _query(key: Key) -> Query:
    return Query(
        environment=key.environment,
        model=key.model,
        shape=key.sample.shape,
        dtype=key.sample.dtype,
        mode=key.mode,
        optimizer=key.optimizer,
        world_size=key.world_size,
        deterministic=key.permits.deterministic,
        precisions=key.permits.precisions,
    )


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(folder / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as exc:
        raise Busy("another advisor tune measures this very key now; wait for it") from exc
    try:
        yield
    finally:
        lock.release()


def staleness(record: Record) -> tuple[Difference, ...]:
    """What has changed on this machine since a record of its device was measured."""
    from advisor.tuners.environment import default_device, detect

    device = record.key.environment.device
    here = detect("cpu" if device.kind == "cpu" else default_device())
    if here.device != device:
        return ()
    query = dataclasses.replace(_query(record.key), environment=here)
    return compare(query, record.key)[1]


def choices(record: Record) -> list[tuple[str, Choice]]:
    """The chosen configs of a record with their names, for reports."""
    found = [("torch default", record.baseline)]
    if record.at_batch != record.baseline:
        found.append(("at your batch", record.at_batch))
    if record.free is not None and record.free != record.at_batch:
        found.append(("batch free", record.free))
    return found
