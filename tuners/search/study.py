"""The search over a runner: guesses, a climb over batch sizes, what compiles, then the sampler.

Every config that is told to the study was really measured. A study is resumed by opening it
again: finished trials are read back, and what was in flight is tried once more.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import optuna

from advisor.cache.config import BATCH, Config, Value
from advisor.cache.record import RACED, Trial
from advisor.errors import WorkerError
from advisor.tuners import knobs
from advisor.tuners.measure.runner import TOO_SOON, Builder, Runner
from advisor.tuners.measure.worker.fleet import Ask, Done, Fleet, one_by_one
from advisor.tuners.search import guesses, left_out
from advisor.tuners.search.ahead import Builds, order, together
from advisor.tuners.search.feeding import Feeding
from advisor.tuners.search.journal import Journal
from advisor.tuners.search.leaders import Leaders
from advisor.tuners.search.memory import needed
from advisor.tuners.search.plan import Clock, Progress
from advisor.tuners.search.sampler import GainPerSecond
from advisor.tuners.search.space import Space
from advisor.tuners.search.times import LONGER, Times

REPEATS = 10
"""Proposals of known configs in a row after which one not yet tried is drawn instead."""
PATIENCE = 12
"""Trials without a better config after which the sampler stops, for the widest use."""
PATIENCE_LESS = 4
"""The same for each lesser use."""
LEADING = 1
"""Guesses before the first look at a large batch."""
HOPELESS = 0.6
"""Below this fraction of the fastest at its batch and use a config is measured no longer."""
BESIDE = 0.85
"""Below this fraction a config that others ran beside is not measured again alone."""
EAGER, EAGER_AHEAD = 0.5, 0.3
"""Share of the search for guesses and larger batches where a dear knob is to be tried after; the
same where several configs are then built at once, which takes as long as the slowest."""
REBUILT = 2
"""Times that what leads is built, and compiled, again once the search is over: to hold it against
fp32, and through a DataLoader."""
GAIN = 1.03
"""A doubling of the batch that gains less is not worth its memory."""
LEAST_S, TWICE = 30.0, 2.0
"""A budget to advise where the baseline alone ran out of it, and times as long as that took."""
TRIES = 2
"""Interruptions after which a config is not tried again: the tuner itself did not survive it."""
MOMENTS = 4
"""Times as long as a trial is timed, what another one of the same code takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How far a search goes.

    Attributes:
        clock: of the whole tuning.
        baseline: what is measured first, for people.
        trials: at most, or None.
        memory: bytes that a config may take; 0 where that is not known.
        first: configs to try before the guesses, from records that nearly fit.
        seed: of the sampler.
        sampler: any Optuna sampler in place of GainPerSecond; it is kept from dear knobs, whose
            cost it does not count.
        builder: builds several configs at once before they are measured; None: there is none.
    """

    clock: Clock
    baseline: str = "torch's default"
    trials: int | None = None
    memory: int = 0
    first: Sequence[Config] = ()
    seed: int = 0
    sampler: optuna.samplers.BaseSampler | None = None
    builder: Builder | None = None


@dataclass(frozen=True, slots=True)
class _Aim:
    """What the sampler looks for: the best that a use can follow, at one batch or at any."""

    use: str
    batch: int | None


class Search:
    """Tries configs of a space until time, trials or ideas run out.

    Args:
        study: where trials are kept; it is the one that is asked.
        progress: told of each trial once it is over, never during one.
        fleet: what measures several configs at once, in the place of the runner.
    """

    def __init__(
        self,
        runner: Runner,
        space: Space,
        study: optuna.Study,
        scope: Scope,
        progress: Progress | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        self._runner, self._fleet = runner, fleet
        self._width = len(fleet.lanes) if fleet else 1
        self._space = space
        self._scope = scope
        self._progress = progress or Progress()
        self.clock = scope.clock
        self._aim = _Aim(space.uses[0], None)
        self._left: list[Config] = []
        self._builds = Builds(scope.builder)
        self._times = Times(scope.clock, space, self._builds)
        self._begun: dict[Config, optuna.Trial] = {}
        self._feeding = Feeding(space, self._load_otherwise)
        self._dear_s, self._kept = math.inf, 1.0
        study.sampler = scope.sampler or GainPerSecond(
            seed=scope.seed, among=lambda: self._left, best=lambda: self._rate(self._aim)
        )
        self._journal = Journal(study, space, self._progress.notice)
        self.trials: list[Trial] = []
        self._known: dict[Config, Trial] = {}
        self._attempts: collections.Counter[Config] = collections.Counter()
        self._running: dict[Config, tuple[optuna.Trial, str]] = {}
        self._resume()

    def _resume(self) -> None:
        trials, interrupted = self._journal.resume()
        latest = {trial.config: trial for trial in trials}
        self._attempts.update(interrupted)
        self.clock.resume(self._journal.spent_s)
        for trial in trials:
            measured = trial.measurement
            failed = not measured.ok and trial.config == self._space.default
            short = measured.outcome == "timed_out" and (
                self._times.limit_s(trial.config) > LONGER * trial.seconds
            )
            if not failed and not short and trial is latest[trial.config]:
                self._remember(trial)

    def _remember(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._known[trial.config] = trial

    def known(self, config: Config) -> Trial:
        """The trial of a config that was tried."""
        return self._known[config]

    @property
    def again(self) -> Mapping[Config, float]:
        """Seconds of a first step in the worker of configs that were built ahead."""
        return self._builds.again

    def run(self) -> list[Trial]:
        """All trials, those of earlier runs first.

        Raises:
            WorkerError: the baseline cannot be measured, so that nothing could be compared.
        """
        default = self._try(self._space.default, "default", always=True)
        if default is None or not default.measurement.ok:
            reason = default.measurement.reason if default else "it was not tried"
            if default and default.measurement.outcome == "timed_out":
                needed_s = max(LEAST_S, TWICE * default.seconds)
                reason += f"; give a budget of {self.clock.advised(needed_s)}"
            raise WorkerError(f"{self._scope.baseline} could not be measured: {reason}")
        eager = EAGER if self._room(self._space.batch) < 2 else EAGER_AHEAD
        self._kept = 1 - eager
        kept_s = self._kept * self._times.left_s
        most = self._times.reach_s(kept_s)
        if any(self._times.needs_s({n: v}) <= most for n, v in self._space.dear_values):
            self._times.kept_s = kept_s
        near = dict.fromkeys(self._space.near(config) for config in self._scope.first)
        self._try_each(filter(self._space.holds, near), "near record")
        self._feeding.feed(self.trials)
        guessed = guesses.first(self._space)
        leading = max(LEADING, self._width)
        self._guess(guessed[:leading])
        self._probe_large()
        self._guess(guessed[leading:])
        self._settle_batch()
        self._times.kept_s = 0.0
        self._feeding.feed(self.trials)
        self._try_dear()
        self._try_frugal()
        self._feeding.feed(self.trials)
        self._try_on_leaders()
        self._times.kept_s = self._rebuilding_s
        self._sample()
        self._try_longer()
        return self.trials

    @property
    def _is_full(self) -> bool:
        """Whether there are as many trials as there may be."""
        most = self._scope.trials
        return most is not None and len(self.trials) + len(self._running) >= most

    @property
    def left_out(self) -> list[str]:
        """What compiles and was not measured for want of time, as lines."""
        if self._is_full:
            return []
        space, trials = self._space, self.trials
        times, kept = self._times, self._kept
        begun = left_out.not_begun(space, trials, times, kept, self._dear_s)
        late = left_out.timed_out(space, trials, times, kept, self._scope.baseline)
        return [*begun, *late]

    def settle(self) -> None:
        """This run ends without a race: one that goes on has all of its own time."""
        self._journal.settle()

    def give_up(self) -> None:
        """As `settle`, and what is in flight is not held against its config: it was not why."""
        for asked in (*(one for one, _origin in self._running.values()), *self._begun.values()):
            self._journal.pass_over(asked)
        self.settle()

    def best(self, batch: int | None = None, use: str = RACED[-1]) -> Trial:
        """The fastest trial that a use can follow, at one batch size or at any."""
        aim = _Aim(use, batch)
        return max(
            (t for t in self.trials if t.measurement.ok and self._covers(aim, t.config)),
            key=lambda trial: trial.measurement.samples_per_s,
            default=self._known[self._space.default],
        )

    def _guess(self, configs: Sequence[Config]) -> None:
        """Try these; in a run each with what feeds the best by then."""
        if not self._feeding.given:
            self._try_each(configs, "guess")
            return
        for config in configs:
            self._try(config | self._feeding.given, "guess")
            if self._loads_at_once:
                self._feeding.feed(self.trials)

    def _load_otherwise(self, config: Config) -> Trial | None:
        """Try a config of which only the loader is new. It takes a moment, which the race gives
        where the search has no more: held against one another there would be what waits."""
        left_s = self._times.reach_s(self._times.left_s)
        brief = self._loads_at_once and left_s >= MOMENTS * self.clock.trial_s
        always = brief and not self._is_full and self._attempts[config] < TRIES
        return self._try(config, "loading", always=always)

    @property
    def _loads_at_once(self) -> bool:
        """Whether a run's loader is another from the next step on, and takes no start for it."""
        return knobs.WORKERS not in self._space.anew

    def _covers(self, aim: _Aim, config: Config) -> bool:
        return aim.batch in (None, config.batch) and knobs.follows(
            aim.use, config, self._space.default
        )

    def _probe_large(self) -> None:
        """What leads where the device is the limit, at the largest batch that is sure to fit."""
        user = self._space.batch
        peak = self._known[self._space.default].measurement.peak_bytes
        memory = self._scope.memory
        sure = [
            batch
            for batch in self._space.batches
            if batch > user and (memory == 0 or peak * batch / user <= memory)
        ]
        if not sure:
            return
        large = guesses.at_large_batch(self._space, self.best(user).config, max(sure))
        self._try_each(large, "large")

    def _settle_batch(self) -> None:
        """From the fastest batch up while that gains, then down while it costs nothing.

        Advised with the batch free is the smallest batch that is about as fast as any.
        """
        batches = sorted(self._space.batches)
        top = self.best()
        for tried in self._climb(top.config, batches[batches.index(top.config.batch) + 1 :]):
            if tried is None or not tried.measurement.ok:
                break
            gained = tried.measurement.samples_per_s >= GAIN * top.measurement.samples_per_s
            top = max(top, tried, key=lambda trial: trial.measurement.samples_per_s)
            if not gained:
                break
        smaller = batches[: batches.index(top.config.batch)]
        for tried in self._climb(top.config, smaller[::-1]):
            if tried is not None and (
                tried.measurement.samples_per_s < top.measurement.samples_per_s / GAIN
            ):
                break
        # The lesser uses' leaders, at the batch that leads.
        lesser = [self.best(self._space.batch, use).config for use in self._space.uses[1:]]
        self._try_each([config.at(top.config.batch) for config in lesser], "climb")

    def _climb(self, config: Config, batches: Sequence[int]) -> Iterator[Trial | None]:
        """Trials of a config at one batch after the other, None where it is not to be tried: as
        many ahead of who listens as are measured at once."""
        for start in range(0, len(batches), self._width):
            some = [config.at(batch) for batch in batches[start : start + self._width]]
            self._try_each(some, "climb")
            yield from map(self._known.get, some)

    def _try_dear(self) -> None:
        """Dear knobs on what leads at the user's batch and at any, built several at once where that
        can be; then the best of them at the batch that leads.

        At a small batch the host hides what the device could do; the leader of the large ones
        shows it, and compilation is what takes the host out of the way. What a lesser use can
        follow goes first: more scripts can.
        """
        user, space = self._space.batch, self._space
        values = space.dear_values
        uses = [
            use
            for use in reversed(space.uses)
            if any(
                self._covers(_Aim(use, user), space.default.replace(**{n: v})) for n, v in values
            )
        ]
        if not uses:
            return
        self._dear_s = self._times.reach_s(self._times.left_s)
        leaders = Leaders.among(space, self.trials)
        found, free = leaders.found(uses), leaders.batch
        behind = [one for one in found if leaders.is_behind(one, found[0])]
        dear = self._try_on([one for one in found if one not in behind], values)
        if free != user:
            best = Leaders.among(space, self.trials).of_each_use(dear)
            room = self._room(free)
            self._try_group([config.at(free) for config in best[:room]], room)
        self._try_on(behind, values)

    def _try_frugal(self) -> None:
        """Give speed for memory where that is what limits: at the batch above the fastest, if that
        was worth its own memory and the next is more than there is. What fits costs the least."""
        leader = self.best()
        larger = [batch for batch in self._space.batches if batch > leader.config.batch]
        smaller = [
            trial.measurement.samples_per_s
            for trial in self.trials
            if trial.config.knobs == leader.config.knobs
            and trial.config.batch < leader.config.batch
        ]
        if not larger or leader.measurement.samples_per_s < GAIN * max(smaller, default=0.0):
            return
        above = leader.config.at(min(larger))
        if not self._cannot_fit(above):
            return
        for changes in knobs.FRUGAL:
            config = self._space.on(above, changes)
            if config and self._may_be_dear(config):
                tried = self._try(config, "leader")
                if tried is not None and tried.measurement.ok:
                    return

    def _try_on(
        self, leaders: Sequence[Config], values: Sequence[tuple[str, Value]]
    ) -> list[Config]:
        """Try dear knobs on leaders, fed as the best is; the configs that this is about."""
        times = self._times
        leaders = list(dict.fromkeys(leader | self._feeding.given for leader in leaders))
        each = [times.needs_s({name: value}) for name, value in values]
        needs_s = max((one for one in each if one <= times.ahead_s), default=math.inf)
        room = times.at_once(needs_s)
        # Of two that one time is left for, the one that more scripts can follow.
        short = Leaders.among(self._space, self.trials).is_short if times.hold(2, needs_s) else None
        groups = order(self._space, leaders, values, short)
        dear = list(dict.fromkeys(config for group in groups for config in group))
        if room > 1:  # asked first: for the memory a run hands over the calls of a step
            room = min(room, self._room(self._space.batch))
        for group in together(dear, room, times.needs_s) if room > 1 else groups:
            self._try_group(group, room)
            if room == 1:
                self._try_on_leaders()  # a compiler has done most of its work for these
        return dear

    @property
    def _rebuilding_s(self) -> float:
        """What is kept of the search, once it is over, for what leads."""
        best = self.best(self._space.batch)
        return REBUILT * self.again.get(best.config, best.measurement.first_step_s)

    def _room(self, batch: int) -> int:
        """How many configs may be built at once, by the memory that the default takes."""
        default = self._space.default
        peak = self._known[default].measurement.peak_bytes
        room = self._builds.room(int(peak * max(1.0, batch / default.batch)))
        most = self._scope.trials
        return room if most is None else max(1, min(room, most - len(self.trials)))

    def _try_group(self, configs: Sequence[Config], room: int) -> None:
        """Try what is dear, as many as there is room for built at once."""
        self._build(self._builds.open(filter(self._may_be_dear, configs))[:room], room)
        self._try_each(filter(self._may_be_dear, configs), "leader")
        for asked in self._begun.values():
            self._journal.pass_over(asked)
        self._begun.clear()

    def _build(self, configs: Sequence[Config], room: int) -> None:
        """Build configs before they are measured; one that fails has had its trial, and one of
        which nothing is known is tried as if it had not been to be built."""
        builder, deadline_s = self._builds.builder, self._times.ahead_s
        if builder is None or len(configs) < 2:
            return
        if len(configs) > self._times.at_once(max(map(self._times.needs_s, configs))):
            return
        self._runner.release()
        asked = {config: self._journal.ask("leader", config) for config in configs}
        start = self.clock.now()
        built = builder.build(configs, room=room, deadline_s=deadline_s)
        self._builds.keep(built, self.clock.now() - start)
        for config, one in built.items():
            if one.measurement.ok:
                self._begun[config] = asked[config]
            else:
                self._running[config] = asked[config], "leader"
                self._told(Done(config=config, measured=one.measurement, seconds=one.seconds))
        for config in (one for one in configs if one not in built):
            self._journal.pass_over(asked[config])

    def _try_on_leaders(self) -> None:
        """Variants of what leads, which seldom gain much: what rebuilds it comes first."""
        kept_s, self._times.kept_s = self._times.kept_s, self._rebuilding_s
        leaders = (self.best(self._space.batch, use).config for use in self._space.uses)
        guessed = (one for leader in leaders for one in guesses.on_leader(self._space, leader))
        self._try_each(guessed, "guess")
        self._times.kept_s = kept_s

    def _may_be_dear(self, config: Config) -> bool:
        return (
            config not in self._known
            and self._times.suffice(config)
            and self._space.holds(config)
            and not self._hung(config)
            and self._may_be_tried(config)
        )

    def _hung(self, config: Config) -> bool:
        """Whether a value of a dear knob ran into its deadline in another config, or the same code
        could not be built."""
        if self._builds.built(config) or self._builds.failed(config):
            return self._builds.failed(config)
        hung = {
            pair
            for trial in self.trials
            if trial.measurement.outcome == "timed_out"
            for pair in self._space.dear_in(trial.config)
        }
        return any(pair in hung for pair in self._space.dear_in(config))

    def _sample(self) -> None:
        """Until patience ends for each use at the user's batch, and for the widest with it free."""
        user = self._space.batch
        widest, *lesser = self._space.uses
        patience = {_Aim(widest, user): PATIENCE}
        if len(self._space.batches) > 1 and BATCH not in self._space.anew:
            patience[_Aim(widest, None)] = PATIENCE
        patience |= {_Aim(use, user): PATIENCE_LESS for use in lesser}
        # Two of its trials at the user's batch for each one beside: that is what is served.
        turns = [_Aim(widest, user), *patience]
        asked: dict[Config, tuple[_Aim, float]] = {}

        def drop(aim: _Aim) -> None:
            turns[:] = [one for one in turns if one != aim]

        def proposals() -> Iterator[Ask]:
            while turns and self._affords(self._space.default):
                self._aim = aim = turns.pop(0)
                turns.append(aim)
                proposed = self._proposed()
                if proposed is None:
                    drop(aim)
                    continue
                ask = self._ask(proposed, "sampler")
                asked[ask.config] = aim, self._rate(aim)
                yield ask

        for trial in self._measured(proposals()):
            aim, before = asked[trial.config]
            patience[aim] -= 1
            if self._rate(aim) > before:
                patience[aim] = PATIENCE if aim.use == widest else PATIENCE_LESS
            if patience[aim] <= 0:
                drop(aim)

    def _try_longer(self) -> None:
        """Where all that compiles ran out of time, and the search ended early by that: the first of
        it once more, with what is left."""
        space, times = self._space, self._times
        late = left_out.without_answer(space, self.trials)
        dear = (t for t in self.trials if space.is_dear(t.config))
        if not late or times.left_s <= 0 or self._is_full:
            return
        if any(trial.measurement.ok for trial in dear):
            return
        first, default = late[0], self._known[space.default].measurement
        leads = self.best().measurement.samples_per_s >= GAIN * default.samples_per_s
        spare_s = times.spare_s(leads=leads)
        if spare_s >= first.seconds:
            self.trials.remove(first)
            del self._known[first.config]
            times.last_s = spare_s
            self._try(first.config, "leader", always=True)
            times.last_s = 0.0

    def _rate(self, aim: _Aim) -> float:
        return self.best(aim.batch, aim.use).measurement.samples_per_s

    def _open(self) -> list[Config]:
        """The configs that may be proposed for the aim."""
        dear = self._scope.sampler is None  # which counts what they cost
        batches = self._space.batches if self._aim.batch is None else (self._aim.batch,)
        return [
            config
            for batch in batches
            for config in self._space.configs(batch, dear=dear)
            if config not in self._known
            and config not in self._running
            and self._attempts[config] < TRIES
            and self._feeding.given.items() <= config.items()
            and self._covers(self._aim, config)
            and not self._cannot_fit(config)
            and not self._hung(config)
            and self._times.suffice(config)
        ]

    def _proposed(self) -> optuna.Trial | None:
        """What the sampler proposes; None where nothing is left."""
        self._left = left = self._open()
        if not left:
            return None
        if self._scope.sampler is None:
            return self._journal.ask("sampler")
        kept = (*self._space.dear, *self._space.frugal)
        fixed = {name: self._space.choices[name][0] for name in kept}
        if self._aim.batch is not None:
            fixed[BATCH] = self._aim.batch
        for _ in range(REPEATS):
            asked = self._journal.ask("sampler", fixed)
            if Config(asked.params) in left:
                return asked
            self._journal.pass_over(asked)
        drawn = random.Random(self._scope.seed + len(self.trials)).choice(left)
        return self._journal.ask("sampler", drawn)

    def _fastest(self, config: Config) -> float:
        """Samples/s of the fastest at its batch and use; 0 where there is none."""
        use = next(u for u in RACED if knobs.follows(u, config, self._space.default))
        rates = [
            trial.measurement.samples_per_s
            for trial in self.trials
            if trial.measurement.ok and self._covers(_Aim(use, config.batch), trial.config)
        ]
        return max(rates, default=0.0)

    def _affords(self, config: Config) -> bool:
        """Whether about six steps of the default's length fit in the time and trials left."""
        left_s = self._times.left_for(config)
        if self._is_full or left_s <= 0:
            return False
        step_s = self._known[self._space.default].measurement.step_s
        scale = config.batch / self._space.batch
        return 6 * step_s * max(1.0, scale) <= left_s

    def _cannot_fit(self, config: Config) -> bool:
        """Whether a config needs more memory than there is, by what others took."""
        most = needed(self.trials, config)
        return most == float("inf") or 0 < self._scope.memory < most

    def _try(self, config: Config, origin: str, *, always: bool = False) -> Trial | None:
        """Measure a config, once; None where it is not to be tried."""
        if config not in self._known:
            self._try_each([config], origin, always=always)
        return self._known.get(config)

    def _try_each(self, configs: Iterable[Config], origin: str, *, always: bool = False) -> None:
        """Measure those that are to be tried, each once, and several at once where there is room:
        whether one is, is asked when its turn comes."""

        def asks() -> Iterator[Ask]:
            for config in configs:
                tried = config in self._known or config in self._running
                if not tried and (always or self._may_be_tried(config)):
                    begun = self._begun.pop(config, None)
                    yield self._ask(begun or self._journal.ask(origin, config), origin)

        collections.deque(self._measured(asks()), maxlen=0)

    def _may_be_tried(self, config: Config) -> bool:
        return (
            self._attempts[config] < TRIES
            and not self._cannot_fit(config)
            and self._affords(config)
            and (not self._builds.built(config) or self._times.suffice(config))
        )

    def _ask(self, asked: optuna.Trial, origin: str) -> Ask:
        config = Config(asked.params)
        if self._space.is_dear(config):
            self._progress.building([config], 0.0)
        self._running[config] = asked, origin
        fastest = self._fastest(config)
        return Ask(
            config=config,
            seconds=self.clock.trial_s,
            floor=HOPELESS * fastest,
            worth=BESIDE * fastest,
            deadline_s=self._times.limit_s(config),
        )

    def _measured(self, asks: Iterable[Ask]) -> Iterator[Trial]:
        """The trials as they end, each told to the study."""
        if self._fleet is None:
            found = one_by_one(self._runner, asks, self.clock.now)
        else:
            default = self._space.default
            limit_s = self._times.limit_s(default)
            anchor = Ask(config=default, seconds=self.clock.trial_s, deadline_s=limit_s)
            found = self._fleet.each(asks, anchor)
        return map(self._told, found)

    def _told(self, done: Done) -> Trial:
        """Keep and report what a trial gave."""
        asked, origin = self._running.pop(done.config)
        measured, seconds = done.measured, done.seconds
        if self._builds.built(done.config):
            seconds += self._builds.measured(done.config, measured)
            if measured.ok:
                # What it takes with nothing compiled yet, as other trials have it.
                first_step_s = max(measured.first_step_s, self._builds.first_step_s(done.config))
                measured = dataclasses.replace(measured, first_step_s=first_step_s)
        trial = Trial(
            number=asked.number,
            config=done.config,
            measurement=measured,
            stage="compute",
            origin=origin,
            seconds=seconds,
        )
        if measured.reason == TOO_SOON:  # which says nothing of the config
            self._journal.pass_over(asked)
            self._known[trial.config] = trial
        else:
            self._journal.tell(asked, trial, beside=done.beside)
            self._remember(trial)
        self._progress.tried(trial, self.clock.spent_s)
        return trial
