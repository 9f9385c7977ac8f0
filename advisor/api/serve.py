"""apply() and lookup(): what was found, served to a training script."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.api import horizon
from advisor.api.arguments import (
    MODES,
    Shapes,
    check,
    check_length,
    mix_of,
    parse_bytes,
    parse_duration,
    parse_shapes,
)
from advisor.api.lines import tune_line
from advisor.cache.config import Config, Value
from advisor.cache.match import Match, Query, best
from advisor.cache.record import Record
from advisor.cache.store import Records, open_store
from advisor.errors import (
    AdvisorError,
    AdvisorWarning,
    NoRecord,
    UsageError,
)
from advisor.tuners.job import Length

if TYPE_CHECKING:
    import torch
    from torch import nn

    from advisor.tuners.advice import Advice

_log = logging.getLogger("advisor")


def apply(
    target: str | nn.Module | None = None,
    *,
    shape: Shapes | None = None,
    batch: int | str | None = None,
    dtype: str | torch.dtype | None = None,
    mode: str = "train",
    device: str | torch.device | None = None,
    optimizer: str | None = None,
    model_args: Mapping[str, Value] | None = None,
    deterministic: bool | None = None,
    precisions: Sequence[str] | None = None,
    max_memory: int | str | None = None,
    steps: int | None = None,
    duration: float | str | None = None,
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
            A list of shapes for a job that was tuned for a mix of them.
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
        steps: how many steps this job has, at its batch: the best over that job, with what is
            paid before the first step counted in. `duration` is how long it runs instead:
            seconds, or '2h'. Default: what the record was tuned for.
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
        steps=steps,
        duration=duration,
        cache=cache,
        strict=strict,
    )
    advice.set_flags()
    return advice


def lookup(
    target: str | nn.Module | None = None,
    *,
    shape: Shapes | None = None,
    batch: int | str | None = None,
    dtype: str | torch.dtype | None = None,
    mode: str = "train",
    device: str | torch.device | None = None,
    optimizer: str | None = None,
    model_args: Mapping[str, Value] | None = None,
    deterministic: bool | None = None,
    precisions: Sequence[str] | None = None,
    max_memory: int | str | None = None,
    steps: int | None = None,
    duration: float | str | None = None,
    cache: str | None = None,
    strict: bool = False,
) -> Advice:
    """As `apply`, without touching any flag of the process."""
    from advisor.tuners.advice import Advice

    set_up_logging()
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
            raise NoRecord(_why_missed(target, asked.shapes, match, query))
        record = match.record
        limits = _Limits(
            batch=known, max_memory=parse_bytes(max_memory), precisions=asked.precisions
        )
        seconds = None if duration is None else parse_duration(duration)
        check_length(steps, seconds)
        if steps or seconds:
            length = Length(batch=known or record.batch, steps=steps or 0, seconds=seconds or 0.0)
            config, reason = _over(record, limits, length, free=batch == "free")
        else:
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
    if record.stale:
        reason += f"; marked stale by advisor verify: {record.stale}"
        _warn(
            f"the advice for {record.target.name} no longer holds ({record.stale}); it is used all "
            f"the same. To measure again: {tune_line(record)}"
        )
    status = "stale" if changed or record.stale else "exact"
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

    shapes: tuple[tuple[int, ...], ...]
    dtype: str | None
    mode: str
    device: str
    optimizer: str | None
    precisions: tuple[str, ...] | None

    @classmethod
    def of(
        cls,
        target: object,
        shape: Shapes | None,
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
        check("mode", mode, MODES)
        if kind is not None:
            check("dtype", kind, DTYPES)
        if optimizer is not None:
            check("optimizer", optimizer, tuple(OPTIMIZERS))
        if isinstance(precisions, str):
            precisions = precisions.split(",")
        for precision in precisions or ():
            check("precision", precision, PRECISIONS)
        return cls(
            shapes=() if shape is None else parse_shapes(shape),
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
            shape=self.shapes[0][1:] if self.shapes else None,
            mix=mix_of(self.shapes) if self.shapes else None,
            dtype=self.dtype,
            mode=self.mode,
            optimizer=self.optimizer,
            world_size=int(world_size) if world_size.isdigit() else 1,
            deterministic=True if deterministic is None and _is_deterministic() else deterministic,
            precisions=self.precisions,
        )


def _known_batch(shape: Shapes | None, batch: int | str | None) -> int | None:
    """The batch size that the script itself names, None where it leaves it open or is wrong."""
    if batch is None and shape is not None:
        with contextlib.suppress(UsageError):
            return parse_shapes(shape)[0][0]
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
    if len(rivals) < 2:
        return match
    if arguments is None and not all(len(record.target.arguments) for record in rivals.values()):
        # Without model_args, the model that is built without them is meant.
        return _find(records, target, query, {})
    listed = "; ".join(map(_named, rivals.values()))
    raise NoRecord(
        f"several records fit: {listed}. Name one: apply(target, shape=..., dtype=..., "
        "model_args=...)"
    )


def _named(record: Record) -> str:
    given = ", ".join(f"{name}={value}" for name, value in record.target.arguments.items())
    return f"{record.target.name}{f'({given})' if given else ''} {record.key.sample}"


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


def _why_missed(
    target: object, shapes: Sequence[tuple[int, ...]], match: Match, query: Query
) -> str:
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
    sizes = ["x".join(map(str, shape)) for shape in shapes] or ["BATCHxSAMPLE"]
    return f"{what}; run: advisor tune {name} --shape {' --shape '.join(sizes)}"


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
            f"{choice.speedup:.2f}x torch's default at batch {record.batch}{_chosen_for(record)}",
        )
    return _from_trials(record, limits)


def _chosen_for(record: Record) -> str:
    made = record.provenance
    if made.steps:
        return f" in the steady state, chosen for a job of {made.steps} steps"
    return f" in the steady state, chosen for a job of {made.duration_s:g} s" * bool(
        made.duration_s
    )


def _from_trials(record: Record, limits: _Limits) -> tuple[Config, str]:
    fitting = [
        trial
        for trial in record.trials
        if trial.stage == "compute"
        and trial.measurement.ok
        and trial.origin != "reference"
        and trial.config["batch_size"] == limits.batch
        and _is_sound(record, trial.config)
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


def _over(record: Record, limits: _Limits, length: Length, *, free: bool) -> tuple[Config, str]:
    """The config that trains on most samples a second over a job, and what it is.

    Raises:
        NoRecord: nothing that was measured satisfies the limits.
    """
    limits = dataclasses.replace(limits, batch=length.batch)
    sizes = {int(t.config["batch_size"] or 0) for t in record.trials if t.stage == "compute"}
    known = {
        size: horizon.candidates(record, size, lambda config: _is_sound(record, config))
        for size in (sorted({record.batch} | sizes) if free else [length.batch])
    }
    base = next(iter(known.get(length.batch, [])), None)
    found = [c for some in known.values() for c in some if limits.allow(c.config, c.peak_bytes)]
    if base is None or not found:
        config, reason = _answer(record, limits, free=free)
        return (
            config,
            f"{reason}; its first steps are not known, so the job's length is not counted",
        )
    best = max(found, key=lambda one: length.rate(one.pace))
    if base in found and length.rate(best.pace) < 1.01 * length.rate(base.pace):
        best = base
    config = Config(best.config | record.input)
    job = f"{length.steps} steps" if length.steps else f"{length.seconds:g} s"
    if best == base:
        return config, f"torch's default: over {job} at batch {length.batch} nothing pays"
    ran = length.rate(base.pace)
    gain = f"{length.rate(best.pace) / ran:.2f}x" if ran else "more than"
    rates = "raced" if best.raced and base.raced else "each measured once"
    started = "in a fresh process" if best.fresh and base.fresh else "as the slowest one seen"
    return config, (
        f"{gain} torch's default over {job} at batch {best.pace.batch}, "
        f"{best.pace.first_step_s:.3g} s of first step counted ({started}; {rates})"
    )


def break_even(record: Record) -> list[horizon.Row]:
    """Which config is the best from how many steps on, at the user's batch."""
    return horizon.table(record, lambda config: _is_sound(record, config))


def _is_sound(record: Record, config: Config) -> bool:
    """Whether a config may be served: compared with fp32, or with nothing in it that needs it."""
    checks = [trial for trial in record.trials if trial.stage == "numerics"]
    if not checks:
        return True
    sound = [
        trial.config.without("batch_size")
        for trial in checks
        if trial.measurement.outcome != "wrong"
    ]
    if config.without("batch_size") in sound:
        return True
    plain = config.get("precision", "default") in ("default", "tf32")
    return plain and config.get("compile", "none") == "none"


def _warn(message: str) -> None:
    """One warning for a whole job: rank 0 speaks for all. It names the user's own line."""
    if os.environ.get("RANK", "0") != "0":
        _log.debug(message)
        return
    level, frame = 1, sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] == "advisor":
        level, frame = level + 1, frame.f_back
    warnings.warn(f"advisor: {message}", AdvisorWarning, stacklevel=level)


def set_up_logging() -> None:
    level = os.environ.get("ADVISOR_LOG", "")
    if level and not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("advisor %(levelname)s %(message)s"))
        _log.addHandler(handler)
        named = logging.getLevelNamesMapping().get(level.upper())
        _log.setLevel(named if named is not None else logging.INFO)
