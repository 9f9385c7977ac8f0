"""The loader of a workload's own data: as few workers as feed the chosen step as well as any.

What a pair of loader and step gives is at most what either gives by itself, and the loader by
itself is measured in a second: so it is, for few numbers of workers, until it outruns the step or
gains no more. Only those near that knee are measured with the step, which shares the host with
them; and the usual recipe, a worker for each core, so that the advice is not below it. On CUDA all
of them pin memory, as a copy of what is not pinned waits for the step before: it is leaving that
out which has to show a gain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from advisor.cache.config import Config, Value
from advisor.cache.record import Measurement, Trial, best_known
from advisor.tuners import knobs, room
from advisor.tuners.decide.race import MIN_ROUNDS, paired, race
from advisor.tuners.decide.winners import CLEARLY, Rates, faster, level
from advisor.tuners.knobs import BY_NAME, INPUT, LOADER, WORKERS
from advisor.tuners.measure.runner import Runner
from advisor.tuners.room import Batch
from advisor.tuners.search.plan import LOADER as SHARE
from advisor.tuners.search.plan import Part, Progress, larger
from advisor.tuners.search.space import Space

ALONE_S = 0.7
"""Timed seconds of a loader by itself, and of the step."""
ENOUGH = 1.25
"""Times the step's speed from which on more workers are not looked at."""
UNLIKELY = 0.8
"""Of the step's speed: workers who can only give less, by what one gives, are passed over."""
GAIN = 1.05
"""More workers that give less than so many times as much are of no use, twice in a row."""
NEAR = 0.97
"""Of the best that can be, what is as good."""
CLOSE = 0.8
"""Of that, what may yet be."""
MOST_PAIRS = 4
"""The fewer, the more turns each has."""
FAR = 1.5
"""Times as fast: no noise of a host does that twice."""
HANGS = 20.0
"""As many times as long as a batch takes without workers: with them none comes."""
LOOKED = 0.6
"""Of the whole time, after which no further loader is looked at by itself: pairs tell."""
PAIRS = 0.8
"""Of the time after that: how many workers; what is left goes to how they work."""
WAITS = 0.03
"""Share of its time that a step waits from which it is worth a try to have more batches ready."""
EPOCH = 0.01
"""Of an epoch, what its start takes where workers had better stay."""


class Loaders:
    """What may be chosen of a loader, tried with a config's step.

    Args:
        loaded: what a worker hands over at a time.
        progress: told what each gives, the step, the loader and both, side by side.

    Attributes:
        trials: of it: the step alone, loaders alone, both together. Their numbers are the caller's.
        said: what a person should know.
    """

    def __init__(
        self,
        runner: Runner,
        space: Space,
        config: Config,
        part: Part,
        loaded: Batch,
        progress: Progress,
    ) -> None:
        self._loaded, self._progress = loaded, progress
        self._runner, self._space, self._config, self._part = runner, space, config, part
        self.trials: list[Trial] = []
        self.said: list[str] = []
        self._alone: dict[int, Measurement] = {}
        self._failing = math.inf
        self._step = 0.0
        self._whole_s = part.left_s

    def chosen(self, samples: int) -> Config:
        """What differs from a DataLoader's own; nothing where that is as good, or time ran out.

        Args:
            samples: of an epoch; 0 where that is not known.
        """
        found = self._chosen(samples)
        self._runner.release()
        return found

    def _chosen(self, samples: int) -> Config:
        step = self._measured(self._config, INPUT, "step")
        if step is None:
            return self._without_time()
        self._step = step.samples_per_s
        self._tell(self._config)
        self._look(step.samples_per_s)
        near = self._near(step.samples_per_s)
        if not near:
            return self._without_time()
        if near == [0] and self._hangs():
            return Config()
        rates = self._raced([self._with(workers) for workers in near], PAIRS)
        best = self._best(self._told_apart(rates))
        if best is None or len(rates) < min(2, len(near)):
            return self._without_time()
        if workers := knobs.workers(best):
            if workers not in self._alone:  # passed over, for what one gives
                self._look_at(workers)
            best = self._refined(best, samples)
        own = self._space.default_input
        return Config({name: best[name] for name in own if name in best}).changed(own)

    def _without_time(self) -> Config:
        """A DataLoader's own; said of it is, unless something failed, which budget would do."""
        failed = [t.measurement for t in self.trials if not t.measurement.ok]
        if all(one.outcome == "timed_out" for one in failed):
            long_s = max((t.seconds for t in self.trials), default=self._whole_s)
            spent_s = self._whole_s - self._part.left_s
            needs_s = max(self._whole_s, spent_s) + 2 * MIN_ROUNDS * long_s
            self.said = [
                "the loader is not tuned: the budget left no time to measure it with the step; a "
                f"budget of {larger(needs_s / SHARE, self._part.clock.whole_s):.0f}s would do"
            ]
        return Config()

    def _hangs(self) -> bool:
        """Whether workers gave no batch in the time of many without any; that is said then."""
        plain = self._alone.get(0)
        for trial in self.trials:
            late = trial.stage == LOADER and trial.measurement.outcome == "timed_out"
            if late and plain and trial.seconds >= HANGS * plain.step_s:
                workers = knobs.described(trial.config.only(WORKERS))
                self.said = [
                    f"{workers}: no batch within {trial.seconds:.0f} s, where without workers one "
                    f"takes {plain.step_s:.2g} s: it hangs there; the loader stays without workers"
                ]
                return True
        return False

    def _told_apart(self, rates: Rates) -> Rates:
        """With further turns of the fastest and of a loader without workers, where these do not
        tell them apart yet and there is time."""
        plain = self._with(0)
        if plain not in rates:
            return rates
        best = _fastest(rates)
        if best == plain or self._known_faster(rates[best], rates[plain]):
            return rates
        again = self._raced([plain, best], 1.0)
        if len(again) < 2:
            return rates
        turns = min(len(rates[plain]), len(rates[best]))  # those that were taken in turn
        return rates | {config: rates[config][:turns] + seen for config, seen in again.items()}

    def _look(self, step: float) -> None:
        """Loaders by themselves, few workers first, until they outrun the step by far."""
        counts, useless, best = self._counts, 0, 0.0
        for workers in counts:
            one = self._alone.get(1)
            if one and workers < counts[-1] and workers * one.samples_per_s < UNLIKELY * step:
                continue
            if len(self._alone) > 1 and self._part.left_s < (1 - LOOKED) * self._whole_s:
                return
            measured = self._look_at(workers)
            if measured is None:
                self._failing = workers
                return
            rate = measured.samples_per_s
            useless = useless + 1 if workers > 1 and rate < GAIN * best else 0
            best = max(best, rate)
            if (workers and rate >= ENOUGH * step) or useless == 2:
                return

    def _look_at(self, workers: int) -> Measurement | None:
        """A loader by itself; None where it failed."""
        measured = self._measured(self._with(workers), LOADER, "alone")
        if measured is not None:
            self._alone[workers] = measured
            self._tell(self._with(workers))
        return measured

    def _near(self, step: float) -> list[int]:
        """Numbers of workers that may feed it best; none at all, as torch's own loader has; and
        all that there are, as the usual recipe has. The likeliest first."""
        rates = {workers: seen.samples_per_s for workers, seen in self._alone.items()}
        if not rates:
            return []
        wanted = NEAR * min(step, max(rates.values()))
        knee = min(workers for workers, rate in rates.items() if rate >= wanted)
        # Those passed over may do: what one gives, several do, as far as there are cores.
        likely = min((n for n in self._counts if n * rates.get(1, 0.0) >= wanted), default=knee)
        least = min(knee, likely)
        # Beside the step each gives less than alone: rather more than fewer.
        near = [knee, 0, self._counts[-1], least, *self._beside(least, 1), *self._beside(knee, 1)]
        # Pairs give no more than the loader alone, but for its own noise.
        near += (n for n in self._beside(least, -1) if rates.get(n, wanted) >= CLOSE * wanted)
        return list(dict.fromkeys(near))[:MOST_PAIRS]

    def _beside(self, workers: int, by: int) -> list[int]:
        """The next number of workers, up or down; none at the end."""
        at = self._counts.index(workers) + by
        return self._counts[at : at + 1] if at >= 0 else []

    def _best(self, rates: Rates) -> Config | None:
        """The fastest, or of those that are known to be level with it the one with fewest workers;
        the usual recipe where that is not known of the fastest and of it. None where the race did
        not come to the loader without any."""
        plain = self._with(0)
        if plain not in rates:
            return None
        best = _fastest(rates)
        if best != plain and not self._known_faster(rates[best], rates[plain]):
            if paired(rates[best], rates[plain]).mean >= CLEARLY:
                whole_s = self._part.clock.whole_s
                self.said.append(
                    f"{knobs.described(best.only(WORKERS))} may be faster than none, which could "
                    f"not be told: give a budget of {larger(whole_s, whole_s):.0f}s, or a quieter "
                    "machine"
                )
            return plain
        recipe = self._with(self._counts[-1])
        if held := rates.get(recipe):
            ratio = paired(rates[best], held)
            if not faster(ratio) and not _known_level(rates[best], held):
                best = recipe
        tied = [c for c in rates if c == best or _known_level(rates[c], rates[best])]
        return min(tied, key=knobs.workers)

    def _known_faster(self, ours: Sequence[float], plain: Sequence[float]) -> bool:
        """Whether workers are faster than none: clearly, or so much, by themselves too, that one
        turn of each, which has no interval, tells."""
        ratio = paired(ours, plain)
        alone = {workers: seen.samples_per_s for workers, seen in self._alone.items()}
        far = min(ratio.mean, max(alone.values()) / alone.get(0, math.inf)) >= FAR
        return far or faster(ratio)

    def _refined(self, best: Config, samples: int) -> Config:
        """How the workers work: each knob of that, as far as it gains."""
        start_s, waits = self._start_s(best), self._waits(best)
        for name, values in self._space.inputs.items():
            knob = BY_NAME[name]
            if name == WORKERS or knob.by_rule:
                continue
            others = [value for value in values if value != best[name]]
            if knob.per_epoch:
                rate = self._rate(best)
                if samples and rate and start_s >= EPOCH * samples / rate:
                    best = best.replace(**{name: others[-1]})
                    epoch_s = samples / rate
                    self.said.append(
                        f"an epoch's start takes {start_s:.2g} s of its {epoch_s:.2g} s: workers "
                        "stay from one to the next"
                    )
            elif knob.non_blocking is not None or waits >= WAITS:
                best = self._improved(best, name, others)
        return best

    def _improved(self, best: Config, name: str, others: Sequence[Value]) -> Config:
        tried = (best.replace(**{name: value}) for value in others)
        configs = [best, *(config for config in tried if self._fits(config))]
        if len(configs) == 1:
            return best
        rates = self._raced(configs, 1 / 2)
        held = rates.get(best)
        if not held:
            return best
        better = [c for c in rates if c != best and faster(paired(rates[c], held))]
        return max(better, key=lambda c: paired(rates[c], held).mean, default=best)

    def _fits(self, config: Config) -> bool:
        """Whether what its workers have ready has room: what has not would end one of them."""
        how = knobs.loading(config)
        ahead = how.get("prefetch_factor", room.AHEAD)
        return not room.lacking(self._loaded, how["num_workers"], ahead)

    @property
    def _counts(self) -> list[int]:
        counts = self._space.inputs[WORKERS]
        return [n for n in counts if isinstance(n, int) and n < self._failing]

    def _with(self, workers: int) -> Config:
        """The step with a loader of so many workers, as they usually work."""
        own, values = self._space.default_input, self._space.inputs
        idle = [name for name in own if name != WORKERS and not workers]
        rows = {name: BY_NAME[name] for name in own}
        usual = {n: values[n][-1] for n, row in rows.items() if row.by_rule or row.non_blocking}
        return Config(self._config | own.replace(**usual, **{WORKERS: workers}).without(*idle))

    def _tell(self, config: Config) -> None:
        said = [f"the step alone {self._step:,.0f}"]
        if WORKERS in config:
            alone = self._alone.get(knobs.workers(config))
            known = {"alone": alone.samples_per_s if alone else 0.0, "both": self._rate(config)}
            loader = self._space.default_input.keys()
            what = knobs.described(config.only(*loader), self._space.default_input | {WORKERS: -1})
            said = [what, *(f"{name} {rate:,.0f}" for name, rate in known.items() if rate), *said]
        self._progress.phase(f"the loader, samples/s: {', '.join(said)}")

    def _rate(self, config: Config) -> float:
        known = self._known(config)
        return known.samples_per_s if known else 0.0

    def _waits(self, config: Config) -> float:
        known = self._known(config)
        return known.waited if known else 0.0

    def _known(self, config: Config) -> Measurement | None:
        """With the step; None where it was not measured."""
        trials = (one for one in self.trials if one.stage == INPUT and one.config == config)
        seen = [one.measurement for one in trials if one.measurement.ok]
        return best_known(seen) if seen else None

    def _start_s(self, config: Config) -> float:
        known = self._alone.get(knobs.workers(config))
        return known.first_step_s if known else 0.0

    def _raced(self, configs: Sequence[Config], share: float) -> Rates:
        seen = _Noted(self._runner)
        part = self._part.share(share)
        rates = race(seen, configs, part, stage=INPUT)
        self.trials += (
            _trial(config, seen.whole(config, turns), INPUT, "race", seen.seconds.get(config, 0.0))
            for config, turns in rates.items()
        )
        for config in rates:
            self._tell(config)
        for config in configs:
            if config not in rates and (failed := seen.failed.get(config)):
                self._fail(config, failed, INPUT)
        return rates

    def _measured(self, config: Config, stage: str, origin: str) -> Measurement | None:
        """None where it failed, which is said."""
        if self._part.left_s <= 0:
            return None
        began = self._part.clock.now()
        measured = self._runner.measure(
            config,
            seconds=ALONE_S,
            stage=stage,
            keep=True,  # what was compiled for the step
            deadline_s=self._part.deadline_s,
        )
        took_s = self._part.clock.now() - began
        if not measured.ok:
            self._fail(config, measured, stage, took_s)
            return None
        self.trials.append(_trial(config, measured, stage, origin, took_s))
        return measured

    def _fail(
        self, config: Config, measured: Measurement, stage: str, seconds: float = 0.0
    ) -> None:
        self.trials.append(_trial(config, measured, stage, "failed", seconds))
        what = knobs.described(config.only(WORKERS), Config({WORKERS: 0}), nothing="the loader")
        self.said.append(f"{what}: {measured.reason}")


class _Noted:
    """A Runner that notes what else it is told of each config than its speed."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.failed: dict[Config, Measurement] = {}
        self.seconds: dict[Config, float] = {}
        self._waited: dict[Config, list[float]] = {}

    def measure(self, config: Config, **how: object) -> Measurement:
        """As `Runner.measure`."""
        measured: Measurement = self._runner.measure(config, **how)  # type: ignore[arg-type]
        if measured.ok:
            self._waited.setdefault(config, []).append(measured.waited)
        else:
            self.failed[config] = measured
        return measured

    def release(self) -> None:
        """As `Runner.release`: not before the last race."""

    def whole(self, config: Config, turns: Sequence[float]) -> Measurement:
        """What a race's turns come to."""
        middle = statistics.median_low(turns)
        return Measurement(
            outcome="ok",
            samples_per_s=middle,
            low=min(turns),
            high=max(turns),
            step_s=config.batch / middle,
            blocks=tuple(config.batch / turn for turn in turns),
            waited=statistics.median(self._waited[config]),
        )


def _trial(config: Config, measured: Measurement, stage: str, origin: str, seconds: float) -> Trial:
    return Trial(
        number=0, config=config, measurement=measured, stage=stage, origin=origin, seconds=seconds
    )


def _fastest(rates: Rates) -> Config:
    return max(rates, key=lambda config: statistics.median(rates[config]))


def _known_level(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether they are level, by as many turns as tell: one or two call level what is far apart."""
    return min(len(ours), len(theirs)) >= MIN_ROUNDS and level(paired(ours, theirs))
