"""Which config is visited next: the recipe, which knows what gained before."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from advisor.cache.config import Config, Value
from advisor.cache.record import CAPTURE
from advisor.tuners import knobs
from advisor.tuners.compiling import BLOCKS
from advisor.tuners.decisions import CLEARLY, FAST_STEP_S, GAIN, HOPELESS, PAIRS, RESOLVABLE, TURN_S
from advisor.tuners.search.space import Space
from advisor.tuners.search.visit import Visit
from advisor.tuners.search.visits import Visits, score

STARVED = 1 - HOPELESS
"""If the best config waits for data for this fraction of its time, the loader is tuned first."""
LOADER_TURN_S = PAIRS * TURN_S
"""Seconds of a block while loaders are compared: workers deliver in bursts."""


@dataclass(frozen=True, slots=True)
class Proposal:
    config: Config
    origin: str
    turn_s: float = TURN_S  # of a block
    compares: bool = False  # with fp32 although it does not lead, because others build on it


class Recipe:
    """Proposes configs in the order of their expected gain per second (docs/how-it-decides.md).
    The caller visits each config, or passes over it, before it asks for the next."""

    def __init__(self, space: Space, visits: Visits) -> None:
        self._space, self._visits = space, visits
        self._uses, self._on = space.uses, space.on
        self._saves: dict[str, Value] = {}  # how the format that was tried last saves memory
        self._saving = knobs.OFFLOAD in space.choices  # the unmodified script does not fit
        self._ways_to_save = knobs.SAVED if self._saving else ({},)
        modes = space.choices.get(knobs.COMPILE, ())
        # On a GPU, or for the blocks of FSDP2, if compiling is permitted.
        early = modes[1:] == (BLOCKS,) or any(one in knobs.GRAPHED_MODES for one in modes)
        self._compiles_early = self._saving or early

    def __iter__(self) -> Iterator[Proposal]:
        yield from self._loader(STARVED)
        # Compiling gains the most on a GPU. Elsewhere it takes as long, and gains little.
        if self._compiles_early:
            stages = [self._half, self._compiled, self._lighter, self._toggles, self._larger]
            stages += [self._other_code, self._alone]
        else:
            stages = [self._half, self._alone, self._toggles, self._compiled, self._lighter]
            stages += [self._other_code, self._larger]
        for stage in (*stages, self._nearby):
            origin = "batch" if stage in (self._larger, self._nearby) else "recipe"
            for config in stage():
                if config is not None and self._is_new(config):
                    yield Proposal(config, origin, compares=stage == self._half)
                    yield from self._loader(STARVED)
            if stage == self._lighter:
                yield from self._loader()

    def _is_new(self, config: Config) -> bool:
        known = self._visits
        return self._space.holds(config) and config not in known and known.allowed(config)

    def _near(self, changes: Mapping[str, Value]) -> Config:
        """The baseline with those of `changes` that the space offers."""
        return self._space.near({**self._saves, **changes}).replace(**self._visits.feed)

    @property
    def _format(self) -> Config:
        """The number format and layout to compile: the first of the recipe that runs; the fastest
        of them without a GPU, and for volumes."""
        found = [config for config in self._recipes() if self._runs(config)]
        if self._space.volumes or not self._compiles_early:
            seen = [v for c in (*found, self._near({})) if (v := self._visits.get(c)) and v.ok]
            return max(seen, key=score).config if seen else self._near({})
        return next((c for c in found if c.changed(self._space.default)), self._near({}))

    def _runs(self, config: Config) -> bool:
        visit = self._visits.get(config)
        return self._visits.is_right(config) and (visit is None or visit.ok)

    def _ran(self, config: Config) -> bool:
        return config in self._visits and self._runs(config)

    def _recipes(self) -> Iterator[Config]:
        """Yields the configs of RECIPE whose number format is not ruled out; for volumes each first
        in the script's own layout, for others if it failed, or was wrong, in the recipe's."""
        for changes in knobs.RECIPE:
            formats = {(n, v) for n, v in changes.items() if n in knobs.FORMATS}
            if not formats & self._visits.ruled_out:
                if self._space.volumes:
                    yield self._near(dict(formats))
                yield (config := self._near(changes))
                visit = self._visits.get(config)
                if not self._visits.is_right(config) or (visit is not None and visit.failed):
                    yield self._near(dict(formats))

    def _half(self) -> Iterator[Config | None]:
        """Number formats, not compiled. With a GPU, where eager code may hide their gain, until one
        runs; without, until one gains. With a GPU, a layout alone comes later: with cudnn.benchmark
        its visit takes 40 s, and another 40 s once it is compiled."""
        least = CLEARLY * score(self._visits.baseline)
        for config in self._recipes():
            same = not config.changed(self._space.default).only(*knobs.FORMATS)
            if self._compiles_early and same and not self._saving:
                return
            for changes in self._ways_to_save:
                tried = self._near(config | changes)
                yield tried
                if tried in self._visits and self._runs(tried):
                    self._saves = changes
                    if self._compiles_early or score(self._visits[tried]) >= least:
                        if self._space.volumes:
                            yield self._near(tried | dict.fromkeys(knobs.LAYOUTS, True))
                        return
                    break

    def _lighter(self) -> Iterator[Config | None]:
        """The leader with less effort to save memory: compiled code needs less."""
        leader = self._visits.best(batch=self._space.batch).config
        for changes in self._ways_to_save:
            config = self._space.near(leader | changes)
            if not changes or config == leader:
                return
            yield config if self._space.holds(config) else None
            if self._ran(config):
                return

    def _compiled(self) -> Iterator[Config | None]:
        if self._visits.baseline.step_s < FAST_STEP_S:
            yield from self._graphs_of_own()
        if CAPTURE in self._uses:  # takes seconds; compiling a deep model takes two minutes
            yield self._on(self._format, knobs.CAPTURED[0])
        format_ = None
        while format_ != self._format:  # it changes if a compiled config turns out wrong
            format_ = self._format
            saves = format_.get(knobs.OFFLOAD) or format_.get(knobs.CHECKPOINT)
            for changes in knobs.COMPILED_SAVING if saves else knobs.COMPILED:
                config = self._on(format_, changes)
                yield config
                if saves:
                    continue
                if format_ != self._format or (config is not None and self._ran(config)):
                    break
        if CAPTURE in self._uses:
            for changes in knobs.CAPTURED:
                yield self._on(self._format, changes)

    def _graphs_of_own(self) -> Iterator[Config | None]:
        """CUDA graphs in the script's own precision, and in TF32."""
        for changes in knobs.GRAPHS:
            yield self._on(self._near({}), changes)

    def _toggles(self) -> Iterator[Config | None]:
        for use in self._uses:
            for changes in self._guessed("leader"):
                config = self._on(self._visits.best(use, self._space.batch).config, changes)
                if config is not None and knobs.follows(use, config, self._space.default):
                    yield config

    def _guessed(self, guess: str) -> Iterator[dict[str, Value]]:
        for knob in knobs.KNOBS:
            if knob.guess == guess and not knob.input_pipeline:
                for value in self._space.choices.get(knob.name, ())[1:]:
                    yield {knob.name: value}

    def _other_code(self) -> Iterator[Config | None]:
        """Other ways to compile, in the leader's format; then the leader in other formats."""
        yield from self._graphs_of_own()
        half = self._format
        for changes in knobs.COMPILED:
            yield self._on(half, changes)
        for name in self._space.expensive:
            for value in self._space.choices[name][1:]:
                yield self._on(half, {name: value})
        for use in self._uses:
            leader = self._visits.best(use, self._space.batch).config
            for changes in knobs.FORMATS_TRIED:
                yield self._on(leader, changes)

    def _alone(self) -> Iterator[Config | None]:
        """The other formats, not compiled, and single values of knobs by themselves."""
        changes = (*knobs.RECIPE, *knobs.FORMATS_TRIED, *self._guessed("alone"))
        yield from map(self._near, changes)

    def _larger(self) -> Iterator[Config | None]:
        """The largest batch that runs, not compiled, then smaller ones while they cost little, in
        the first format that is not much slower than the baseline. At the best of these batches:
        other formats and toggles, and the leaders at the user's batch."""
        own = self._space.batch
        ran = (self._visits.get(config) for config in self._recipes() if self._ran(config))
        baseline = self._visits.baseline
        least = HOPELESS * score(baseline)
        top = at_own = next((v for v in ran if v and score(v) >= least), baseline)
        for batch in sorted((one for one in self._space.batches if one > own), reverse=True):
            yield (config := at_own.config.at(batch))
            visit = self._visits.get(config)
            if visit is not None and visit.ok:
                if GAIN * score(visit) < score(top):
                    break
                top = visit
        if (batch := top.config.batch) == own:
            return
        for changes in (*knobs.FORMATS_TRIED, *self._guessed("leader")):
            yield self._on(top.config, changes)
        for use in self._uses:
            yield from self._at(batch, self._visits.best(use, own).config)

    def _nearby(self) -> Iterator[Config | None]:
        """The best config of all batches at the batches next to its own, the larger one first."""
        batches, best = sorted(self._space.batches), self._visits.best().config
        at = batches.index(best.batch)
        for batch in (*batches[at + 1 : at + 2], *batches[max(0, at - 1) : at]):
            if batch != self._space.batch:
                yield from self._at(batch, best)

    def _at(self, batch: int, config: Config) -> Iterator[Config | None]:
        """A config at another batch; compiled without CUDA graphs if their pools do not fit."""
        config = config.at(batch)
        yield config
        visit = self._visits.get(config)
        if visit is not None and visit.outcome == "out_of_memory":
            yield self._on(config, {"compile": "default"})

    def _loader(self, least: float = 0.0) -> Iterator[Proposal]:
        """Propose more workers while the leader waits for data for `least` of its time or more;
        fewer workers if more gain nothing."""
        best = self._visits.best(batch=self._space.batch)
        for name in self._visits.feed:
            if not best.waits or best.waited < least:
                return
            values = sorted(self._space.choices[name], key=_number)
            at = values.index(best.config[name])
            more = values[at + 1 :]
            if name == knobs.WORKERS:
                more = _doublings(_number(values[at]), more) or more
            for side in (more, values[:at][::-1]):
                improved = yield from self._along(best, name, side)
                if improved is not best:
                    best = improved
                    break

    def _along(
        self, best: Visit, name: str, values: Sequence[Value]
    ) -> Generator[Proposal, None, Visit]:
        """Propose one value after the other, until a value gains nothing or is not clearly faster
        than the baseline, because a loader is noisy. Returns the best visit."""
        for value in values:
            config = self._fed(best.config, name, value)
            if not best.waits or not self._is_new(config):
                break
            yield Proposal(config, "loader", LOADER_TURN_S)
            tried = self._visits.get(config)
            if tried is None or not tried.ok or tried.ratio.mean < GAIN * best.ratio.mean:
                break
            if not (tried.ratio.faster or tried.ratio.low >= RESOLVABLE):
                break
            best = tried
            self._visits.feed = config.only(*knobs.INPUT_PIPELINE)
        return best

    def _fed(self, config: Config, name: str, value: Value) -> Config:
        """The config with another value of a loader's knob; workers pin memory if offered."""
        config = self._space.combined(config, name, value)
        if name == knobs.WORKERS and value:
            pinned = (n for n in self._visits.feed if knobs.BY_NAME[n].non_blocking)
            return config.replace(**{n: self._space.choices[n][-1] for n in pinned})
        return config


def _doublings(number: int, more: Sequence[Value]) -> list[Value]:
    """Larger numbers, doubling from 2 on: with fast steps, only several workers gain over none."""
    found: list[Value] = []
    for value in more:
        if _number(value) >= max(2, 2 * number):
            found.append(value)
            number = _number(value)
    return found


def _number(value: Value) -> int:
    return int(value) if isinstance(value, int) else 0
