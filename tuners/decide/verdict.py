"""What a search ends in: the race, the comparison with fp32, first steps, the loader."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from advisor.cache.config import Config
from advisor.cache.record import LOOP, Choice, Measurement, Trial, Winner
from advisor.cache.shown import interval, tells
from advisor.tuners import knobs
from advisor.tuners.decide.finalists import affordable, finalists
from advisor.tuners.decide.loading import Loaders
from advisor.tuners.decide.race import beside, race
from advisor.tuners.decide.winners import Rates, Verdict, choose, raced, untold
from advisor.tuners.length import WARM, Length, Pace, break_even
from advisor.tuners.measure.first_step import Starter, Starts
from advisor.tuners.measure.runner import Runner
from advisor.tuners.room import Batch
from advisor.tuners.search import plan
from advisor.tuners.search.plan import Progress
from advisor.tuners.search.space import Space
from advisor.tuners.search.study import Search

FIRST_HEAT = 0.7
"""Of the race's time, where there are two."""
TOGETHER = 0.6
"""Share of the memory that the configs of one race may take together: an allocator reserves more
than they take, and for what finds no room all that is built beside it is dropped, to be built
again."""
LEAST_S = 1.0
"""A comparison is not begun with less."""
FITS = 0.7
"""Nor with less than this share of what it usually takes."""
TRIES = 2
"""Times what a comparison was given in vain, that is to be given the next time."""
STARTED = 3
"""First steps that a race leaves the time for where nothing is compared after it."""
LEAST_TURNS = 2
"""Of a config that is in the record as raced: fewer have no interval."""
ROUNDING_S = 10.0
"""Of fp32 with rounding, which Python draws one operation after the other: MobileNetV3's whole
comparison took more than 31 s on an H200."""
REFERENCE_S = 0.5
"""Timed seconds of strict fp32, measured to compare with."""

MOST_TOLD = 3
"""Configs that are named where the race could not tell."""


class Verifier(Protocol):
    """Holds a config against strict fp32."""

    def verify(
        self,
        config: Config,
        *,
        against: Config,
        steps: int,
        tolerance: float,
        deadline_s: float | None = None,
    ) -> Measurement:
        """Outcome 'ok' or 'wrong', or why it could not be told."""


class Tester(Runner, Verifier, Starter, Protocol):
    """All that deciding needs; a Worker is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is asked of a choice.

    Attributes:
        length: of the job; None for the steady state.
        tolerance: of the comparison with fp32; 0 for none.
        process_s: what starting a worker takes.
        memory: bytes of the device that configs may take; 0 where that is not known.
        baseline: what everything is held against, for people.
        folder: takes the artifacts of what was chosen; None where none are kept.
        compare_s: what one comparison takes, its steps and compiling aside.
        compare_steps: as many of the default's steps take as long as its own; 0 where it takes as
            many as fit. Where it is known the race leaves that time, up to half of its own.
        draws: what is compared draws random numbers, otherwise then, and is compiled anew for it.
        samples: of an epoch of its data; 0 where that is not known. `loaded`: what its workers
            hand over at a time.
    """

    length: Length | None = None
    tolerance: float = 0.0
    process_s: float = 0.0
    memory: int = 0
    compare_s: float = 0.0
    compare_steps: int = 0
    draws: bool = False
    baseline: str = "torch's default"
    folder: Path | None = None
    samples: int = 0
    loaded: Batch = Batch()  # noqa: RUF009 # immutable


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The fields of a record that the search and the race decide; see `Record`.

    `artifacts`: files of what was compiled for its configs, as `act.artifacts.saved` reads them.
    """

    baseline: Choice
    winners: tuple[Winner, ...]
    input: Config
    trials: tuple[Trial, ...]
    raced: tuple[Choice, ...]
    artifacts: Mapping[Config, Path]


def decide(
    worker: Tester, space: Space, search: Search, terms: Terms, progress: Progress
) -> Decided:
    """Race the finalists, and let nothing through that does not train like strict fp32.

    What there was no time to compare may be advised: the record has no 'numerics' trial of it that
    is ok, and `progress` is told.

    Raises:
        WorkerError: torch's default did not finish the race.
    """
    return _Decision(worker, space, search, terms, progress).made()


class _Decision:
    """One decision on its way. `rates`: what is still in the race; `trials`: all of the record."""

    def __init__(
        self, worker: Tester, space: Space, search: Search, terms: Terms, progress: Progress
    ) -> None:
        self.worker, self.space, self.terms, self.progress = worker, space, terms, progress
        self.clock, self.again = search.clock, search.again
        self.default = space.default
        self.trials = list(search.trials)
        self.tried = search.known(space.default)
        self.peaks = {t.config: t.measurement.peak_bytes for t in self.trials}
        self.rates: Rates = {}
        self.compared = 0
        self.starting: plan.Part | plan.Clock = self.clock
        self.starts = Starts(
            worker,
            search.trials,
            process_s=terms.process_s,
            left_s=lambda: self.starting.left_s,
            folder=terms.folder,
        )

    def made(self) -> Decided:
        self._race()
        if self.terms.length is not None:
            self.starting = self.clock.part(plan.STARTS)
            self._start(self._worthwhile())
        self._verify()
        verdict = self._verdict()
        chosen_input = self._loader(verdict.winner(LOOP).config)
        self._reference()
        self.starting = self.clock
        self._start([*self._chosen(verdict), *self._worthwhile()])
        self.starts.keep(self.default, self._chosen(verdict))
        choices = raced(self.space, self.rates, self.peaks)
        kept = [choice for choice in choices.values() if self._is_raced(choice)]
        unclear = untold(self.space, choices, verdict)
        # Where nothing else was raced for long enough to be kept, that is what is said of it.
        if unclear and any(choice.config != self.default for choice in kept):
            listed = ", ".join(map(self._unclear, unclear[:MOST_TOLD]))
            self.progress.notice(
                f"the race could not tell all within 5%: {listed}; a larger "
                "budget or a quieter machine tells more"
            )
        return Decided(
            baseline=self._started(verdict.baseline),
            winners=tuple(
                dataclasses.replace(one, choice=self._started(one.choice))
                for one in verdict.winners
            ),
            input=chosen_input,
            trials=tuple(self.trials),
            raced=tuple(map(self._started, kept)),
            artifacts=self.starts.artifacts,
        )

    def _unclear(self, choice: Choice) -> str:
        """What could not be told, with its figures where they say anything."""
        named = f"{self._named(choice.config)} at batch {choice.batch}"
        low, high = choice.speedup_low, choice.speedup_high
        ratio = f"{choice.speedup:.2f}x {self.terms.baseline} ({interval(low, high)})"
        return f"{named}: {ratio}" if tells(low, high) else named

    def _is_raced(self, choice: Choice) -> bool:
        # One turn beside the default's tells no interval, however many it has itself.
        told = len(choice.rounds) >= LEAST_TURNS and math.isfinite(choice.speedup_high)
        return told or choice.config == self.default

    def _race(self) -> None:
        """The finalists in turn; without time for it, the default as the search measured it."""
        self.progress.phase(f"the finalists and {self.terms.baseline}, measured in turn")
        found = finalists(self.space, self.trials)
        most = self._most(found)
        part = self.clock.part(
            min(1.0, min(plan.RACE, most) + self._start_s / max(self.clock.left_s, 1e-9)),
            reserve=min(plan.RESERVE, max(0.0, most - plan.RACE)),
        )
        if part.left_s > self.tried.measurement.first_step_s:
            found = affordable(found, self.trials, part, self.again)
            part.reserve_s = max(part.reserve_s, self._unused_s(found) - part.left_s)
            self.rates = self._heats(found, part)
            self.starts.save_raced(self.rates)
        else:
            part = self.clock.part(0.0)
        if self.default not in self.rates and part.left_s <= 0:
            self.progress.notice(f"no time was left for the race; {self.terms.baseline} is advised")
            self.rates = {self.default: [self.tried.measurement.samples_per_s]}

    @property
    def _start_s(self) -> float:
        """Seconds that a worker takes to start for the race, as the last trial ended it."""
        ended = self.trials[-1].measurement.outcome in ("timed_out", "crashed")
        return self.terms.process_s if ended and not self.rates else 0.0

    def _most(self, found: Sequence[Config]) -> float:
        """Share of what is left that the race may have: it leaves the comparisons with fp32 of what
        leads for each use at the user's batch their time, or that of the first of them."""
        leading = [c for c in found[: 1 + len(self.space.uses)] if c.batch == self.space.batch]
        doubtful = list(filter(knobs.doubtful, leading)) if self.terms.tolerance else []
        for compared in (doubtful, doubtful[:1]):
            most = 1 - self._compared_s(compared) / max(self.clock.left_s, 1e-9)
            if most >= plan.RACE / 2:
                return most
        return 1.0  # no comparison fits in: its time is worth more in the race

    def _unused_s(self, found: Sequence[Config]) -> float:
        """Seconds of what is left that nothing after the race of these has a use for: it may go on
        as long where it cannot tell, but enters no more configs for that."""
        compared = self.terms.tolerance > 0 and any(map(knobs.doubtful, found))
        if compared or self.terms.length is not None:
            return 0.0
        first_step_s = max(map(self.starts.seen, self.peaks), default=0.0)
        return self.clock.left_s - STARTED * (self.terms.process_s + first_step_s)

    def _compared_s(self, configs: Sequence[Config]) -> float:
        """Seconds of comparisons with fp32, which is run for the first alone."""
        if not configs:
            return 0.0
        if self.terms.compare_steps:
            return sum(map(self._least_s, configs))
        builds_s = sum(map(self._before_s, [configs[0], *configs]))
        return builds_s + self._least_steps_s() + ROUNDING_S

    def _heats(self, found: list[Config], part: plan.Part) -> Rates:
        """One race, or two where the finalists are not in memory together: those at the user's
        batch, then what leads at others, held against the default again."""
        whole = [c for c in found if c.batch == self.space.batch]
        large = [c for c in found if c not in whole]
        if not large or self._fits(found):
            return self._heat(found, part, self._start_s)
        rates = self._heat(whole, part.share(FIRST_HEAT), self._start_s)
        second = [self.default]
        for config in large:
            if self._fits([*second, config]) or len(second) == 1:
                second.append(config)
        again = self._heat(second, part)
        held, now = rates.get(self.default), again.pop(self.default, None)
        if held and now:
            rates |= {config: beside(seen, now, held) for config, seen in again.items()}
        return rates

    def _heat(self, configs: Sequence[Config], part: plan.Part, start_s: float = 0.0) -> Rates:
        return race(
            self.worker,
            configs,
            part,
            build_s=self.starts.seen,
            start_s=start_s,
            lost=self._lost,
        )

    def _lost(self, config: Config, why: Measurement) -> None:
        self.progress.notice(
            f"out of the race: {self._named(config)} at batch {config.batch}: "
            f"{why.outcome.replace('_', ' ')}, {why.reason}"
        )

    def _fits(self, configs: Sequence[Config]) -> bool:
        taken = sum(self.peaks.get(config, 0) for config in configs)
        return not self.terms.memory or taken <= TOGETHER * self.terms.memory

    def _verdict(self) -> Verdict:
        return choose(self.space, self.rates, self.peaks, self._weigh())

    def _weigh(self) -> Callable[[Config, float], float] | None:
        """Samples/s over the job, from a config and its steady samples/s; None for the steady
        state."""
        length = self.terms.length
        return None if length is None else lambda c, rate: length.rate(self._pace(c, rate))

    def _pace(self, config: Config, rate: float) -> Pace:
        first_step_s = self.starts.of(config, self.default)
        return Pace(batch=config.batch, first_step_s=first_step_s, step_s=config.batch / rate)

    def _worthwhile(self) -> list[Config]:
        """What was raced at the user's batch and is the best for some length of job."""
        at_batch = [c for c in self.rates if c.batch == self.space.batch]
        paces = [self._pace(c, statistics.median(self.rates[c])) for c in at_batch]
        return [at_batch[i] for _, i in break_even(paces)]

    @staticmethod
    def _chosen(verdict: Verdict) -> list[Config]:
        """The winners, what most scripts can follow first: the loop's, then the widest."""
        ordered = sorted(verdict.winners, key=lambda w: (w.free, w.use != LOOP))
        return list(dict.fromkeys(one.choice.config for one in ordered))

    def _named(self, config: Config) -> str:
        return knobs.described(config, self.default, nothing=self.terms.baseline)

    def _started(self, choice: Choice) -> Choice:
        fresh = self.starts.fresh.get(choice.config, 0.0)
        loaded = self.starts.loaded.get(choice.config, 0.0)
        return dataclasses.replace(choice, first_step_s=fresh, loaded_step_s=loaded)

    def _start(self, configs: Sequence[Config]) -> None:
        self.progress.phase("first steps, each in a fresh process")
        self.starts.measure(self.default, configs)

    def _verify(self) -> None:
        """Hold every doubtful winner against strict fp32, until none is left, or no time.

        The batch size changes no number format: what holds at the user's holds at another.
        """
        if not self.terms.tolerance:
            return
        part = self.clock.part(plan.NUMERICS)
        seen: set[Config] = set()
        while True:
            chosen = [*self._chosen(self._verdict()), *self._worthwhile()]
            open_ = dict.fromkeys(c.at(self.space.batch) for c in chosen if knobs.doubtful(c))
            doubtful = [config for config in open_ if config not in seen]
            if not doubtful:
                return self._drop_suspects()
            config = doubtful[0]
            seen.add(config)
            if len(seen) == 1:
                self.progress.phase("what was chosen, against strict fp32")
            self._compare(config, part.share(1 / len(doubtful)).left_s)

    def _compare(self, config: Config, share_s: float) -> None:
        """Compare one; it is worth more than the parts that follow, which give up their time."""
        # Of the same length as those before, whose runs of the reference are used again.
        self.compared = steps = self.compared or self._steps(config, share_s)
        least_s = self._least_s(config) if self.terms.compare_steps else self._before_s(config)
        if not steps or self.clock.part().deadline_s < max(LEAST_S, FITS * least_s):
            none = Measurement(outcome="timed_out", reason="no time is left for it")
            self._not_compared(config, none)
            return
        began = self.clock.now()
        measured = self.worker.verify(
            config,
            against=knobs.strict(self.default),
            steps=steps,
            tolerance=self.terms.tolerance,
            deadline_s=self.clock.part().deadline_s,
        )
        self._add(config, measured, "numerics", "fp32", self.clock.now() - began)
        if measured.outcome == "wrong":
            self.progress.notice(f"struck out: {self._named(config)}: {measured.reason}")
            self._strike(config, measured.reason)
        elif not measured.ok:
            self._not_compared(config, measured, self.clock.now() - began)

    def _not_compared(self, config: Config, said: Measurement, took_s: float = 0.0) -> None:
        """Tell it, with the budget that would have the time, if it was that."""
        why = said.reason
        if said.outcome == "timed_out":
            needs_s = max(self._least_s(config), TRIES * took_s)
            why += f"; a budget of {self.clock.advised(needs_s / plan.COMPARED)} would do"
        self.progress.notice(f"not compared with fp32: {self._named(config)}: {why}")

    def _steps(self, config: Config, share_s: float) -> int:
        """Steps of a comparison; 0 where there is no time for one."""
        from advisor.tuners.measure.numerics import LEAST_STEPS, steps_within

        if self.terms.compare_steps:
            return LEAST_STEPS
        before_s, step_s = self._before_s(config), self.tried.measurement.step_s
        least = min(LEAST_STEPS, steps_within(self.clock.left_s - before_s, step_s, self._fp32))
        return steps_within(share_s - before_s, step_s, self._fp32) or least

    def _before_s(self, config: Config) -> float:
        """Seconds that comparing a config takes, its steps aside."""
        seen = self.starts.seen(config)
        # What was compiled for the search is in the compiler's cache on disk.
        again = self.again.get(config, seen / WARM)
        return self.terms.compare_s + (seen if self.terms.draws else again)

    def _least_s(self, config: Config) -> float:
        """The same, with as few steps as can be."""
        known_s = self.terms.compare_steps * self.tried.measurement.step_s
        return self._before_s(config) + (known_s or self._least_steps_s())

    def _least_steps_s(self) -> float:
        """Seconds of as few steps of a comparison as can be."""
        from advisor.tuners.measure.numerics import LEAST_STEPS, seconds_of

        return seconds_of(LEAST_STEPS, self.tried.measurement.step_s, self._fp32)

    @property
    def _fp32(self) -> float:
        """As many times as long as the default strict fp32 takes, which without convolutions it
        is."""
        from advisor.tuners.measure.numerics import FP32

        return FP32 if knobs.convolving(self.space.choices) else 1.0

    def _drop_suspects(self) -> None:
        """Take out what was not compared where all that was found of a value of it is wrong."""
        checks = [trial for trial in self.trials if trial.stage == "numerics"]
        struck = [t.config for t in checks if t.measurement.outcome == "wrong"]
        wrong = {one for config in struck for one in knobs.doubts(config)}
        sound = {one for t in checks if t.measurement.ok for one in knobs.doubts(t.config)}
        fine = {t.config.knobs for t in checks if t.measurement.ok}
        self.rates = {
            c: seen
            for c, seen in self.rates.items()
            if c.knobs in fine or not knobs.doubts(c) & (wrong - sound)
        }

    def _strike(self, config: Config, reason: str) -> None:
        """Take a config out of the race at every batch, and mark its trials."""
        wrong = Measurement(outcome="wrong", reason=reason)
        self.rates = {c: seen for c, seen in self.rates.items() if c.knobs != config.knobs}
        self.trials = [
            dataclasses.replace(trial, measurement=wrong)
            if trial.config.knobs == config.knobs and trial.stage != "numerics"
            else trial
            for trial in self.trials
        ]

    def _loader(self, config: Config) -> Config:
        """What is chosen of the data's loader, with the step of a config."""
        if not self.space.inputs:
            return Config()
        self.progress.phase("the loader: alone, and with the step that it feeds")
        part = self.clock.kept()
        loaders = Loaders(self.worker, self.space, config, part, self.terms.loaded, self.progress)
        found = loaders.chosen(self.terms.samples)
        for trial in loaders.trials:
            self._add(trial.config, trial.measurement, trial.stage, trial.origin, trial.seconds)
        for line in loaders.said:
            self.progress.notice(line)
        return found

    def _reference(self) -> None:
        """Strict fp32, measured to compare with; advised only where it is permitted."""
        reference = self.space.reference
        if reference is None or self.clock.left_s < self.terms.process_s + self.tried.seconds:
            return
        began = self.clock.now()
        measured = self.worker.measure(
            reference, seconds=REFERENCE_S, deadline_s=self.clock.part().deadline_s
        )
        self._add(reference, measured, knobs.COMPUTE, "reference", self.clock.now() - began)

    def _add(
        self, config: Config, measured: Measurement, stage: str, origin: str, seconds: float
    ) -> None:
        self.trials.append(
            Trial(
                number=1 + max(trial.number for trial in self.trials),
                config=config,
                measurement=measured,
                stage=stage,
                origin=origin,
                seconds=seconds,
            )
        )
