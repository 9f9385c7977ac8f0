"""Which config of a record answers what a script asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from advisor.cache.config import Config
from advisor.cache.match import Query
from advisor.cache.record import FLAGS, LOOP, RACED, USES, Choice, Record, Trial
from advisor.cache.shown import interval, size, times
from advisor.cache.task import PERMITTED
from advisor.errors import NoRecord
from advisor.finding import horizon
from advisor.finding.doubt import without_doubtful
from advisor.finding.request import Fits, Request, anything
from advisor.tuners import knobs
from advisor.tuners.length import Length

NOISE = 1.03
"""Of two configs measured once each: a smaller difference may be noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A config, and what it is.

    Attributes:
        reason: what it is, with the doubt.
        doubt: '; not verified: ...' where it was not held against fp32 and should have been.
        gains: its speed-up over torch's default by use; empty where it was not raced.
        flags: the config for a script that follows flags alone.
    """

    config: Config
    reason: str
    doubt: str = ""
    gains: Mapping[str, float] = field(default_factory=dict)
    flags: Config = dataclasses.field(default_factory=Config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a script asks of the config it is given. `batch`: 0 for the record's own."""

    batch: int
    use: str
    given: Mapping[str, Any]
    fits: Fits = anything

    @classmethod
    def of(cls, request: Request, record: Record) -> Limits:
        return cls(
            batch=request.batch or record.batch,
            use=request.use,
            given=request.given,
            fits=request.fits,
        )

    def allow(self, record: Record, config: Config, peak_bytes: int) -> bool:
        """Whether a script of this use may be served it."""
        most = self.given.get("max_memory", 0)
        return (
            not (most and peak_bytes > most)
            and knobs.permits(self.given, config)
            and knobs.follows(self.use, config, record.baseline.config)
            and self.fits(record, config)
        )

    def __str__(self) -> str:
        most = self.given.get("max_memory", 0)
        return f"batch {self.batch}{f' within {size(most)}' if most else ''}"


def answer(record: Record, request: Request) -> Answer:
    """A config of the record as asked for.

    Raises:
        NoRecord: no measured trial satisfies what is asked.
    """
    limits = Limits.of(request, record)
    length = request.length(record.batch)
    sober = without_doubtful(record)
    if length is not None:
        answered = _over(sober, limits, length, free=request.free)
    else:
        answered = _steady(sober, limits, free=request.free)
    if sober is record:
        return answered
    reason = f"{answered.reason}; the host was too busy to tell what else gains"
    return dataclasses.replace(answered, reason=reason)


def _steady(record: Record, limits: Limits, *, free: bool) -> Answer:
    choice = record.winner(limits.use, free=free)
    if free:
        limits = dataclasses.replace(limits, batch=choice.batch)
    if limits.batch == choice.batch and limits.allow(record, choice.config, choice.peak_bytes):
        return _raced(record, choice, limits, free=free)
    return _from_trials(record, limits)


def _raced(record: Record, choice: Choice, limits: Limits, *, free: bool) -> Answer:
    """The winner for a use, with what the other uses would give."""
    winners = {use: record.winner(use, free=free) for use in RACED}
    allowed = {
        use: one
        for use, one in winners.items()
        if limits.allow(record, one.config, one.peak_bytes) or USES.index(use) > _at(limits.use)
    }
    flags = allowed.get(FLAGS, record.baseline)
    default = choice.config == record.baseline.config
    baseline = record.key.task.baseline
    what = f"{times(choice.speedup)} {baseline} at batch {record.batch}"
    if default:
        what = f"{baseline}: {_no_gain(record)}"
    doubt = unverified(record, choice.config)
    return Answer(
        config=Config(choice.config | record.input),
        reason=what + _chosen_for(record) + doubt,
        doubt=doubt,
        gains={use: one.speedup for use, one in allowed.items()},
        flags=flags.config,
    )


def _no_gain(record: Record) -> str:
    return "nothing measured is clearly faster" if record.compares else "nothing else was measured"


def _at(use: str) -> int:
    return USES.index(use)


def _chosen_for(record: Record) -> str:
    made = record.provenance
    if made.steps:
        return f" in the steady state, chosen for a job of {made.steps} steps"
    if made.duration_s:
        return f" in the steady state, chosen for a job of {made.duration_s:g} s"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What a record knows of a config: its samples/s with their spread, from a race or from once.

    `faster`: whether the race was sure of it; None where it was measured once.
    """

    config: Config
    rate: float
    low: float
    high: float
    peak_bytes: int
    faster: bool | None = None


def _from_trials(record: Record, limits: Limits) -> Answer:
    known = _seen(record, limits.batch)
    base = known.get(record.baseline.config.at(limits.batch))
    fitting = [
        one
        for one in known.values()
        if is_sound(record, one.config) and limits.allow(record, one.config, one.peak_bytes)
    ]
    if not fitting or base is None:
        default = record.baseline.config.knobs
        ran = {t.config for t in record.trials if t.measurement.ok and t.stage == "compute"}
        sizes = sorted({record.batch} | {one.batch for one in ran if one.knobs == default})
        raise NoRecord(
            f"{record.target.name} was not measured at {limits} beside torch's default (batches "
            f"at which that was: {', '.join(map(str, sizes))})"
        )
    # Of single measurements, not a race, only a difference beyond their own spread counts.
    better = [
        one
        for one in fitting
        if one is not base and (one.low > NOISE * base.high if one.faster is None else one.faster)
    ]
    if not better:
        return Answer(
            config=Config(base.config | record.input),
            reason=f"torch's default: nothing measured beats it at {limits}",
        )
    best = max(better, key=lambda one: one.rate)
    speedup = best.rate / base.rate
    how = "each measured once" if best.faster is None else "raced"
    flags = _flags(record, limits)
    doubt = unverified(record, best.config)
    return Answer(
        config=Config(best.config | record.input),
        reason=f"{times(speedup)} torch's default at batch {limits.batch}, {how}{doubt}",
        doubt=doubt,
        gains={**({FLAGS: flags.speedup} if flags else {}), limits.use: speedup},
        flags=flags.config if flags else record.baseline.config.at(limits.batch),
    )


def _seen(record: Record, batch: int) -> dict[Config, _Seen]:
    """Every config that ran at a batch, by what the race says of it where it was in one."""
    found = {
        trial.config: _Seen(
            config=trial.config,
            rate=trial.measurement.samples_per_s,
            low=trial.measurement.low,
            high=trial.measurement.high,
            peak_bytes=trial.measurement.peak_bytes,
        )
        for trial in record.trials
        if trial.stage == "compute"
        and trial.measurement.ok
        and trial.origin != "reference"
        and trial.config.batch == batch
    }
    for one in (record.baseline, *record.raced, *(winner.choice for winner in record.winners)):
        if one.batch == batch == record.batch:
            found[one.config] = _Seen(
                config=one.config,
                rate=one.samples_per_s,
                low=one.low,
                high=one.high,
                peak_bytes=one.peak_bytes,
                faster=one.speedup_low > 1,
            )
    return found


def _flags(record: Record, limits: Limits) -> Choice | None:
    """What was raced for a script that only calls apply(), of this batch and allowed, if any."""
    raced = record.winner(FLAGS)
    fits = raced.batch == limits.batch and limits.allow(record, raced.config, raced.peak_bytes)
    return raced if fits else None


def _over(record: Record, limits: Limits, length: Length, *, free: bool) -> Answer:
    """The config that trains on most samples a second over a job, and what it is."""
    sizes = {record.batch} | {t.config.batch for t in record.trials if t.stage == "compute"}
    known = {
        size: [
            one
            for one in horizon.candidates(record, size, lambda c: _advised(record, c))
            if limits.allow(record, one.config, one.peak_bytes)
        ]
        for size in (sorted(sizes) if free else [length.batch])
    }
    base = next(iter(known.get(length.batch, [])), None)
    found = [candidate for some in known.values() for candidate in some]
    if not record.compares and all(one == base for one in found):
        return _steady(record, limits, free=free)  # however long the job is
    if base is None or not found:
        steady = _steady(record, limits, free=free)
        return dataclasses.replace(
            steady,
            reason=f"{steady.reason}; its first steps are not known, so the job's length is not "
            "counted",
        )
    best = max(found, key=lambda one: length.rate(one.pace))
    if length.rate(best.pace) < 1.01 * length.rate(base.pace):
        best = base
    config = Config(best.config | record.input)
    job = f"{length.steps} steps" if length.steps else f"{length.seconds:g} s"
    if best == base:
        return Answer(
            config=config,
            reason=f"torch's default: over {job} at batch {length.batch} nothing pays",
        )
    ran = length.rate(base.pace)
    gain = length.rate(best.pace) / ran if ran else float("inf")
    rates = "raced" if best.raced and base.raced else "each measured once"
    started = "as measured" if best.fresh and base.fresh else "as the slowest one seen"
    doubt = unverified(record, best.config)
    return Answer(
        config=config,
        reason=f"{times(gain)} torch's default over {job} at batch {best.pace.batch}, "
        f"{best.pace.first_step_s:.3g} s of first step counted ({started}; {rates}){doubt}",
        doubt=doubt,
        gains={limits.use: gain},
        # Over a job nothing was raced for a script that only calls apply().
        flags=record.baseline.config.at(best.config.batch),
    )


def break_even(record: Record, use: str = LOOP) -> list[horizon.Row]:
    """Which config is the best from how many steps on, at the user's batch, for a use."""
    default = record.baseline.config

    def sound(config: Config) -> bool:
        return _advised(record, config) and knobs.follows(use, config, default)

    return horizon.table(record, sound)


def _checked(record: Record, config: Config) -> Trial | None:
    """The comparison of these knobs with strict fp32, whatever its outcome."""
    checks = [trial for trial in record.trials if trial.stage == "numerics"]
    return next((t for t in reversed(checks) if t.config.knobs == config.knobs), None)


def is_sound(record: Record, config: Config) -> bool:
    """Whether a config may be served unasked: compared with fp32, or with nothing that needs it."""
    check = _checked(record, config)
    if check is not None:
        return check.measurement.ok
    return not knobs.needs_comparison(config, record.baseline.config)


def _advised(record: Record, config: Config) -> bool:
    """Whether a config is sound, or a winner all the same, of which it is said that it is not."""
    return is_sound(record, config) or config in {one.choice.config for one in record.winners}


def unverified(record: Record, config: Config) -> str:
    """'; not verified: ...' where a config changes numerics and was not held against fp32."""
    check = _checked(record, config)
    needs_comparison = knobs.needs_comparison(config, record.baseline.config)
    if not needs_comparison or (check is not None and check.measurement.ok):
        return ""
    if check is not None:
        return f"; not verified against fp32: {check.measurement.reason}"
    why = "inference" if record.key.task.mode != "train" else "left out"
    if record.key.task.mode == "train" and record.key.task.tolerance:
        why = "there was no time"
    return f"; not verified against fp32: {why}"


def gain(record: Record, use: str) -> str:
    """What a winner gives, with its interval, and whether it was held against fp32."""
    choice = record.winner(use)
    if choice.config == record.baseline.config:
        return _no_gain(record)
    spread = interval(choice.speedup_low, choice.speedup_high)
    gained = f"{times(choice.speedup)} {record.key.task.baseline} ({spread})"
    check = _checked(record, choice.config)
    held = "; it may change rounding, no number format"
    if knobs.needs_comparison(choice.config, record.baseline.config) and check is not None:
        held = f"; verified against fp32: {check.measurement.reason}"
    return gained + (unverified(record, choice.config) or held)


def akin(query: Query, near: Record | None) -> bool:
    """Whether anything of a record may be carried over: what a CPU likes says nothing of a GPU."""
    return near is not None and near.key.environment.device.kind == query.environment.device.kind


def carried(record: Record, request: Request, query: Query) -> Answer:
    """What of a record for something near is safe to follow unmeasured, and what that is.

    Knobs that are `Knob.transferable` and that this device and these permissions offer. The batch
    is the script's own; the record's only where the sample is the same and there is no less memory.
    """
    from advisor.tuners.environment import cpu_has_bf16

    here, there = query.environment.device, record.key.environment.device
    sample = query.sample or record.key.task.sample
    choice = record.winner(request.use)
    held = choice.config | record.input
    situation = knobs.SearchContext(
        device=here.kind,
        capability=here.compute_capability,
        cpu_bf16=here == there and cpu_has_bf16(),
        dimensions=len(sample) + 1,
        training=request.given["mode"] == "train",
        deterministic=bool(request.given.get("deterministic")),
        precisions=request.given.get("precisions", PERMITTED),
        full=True,
        loaded=True,
        workers=1,
    )
    found = Config(
        {
            knob.name: held[knob.name]
            for knob in knobs.KNOBS
            if knob.transferable
            and knob.name in held
            and held[knob.name] in knob.values(situation)
            and knobs.permits(request.given, Config({knob.name: held[knob.name]}))
            and request.fits(record, Config({knob.name: held[knob.name]}))
        }
    )
    if not is_sound(record, choice.config):
        # Nothing that was not held against fp32 there is followed here.
        found = Config(
            {n: v for n, v in found.items() if not knobs.needs_comparison(Config({n: v}))}
        )
    batch = request.batch
    if batch is None and sample == record.key.task.sample and here.memory_gib >= there.memory_gib:
        batch = record.batch
    said = knobs.described(found) if found.changed(knobs.TORCH) else "nothing"
    return Answer(
        config=found if batch is None else found.at(batch),
        reason=f"carried over, not measured: {said}",
    )
