"""Which config of a record answers a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from advisor.cache.config import Config
from advisor.cache.match import Query
from advisor.cache.record import FLAGS, LOOP, RACED, USES, Choice, Record, Trial
from advisor.cache.shown import interval, times
from advisor.cache.task import PERMITTED
from advisor.errors import NoRecord
from advisor.resolve import job_length
from advisor.resolve.doubt import without_doubtful
from advisor.resolve.request import Request
from advisor.tuners import knobs
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.length import Length

NOISE = 1.03
"""Between two configs that were measured once each, a smaller ratio may be noise."""
LEAST_GAIN = 1.01
"""Over a job of known length, less is not advised."""


def answer(record: Record, request: Request) -> Served:
    """A config of the record as asked for.

    Raises:
        NoRecord: no measured trial satisfies what is asked.
    """
    length = request.length(record.batch)
    request = dataclasses.replace(request, batch=request.batch or record.batch)
    sober = without_doubtful(record)
    found = _steady(sober, request) if length is None else _over(sober, request, length)
    reason = found.reason
    if sober is not record:
        reason += "; the host was too busy to tell what else gains"
    return dataclasses.replace(found, reason=reason, record=record)


def _served(
    record: Record,
    request: Request,
    config: Config,
    reason: str,
    *,
    flags: Config | None = None,
    gains: Mapping[str, float] | None = None,
) -> Served:
    """A config that is better than the default, if it has gains, with what is in doubt about it."""
    doubt = "" if gains is None else unverified(record, config)
    return Served(
        config=Config(config | record.input),
        reason=reason + doubt,
        doubt=doubt,
        record=record,
        use=request.use,
        # Determinism and the like, which the task itself asks for, are no defaults of torch's.
        default=Config(record.baseline.config | knobs.TORCH),
        flags=flags,
        gains=gains or {},
    )


def _steady(record: Record, request: Request) -> Served:
    choice = record.winner(request.use, free=request.free)
    if request.free:
        request = dataclasses.replace(request, batch=choice.batch)
    fits = request.allows(record, choice.config, choice.peak_bytes)
    if request.batch == choice.batch and fits:
        return _raced(record, choice, request)
    return _from_trials(record, request)


def _raced(record: Record, choice: Choice, request: Request) -> Served:
    """The winner for a use, with what the other uses would give."""
    winners = {use: record.winner(use, free=request.free) for use in RACED}
    allowed = {
        use: one
        for use, one in winners.items()
        if USES.index(use) > USES.index(request.use)
        or request.allows(record, one.config, one.peak_bytes)
    }
    baseline, made = record.key.task.baseline, record.provenance
    what = f"{times(choice.speedup)} {baseline} at batch {record.batch}"
    if choice.config == record.baseline.config:
        what = f"{baseline}: {_no_gain(record)}"
    if made.steps or made.duration_s:
        job = f"{made.steps} steps" if made.steps else f"{made.duration_s:g} s"
        what += f" in the steady state, chosen for a job of {job}"
    return _served(
        record,
        request,
        choice.config,
        what,
        flags=allowed.get(FLAGS, record.baseline).config,
        gains={use: one.speedup for use, one in allowed.items()},
    )


def _no_gain(record: Record) -> str:
    return "nothing measured is clearly faster" if record.compares else "nothing else was measured"


def _from_trials(record: Record, request: Request) -> Served:
    """The best of what was measured at a batch, or within limits, that no race was for."""
    assert request.batch is not None
    known = job_length.measured(record, request.batch)
    base = known.get(record.baseline.config.at(request.batch))
    fitting = [
        one
        for one in known.values()
        if is_sound(record, one.config) and request.allows(record, one.config, one.peak_bytes)
    ]
    if not fitting or base is None:
        default = record.baseline.config.knobs
        ran = {t.config for t in record.trials if t.measurement.ok and t.stage == "compute"}
        sizes = sorted({record.batch} | {one.batch for one in ran if one.knobs == default})
        raise NoRecord(
            f"{record.target.name} was not measured at {request} beside torch's default (batches "
            f"at which that was: {', '.join(map(str, sizes))})"
        )

    def raced(one: job_length.Measured) -> bool:
        return one.raced and request.batch == record.batch

    # Between single measurements only a difference beyond their own spread counts.
    better = [
        one
        for one in fitting
        if one is not base and (one.faster if raced(one) else one.low > NOISE * base.high)
    ]
    if not better:
        reason = f"torch's default: nothing measured beats it at {request}"
        return _served(record, request, base.config, reason)
    best = max(better, key=lambda one: one.samples_per_s)
    speedup = best.samples_per_s / base.samples_per_s
    how = "raced" if raced(best) else "each measured once"
    flags = record.winner(FLAGS)
    gains, alone = {request.use: speedup}, record.baseline.config.at(request.batch)
    if flags.batch == request.batch and request.allows(record, flags.config, flags.peak_bytes):
        gains, alone = {FLAGS: flags.speedup} | gains, flags.config
    reason = f"{times(speedup)} torch's default at batch {request.batch}, {how}"
    return _served(record, request, best.config, reason, flags=alone, gains=gains)


def _over(record: Record, request: Request, length: Length) -> Served:
    """The config that trains on most samples a second over a job."""
    sizes = {record.batch} | {t.config.batch for t in record.trials if t.stage == "compute"}
    known = {
        size: [
            one
            for one in job_length.candidates(record, size, lambda c: _advised(record, c))
            if request.allows(record, one.config, one.peak_bytes)
        ]
        for size in (sorted(sizes) if request.free else [length.batch])
    }
    base = next(iter(known.get(length.batch, [])), None)
    found = [candidate for some in known.values() for candidate in some]
    if not record.compares and all(one == base for one in found):
        return _steady(record, request)  # however long the job is
    if base is None or not found:
        steady = _steady(record, request)
        unknown = "; its first steps are not known, so the job's length is not counted"
        return dataclasses.replace(steady, reason=steady.reason + unknown)
    best = max(found, key=lambda one: length.rate(one.pace))
    job = f"{length.steps} steps" if length.steps else f"{length.seconds:g} s"
    rate, default_rate = length.rate(best.pace), length.rate(base.pace)
    if rate < LEAST_GAIN * default_rate or best == base:
        reason = f"torch's default: over {job} at batch {length.batch} nothing pays"
        return _served(record, request, base.config, reason)
    gain = rate / default_rate if default_rate else float("inf")
    rates = "raced" if best.raced and base.raced else "each measured once"
    started = "as measured" if best.fresh and base.fresh else "as the slowest one seen"
    return _served(
        record,
        request,
        best.config,
        f"{times(gain)} torch's default over {job} at batch {best.pace.batch}, "
        f"{best.pace.first_step_s:.3g} s of first step counted ({started}; {rates})",
        # Over a job nothing was raced for a script that only calls apply().
        flags=record.baseline.config.at(best.config.batch),
        gains={request.use: gain},
    )


def break_even(record: Record, use: str = LOOP) -> list[job_length.BreakEven]:
    """Which config is the best from how many steps on, at the user's batch, for a use."""
    default = record.baseline.config

    def sound(config: Config) -> bool:
        return _advised(record, config) and knobs.follows(use, config, default)

    return job_length.table(record, sound)


def _checked(record: Record, config: Config) -> Trial | None:
    """The last comparison of these knobs with strict fp32."""
    checks = [trial for trial in record.trials if trial.stage == "numerics"]
    return next((t for t in reversed(checks) if t.config.knobs == config.knobs), None)


def is_sound(record: Record, config: Config) -> bool:
    """Whether a config may be served unasked: it matched fp32, or needs no comparison."""
    check = _checked(record, config)
    if check is not None:
        return check.measurement.ok
    return not knobs.needs_comparison(config, record.baseline.config)


def _advised(record: Record, config: Config) -> bool:
    """Whether a config is sound, or a winner, which is served with its doubt."""
    return is_sound(record, config) or config in {one.choice.config for one in record.winners}


def unverified(record: Record, config: Config) -> str:
    """'; not verified: ...' if a config changes numerics and did not match fp32."""
    check = _checked(record, config)
    needs_comparison = knobs.needs_comparison(config, record.baseline.config)
    if not needs_comparison or (check is not None and check.measurement.ok):
        return ""
    task = record.key.task
    why = "inference" if task.mode != "train" else "left out"
    if task.mode == "train" and task.tolerance:
        why = "there was no time"
    return f"; not verified against fp32: {why if check is None else check.measurement.reason}"


def gain(record: Record, use: str) -> str:
    """What a winner gives, with its interval, and whether it was compared with fp32."""
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


def carried(record: Record, request: Request, query: Query) -> Served:
    """What is safe to follow unmeasured of a record for something near.

    Knobs that are `Knob.transferable` and that this device and these permissions offer. The batch
    is the script's own; the record's only for the same sample and no less memory.
    """
    from advisor.tuners.environment import cpu_has_bf16

    here, there = query.environment.device, record.key.environment.device
    sample = query.sample or record.key.task.sample
    choice = record.winner(request.use)
    held = choice.config | record.input
    sound = is_sound(record, choice.config)
    context = knobs.SearchContext(
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

    def is_safe(knob: knobs.Knob, value: Any) -> bool:
        alone = Config({knob.name: value})
        return (
            knob.transferable
            and value in knob.values(context)
            and knobs.permits(request.given, alone)
            and request.fits(record, alone)
            and (sound or not knobs.needs_comparison(alone))
        )

    safe = (k for k in knobs.KNOBS if k.name in held and is_safe(k, held[k.name]))
    found = Config({knob.name: held[knob.name] for knob in safe})
    batch = request.batch
    if batch is None and sample == record.key.task.sample and here.memory_gib >= there.memory_gib:
        batch = record.batch
    what = knobs.described(found) if found.changed(knobs.TORCH) else "nothing"
    return Served(
        config=found if batch is None else found.at(batch),
        status="nearest",
        reason=f"carried over, not measured: {what}",
        record=record,
        use=request.use,
        default=Config(record.baseline.config | knobs.TORCH),
    )
