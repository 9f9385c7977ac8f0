"""Which config of a record answers what a script asks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from advisor.cache.config import Config, Value
from advisor.cache.match import Query
from advisor.cache.record import Record
from advisor.errors import NoRecord
from advisor.finding import horizon
from advisor.tuners.length import Length


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
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


def answer(record: Record, limits: Limits, *, free: bool) -> tuple[Config, str]:
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


def _from_trials(record: Record, limits: Limits) -> tuple[Config, str]:
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


def over(record: Record, limits: Limits, length: Length, *, free: bool) -> tuple[Config, str]:
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
        config, reason = answer(record, limits, free=free)
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


def akin(query: Query, near: Record | None) -> bool:
    """Whether anything of a record may be carried over: what a CPU likes says nothing of a GPU."""
    return near is not None and near.key.environment.device.kind == query.environment.device.kind


def carried(record: Record, query: Query, batch: int | None) -> tuple[Config, str]:
    """What of a record for something near is safe to follow unmeasured, and what that is.

    Knobs that `Knob.carries` and that this device and these permissions offer. The batch is the
    script's own; the record's only where the sample is the same and there is no less memory.
    """
    from advisor.tuners.knobs import KNOBS, PERMITTED, Situation

    here, there = query.environment.device, record.key.environment.device
    shape = query.shape or record.key.sample.shape
    held = record.at_batch.config | record.input
    situation = Situation(
        device=here.kind,
        capability=here.compute_capability,
        cpu_bf16=held.get("precision") == "bf16" and here == there,
        dimensions=len(shape) + 1,
        training=query.mode == "train",
        deterministic=bool(query.deterministic),
        precisions=query.precisions or PERMITTED,
        full=True,
    )
    found: dict[str, Value] = {}
    for knob in KNOBS:
        if knob.carries and knob.name in held and held[knob.name] in knob.values(situation):
            found[knob.name] = held[knob.name]
    if batch is None and shape == record.key.sample.shape and here.memory_gib >= there.memory_gib:
        batch = record.batch
    if batch is not None:
        found["batch_size"] = batch
    config = Config(found)
    default = record.baseline.config
    said = ", ".join(
        f"{name}={value}"
        for name, value in config.items()
        if name != "batch_size" and value != default.get(name, False)
    )
    return config, f"carried over, not measured: {said or 'nothing'}"
