"""The final race, the winner for each use, and why others are not advised."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from advisor.cache.config import Config
from advisor.cache.record import USES, Choice, Trial, Winner
from advisor.cache.shown import speedup, tells, times
from advisor.errors import WorkerError
from advisor.tuners import knobs
from advisor.tuners.decisions import CLEARLY, GAIN, HOPELESS, LOOKS, NOTABLE, RESOLVABLE, TURN_S
from advisor.tuners.measure.runner import ConfigFailed
from advisor.tuners.search.ratio import LEVEL, UNMEASURED, Noise, Ratio, is_doubtful, paired
from advisor.tuners.search.space import Space
from advisor.tuners.search.visit import Visit, Visitor
from advisor.tuners.search.visits import Visits, score

Rates = dict[Config, list[float]]  # samples/s of each turn


def race(
    visitor: Visitor, configs: Sequence[Config], turn_s: float = TURN_S
) -> tuple[Rates, dict[Config, ConfigFailed]]:
    """Measure configs in turn, in blocks of `turn_s` seconds, in alternating order so that drift is
    the same for all. Returns the rates of the configs that did not fail, and why the others failed.

    Ends when all ratios to the first config are known closely, after the last of LOOKS, or if no
    time is left for another round like the last. Only whole rounds count.
    """
    reference, clock = configs[0], visitor.clock
    rates: Rates = {config: [] for config in dict.fromkeys(configs)}
    lost: dict[Config, ConfigFailed] = {}
    for turn in range(LOOKS[-1]):
        began = clock.now()
        for config in list(rates) if turn % 2 == 0 else list(rates)[::-1]:
            try:
                rates[config].append(visitor.block(config, turn_s).rate)
            except ConfigFailed as exc:
                if exc.outcome != "timed_out":
                    lost[config] = exc
                if config == reference or exc.outcome == "timed_out":
                    return {one: seen[:turn] for one, seen in rates.items() if turn}, lost
                del rates[config]
        ratios = [paired(rates[config], rates[reference]) for config in rates]
        known = turn + 1 in LOOKS and all(one.within(CLEARLY - 1) for one in ratios[1:])
        if known or clock.left_s < clock.now() - began:
            break
    return rates, lost


def deciding_rates(raced: Rates, leaders: Sequence[Visit], visitor: Visitor) -> Rates:
    """The turns that decide: those of the race, or those of the visits if there was no race or it
    was too noisy to contradict the visits."""
    own = visitor.own
    visits = [one for one in leaders if one.turns]
    if len(raced) > 1:
        pooled = _pooled(raced, visits, own)
        ratios = {c: paired(pooled[c], pooled[own], visitor.noise) for c in pooled if c != own}
        told = [one for one in leaders if one.ratio.faster and one.config in ratios]
        clear = any(one.faster for one in ratios.values())
        if clear or not any(ratios[one.config].high >= one.ratio.mean for one in told):
            return pooled
    if not visits:
        return {own: [block.rate for block in visitor.baseline]}
    return _beside(own, visits, max(len(one.turns) for one in visits))


def _pooled(raced: Rates, visits: Sequence[Visit], own: Config) -> Rates:
    """The rounds of a race. If there are few, turns of visits come first, as many of each visit."""
    visits = [one for one in visits if one.config in raced]
    if len(raced[own]) >= LOOKS[1] or len(visits) < len(raced) - 1:
        return raced
    turns = _beside(own, visits, min(len(one.turns) for one in visits))
    return {config: turns[config] + seen for config, seen in raced.items()}


def _beside(own: Config, visits: Sequence[Visit], count: int) -> Rates:
    """The last `count` turns of visits, rescaled as if all had the same blocks of the baseline."""
    most = max((one.turns for one in visits), key=len)
    rates = [turn.beside.rate for turn in most[-count:]]
    return {own: rates} | {
        one.config: [t.ratio * rate for t, rate in zip(one.turns[-count:], rates, strict=False)]
        for one in visits
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The decisions of a search; fields as in `Record`."""

    baseline: Choice
    winners: tuple[Winner, ...]  # at the user's batch and, if others were tried, with it free
    raced: tuple[Choice, ...]
    input: Config = field(default_factory=Config)
    trials: tuple[Trial, ...] = ()
    artifacts: Mapping[Config, Path] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # lines on configs that gained and are not advised, and on limits
    interrupted: bool = False  # by Ctrl-C
    exhausted: bool = False  # nothing but the baseline could be tried, whatever the budget
    complete: bool = True  # neither interrupted nor ended by losing the runner
    unmodified: float = 1.0  # estimated speed-up of the script if it had enough memory


def choose(
    space: Space,
    rates: Rates,
    peaks: dict[Config, int],
    weigh: Callable[[Config, float], float] = lambda _config, rate: rate,
    first_s: Callable[[Config], float] = lambda _config: 0.0,
    noise: Noise = UNMEASURED,
    joules: Callable[[Config], float] = lambda _config: 0.0,
) -> SearchResult:
    """Choose the winners: configs that clearly beat the baseline. `weigh` turns steady samples/s,
    which are reported, into samples/s over the whole job, which decide. `peaks`: bytes; `first_s`:
    seconds of a first step; `joules`: of a sample. Raises WorkerError without the baseline's."""
    if not rates.get(space.default):
        raise WorkerError("the baseline did not finish the race; tune again")
    over_job = {c: [max(1e-9, weigh(c, rate)) for rate in seen] for c, seen in rates.items()}
    steady, choices = (
        {
            c: dataclasses.replace(
                choice_of(c, seen, turns[space.default], peaks, noise),
                first_step_s=first_s(c),
                joules=joules(c),
            )
            for c, seen in turns.items()
        }
        for turns in (rates, over_job)
    )
    found = _at_batch(space, choices)
    if len(space.batches) > 1:
        found |= _free(space, choices, found)
    return SearchResult(
        baseline=steady[space.default],
        winners=tuple(
            Winner(use=use, free=free, choice=steady[choice.config])
            for (use, free), choice in found.items()
        ),
        raced=tuple(
            choice
            for choice in steady.values()
            if len(choice.rounds) > 1 and math.isfinite(choice.speedup_high)
        ),
    )


_ByUse = dict[tuple[str, bool], Choice]


def _at_batch(space: Space, choices: dict[Config, Choice]) -> _ByUse:
    """For each use, the fastest choice at the user's batch; a lesser use's if that is as fast."""
    found: _ByUse = {}
    held = choices[space.default]
    for use in USES:
        if better := [c for c in _better(space, choices, use) if c.batch == space.batch]:
            best = _lightest(space, better)
            held = held if _ties(held, best) else best
        found[use, False] = held
    return found


def _free(space: Space, choices: dict[Config, Choice], fixed: _ByUse) -> _ByUse:
    """For each use, the choice at the smallest batch that is nearly the fastest, or at the user's
    batch if that is as fast."""
    found: _ByUse = {}
    held = fixed[USES[0], False]
    for use in USES:
        at_user = fixed[use, False]
        if held.batch == space.batch or paired(at_user.rounds, held.rounds).faster:
            held = at_user
        if better := _better(space, choices, use):
            fastest = max(choice.samples_per_s for choice in better)
            near = [c for c in better if GAIN * c.samples_per_s >= fastest]
            smallest = min(choice.batch for choice in near)
            best = _lightest(space, [c for c in near if c.batch == smallest])
            if paired(best.rounds, at_user.rounds).faster and not _ties(held, best):
                held = best
        found[use, True] = held
    return found


def _better(space: Space, choices: dict[Config, Choice], use: str) -> list[Choice]:
    """Configs that a use can follow and that clearly beat the baseline. Workers deliver in bursts:
    if a config adds workers, a low end of its interval from RESOLVABLE on is enough."""
    found = []
    own = choices[space.default]
    for choice in choices.values():
        if is_doubtful(choice, own):
            continue
        ratio = Ratio(mean=choice.speedup, low=choice.speedup_low, high=choice.speedup_high)
        fed = knobs.workers(choice.config) > knobs.workers(space.default)
        faster = ratio.faster or (fed and ratio.low >= RESOLVABLE)
        if faster and knobs.follows(use, choice.config, space.default):
            found.append(choice)
    return found


def _lightest(space: Space, choices: Sequence[Choice]) -> Choice:
    """Of the choices that tie with the fastest, the one with the lowest adoption cost."""
    fastest = max(choices, key=lambda choice: choice.samples_per_s)

    def asks(choice: Choice) -> tuple[int, int, float]:
        adoption_cost = knobs.adoption_cost(choice.config, space.default)
        return adoption_cost, knobs.workers(choice.config), -choice.samples_per_s

    return min((one for one in choices if one is fastest or _ties(one, fastest)), key=asks)


def _ties(ours: Choice, fastest: Choice) -> bool:
    return paired(ours.rounds, fastest.rounds).level


def choice_of(
    config: Config,
    seen: list[float],
    reference: list[float],
    peaks: dict[Config, int],
    noise: Noise = UNMEASURED,
) -> Choice:
    ratio = LEVEL if seen is reference else paired(seen, reference, noise)
    return Choice(
        config=config,
        batch=config.batch,
        samples_per_s=statistics.median(seen),
        low=min(seen),
        high=max(seen),
        speedup=ratio.mean,
        speedup_low=ratio.low,
        speedup_high=ratio.high,
        peak_bytes=peaks.get(config, 0),
        rounds=tuple(seen),
    )


def shown(ratio: Ratio) -> str:
    """A ratio as '1.52x (1.49-1.55)', '1.52x in one turn', or '1.52x' if it may be noise."""
    if tells(ratio.low, ratio.high):
        return speedup(ratio.mean, ratio.low, ratio.high)
    return times(ratio.mean) + " in one turn" * (ratio.high == math.inf)


def gains(
    visits: Visits,
    rates: Rates,
    noise: Noise,
    chosen: Collection[Config],
    named: Callable[[Config], str],
    *,
    any_raced: bool,
) -> Iterator[str]:
    """Yields a line for each config that seemed to gain and is not advised, judged by the turns in
    `rates`, and a line if the loader limits the best config. `any_raced`: in a final race."""
    own = visits.baseline.config
    baseline = choice_of(own, rates[own], rates[own], {})
    seemed = [v for v in visits.values() if v.ok and v.ratio.mean >= NOTABLE]
    for visit in sorted(seemed, key=lambda one: -one.ratio.mean):
        if (config := visit.config) not in chosen and config != own:
            raced = len(rates.get(config, ())) > 1
            ratio = paired(rates[config], rates[own], noise) if raced else visit.ratio
            why = _why_not(visits, visit, ratio, alone=set(chosen) <= {own}, raced=any_raced)
            turns = rates.get(config, rates[own])
            if is_doubtful(choice_of(config, turns, rates[own], {}, noise), baseline):
                why = "doubtful: it may gain only while the host is busy"
            yield f"{named(config)}: {shown(ratio)}, not advised: {why}"
    best = next((one for one in visits.ranked() if one.unstarved_ratio(noise).faster), None)
    if best is not None and score(best) >= NOTABLE * best.ratio.mean:
        yield (
            f"the loader limits {named(best.config)}: it waits {best.waited:.0%} of its time for "
            f"data, and would be {score(best):.2f}x without waiting"
        )


def _why_not(visits: Visits, visit: Visit, ratio: Ratio, *, alone: bool, raced: bool) -> str:
    """Why a config is not advised; `alone`: no other config is; `raced`: some config was raced."""
    compared = visits.compared(visit.config)
    if compared is not None and not compared.ok:
        wrong = compared.outcome == "wrong"
        return "it does not train like fp32" if wrong else "it could not be compared with fp32"
    if compared is None and visits.needs_comparison(visit.config) and visits.leads(visit):
        return "it was not compared with fp32"
    if ratio.high == math.inf and score(visit) >= HOPELESS * score(visits.best()):
        return "one turn is too few to tell"
    if ratio.high < 1:
        return "slower in the final race"
    if ratio.high < math.inf and not ratio.faster:
        return "too noisy to tell" if ratio.low <= 1 else "too noisy to tell how much it gains"
    if alone:
        return "it was not in the final race" if raced else "its trial alone is too little to tell"
    return "another config is as fast or faster"
