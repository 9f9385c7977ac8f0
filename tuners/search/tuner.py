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
from advisor.errors import WorkerError
from advisor.tuners import knobs
from advisor.tuners.decisions import (
    BATCH_GAIN,
    CLEARLY,
    COMPARE_S,
    IDLE_TRIALS,
    LEADERS,
    LIKELY,
    NEAR,
    PAIRS,
    TURN_S,
    WAITS,
)
from advisor.tuners.length import Length, Pace
from advisor.tuners.measure.place import UNVERIFIED, Compared, ConfigFailed, Place
from advisor.tuners.search.clock import Clock
from advisor.tuners.search.journal import Journal, Known
from advisor.tuners.search.order import Proposal, Recipe, Visits, score
from advisor.tuners.search.plan import Progress
from advisor.tuners.search.race import race
from advisor.tuners.search.ratio import Ratio, paired
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
        self._progress = progress or Progress()
        self.clock = clock or Clock(scope.budget_s, reserve_s=scope.reserve_s)
        self._visitor = Visitor(place, self.clock, self._tell)
        self._visits = Visits(space)
        self._recipe = Recipe(space, self._visits, scope.modules)
        self._among: list[Config] = []
        study.sampler = scope.sampler or GainPerSecond(
            seed=scope.seed, among=lambda: self._among, best=lambda: score(self._visits.best())
        )
        self._journal = Journal(study, space, self._progress.notice)
        self._trials: list[Trial] = []
        self._compared: dict[Config, Compared] = {}
        self._compare_s = COMPARE_S
        self._passed_over: dict[Config, float] = {}
        self.known = self._resume()

    def _resume(self) -> int:
        """Take over the trials of earlier runs; how many there are."""
        for one in self._journal.resume():
            self._trials.append(one.trial)
            if one.compared is not None:
                self._compared[one.trial.config] = one.compared
                self._strike(one.trial.config, one.compared)
            if one.trial.config != self._space.default:
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
            if not self._visits.all:
                raise
            interrupted, rates = True, {}
        rates = rates if len(rates) > 1 else self._visited_rates()
        return self._decide(rates, interrupted)

    def _search(self) -> Rates:
        """Visit what fits, then race what leads; a place that is lost ends the search."""
        try:
            for proposal in self._proposals():
                self._consider(proposal)
            return self._race(self._leaders())
        except WorkerError as exc:
            self._progress.notice(f"the search ends here: {exc}")
            return {}

    # Visits -------------------------------------------------------------------------------------

    def _measure_baseline(self) -> None:
        default = self._space.default
        asked = self._journal.ask("baseline", default)
        began = self.clock.now()
        try:
            first = self._visitor.begin()
            again = self._visitor.block(default)
        except ConfigFailed as exc:
            self._journal.pass_over(asked)
            raise WorkerError(f"{self._scope.baseline} could not be measured: {exc}") from exc
        turns = (Turn(block=again, beside=first, ratio=1.0, fed=1.0),)
        one = Ratio(mean=1.0, low=1.0, high=1.0)
        seconds = self.clock.now() - began
        self._told(
            asked, Visit(config=default, turns=turns, ratio=one, seconds=seconds), "baseline"
        )

    def _proposals(self) -> Iterator[Proposal]:
        near = dict.fromkeys(self._space.near(config) for config in self._scope.first)
        yield from (Proposal(c, "near record") for c in near if self._space.holds(c))
        yield from self._recipe
        yield from self._sampled()

    def _sampled(self) -> Iterator[Proposal]:
        """What the sampler asks for, until it has found nothing better for a while."""
        idle, best = 0, score(self._visits.best())
        while idle < IDLE_TRIALS:
            self._among = self._open()
            if not self._among or self._is_full or not self._fits(self._among[0]):
                return
            asked = self._journal.ask("sampler")
            config = Config(asked.params)
            if config not in self._among:
                self._journal.pass_over(asked)
                idle += 1
                continue
            self._visit(Proposal(config, "sampler"), asked)
            now = score(self._visits.best())
            idle, best = (0, now) if now > CLEARLY * best else (idle + 1, best)
        yield from ()

    def _open(self) -> list[Config]:
        """Configs that the sampler may propose: not visited, and of code that is known to run."""
        built = {
            pair
            for visit in self._visits.all
            if visit.ok
            for pair in self._space.dear_in(visit.config)
        }
        return [
            config
            for config in self._space.configs(self._space.batch, dear=True)
            if self._space.dear_in(config) <= built
            and config not in self._visits
            and self._visits.allowed(config)
            and config.only(*knobs.FEEDS) == self._visits.feed
        ]

    def _consider(self, proposal: Proposal) -> None:
        config = proposal.config
        if config in self._visits or self._is_full or not self._visits.allowed(config):
            return
        if not self._fits(config):
            self._passed_over[config] = self._expected_s(config)
            return
        self._visit(proposal, self._journal.ask(proposal.origin, config))

    def _visit(self, proposal: Proposal, asked: optuna.Trial) -> None:
        config = proposal.config
        best = score(self._visits.best(batch=config.batch))
        try:
            visit = self._visitor.visit(config, best, proposal.turn_s)
        except BaseException:
            self._journal.pass_over(asked)
            raise
        visit = self._verified(visit)
        self._told(asked, visit, proposal.origin)
        self._learn(visit)

    def _verified(self, visit: Visit) -> Visit:
        """A visit with the comparison of what was timed, where it leads for some use."""
        config = visit.config
        if not visit.ok or not self._is_doubtful(config) or not self._leads(visit):
            return visit
        began = self.clock.now()
        compared = self._comparison_of(config)
        self._compare_s = max(1.0, self.clock.now() - began)
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
        at_own = config.at(self._space.batch)
        if at_own not in self._compared:
            self._compared[at_own] = self._visitor.compare(at_own)
        return self._compared[at_own]

    def _is_doubtful(self, config: Config) -> bool:
        changed = config.changed(self._space.default)
        return self._scope.compares and bool(knobs.doubts(config) & set(changed.items()))

    def _leads(self, visit: Visit) -> bool:
        """Whether it is faster than the best verified config of some use that can follow it."""
        if visit.ratio.mean < CLEARLY and visit.fed < CLEARLY:
            return False
        uses = [u for u in self._space.uses if knobs.follows(u, visit.config, self._space.default)]
        batch = visit.config.batch
        return any(score(visit) > score(self._best_safe(use, batch)) for use in uses)

    def _best_safe(self, use: str, batch: int) -> Visit:
        """The fastest config of a use that is known to be right."""
        ranked = self._visits.ranked(use, batch)
        return next((v for v in ranked if self._is_safe(v)), self._visits.baseline)

    def _is_safe(self, visit: Visit) -> bool:
        compared = self._compared.get(visit.config.at(self._space.batch))
        return not self._is_doubtful(visit.config) or (compared is not None and compared.ok)

    def _learn(self, visit: Visit) -> None:
        """Strike out what a visit has shown to fail, and free what will not lead."""
        config = visit.config
        if not visit.ok and visit.outcome in ("failed", "crashed"):
            self._strike_failed(visit)
        if visit.compared is not None:
            self._strike(config, visit.compared)
        best = score(self._visits.best(batch=config.batch))
        if visit.ok and score(visit) < NEAR * best and config != self._space.default:
            self._visitor.forget(config)

    def _strike_failed(self, visit: Visit) -> None:
        """A failure is one of the compiled code where there is any, else of the only new value."""
        changed = visit.config.changed(self._space.default)
        code = {(n, v) for n, v in changed.items() if knobs.BY_NAME[n].dear or n == "step_graph"}
        found = code or (set(changed.items()) if len(changed) == 1 else set())
        if not found and any(knobs.BY_NAME[n].autocast for n in changed):
            found = {(n, v) for n, v in changed.items() if knobs.BY_NAME[n].autocast}
        self._visits.struck |= found
        if found:
            what = knobs.described(Config(dict(found)), self._space.default)
            self._progress.notice(f"continues without {what}: {visit.reason}")

    def _strike(self, config: Config, compared: Compared) -> None:
        """Strike out what a wrong comparison blames, and nothing else."""
        if compared.outcome != "wrong":
            return
        changed = config.changed(self._space.default)
        blamed = {
            "format": [n for n in changed if knobs.BY_NAME[n].autocast],
            "optimizer": [n for n in changed if knobs.BY_NAME[n].optimizer],
            "code": [n for n in changed if knobs.BY_NAME[n].model and not knobs.BY_NAME[n].layout],
        }.get(compared.blames, [])
        self._visits.struck |= {(name, changed[name]) for name in blamed}

    def _told(self, asked: optuna.Trial, visit: Visit, origin: str) -> None:
        trial = Trial(
            number=asked.number,
            config=visit.config,
            measurement=visit.measurement,
            stage=self._scope.stage,
            origin=origin,
            seconds=visit.seconds,
        )
        self._visits.add(visit)
        self._trials.append(trial)
        known = Known(trial=trial, ratio=visit.ratio, compared=visit.compared)
        self._journal.tell(asked, known, [turn.ratio for turn in visit.turns])
        safe = self._best_safe(self._space.uses[0], visit.config.batch)
        self._progress.visited(trial, visit.ratio, visit.compared, safe.config, self.clock.left_s)

    def _tell(self, config: Config, doing: str) -> None:
        best = self._visits.best() if self._space.default in self._visits else None
        self._progress.doing(config, doing, best.config if best else None, self.clock.left_s)

    # Time ---------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        tried = sum(trial.stage != NUMERICS for trial in self._trials)
        return self._scope.trials is not None and tried >= self._scope.trials

    def _fits(self, config: Config) -> bool:
        """Whether there is time for a visit, and for the race after it. Before anything compiled
        leads, what compiles may be tried with less time: it gains the most."""
        expected_s = self._expected_s(config)
        left_s = self.clock.left_s - self._race_s(PAIRS)
        best = self._visits.best(batch=self._space.batch).config
        first = self._space.is_dear(config) and not self._space.is_dear(best)
        needs_s = LIKELY * expected_s if first else expected_s
        return needs_s <= left_s and self._scope.worth(expected_s)

    def _expected_s(self, config: Config) -> float:
        """Seconds that a visit is expected to take."""
        turn_s = max(TURN_S, *(turn.beside.seconds for turn in self._visits.baseline.turns))
        timing_s = (2 * PAIRS + 3) * turn_s
        compare_s = self._compare_s if self._is_doubtful(config) else 0.0
        return self._build_s(config) + timing_s + compare_s

    def _build_s(self, config: Config) -> float:
        """Seconds until a config's first step is done: as long as others of its kind took."""
        dear = self._space.dear_in(config)
        code = knobs.code(config)
        seen = [v for v in self._visits.all if v.ok and v.config != self._space.default]
        if any(knobs.code(v.config) == code and v.turns for v in seen):
            return 0.0
        if not dear:
            return 0.0
        guessed = self._guessed_s(config)
        ratios = [
            v.first_s / self._guessed_s(v.config)
            for v in seen
            if self._space.dear_in(v.config) and v.first_s
        ]
        return guessed * (max(ratios) if ratios else 1.0)

    def _guessed_s(self, config: Config) -> float:
        rows = ((knobs.BY_NAME[n].dear, value) for n, value in self._space.dear_in(config))
        return max(seconds(value, self._scope.modules) for seconds, value in rows if seconds)

    def _race_s(self, rounds: int) -> float:
        """Seconds that so many rounds of the final race take."""
        racing = [self._visits.baseline, *map(self._visits.get, self._leaders())]
        blocks = [max((t.block.seconds for t in v.turns), default=TURN_S) for v in racing if v]
        return 1.3 * rounds * sum(blocks)

    # Race and choice ----------------------------------------------------------------------------

    def _leaders(self) -> list[Config]:
        """What races: for each use the best safe config, and those that come near it."""
        found: dict[Config, None] = {}
        own = self._space.batch
        for use in self._space.uses:
            for batch in dict.fromkeys((own, self._free_batch(use))):
                safe = [v for v in self._visits.ranked(use, batch) if self._is_safe(v)]
                near = [v for v in safe if score(v) >= NEAR * score(safe[0])]
                most = LEADERS if use == self._space.uses[0] and batch == own else 1
                found |= dict.fromkeys(v.config for v in near[:most])
        found.pop(self._space.default, None)
        return list(found)

    def _free_batch(self, use: str) -> int:
        """The smallest batch that is about as fast as any."""
        ranked = self._visits.ranked(use)
        top = score(ranked[0]) if ranked else 1.0
        near = [v.config.batch for v in ranked if BATCH_GAIN * score(v) >= top]
        return min(near, default=self._space.batch)

    def _race(self, configs: Sequence[Config]) -> Rates:
        """Samples/s of each turn of the baseline and the leaders, there and back."""
        if not configs or self.clock.left_s < self._race_s(2):
            return {}
        self._progress.phase(f"final race: {self._scope.baseline} and {len(configs)} in turn")
        default = self._space.default

        def lost(config: Config, exc: ConfigFailed) -> None:
            self._progress.notice(f"out of the race: {self._named(config)}: {exc}")

        try:
            rates = race(self._visitor, [default, *configs], lambda: self.clock.left_s, lost)
        except ConfigFailed:
            return {}
        return rates if len(rates.get(default, ())) >= PAIRS else {}

    def _visited_rates(self) -> Rates:
        """The turns of the best safe config's own visit, where there was no race."""
        own = self._space.batch
        best = self._best_safe(self._space.uses[0], own)
        default = self._space.default
        beside = [turn.beside.rate for turn in best.turns]
        if best.config == default:
            return {default: beside}
        return {
            default: beside,
            best.config: [turn.ratio * turn.beside.rate for turn in best.turns],
        }

    def _decide(self, rates: Rates, interrupted: bool) -> Found:
        space = self._space
        if not rates.get(space.default):
            rates = {space.default: [block.rate for block in self._visitor.baseline[-1:]]}
        peaks = {t.config: t.measurement.peak_bytes for t in self._trials}
        verdict = choose(space, rates, peaks, self._weigh())
        chosen = {one.choice.config for one in verdict.winners}
        raced = [
            choice
            for choice in choices_of(space, rates, peaks).values()
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
            remarks=tuple(self._remarks(chosen, rates)),
            interrupted=interrupted,
            spent_s=self.clock.spent_s,
        )
        artifacts = {} if interrupted else self._artifacts(chosen)
        return dataclasses.replace(found, artifacts=artifacts)

    def _artifacts(self, chosen: set[Config]) -> dict[Config, Path]:
        """Files of what was compiled for the configs that were chosen."""
        folder, found = self._scope.folder, {}
        for config in filter(knobs.compiles, chosen) if folder is not None else ():
            assert folder is not None
            file = folder / config.digest
            with contextlib.suppress(ConfigFailed):
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
            visit = self._visits.get(config)
            first_s = visit.first_s if visit else 0.0
            pace = Pace(batch=config.batch, first_step_s=first_s, step_s=config.batch / rate)
            return length.rate(pace)

        return over_job

    def _started(self, choice: Choice) -> Choice:
        visit = self._visits.get(choice.config)
        return dataclasses.replace(choice, first_step_s=visit.first_s if visit else 0.0)

    # What is said -------------------------------------------------------------------------------

    def _remarks(self, chosen: set[Config], rates: Rates) -> Iterator[str]:
        """A line for each config above 1.1x that is not advised, and what limits the rest."""
        default = self._space.default
        for visit in self._visits.ranked() + [v for v in self._visits.all if not v.ok]:
            config = visit.config
            if config in chosen or config == default or visit.ratio.mean < 1.1 or not visit.ok:
                continue
            yield f"{self._named(config)}: {visit.ratio.mean:.2f}x, not advised: {self._why(visit, rates)}"
        best = max(self._visits.all, key=score)
        if best.waited >= WAITS and score(best) >= CLEARLY * best.ratio.mean:
            yield (
                f"the loader is the limit: {self._named(best.config)} waits {best.waited:.0%} of "
                f"its time for data, and would be {score(best):.2f}x if it were fed"
            )
        best_is_dear = self._space.is_dear(self._visits.best(batch=self._space.batch).config)
        dear = [one for one in self._passed_over.items() if self._space.is_dear(one[0])]
        for config, needs_s in dear[:1] if not best_is_dear else ():
            yield (
                f"not tried for want of time: {self._named(config)}; --budget "
                f"{_budget(self.clock.budget_s + needs_s)} has the time for it"
            )

    def _why(self, visit: Visit, rates: Rates) -> str:
        config, default = visit.config, self._space.default
        compared = self._compared.get(config.at(self._space.batch))
        if compared is not None and not compared.ok:
            return compared.reason
        raced = paired(rates[config], rates[default]) if config in rates else visit.ratio
        if config in rates and not raced.faster:
            return f"{raced.mean:.2f}x in the final race ({raced.low:.2f}-{raced.high:.2f})"
        if len(visit.turns) < 2:
            return "measured once, and below the best"
        if not raced.faster:
            return f"the interval is {raced.low:.2f}-{raced.high:.2f}"
        return "another one is as fast or faster"

    def _named(self, config: Config) -> str:
        at = f" at batch {config.batch}" if config.batch != self._space.batch else ""
        return knobs.described(config, self._space.default, nothing=self._scope.baseline) + at


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


def _budget(seconds: float) -> str:
    """Seconds as a budget that can be typed, rounded up to tens: '120s'."""
    return f"{10 * math.ceil(seconds / 10)}s"
