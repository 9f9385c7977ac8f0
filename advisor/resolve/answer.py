"""Choose the config of a record that answers a request."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from advisor.cache.config import Config
from advisor.cache.record import CAPTURE, CUT_SHORT, FLAGS, LOOP, USES, Choice, Measurement, Record
from advisor.cache.shown import interval, times
from advisor.errors import NoRecord
from advisor.resolve.request import Request
from advisor.tuners import knobs
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.decisions import NOTABLE
from advisor.tuners.length import Length, Pace, first_step_seen
from advisor.tuners.length import break_even as overtaking
from advisor.tuners.search.ratio import is_doubtful, unsteady

NOISE = 1.03  # a smaller ratio between two configs that were measured once each may be noise
LEAST_GAIN = 1.01  # a smaller gain is not advised, if no race chose the config
DOUBTFUL = (
    "Doubtful: the host was busy. During the tuning, the baseline's speed changed by more than the "
    "result's interval, so configs that seemed to gain are not advised"
)


def answer(record: Record, request: Request) -> Served:
    """The record's best config for a request. Raises NoRecord if no measured config fits it."""
    batch = request.batch or record.batch
    length, request = request.plan.length(batch), dataclasses.replace(request, batch=batch)
    reliable = without_doubtful(record)
    found = _best(reliable, request, length) if length else _steady(reliable, request)
    if reliable is record:
        return found
    busy = "the host was too busy to tell what"
    reason = f"{record.key.task.baseline}: {busy} gains"
    if reliable.compares:
        reason = f"{found.reason}; {busy} else gains"
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
    """A config as Served; the reason says whether its numerics are in doubt."""
    doubt = unverified(record, config)
    return Served(
        config=config | record.input,
        reason=reason + doubt,
        doubt=doubt,
        record=record,
        use=request.use,
        # Settings that the task asks for, such as determinism, do not count as torch's default.
        default=record.baseline.config | knobs.TORCH,
        flags=flags,
        gains=gains or {},
    )


def _steady(record: Record, request: Request) -> Served:
    """The best config without counting the first step: the winner of the race if it fits, with the
    gains of the other uses, else the best of all that ran."""
    choice = record.winner(request.use, free=request.free)
    if request.free:
        request = dataclasses.replace(request, batch=choice.batch)
    if request.batch != choice.batch or not request.allows(record, choice):
        return _best(record, request)
    winners = {use: record.winner(use, free=request.free) for use in USES}
    wider = USES[USES.index(request.use) + 1 :]
    allowed = {u: one for u, one in winners.items() if u in wider or request.allows(record, one)}
    baseline = record.key.task.baseline
    reason = f"{times(choice.speedup)} {baseline} at batch {record.batch}"
    if choice.config == record.baseline.config:
        reason = f"{baseline}: {_no_gain(record)}"
    if length := length_of(record):
        reason += f" in the steady state, chosen for a job of {length}"
    flags = allowed.get(FLAGS, record.baseline).config
    gains = {use: one.speedup for use, one in allowed.items()}
    return _served(record, request, choice.config, reason, flags=flags, gains=gains)


def _no_gain(record: Record) -> str:
    return "nothing measured is clearly faster" if record.compares else "nothing else was measured"


class Candidate(NamedTuple):
    """A config that ran. `raced`: measured in turn with torch's default, not once."""

    config: Config
    samples_per_s: float
    peak_bytes: int
    raced: bool
    pace: Pace


def _best(record: Record, request: Request, length: Length | None = None) -> Served:
    """The fastest config of all that ran: over a job, first step included, or in the steady state.
    For batches and limits that no race covered, and for jobs of another length."""
    batch = request.batch or record.batch
    default, sizes = record.baseline.config.at(batch), [batch]
    if length and request.free:
        tried = {one.config.batch for one in record.trials if one.stage == "compute"}
        sizes = sorted({record.batch} | tried)
    known = [one for size in sizes for one in _candidates(record, size, timed=length is not None)]
    found = [one for one in known if request.allows(record, one)]
    base = next((one for one in known if one.config == default), None)
    if length and not record.compares and all(one is base for one in found):
        return _steady(record, request)  # the length makes no difference
    if length and base not in found:
        steady, why = _steady(record, request), "has no known first step"
        if base is not None:
            why = "is not among what is permitted"
        unknown = f"; the job's length is not counted, because torch's default {why}"
        return dataclasses.replace(steady, reason=steady.reason + unknown)
    if base is None or not found:
        ran = {t.config for t in record.trials if t.measurement.ok and t.stage == "compute"}
        batches = sorted({record.batch} | {one.batch for one in ran if one.knobs == default.knobs})
        raise NoRecord(
            f"{record.target.name} was not measured at {request}, or torch's default was not; "
            f"measured batches: {', '.join(map(str, batches))}"
        )

    def rate(one: Candidate) -> float:
        return length.rate(one.pace) if length else one.samples_per_s

    best = max(found, key=rate)
    if best is base or rate(best) < LEAST_GAIN * rate(base):
        beaten = f"nothing measured beats it at {request}"
        if length:
            beaten = f"over {length} at batch {batch} no config pays"
        return _served(record, request, default, f"torch's default: {beaten}")
    gain = rate(best) / rate(base) if rate(base) else math.inf
    reason = f"{times(gain)} torch's default"
    how = "raced" if best.raced and base.raced else "each measured once"
    # A script that only calls apply() gets the default, unless a race at this batch chose flags.
    flags, chosen = default.at(best.config.batch), record.winner(FLAGS)
    gains = {request.use: gain}
    if length:
        first = f"{best.pace.first_step_s:.3g} s of first step counted"
        reason += f" over {length} at batch {best.config.batch}, {first} ({how})"
    else:
        reason += f" at batch {batch}, {how}"
        if chosen.batch == batch and request.allows(record, chosen):
            gains, flags = {FLAGS: chosen.speedup} | gains, chosen.config
    return _served(record, request, best.config, reason, flags=flags, gains=gains)


def break_even(record: Record) -> list[tuple[int, Config, Pace]]:
    """For jobs of at least a number of steps at the user's batch: a loop's best config and pace."""
    default = record.baseline.config
    found = _candidates(record, record.batch, timed=True)
    known = [(one.config, one.pace) for one in found if knobs.follows(LOOP, one.config, default)]
    return [(steps, *known[i]) for steps, i in overtaking([pace for _config, pace in known])]


def _candidates(record: Record, batch: int, *, timed: bool) -> Iterator[Candidate]:
    """Yields torch's default at a batch, then the configs that ran there and are clearly faster and
    verified; nothing if the default did not run. `timed`: only configs whose first step is known,
    and all that won a race."""
    own, default, trials = record.baseline.config, record.baseline.config.at(batch), record.trials
    choices = [record.baseline, *(one.choice for one in record.winners), *record.raced]
    ran: dict[Config, Measurement | Choice] = {
        trial.config: trial.measurement
        for trial in trials
        if trial.stage == "compute" and trial.measurement.ok and trial.origin != "reference"
    }
    ran |= {one.config: one for one in choices}
    base = ran.pop(default, None)
    if base is None:
        return
    # In the steady state, no config may count as faster than the advice, which won the race.
    best, advised = record.winner(CAPTURE), {one.choice.config for one in record.winners}
    most = best.samples_per_s if best.batch == batch and not length_of(record) else math.inf
    fresh = {one.config: one.first_step_s for one in choices if one.first_step_s > 0}
    # In a run, every changed knob costs its first step, and the baseline costs nothing.
    paying = tuple(own) if record.key.task.command else knobs.FIRST_STEP_COSTS
    # Each fresh process pays this; the trials, in one process, paid it only once.
    loading = max(0.0, fresh.get(own, 0.0) - first_step_seen(trials, own, paying))
    for config, seen in ((default, base), *ran.items()):
        if config.batch != batch:
            continue
        rate, raced = seen.samples_per_s, isinstance(seen, Choice)
        if seen is not base:
            rate, clear = min(most, rate), seen.low > NOISE * base.high
            if isinstance(seen, Choice) and batch == record.batch:
                clear = seen.speedup_low > 1
            won = timed and config in advised
            if not won and (not clear or unverified(record, config)):
                continue
        first_step_s = fresh.get(config, 0.0)
        if timed and not first_step_s and (seen_s := first_step_seen(trials, config, paying)):
            first_step_s = seen_s + loading
        if not timed or (first_step_s and rate):
            step_s = batch / rate if rate else math.inf
            pace = Pace(batch=batch, first_step_s=first_step_s, step_s=step_s)
            yield Candidate(config, rate, seen.peak_bytes, raced, pace)
        elif seen is base:
            return


def length_of(record: Record) -> Length | None:
    """The job that a record's advice was chosen for; None for the steady state."""
    made = record.provenance
    if not (made.steps or made.duration_s):
        return None
    return Length(batch=record.batch, steps=made.steps, seconds=made.duration_s)


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


def advises(record: Record) -> bool:
    """Whether a record advises anything but its baseline."""
    return record.winner(record.use).config != record.baseline.config


def is_clear(record: Record) -> bool:
    """Whether a record's result is certain: not stale, cut short, noisy or unverified."""
    if record.stale or not record.compares or record.provenance.effort == CUT_SHORT:
        return False
    # A config that seemed to gain, and still lost, was too noisy to tell.
    seemed = any(one.speedup >= NOTABLE for one in record.raced) or _seemed_to_gain(record)
    if not advises(record) and (seemed or unsteady(record.baseline.rounds)):
        return False
    return not doubtful(record) and not unverified(record, record.winner(record.use).config)


def _seemed_to_gain(record: Record) -> bool:
    """Whether a trial at the user's batch seemed to gain, and was neither raced nor found wrong."""
    own, judged = record.baseline, {one.config for one in record.raced}
    judged |= {one.config for one in record.trials if one.measurement.outcome == "wrong"}
    rates = {t.config: t.measurement.samples_per_s for t in record.trials if t.stage == "compute"}
    least = NOTABLE * rates.get(own.config, math.inf)
    return any(
        rate >= least and config.batch == own.batch and config not in judged
        for config, rate in rates.items()
    )


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


def doubtful(record: Record) -> bool:
    """Whether the host was too busy during a record's race. Such a record counts in no mean."""
    best, own = record.winner(record.use), record.baseline
    deciding = record.raced if best.config == own.config else (best,)
    return any(is_doubtful(one, own) for one in deciding)


def without_doubtful(record: Record) -> Record:
    """The record without doubtful configs. Its baseline replaces doubtful winners."""
    own, winners = record.baseline, [one.choice for one in record.winners]
    dropped = {one.config for one in (*winners, *record.raced) if is_doubtful(one, own)}
    if not dropped:
        return record
    return dataclasses.replace(
        record,
        winners=tuple(
            dataclasses.replace(one, choice=own) if one.choice.config in dropped else one
            for one in record.winners
        ),
        raced=tuple(one for one in record.raced if one.config not in dropped),
        trials=tuple(one for one in record.trials if one.config not in dropped),
    )
