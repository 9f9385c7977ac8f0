"""The search: visits configs until nothing more fits into the budget, then races them.

The best verified config is replaced only by one that is faster and trains like strict fp32, so that
more time cannot give less, and an interruption keeps the best so far.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna

from advisor.cache.config import Config
from advisor.cache.record import LOOP, Measurement, Trial
from advisor.errors import TargetFailed, WorkerError
from advisor.tuners import knobs
from advisor.tuners.decisions import CLEARLY, NOTABLE, PAIRS, TURN_S
from advisor.tuners.length import Length
from advisor.tuners.measure.runner import UNVERIFIED, Compared, ConfigFailed, Runner
from advisor.tuners.search.journal import Journal, JournaledTrial
from advisor.tuners.search.plan import Clock, Progress
from advisor.tuners.search.race import (
    Rates,
    SearchResult,
    choose,
    deciding_rates,
    gains,
    race,
    shown,
)
from advisor.tuners.search.recipe import LOADER_TURN_S, Proposal, Recipe
from advisor.tuners.search.sampler import GainPerSecond
from advisor.tuners.search.space import Space
from advisor.tuners.search.visit import Visit, Visitor
from advisor.tuners.search.visits import TimeEstimates, Visits, score

NUMERICS = "numerics"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    compares: bool = True  # with strict fp32, and advises only configs that pass
    real: bool = False  # every step trains: a config makes none before it passed
    baseline: str = "torch's default"  # its name in messages
    trials: int | None = None  # visits at most
    most_s: float = math.inf  # most seconds of one visit
    first: Sequence[Config] = ()  # visited before the recipe: from similar records
    without: Sequence[Config] = ()
    """Baselines that each lack one of the script's own settings: measured, and never advised."""
    seed: int = 0
    length: Length | None = None  # of the job; None for the steady state
    modules: int = 0  # their number in the model
    folder: Path | None = None  # for compiled artifacts of the winners
    stage: str = knobs.COMPUTE  # of its trials, as in `Trial`


class Tuner:
    """One search with one runner. `study` keeps the trials on disk: trials of earlier runs count,
    and configs that had no time then are tried again."""

    def __init__(
        self,
        runner: Runner,
        space: Space,
        study: optuna.Study,
        scope: SearchOptions,
        progress: Progress,
        clock: Clock,
    ) -> None:
        self._runner, self._space, self._scope = runner, space, scope
        self._progress, self.clock = progress, clock
        self._visitor = Visitor(runner, space.default, self.clock, self._tell_compiling)
        self._visits = Visits(space, compares=scope.compares, length=scope.length)
        self._costs = TimeEstimates(space, self._visits, self.clock, scope.modules)
        self._among: list[Config] = []
        sampler = GainPerSecond(
            seed=scope.seed,
            among=lambda: self._among,
            best=lambda: self._visits.best(batch=self._among[0].batch).ratio.mean,
        )
        self._journal = Journal(study, space, sampler, self._progress.notice)
        self._passed_over: dict[Config, float] = {}
        self._remarks: list[str] = []
        self._remedy = ""
        self._complete = True
        for one in self._journal.resume():
            self._resume(one)
        self.known = len(self._visits.trials)

    def _resume(self, known: JournaledTrial) -> None:
        config, measured, compared = known.trial.config, known.trial.measurement, known.compared
        self._visits.add_trial(known.trial)
        if compared is not None and compared.outcome == UNVERIFIED:
            return
        if compared is not None:
            self._visits.add_comparison(config, compared)
        if config != self._space.default and measured.outcome != "timed_out":
            self._visits.add(
                Visit(
                    config=config,
                    outcome=measured.outcome,
                    reason=measured.reason,
                    first_s=measured.first_step_s,
                    ratio=known.ratio,
                    seconds=known.trial.seconds,
                )
            )

    def run(self) -> SearchResult:
        """Visit, race and choose.

        Raises:
            WorkerError: the baseline cannot be measured. TargetFailed: the user's code fails.
        """
        raced: Rates = {}
        interrupted = False
        try:
            self._measure_baseline()
            raced = self._search()
        except KeyboardInterrupt:
            if self._space.default not in self._visits:
                raise
            interrupted = True
        return self._decide(raced, interrupted)

    def _search(self) -> Rates:
        """Visit the configs that fit the budget, then race the leaders. A lost runner ends both."""
        try:
            self._measure_without()
            for proposal in self._proposals():
                self._consider(proposal)
            for batch in dict.fromkeys((self._space.batch, self._visits.best().config.batch)):
                self._sample(batch)
            return self._race(leaders) if (leaders := self._visits.leaders()) else {}
        except (WorkerError, TargetFailed) as exc:
            if sum(visit.ok for visit in self._visits.values()) == 1:  # the baseline
                raise
            self._progress.notice(f"the search ends here: {exc}")
            self._complete = False
            return {}

    # What is visited ----------------------------------------------------------------------------

    def _measure_baseline(self) -> None:
        asked = self._journal.ask(self._space.default)
        try:
            visit = self._visitor.begin()
        except ConfigFailed as exc:
            late = f"too few steps came, perhaps because it evaluates or waits; {self.clock.larger}"
            why = late if exc.outcome == "timed_out" else exc
            raise WorkerError(f"{self._scope.baseline} could not be measured: {why}") from exc
        self._finish_trial(asked, visit, "baseline")
        self._notice_short_budget()

    def _notice_short_budget(self) -> None:
        """Notify the user if the budget has no time for the first config that compiles."""
        compiled = (self._space.near(changes) for changes in knobs.COMPILED)
        config = next((one for one in compiled if self._space.expensive_values(one)), None)
        if config is None or self._costs.fits(config, needs_s := self._costs.visit_s(config)):
            return
        self._remedy = self._budget(needs_s)
        self._progress.notice(
            f"a budget of {self.clock.budget_s:g}s is too short: compiling this model takes about "
            f"{self._costs.build_s(config):.0f} s; {self._remedy}"
        )

    def _measure_without(self) -> None:
        """Measure the cost of the script's own settings."""
        for config in self._scope.without:
            if self._costs.fits(config, self._costs.visit_s(config)):
                visit = self._visitor.visit(config, 1.0)
                self._visitor.forget(config)
                if visit.ok and visit.ratio.faster and visit.ratio.mean >= NOTABLE:
                    own = knobs.described_own(self._space.default, config)
                    self._remarks.append(
                        f"your script's own {own} costs {shown(visit.ratio)} here: without "
                        f"it a step takes {visit.step_s:.3g} s; advisor never changes it"
                    )

    def _proposals(self) -> Iterator[Proposal]:
        """The leaders of earlier runs, the best of similar records, then the recipe."""
        yield from (Proposal(config, "earlier run") for config in self._visits.leaders())
        near = dict.fromkeys(map(self._space.near, self._scope.first))
        yield from (Proposal(c, "near record") for c in near if self._space.holds(c))
        yield from Recipe(self._space, self._visits)

    def _consider(self, proposal: Proposal) -> None:
        config = proposal.config
        known = self._visits.get(config)
        # The leaders of an earlier run are built again.
        done = known is not None and (known.turns or proposal.origin != "earlier run")
        if done or self._is_full or not self._visits.allowed(config):
            return
        needs_s = self._costs.visit_s(config, proposal.turn_s)
        if not self._costs.fits(config, needs_s):
            self._passed_over[config] = needs_s
        elif needs_s <= self._scope.most_s:
            self._visit(proposal, self._journal.ask(config))

    @property
    def _is_full(self) -> bool:
        tried = sum(trial.stage != NUMERICS for trial in self._visits.trials)
        return self._scope.trials is not None and tried >= self._scope.trials

    def _sample(self, batch: int) -> None:
        """Visit the sampler's proposals, until as many visits in a row as there are knobs to choose
        find nothing better."""
        idle, best = 0, score(self._visits.best(batch=batch))
        most = sum(len(values) > 1 for values in self._space.choices.values())
        while idle < most:
            self._among = self._open(batch, min(self._costs.left_s, self._scope.most_s))
            if not self._among or self._is_full:
                return
            asked = self._journal.ask()
            config = Config(asked.params)
            if config in self._among:
                self._visit(Proposal(config, "sampler"), asked)
            now = score(self._visits.best(batch=batch))
            idle, best = (0, now) if now > CLEARLY * best else (idle + 1, best)

    def _open(self, batch: int, most_s: float = math.inf) -> list[Config]:
        built = self._visits.changed(visit.config for visit in self._visits.values() if visit.ok)
        return [
            config
            for config in self._space.configs(batch, self._visits.feed)
            if self._space.expensive_values(config) <= built
            and config not in self._visits
            and self._visits.allowed(config)
            and self._costs.visit_s(config) <= most_s
        ]

    # A visit ------------------------------------------------------------------------------------

    def _visit(self, proposal: Proposal, asked: optuna.Trial) -> None:
        config = proposal.config
        lead = self._visits.best(batch=config.batch)
        # More workers gain what they deliver, not what a config would give without waiting.
        best = lead.ratio.mean if proposal.origin == "loader" else score(lead)
        leave_s = self._costs.comparison_s(config) + self._costs.race_s([config], PAIRS)
        refused, built_s, needs = None, 0.0, self._visits.needs_comparison(config)
        if needs and self._scope.real:
            refused, built_s = self._compare_first(config)
        visit = refused or self._visitor.visit(config, best, proposal.turn_s, leave_s)
        visit = dataclasses.replace(visit, first_s=visit.first_s + built_s)
        self._visits.add(visit)
        known = self._visits.compared(config) is not None  # perhaps with another loader
        asks = self._visits.leads(visit) or (
            proposal.compares and self._costs.comparison_s(config) <= self.clock.left_s
        )
        if visit.ok and (known or asks) and needs and not self._scope.real:
            visit = dataclasses.replace(visit, seconds=visit.seconds + self._compare(config))
        self._finish_trial(asked, visit, proposal.origin)
        self._rule_out(visit)

    def _compare_first(self, config: Config) -> tuple[Visit | None, float]:
        """Compare a config that has made no step. Returns the visit of one that is wrong or cannot
        be compared, and the seconds in which the comparison compiled its code."""
        passes_s = self._costs.comparison_s(config)
        seconds = self._compare(config)
        if self._visits.is_safe(config):
            return None, max(0.0, seconds - passes_s) if self._costs.build_s(config) else 0.0
        self._runner.forget(config)
        one = self._visits.trials[-1].measurement
        return Visit(config=config, outcome=one.outcome, reason=one.reason, seconds=seconds), 0.0

    def _compare(self, config: Config) -> float:
        """Compare the timed code with fp32, at the user's batch because a batch changes no number
        format. Returns the seconds that the comparison took."""
        began = self.clock.now()
        compared = self._visits.compared(config)
        if compared is None:
            compared = self._visitor.compare(config.at(self._space.batch))
            self._visits.add_comparison(config, compared)
            self._costs.add_comparison(config, self.clock.now() - began)
        seconds = self.clock.now() - began
        trial = Trial(
            number=len(self._visits.trials),
            config=config,
            measurement=measurement_of(compared),
            stage=NUMERICS,
            origin="fp32",
            seconds=seconds,
        )
        self._visits.add_trial(trial)
        return seconds

    def _finish_trial(self, asked: optuna.Trial, visit: Visit, origin: str) -> None:
        visits, config = self._visits, visit.config
        visits.add(visit)
        trial = Trial(
            number=asked.number,
            config=config,
            measurement=visit.measurement(visits.baseline.rate),
            stage=self._scope.stage,
            origin=origin,
            seconds=visit.seconds,
        )
        visits.add_trial(trial)
        compared = visits.compared(config)
        known = JournaledTrial(trial, visit.ratio, compared)
        self._journal.tell(asked, known, [turn.ratio for turn in visit.turns])
        best = visits.safe(self._space.uses[0], config.batch)[0].config
        self._progress.visited(known, self._named(config), best, self.clock.left_s)

    def _rule_out(self, visit: Visit) -> None:
        """Rule out the values that made a visit fail, and forget built configs that do not lead."""
        visits, config = self._visits, visit.config
        if visit.outcome == "timed_out":
            self._passed_over[config] = 2 * visit.seconds
        for failed, why in visits.rule_out_failed():
            what = knobs.described(failed, self._space.default)
            self._progress.notice(f"the search continues without {what}: {why}")
        leading = {visits.best(use, self._space.batch).config for use in self._space.uses}
        leading |= {self._space.default, *visits.leaders()}
        # With any loader, because the leader's loader is chosen after its visit.
        leading |= {max(visits.values(), key=lambda one: one.ratio.mean * one.ok).config}
        for built in self._visitor.built:
            if built not in leading:
                self._visitor.forget(built)

    def _tell_compiling(self, config: Config) -> None:
        self._progress.phase(f"compiling: {self._named(config)}  {self.clock.left_s:.0f}s left")

    # Race and choice ----------------------------------------------------------------------------

    def _race(self, configs: Sequence[Config]) -> Rates:
        # One round is worth it: where rounds are few, the turns of the visits count with them.
        if self.clock.left_s < self._costs.race_s(configs, 1):
            self._progress.notice("no time is left for a final race; the trials decide")
            return {}
        self._progress.phase(f"final race: {self._scope.baseline} and {len(configs)} in turn")
        waits = any(one.waits for one in map(self._visits.get, configs) if one)
        turn_s = LOADER_TURN_S if waits else TURN_S
        rates, lost = race(self._visitor, [self._space.default, *configs], turn_s)
        for config, exc in lost.items():
            failed = Visit(config=config, outcome=exc.outcome, reason=f"in the final race: {exc}")
            if config == self._space.default:
                self._progress.notice(f"{self._scope.baseline} failed {failed.reason}")
            else:
                self._finish_trial(self._journal.ask(config), failed, "final race")
        return rates

    def _decide(self, raced: Rates, interrupted: bool) -> SearchResult:
        visits, noise = self._visits, self._visitor.noise
        leaders = [one for one in map(visits.get, visits.leaders()) if one is not None]
        rates = deciding_rates(raced, leaders, self._visitor)
        peaks = {trial.config: trial.measurement.peak_bytes for trial in visits.trials}
        known = visits.over_job, visits.first_s, noise, self._visitor.joules
        found = choose(self._space, rates, peaks, *known)
        chosen = {one.choice.config for one in found.winners}
        lines = gains(visits, rates, noise, chosen, self._named, any_raced=bool(raced))
        artifacts = dict[Config, Path]()
        try:
            artifacts = {} if interrupted else self._artifacts(chosen)
        except KeyboardInterrupt:
            interrupted = True
        return dataclasses.replace(
            found,
            trials=tuple(visits.trials),
            artifacts=artifacts,
            remarks=(*self._remarks, *lines, *self._untried()),
            interrupted=interrupted,
            exhausted=not interrupted
            and len(visits) == 1
            and not (self._passed_over or self._is_full or self._open(self._space.batch)),
            complete=self._complete and not interrupted,
            unmodified=self._unmodified(),
        )

    def _unmodified(self) -> float:
        """The speed-up of the unmodified script with enough memory over a baseline that saves some:
        as measured if it fits, else estimated from the time that saving takes."""
        own = self._space.default
        alone = self._visits.get(knobs.without_saving(own))
        if alone is not None and alone.ok and alone.config != own:
            return alone.ratio.mean
        shares = [block.extra_s / block.seconds for block in self._visitor.baseline]
        return 1 / (1 - min(0.99, statistics.median(shares)))

    def _untried(self) -> Iterator[str]:
        """A line on the first compiled config that had no time, if no compiled config leads; on any
        config if none had time."""
        lacking = [one for one in self._passed_over if self._space.expensive_values(one)]
        if len(self._visits) == 1:
            lacking += self._passed_over
        best = self._visits.best(batch=self._space.batch).config
        if lacking and not self._space.expensive_values(best):
            tried = lacking[0] in self._visits  # how long it takes is then a guess
            known, verb = ("", "may be") if tried else (self._remedy, "is")
            remedy = known or self._budget(self._passed_over[lacking[0]], verb)
            yield f"not measured for want of time: {self._named(lacking[0])}; {remedy}"

    def _budget(self, more_s: float, verb: str = "is") -> str:
        """The option for a budget with `more_s` more seconds, rounded up to tens, and a remark."""
        seconds = 10 * math.ceil((self.clock.budget_s + more_s) / 10)
        return f"--budget {seconds}s {verb} enough"

    def _artifacts(self, chosen: set[Config]) -> dict[Config, Path]:
        folder, found = self._scope.folder, {}
        if folder is not None:
            # Configs that are not built any more are compiled by the run that follows the advice.
            for config in chosen & {one for one in self._visitor.built if knobs.compiles(one)}:
                file = folder / config.digest
                with contextlib.suppress(ConfigFailed, WorkerError, TargetFailed):
                    self._runner.save(config, file)
                if file.exists():
                    found[config] = file
        return found

    def _named(self, config: Config) -> str:
        """A config's changes in words, and its batch if it is not the user's."""
        at = f" at batch {config.batch}" if config.batch != self._space.batch else ""
        return knobs.described(config, self._space.default, nothing=self._scope.baseline) + at


def measurement_of(compared: Compared) -> Measurement:
    outcome = "failed" if compared.outcome == UNVERIFIED else compared.outcome
    return Measurement(outcome=outcome, reason=compared.reason)


def tuned_loader(
    runner: Runner,
    space: Space,
    step: Config,
    found: SearchResult,
    clock: Clock,
    progress: Progress,
) -> SearchResult:
    """Find the loader that feeds a step best, in the rest of the budget. Returns `found` with it.

    The baseline is the step with torch's own DataLoader.
    """
    inputs = Space({name: (value,) for name, value in step.items()} | space.inputs)
    progress.phase("the loader, with the step that was chosen")
    # No loader changes numbers.
    scope = SearchOptions(compares=False, baseline="torch's loader", stage=knobs.INPUT)
    study = optuna.create_study(direction="maximize")
    its_clock = Clock(clock.left_s, now=clock.now)
    try:
        fed = Tuner(runner, inputs, study, scope, progress, its_clock).run()
    except WorkerError as exc:
        progress.notice(f"the loader is not tuned: {exc}")
        return found
    best = next(one.choice.config for one in fed.winners if one.use == LOOP and not one.free)
    chosen = best.changed(inputs.default)
    if knobs.workers(best):
        rules = (n for n in space.inputs if knobs.BY_NAME[n].by_rule)
        chosen |= Config({name: space.inputs[name][-1] for name in rules})
    trials = [dataclasses.replace(t, number=len(found.trials) + t.number) for t in fed.trials]
    return dataclasses.replace(
        found,
        input=Config(chosen),
        trials=(*found.trials, *trials),
        remarks=(*found.remarks, *fed.remarks),
        interrupted=fed.interrupted,
        complete=found.complete and fed.complete,
    )
