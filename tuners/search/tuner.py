"""The search: visits configs of a place until nothing more fits into the budget, then races them.

There is a best verified config at every moment. It is replaced only by one that is faster and
trains like strict fp32, so that more time cannot give less, and an interruption keeps the best so
far.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import optuna

from advisor.cache.config import Config
from advisor.cache.record import Choice, Measurement, Trial, Winner
from advisor.errors import TargetFailed, WorkerError
from advisor.tuners import knobs
from advisor.tuners.decisions import (
    CLEARLY,
    GAIN,
    IDLE_TRIALS,
    LEADERS,
    LOADER_TURN_S,
    LOOKS,
    MENTIONED,
    NEAR,
    PAIRS,
    TURN_S,
)
from advisor.tuners.length import Length, Pace, first_step_seen
from advisor.tuners.measure.place import UNVERIFIED, Compared, ConfigFailed, Place
from advisor.tuners.search import remarks
from advisor.tuners.search.clock import Clock
from advisor.tuners.search.costs import Costs
from advisor.tuners.search.journal import Journal, Known
from advisor.tuners.search.order import Proposal, Recipe, Visits, score
from advisor.tuners.search.plan import Progress
from advisor.tuners.search.race import race
from advisor.tuners.search.ratio import paired
from advisor.tuners.search.sampler import GainPerSecond
from advisor.tuners.search.space import Space
from advisor.tuners.search.visit import Turn, Visit, Visitor
from advisor.tuners.search.winners import Rates, choices_of, choose

NUMERICS = "numerics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What is asked of a search.

    Attributes:
        budget_s: of all of it.
        compares: configs are compared with strict fp32, and only those that pass are advised.
        baseline: what everything is measured against, for people.
        trials: visits at most; None for no limit.
        first: configs to visit before the recipe, from records that nearly fit.
        seed: of the sampler.
        sampler: any Optuna sampler in place of GainPerSecond.
        length: of the job; None for the steady state.
        modules: in the model.
        folder: takes the artifacts of what was chosen; None where none are kept.
        stage: of its trials, as in `Trial`.
        reserve_s: of the budget, kept for what comes after.
        without: the baseline without one of the script's own settings each: measured once, told,
            and never advised.
        worth: whether a visit is worth its seconds; a run that goes on asks for that.
    """

    budget_s: float
    compares: bool = True
    baseline: str = "torch's default"
    trials: int | None = None
    first: Sequence[Config] = ()
    seed: int = 0
    sampler: optuna.samplers.BaseSampler | None = None
    length: Length | None = None
    modules: int = 0
    folder: Path | None = None
    stage: str = knobs.COMPUTE
    reserve_s: float = 0.0
    without: Sequence[Config] = ()
    worth: Callable[[float], bool] = lambda _seconds: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search decided; see the fields of `Record`.

    Attributes:
        artifacts: files of what was compiled for its configs.
        remarks: lines on what was faster and is not advised, and on what limits the rest.
        interrupted: by Ctrl-C; the best so far was kept.
        spent_s: seconds of the budget that it took.
    """

    baseline: Choice
    winners: tuple[Winner, ...]
    input: Config
    trials: tuple[Trial, ...]
    raced: tuple[Choice, ...]
    artifacts: Mapping[Config, Path] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    interrupted: bool = False
    spent_s: float = 0.0


class Tuner:
    """One search on one place.

    Args:
        study: where trials are kept; it is the one that is asked.
        progress: told what is being visited, and what was found.
        clock: of the budget; begun now by default.
    """

    def __init__(
        self,
        place: Place,
        space: Space,
        study: optuna.Study,
        scope: Scope,
        progress: Progress | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._place, self._space, self._scope = place, space, scope
        self._uses = space.uses
        self._progress = progress or Progress()
        self.clock = clock or Clock(scope.budget_s, reserve_s=scope.reserve_s)
        self._visitor = Visitor(place, self.clock, self._tell)
        self._visits = Visits(space)
        self._recipe = Recipe(space, self._visits, scope.modules)
        self._costs = Costs(space, self._visits, scope.modules, self._is_doubtful)
        self._among: list[Config] = []
        self._sampled_batch = space.batch
        study.sampler = scope.sampler or GainPerSecond(
            seed=scope.seed,
            among=lambda: self._among,
            best=lambda: self._visits.best(batch=self._sampled_batch).ratio.mean,
        )
        self._journal = Journal(study, space, self._progress.notice)
        self._trials: list[Trial] = []
        self._compared: dict[Config, Compared] = {}
        self._passed_over: dict[Config, float] = {}
        self._own_costs: list[str] = []
        self._enough = ""
        self._doubtful: dict[Config, bool] = {}
        self.known = self._resume()

    def _resume(self) -> int:
        """Take over the trials of earlier runs; how many there are. What the time was too short for
        then is tried again."""
        for one in self._journal.resume():
            config, compared = one.trial.config, one.compared
            self._trials.append(one.trial)
            unverified = compared is not None and compared.outcome == UNVERIFIED
            timed_out = one.trial.measurement.outcome == "timed_out"
            if compared is not None and not unverified:
                self._compared[self._code(config)] = compared
                self._visits.strike_wrong(config, compared, self._right)
            if config != self._space.default and not unverified and not timed_out:
                self._visits.add(_visit_of(one))
        return len(self._trials)

    def run(self) -> Found:
        """Visit, race and choose.

        Raises:
            WorkerError: the baseline cannot be measured. TargetFailed: the user's code fails.
        """
        interrupted = False
        try:
            self._measure_baseline()
            rates = self._search()
        except KeyboardInterrupt:
            if self._space.default not in self._visits:
                raise
            interrupted, rates = True, {}
        return self._decide(self._told_by(rates), interrupted)

    def _search(self) -> Rates:
        """Visit what fits, then race what leads; a place that is lost ends the search."""
        try:
            self._look_without()
            for proposal in self._proposals():
                self._consider(proposal)
            for batch in dict.fromkeys((self._space.batch, self._visits.best().config.batch)):
                self._sample(batch)
            return self._race(self._leaders())
        except (WorkerError, TargetFailed) as exc:
            if len(self._visits.all) == 1:  # nothing was measured beside the baseline
                raise
            self._progress.notice(f"the search ends here: {exc}")
            return {}

    # Visits -------------------------------------------------------------------------------------

    def _measure_baseline(self) -> None:
        default = self._space.default
        asked = self._journal.ask("baseline", default)
        try:
            visit = self._visitor.begin()
        except ConfigFailed as exc:
            self._journal.pass_over(asked)
            why = "give a larger --budget" if exc.outcome == "timed_out" else str(exc)
            raise WorkerError(f"{self._scope.baseline} could not be measured: {why}") from exc
        self._told(asked, visit, "baseline")
        self._say_if_short()

    def _say_if_short(self) -> None:
        """Say so where the budget has no time for the first config that compiles."""
        compiled = (self._space.near(changes) for changes in knobs.COMPILED)
        config = next((one for one in compiled if self._space.is_dear(one)), None)
        if config is None or self._fits(config, needs_s := self._costs.visit_s(config)):
            return
        self._enough = remarks.budget(self.clock.budget_s + needs_s)
        self._progress.notice(
            f"{self.clock.budget_s:g}s is short here: compiling this model takes about "
            f"{self._costs.build_s(config):.0f} s; --budget {self._enough} has the time for it"
        )

    def _look_without(self) -> None:
        """Measure what the script's own settings cost; said, and never advised."""
        for config in self._scope.without:
            if self._fits(config, self._costs.visit_s(config)):
                visit = self._visitor.visit(config, 1.0)
                self._visitor.forget(config)
                if visit.ok and visit.ratio.faster and visit.ratio.mean >= MENTIONED:
                    own = knobs.described(self._space.default, config)
                    self._own_costs.append(
                        f"your script's own {own} costs {remarks.shown(visit.ratio)} here: without "
                        f"it a step takes {visit.step_s:.3g} s; advisor never changes it"
                    )

    def _proposals(self) -> Iterator[Proposal]:
        """What led in earlier runs, what is best for near records, then the recipe."""
        yield from (Proposal(config, "earlier run") for config in self._leaders())
        near = dict.fromkeys(self._space.near(config) for config in self._scope.first)
        yield from (Proposal(c, "near record") for c in near if self._space.holds(c))
        yield from self._recipe

    def _sample(self, batch: int) -> None:
        """Visit what the sampler asks for, until it has found nothing better for a while."""
        self._sampled_batch = batch
        idle, best = 0, score(self._visits.best(batch=batch))
        while idle < IDLE_TRIALS:
            self._among = self._open(batch)
            if not self._among or self._is_full:
                return
            asked = self._journal.ask("sampler")
            config = Config(asked.params)
            if config not in self._among:
                self._journal.pass_over(asked)
                idle += 1
                continue
            self._visit(Proposal(config, "sampler"), asked)
            now = score(self._visits.best(batch=batch))
            idle, best = (0, now) if now > CLEARLY * best else (idle + 1, best)

    def _open(self, batch: int) -> list[Config]:
        """Configs that the sampler may propose: not visited, of code that is known to run, and for
        which there is time."""
        built = self._visits.changed(visit.config for visit in self._visits.all if visit.ok)
        left_s = self._search_s
        return [
            config
            for config in self._space.configs(batch, self._visits.feed)
            if self._space.dear_in(config) <= built
            and config not in self._visits
            and self._visits.allowed(config)
            and (needs_s := self._costs.visit_s(config)) <= left_s
            and self._scope.worth(needs_s)
        ]

    def _consider(self, proposal: Proposal) -> None:
        config = proposal.config
        known = self._visits.get(config)
        # What an earlier run measured is built again where it leads.
        if known is not None and (known.turns or proposal.origin != "earlier run"):
            return
        if self._is_full or not self._visits.allowed(config):
            return
        needs_s = self._costs.visit_s(config, proposal.turn_s)
        if not self._fits(config, needs_s):
            self._passed_over[config] = needs_s
        elif self._scope.worth(needs_s):
            self._visit(proposal, self._journal.ask(proposal.origin, config))

    def _visit(self, proposal: Proposal, asked: optuna.Trial) -> None:
        config = proposal.config
        best = score(self._visits.best(batch=config.batch))
        try:
            leave_s = self._costs.comparison_s(config) + self._costs.race_s([config], PAIRS)
            visit = self._visitor.visit(config, best, proposal.turn_s, leave_s)
            self._visits.add(visit)
            visit = self._verified(visit, always=proposal.compares)
        except BaseException:
            self._journal.pass_over(asked)
            raise
        self._told(asked, visit, proposal.origin)
        self._learn(visit)

    def _verified(self, visit: Visit, *, always: bool) -> Visit:
        """A visit with the comparison of what was timed, where it leads for some use, or `always`
        where its time is there."""
        config = visit.config
        asked = self._leads(visit) or (always and self._costs.compare_s <= self.clock.left_s)
        if not visit.ok or not self._is_doubtful(config) or not asked:
            return visit
        began = self.clock.now()
        compared = self._comparison_of(config)
        self._costs.compare_s = max(1.0, self.clock.now() - began)
        trial = Trial(
            number=len(self._trials),
            config=config,
            measurement=measurement_of(compared),
            stage=NUMERICS,
            origin="fp32",
            seconds=self.clock.now() - began,
        )
        self._trials.append(trial)
        took = visit.seconds + trial.seconds
        return dataclasses.replace(visit, compared=compared, seconds=took)

    def _comparison_of(self, config: Config) -> Compared:
        """The comparison of a config at the user's batch: a batch changes no number format."""
        code = self._code(config)
        if code not in self._compared:
            self._compared[code] = self._visitor.compare(config.at(self._space.batch))
        return self._compared[code]

    def _code(self, config: Config) -> Config:
        """A config at the user's batch and with its loader: what a comparison is of."""
        own = self._space.default.only(*knobs.FEEDS)
        return config.at(self._space.batch).replace(**own)

    def _is_doubtful(self, config: Config) -> bool:
        if config not in self._doubtful:
            doubtful = knobs.doubtful(config, self._space.default)
            self._doubtful[config] = self._scope.compares and doubtful
        return self._doubtful[config]

    def _leads(self, visit: Visit) -> bool:
        """Whether it is better than the best verified config of some use that can follow it."""
        value = self._value(visit)
        if value < CLEARLY * self._value(self._visits.baseline):
            return False
        uses = [u for u in self._uses if knobs.follows(u, visit.config, self._space.default)]
        batch = visit.config.batch
        return any(value > self._value(self._best_safe(use, batch)) for use in uses)

    def _best_safe(self, use: str, batch: int) -> Visit:
        """The best config of a use that is known to be right."""
        return next(iter(self._safe(use, batch)), self._visits.baseline)

    def _safe(self, use: str, batch: int) -> list[Visit]:
        """The configs of a use that are known to be right, the best first."""
        safe = [one for one in self._visits.ranked(use, batch) if self._is_safe(one)]
        return sorted(safe, key=lambda one: -self._value(one))

    def _value(self, visit: Visit) -> float:
        """The speed-up over the job where that has a length, else in the steady state."""
        weigh, baseline = self._weigh(), self._visits.baseline
        if weigh is None:
            return score(visit)
        rate = baseline.measurement.samples_per_s
        own = weigh(baseline.config, rate)
        return weigh(visit.config, score(visit) * rate) / own if own else score(visit)

    def _is_safe(self, visit: Visit) -> bool:
        compared = self._compared.get(self._code(visit.config))
        return not self._is_doubtful(visit.config) or (compared is not None and compared.ok)

    @property
    def _right(self) -> list[Config]:
        """What was compared, and trains like fp32."""
        return [config for config, compared in self._compared.items() if compared.ok]

    def _learn(self, visit: Visit) -> None:
        """Strike out what a visit has shown to fail, and free what does not lead."""
        if visit.outcome == "timed_out":
            self._passed_over[visit.config] = 2 * visit.seconds
        if visit.outcome in ("failed", "crashed") and (struck := self._visits.strike_failed(visit)):
            what = knobs.described(struck, self._space.default)
            self._progress.notice(f"continues without {what}: {visit.reason}")
        if visit.compared is not None:
            self._visits.strike_wrong(visit.config, visit.compared, self._right)
        leading = {self._visits.best(use, self._space.batch).config for use in self._uses}
        leading |= {self._space.default, *self._leaders()}
        # Whatever its loader: what feeds the leader is chosen after its visit.
        leading |= {max(self._visits.all, key=lambda one: one.ratio.mean * one.ok).config}
        for config in self._visitor.built:
            if config not in leading:
                self._visitor.forget(config)

    def _told(self, asked: optuna.Trial, visit: Visit, origin: str) -> None:
        trial = Trial(
            number=asked.number,
            config=visit.config,
            measurement=self._beside_baseline(visit),
            stage=self._scope.stage,
            origin=origin,
            seconds=visit.seconds,
        )
        self._visits.add(visit)
        self._trials.append(trial)
        known = Known(trial=trial, ratio=visit.ratio, compared=visit.compared)
        self._journal.tell(asked, known, [turn.ratio for turn in visit.turns])
        safe = self._best_safe(self._uses[0], visit.config.batch)
        self._progress.visited(trial, visit.ratio, visit.compared, safe.config, self.clock.left_s)

    def _beside_baseline(self, visit: Visit) -> Measurement:
        """A visit's measurement at the speed that the host had for the baseline's own, so that the
        speeds of two trials have the ratio that their turns have."""
        measured = visit.measurement
        if not measured.ok or visit.config == self._space.default:
            return measured
        rate = self._visits.baseline.measurement.samples_per_s
        scale = visit.ratio.mean * rate / measured.samples_per_s
        return dataclasses.replace(
            measured,
            samples_per_s=scale * measured.samples_per_s,
            low=scale * measured.low,
            high=scale * measured.high,
            step_s=measured.step_s / scale,
            blocks=tuple(block / scale for block in measured.blocks),
        )

    def _tell(self, config: Config, doing: str) -> None:
        best = self._visits.best() if self._space.default in self._visits else None
        self._progress.doing(config, doing, best.config if best else None, self.clock.left_s)

    @property
    def _is_full(self) -> bool:
        tried = sum(trial.stage != NUMERICS for trial in self._trials)
        return self._scope.trials is not None and tried >= self._scope.trials

    def _fits(self, config: Config, needs_s: float) -> bool:
        """Whether there is time for a visit, and for the race after it."""
        return self._costs.fits(config, needs_s, self._search_s)

    @property
    def _search_s(self) -> float:
        """Seconds that are left before the final race, if there is one."""
        leaders = self._leaders()
        return self.clock.left_s - (self._costs.race_s(leaders) if leaders else 0.0)

    # Race and choice ----------------------------------------------------------------------------

    def _leaders(self) -> list[Config]:
        """What races: for each use the best safe config, and those that come near it."""
        found: dict[Config, None] = {}
        own = self._space.batch
        for use in self._uses:
            for batch in dict.fromkeys((own, self._free_batch(use))):
                safe = self._safe(use, batch)
                near = [v for v in safe if self._value(v) >= NEAR * self._value(safe[0])]
                most = LEADERS if use == self._uses[0] and batch == own else 1
                found |= dict.fromkeys(v.config for v in near[:most])
        found.pop(self._space.default, None)
        return list(found)

    def _free_batch(self, use: str) -> int:
        """The smallest batch that is about as fast as any."""
        ranked = self._visits.ranked(use)
        top = score(ranked[0]) if ranked else 1.0
        near = [v.config.batch for v in ranked if GAIN * score(v) >= top]
        return min(near, default=self._space.batch)

    def _race(self, configs: Sequence[Config]) -> Rates:
        """Samples/s of each turn of the baseline and the leaders, there and back."""
        if not configs or self.clock.left_s < self._costs.race_s(configs, PAIRS):
            return {}
        self._progress.phase(f"final race: {self._scope.baseline} and {len(configs)} in turn")
        default = self._space.default
        waits = any(one.waits for one in map(self._visits.get, configs) if one)

        def lost(config: Config, exc: ConfigFailed) -> None:
            self._progress.notice(f"out of the race: {self._named(config)}: {exc}")

        try:
            rates = race(
                self._visitor,
                [default, *configs],
                lambda: self.clock.left_s,
                lost,
                LOADER_TURN_S if waits else TURN_S,
            )
        except ConfigFailed:
            return {}
        return rates if len(rates.get(default, ())) >= PAIRS else {}

    def _told_by(self, raced: Rates) -> Rates:
        """The turns that the choice is made from: those of the race; where it was too noisy to
        contradict what the leader's visit has told, those of the visits."""
        if len(raced) < 2:
            return self._visited_rates()
        default, noise = self._space.default, self._visitor.noise
        pooled = self._pooled(raced)
        ratios = {c: paired(seen, pooled[default], noise) for c, seen in pooled.items()}
        del ratios[default]
        visits = [v for v in map(self._visits.get, ratios) if v is not None and v.ratio.faster]
        clear = any(one.faster for one in ratios.values())
        if clear or not any(ratios[one.config].high >= one.ratio.mean for one in visits):
            return pooled
        return self._visited_rates()

    def _pooled(self, raced: Rates) -> Rates:
        """The rounds of a race; where it had few, after as many turns of each visit."""
        default = self._space.default
        turns = {c: v.turns for c in raced if c != default and (v := self._visits.get(c))}
        count = min(map(len, turns.values()), default=0)
        if not count or len(raced[default]) >= LOOKS[1]:
            return raced
        beside = [turn.beside.rate for turn in next(iter(turns.values()))[-count:]]
        return {default: beside + raced[default]} | {
            config: _rates(seen[-count:], beside) + raced[config] for config, seen in turns.items()
        }

    def _visited_rates(self) -> Rates:
        """The turns of what would race, from their own visits: as if all were beside the same
        blocks of the baseline."""
        visits = [one for one in map(self._visits.get, self._leaders()) if one and one.turns]
        most = max((one.turns for one in visits), key=len, default=())
        # Where nothing came near the baseline, its own blocks are all there is to say.
        beside = [turn.beside.rate for turn in most] or [b.rate for b in self._visitor.baseline]
        return {self._space.default: beside} | {
            one.config: _rates(one.turns, beside) for one in visits
        }

    def _decide(self, rates: Rates, interrupted: bool) -> Found:
        space = self._space
        noise = self._visitor.noise
        peaks = {t.config: t.measurement.peak_bytes for t in self._trials}
        verdict = choose(space, rates, peaks, self._weigh(), noise)
        chosen = {one.choice.config for one in verdict.winners}
        raced = [
            choice
            for choice in choices_of(space, rates, peaks, noise).values()
            if len(choice.rounds) > 1 and math.isfinite(choice.speedup_high)
        ]
        found = Found(
            baseline=self._started(verdict.baseline),
            winners=tuple(
                dataclasses.replace(one, choice=self._started(one.choice))
                for one in verdict.winners
            ),
            input=Config(),
            trials=tuple(self._trials),
            raced=tuple(map(self._started, raced)),
            remarks=(*self._own_costs, *self._remarks(chosen, rates)),
            interrupted=interrupted,
            spent_s=self.clock.spent_s,
        )
        try:
            artifacts = {} if interrupted else self._artifacts(chosen)
        except KeyboardInterrupt:
            return dataclasses.replace(found, interrupted=True)
        return dataclasses.replace(found, artifacts=artifacts)

    def _remarks(self, chosen: set[Config], rates: Rates) -> Iterator[str]:
        """A line for each config that seemed to gain and is not advised; what limits the rest."""
        default = self._space.default
        gains = [v for v in self._visits.all if v.ok and v.ratio.mean >= MENTIONED]
        for visit in sorted(gains, key=lambda one: -one.ratio.mean):
            if (config := visit.config) in chosen or config == default:
                continue
            raced = len(rates.get(config, ())) > 1
            ratio = visit.ratio
            if raced:
                ratio = paired(rates[config], rates[default], self._visitor.noise)
            why = remarks.why_not(
                ratio, self._compared.get(self._code(config)), needed=self._needed(visit)
            )
            yield f"{self._named(config)}: {remarks.shown(ratio)}, not advised: {why}"
        best = self._visits.best()
        if best.waits and score(best) >= CLEARLY * best.ratio.mean:
            yield (
                f"the loader is the limit: {self._named(best.config)} waits {best.waited:.0%} of "
                f"its time for data, and would be {score(best):.2f}x if it were fed"
            )
        if not self._space.is_dear(self._visits.best(batch=self._space.batch).config):
            dear = [one for one in self._passed_over.items() if self._space.is_dear(one[0])]
            for config, needs_s in dear[:1]:
                enough = self._enough or remarks.budget(self.clock.budget_s + needs_s)
                yield (
                    f"not tried for want of time: {self._named(config)}; --budget {enough} has the "
                    "time for it"
                )

    def _needed(self, visit: Visit) -> bool:
        """Whether a config would be advised if it were compared."""
        return self._is_doubtful(visit.config) and self._leads(visit)

    def _artifacts(self, chosen: set[Config]) -> dict[Config, Path]:
        """Files of what was compiled for the configs that were chosen."""
        folder, found = self._scope.folder, {}
        # What has to be built again for it is compiled by whoever follows the advice.
        built = [one for one in chosen if knobs.compiles(one) and one in self._visitor.built]
        for config in built if folder is not None else ():
            assert folder is not None
            file = folder / config.digest
            with contextlib.suppress(ConfigFailed, WorkerError, TargetFailed):
                self._place.save(config, file)
            if file.exists():
                found[config] = file
        return found

    def _weigh(self) -> Callable[[Config, float], float] | None:
        """Samples/s over the whole job, first step included; None for the steady state."""
        length = self._scope.length
        if length is None:
            return None

        def over_job(config: Config, rate: float) -> float:
            first_s = self._first_s(config)
            pace = Pace(batch=config.batch, first_step_s=first_s, step_s=config.batch / rate)
            return length.rate(pace)

        return over_job

    def _started(self, choice: Choice) -> Choice:
        return dataclasses.replace(choice, first_step_s=self._first_s(choice.config))

    def _first_s(self, config: Config) -> float:
        """Seconds of a config's first step where none has compiled its code before."""
        default = self._space.default
        trials = sorted(self._trials, key=lambda trial: trial.config != default)
        return first_step_seen(trials, config, knobs.PAYING)

    def _named(self, config: Config) -> str:
        return remarks.named(self._space, config, self._scope.baseline)


def _rates(turns: Sequence[Turn], beside: Sequence[float]) -> list[float]:
    """Samples/s of turns, as if they were beside blocks of the baseline at these rates."""
    return [turn.ratio * rate for turn, rate in zip(turns, beside, strict=False)]


def _visit_of(known: Known) -> Visit:
    """A visit of an earlier run: what it found, without its turns."""
    measured = known.trial.measurement
    return Visit(
        config=known.trial.config,
        outcome=measured.outcome,
        reason=measured.reason,
        first_s=measured.first_step_s,
        ratio=known.ratio,
        compared=known.compared,
        seconds=known.trial.seconds,
    )


def measurement_of(compared: Compared) -> Measurement:
    """As a record keeps a comparison."""
    outcome = "failed" if compared.outcome == UNVERIFIED else compared.outcome
    return Measurement(outcome=outcome, reason=compared.reason)
