"""Choose the config of a record that answers a request."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from advisor.cache.config import Config
from advisor.cache.match import Query
from advisor.cache.record import (
    CAPTURE,
    FLAGS,
    INTERRUPTED,
    LOOP,
    RACED,
    USES,
    Choice,
    Measurement,
    Record,
)
from advisor.cache.shown import interval, times
from advisor.errors import NoRecord
from advisor.resolve.doubt import doubtful, without_doubtful
from advisor.resolve.request import Candidate, Request
from advisor.tuners import knobs
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.doubt import unsteady
from advisor.tuners.length import Length, Pace, first_step_seen
from advisor.tuners.length import break_even as overtaking

NOISE = 1.03
"""A smaller ratio between two configs that were measured once each may be noise."""
LEAST_GAIN = 1.01
"""For a job of known length, a smaller gain is not advised."""
ONCE = 1.03
"""For a job of known length, a config that was measured once counts as this much slower than the
low end of its interval."""
SHORTEST_S, LONGEST_S = 1e-12, 1e9
"""Step times outside this range are ignored: no clock can have measured them."""


def answer(record: Record, request: Request) -> Served:
    """The record's best config for a request. Raises NoRecord if no measured config fits it."""
    length = request.length(record.batch)
    request = dataclasses.replace(request, batch=request.batch or record.batch)
    reliable = without_doubtful(record)
    found = _steady(reliable, request) if length is None else _over(reliable, request, length)
    reason, busy = found.reason, "the host was too busy to tell what"
    if reliable is not record:
        own = f"{record.key.task.baseline}: {busy} gains"
        reason = f"{reason}; {busy} else gains" if reliable.compares else own
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
    """A config as Served. If it has `gains`, also whether its numerics are in doubt."""
    doubt = "" if gains is None else unverified(record, config)
    return Served(
        config=Config(config | record.input),
        reason=reason + doubt,
        doubt=doubt,
        record=record,
        use=request.use,
        # Settings that the task asks for, such as determinism, do not count as torch's default.
        default=Config(record.baseline.config | knobs.TORCH),
        flags=flags,
        gains=gains or {},
    )


def _steady(record: Record, request: Request) -> Served:
    choice = record.winner(request.use, free=request.free)
    if request.free:
        request = dataclasses.replace(request, batch=choice.batch)
    if request.batch == choice.batch and request.allows(record, choice):
        return _raced(record, choice, request)
    return _from_trials(record, request)


def _raced(record: Record, choice: Choice, request: Request) -> Served:
    """The winner for a use, with the gains of the other uses."""
    winners = {use: record.winner(use, free=request.free) for use in RACED}
    wider = USES[USES.index(request.use) + 1 :]
    allowed = {u: one for u, one in winners.items() if u in wider or request.allows(record, one)}
    baseline, made = record.key.task.baseline, record.provenance
    what = f"{times(choice.speedup)} {baseline} at batch {record.batch}"
    if choice.config == record.baseline.config:
        what = f"{baseline}: {_no_gain(record)}"
    if made.steps or made.duration_s:
        job = f"{made.steps} steps" if made.steps else f"{made.duration_s:g} s"
        what += f" in the steady state, chosen for a job of {job}"
    flags = allowed.get(FLAGS, record.baseline).config
    gains = {use: one.speedup for use, one in allowed.items()}
    return _served(record, request, choice.config, what, flags=flags, gains=gains)


def _no_gain(record: Record) -> str:
    return "nothing measured is clearly faster" if record.compares else "nothing else was measured"


def _from_trials(record: Record, request: Request) -> Served:
    """The best measured config for a batch or for limits that no race covered."""
    batch = request.batch or record.batch
    known = _measured(record, batch)
    base = known.get(record.baseline.config.at(batch))
    fitting = [
        one
        for one in known.values()
        if request.allows(record, one) and not unverified(record, one.config)
    ]
    if not fitting or base is None:
        default = record.baseline.config.knobs
        ran = {t.config for t in record.trials if t.measurement.ok and t.stage == "compute"}
        sizes = sorted({record.batch} | {one.batch for one in ran if one.knobs == default})
        raise NoRecord(
            f"{record.target.name} was not measured at {request}, or torch's default was not; "
            f"measured batches: {', '.join(map(str, sizes))}"
        )
    raced_here = batch == record.batch
    # Single measurements differ only if the difference exceeds their own spread.
    better = [
        one
        for one in fitting
        if one is not base
        and (one.faster if one.raced and raced_here else one.low > NOISE * base.high)
    ]
    if not better:
        reason = f"torch's default: nothing measured beats it at {request}"
        return _served(record, request, base.config, reason)
    best = max(better, key=lambda one: one.samples_per_s)
    speedup = best.samples_per_s / base.samples_per_s
    how = "raced" if best.raced and raced_here else "each measured once"
    flags, gains, alone = record.winner(FLAGS), {request.use: speedup}, base.config
    if flags.batch == batch and request.allows(record, flags):
        gains, alone = {FLAGS: flags.speedup} | gains, flags.config
    reason = f"{times(speedup)} torch's default at batch {batch}, {how}"
    return _served(record, request, best.config, reason, flags=alone, gains=gains)


def _over(record: Record, request: Request, length: Length) -> Served:
    """The config with the most samples/s over a job, first step included."""
    sizes = {record.batch} | {t.config.batch for t in record.trials if t.stage == "compute"}
    found = [
        one
        for size in (sorted(sizes) if request.free else [length.batch])
        for one in _candidates(record, size)
        if request.allows(record, one)
    ]
    default = record.baseline.config.at(length.batch)
    base = next((one for one in found if one.config == default), None)
    if not record.compares and all(one == base for one in found):
        return _steady(record, request)  # the length makes no difference
    if base is None:
        steady = _steady(record, request)
        why = "has no known first step"
        if _candidates(record, length.batch):
            why = "is not among what is permitted"
        unknown = f"; the job's length is not counted, because torch's default {why}"
        return dataclasses.replace(steady, reason=steady.reason + unknown)
    best = max(found, key=lambda one: length.rate(one.pace))
    job = f"{length.steps} steps" if length.steps else f"{length.seconds:g} s"
    rate, default_rate = length.rate(best.pace), length.rate(base.pace)
    if rate < LEAST_GAIN * default_rate or best == base:
        reason = f"torch's default: over {job} at batch {length.batch} no config pays"
        return _served(record, request, base.config, reason)
    gain = rate / default_rate if default_rate else float("inf")
    rates = "raced" if best.raced and base.raced else "each measured once"
    reason = (
        f"{times(gain)} torch's default over {job} at batch {best.pace.batch}, "
        f"{best.pace.first_step_s:.3g} s of first step counted ({rates})"
    )
    # A script that only calls apply() gets the default: no race was for a job's length.
    flags = record.baseline.config.at(best.config.batch)
    return _served(record, request, best.config, reason, flags=flags, gains={request.use: gain})


def break_even(record: Record, use: str = LOOP) -> list[tuple[int, Candidate]]:
    """Pairs (steps, the best config for jobs of at least these steps), at the user's batch."""
    default, found = record.baseline.config, _candidates(record, record.batch)
    known = [one for one in found if knobs.follows(use, one.config, default)]
    return [(steps, known[i]) for steps, i in overtaking([one.pace for one in known])]


def _comparison(record: Record, config: Config) -> Measurement | None:
    """The last comparison of a config's knobs with strict fp32; None if there is none."""
    checks = [one for one in record.trials if one.stage == "numerics"]
    same = (one.measurement for one in reversed(checks) if one.config.knobs == config.knobs)
    return next(same, None)


def unverified(record: Record, config: Config) -> str:
    """'; not verified: ...' if a config did not match fp32, or changes numerics and was not
    compared."""
    check, task = _comparison(record, config), record.key.task
    if check.ok if check else not knobs.needs_comparison(config, record.baseline.config):
        return ""
    why = "inference" if task.mode != "train" else "left out"
    if task.mode == "train" and task.tolerance:
        why = "there was no time"
    return f"; not verified against fp32: {check.reason if check else why}"


def is_clear(record: Record) -> bool:
    """Whether a record's result is certain: not stale, cut short, noisy or unverified."""
    best, own = record.winner(record.use), record.baseline
    if record.stale or not record.compares or record.provenance.effort == INTERRUPTED:
        return False
    if best.config == own.config and unsteady(own.rounds):
        return False
    return not doubtful(record) and not unverified(record, best.config)


def gain(record: Record, use: str) -> str:
    """A line on a winner's speed-up, its interval, and its comparison with fp32."""
    choice = record.winner(use)
    if choice.config == record.baseline.config:
        return _no_gain(record)
    spread = interval(choice.speedup_low, choice.speedup_high)
    check, held = _comparison(record, choice.config), "; it changes at most the rounding"
    if check and knobs.needs_comparison(choice.config, record.baseline.config):
        held = f"; verified against fp32: {check.reason}"
    doubt = unverified(record, choice.config) or held
    return f"{times(choice.speedup)} {record.key.task.baseline} ({spread}){doubt}"


def carry_over(record: Record, request: Request, query: Query) -> Served:
    """The part of a similar record's config that is safe to use unmeasured.

    These are the `Knob.transferable` knobs that this device and the request permit. The batch is
    the script's own, or the record's for the same sample on a device with no less memory.
    """
    from advisor.tuners.environment import cpu_has_bf16

    here, there = query.environment.device, record.key.environment.device
    sample = query.sample or record.key.task.sample
    choice = record.winner(request.use)
    held = choice.config | record.input
    sound = not unverified(record, choice.config)
    context = knobs.SearchContext(
        device=here.kind,
        capability=here.compute_capability,
        cpu_bf16=here == there and cpu_has_bf16(),
        dimensions=len(sample) + 1,
        training=request.given["mode"] == "train",
        deterministic=bool(request.given.get("deterministic")),
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
    return Served(
        config=found if batch is None else found.at(batch),
        status="nearest",
        reason=f"carried over, not measured: {knobs.described(found, nothing='nothing')}",
        record=record,
        use=request.use,
        default=Config(record.baseline.config | knobs.TORCH),
    )


def _measured(record: Record, batch: int) -> dict[Config, Candidate]:
    """Every config that ran at a batch, with the figures of its race, else of its trial."""
    tried: dict[Config, Measurement | Choice] = {
        trial.config: trial.measurement
        for trial in record.trials
        if trial.stage == "compute" and trial.measurement.ok and trial.origin != "reference"
    }
    raced = {one.config: one for one in _choices(record)}
    return {
        config: Candidate(
            config=config,
            samples_per_s=seen.samples_per_s,
            low=seen.low,
            high=seen.high,
            peak_bytes=seen.peak_bytes,
            raced=config in raced,
            faster=isinstance(seen, Choice) and (seen.speedup_low > 1 or batch != record.batch),
        )
        for config, seen in (tried | raced).items()
        if config.batch == batch
    }


def _candidates(record: Record, batch: int) -> list[Candidate]:
    """Configs that may be the best for some job at one batch size, torch's default first, each with
    its pace. Configs without a known first step are left out; [] if the default is one of them."""
    known, default = _measured(record, batch), record.baseline.config
    base = known.get(default.at(batch))
    if base is None:
        return []
    # In the steady state, no config may count as faster than the advice, which won the race.
    best = record.winner(CAPTURE)
    most = best.samples_per_s if best.batch == batch and not length_of(record) else math.inf
    advised = {one.choice.config for one in record.winners}
    fresh = {c.config: c.first_step_s for c in _choices(record) if c.first_step_s > 0}
    # In a run, every changed knob costs its first step, and the baseline costs nothing.
    paying = tuple(default) if record.key.task.command else knobs.FIRST_STEP_COSTS
    # Each fresh process pays this; the trials, in one process, paid it only once.
    seen = first_step_seen(record.trials, default, paying)
    loading = max(0.0, fresh.get(default, 0.0) - seen)
    found = []
    for one in [base, *(other for other in known.values() if other is not base)]:
        rate = one.samples_per_s
        if one is not base:
            rate = min(most, one.samples_per_s if one.raced else one.low / ONCE)
            counts = one.faster if one.raced else rate > base.samples_per_s
            if one.config not in advised and (not counts or unverified(record, one.config)):
                continue
        seen = first_step_seen(record.trials, one.config, paying)
        first_step_s = fresh.get(one.config) or (seen and seen + loading)
        step_s = batch / rate if rate > 0 else 0.0
        if all(SHORTEST_S < seconds < LONGEST_S for seconds in (step_s, first_step_s)):
            pace = Pace(batch=batch, first_step_s=first_step_s, step_s=step_s)
            found.append(dataclasses.replace(one, pace=pace))
        elif one is base:
            return []
    return found


def length_of(record: Record) -> Length | None:
    """The job that a record's advice was chosen for; None for the steady state."""
    made = record.provenance
    if not (made.steps or made.duration_s):
        return None
    return Length(batch=record.batch, steps=made.steps, seconds=made.duration_s)


def _choices(record: Record) -> list[Choice]:
    return [record.baseline, *(one.choice for one in record.winners), *record.raced]
