"""A run as a Tester: configs are switched at its step boundaries; restarts are for failures."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

from advisor.cache.config import BATCH, Config, Value
from advisor.cache.record import Measurement
from advisor.errors import TargetFailed, UsageError, WorkerError
from advisor.tuners.act.pilot.orders import Comparison
from advisor.tuners.act.pilot.seen import Seen
from advisor.tuners.knobs import described, loading
from advisor.tuners.measure.first_step import ANEW, Compiled, empty_caches
from advisor.tuners.measure.run.command import Shown
from advisor.tuners.measure.run.mapped import Mapped
from advisor.tuners.measure.run.repeated import STEPS, comparison
from advisor.tuners.measure.run.session import START_S, Block, Ended, Flight, Session, Struck
from advisor.tuners.measure.runner import TOO_SOON
from advisor.tuners.measure.timing import BLOCK_S, MIN_BLOCKS, PRECISION, median_interval
from advisor.tuners.scratch import Scratch

WARM_S, WARM_STEPS, MOST_WARM = 0.3, 6, 12
"""A config is warm after so many seconds and steps at least, once two laps in a row take as long;
or after so many laps."""
STEADY, VARYING = 0.1, 1.0
"""Two laps that differ by less than this took as long; the same where shapes vary."""
HANGS_S = 60.0
"""Without an answer of all processes of a job; compiling aside, which is the first step's."""
HOPELESS_BLOCKS = 5
"""As many slower ones, and the exact speed is of no interest."""
RESTARTS = 3
"""Times in a row that a command may end before a config is measured."""
TOGETHER = 0.7
"""Of the device's memory that starts may take at once."""
MOST_TOGETHER = 3
"""Starts that wait for their turns at once: what an option of the script sets takes one each."""
NEAR = 0.25
"""A batch that differs by a smaller share is the one that was asked for: an epoch's last is less.
"""


class Run:
    """A command that is measured, started anew where a config did not survive it.

    Args:
        command: its words; `log` for what it prints.
        injected: the folder with the sitecustomize that brings the pilot.
        deadline_s: seconds until a trial is given up and the command ended.
        show: called with what the command prints, as it comes, from another thread.
        options: of the command that set knobs, by what `--map` calls these.

    Attributes:
        own: what the script does itself; set once its space is known.
        memory: bytes of the device, 0 where that is not known.
        start_s: until the first steps, at most.
        hangs_s: until a process of several that does not answer is given up.
    """

    start_s = START_S
    hangs_s = HANGS_S

    def __init__(
        self,
        command: Sequence[str],
        *,
        injected: Path,
        log: Path,
        deadline_s: float,
        show: Callable[[str], None] | None = None,
        options: Mapping[str, Value] | None = None,
    ) -> None:
        self._command = Mapped(command, options or {})
        self._injected = injected
        self._log = log
        self.deadline_s = deadline_s
        self.own = Config()
        self.memory = 0
        self._sessions: dict[tuple[str, ...], Session] = {}
        """By the words of the command, the one that was used last at the end."""
        self._processes = 1
        self._settled: dict[Config, float] = {}
        """Seconds of a step of what these sessions have measured."""
        self._survived = 0
        """Steps that the command has made as it is, after one that failed."""
        self._reasons: set[str] = set()
        """Why it failed."""
        self._peak_bytes = 0
        """Of a step at the script's own batch."""
        self._shown = show is not None
        self._showing: AbstractContextManager[object] = Shown(log, show) if show else nullcontext()

    def __enter__(self) -> Self:
        self._showing.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.stop()
        self._showing.__exit__(*exc)

    def describe(self) -> Seen:
        """Start the command, and wait for its first steps.

        Raises:
            TargetFailed: it ended before.
            WorkerError: none came in time.
        """
        try:
            seen = self._ensured(self.own).seen
        except Ended as exc:
            if exc.outcome == "timed_out":
                raise WorkerError(str(exc)) from exc
            raise TargetFailed(str(exc), "") from exc
        self._processes = seen.processes
        return seen

    def try_option(self, name: str, value: Value) -> None:
        """See that an option of the command sets a knob to a value.

        Raises:
            UsageError: it does not, or the command does not take it.
        """
        config = self.own.replace(**{name: value})
        try:
            self._ensured(config)
        except Ended as exc:
            if exc.outcome in ("out_of_memory", "timed_out"):
                return  # it was taken
            numbers = self._command.numbers(config, self.own, self._processes)
            said = self._command.described({name: numbers[name]})
            raise UsageError(f"map: with {said} {exc.said or exc}") from exc

    @property
    def mapped(self) -> tuple[str, ...]:
        """Knobs that options of the command set."""
        return self._command.names

    def gives(self, name: str) -> bool:
        """Whether the command as it is gives the option that sets a knob."""
        return self._command.given(name)

    def measure(
        self,
        config: Config,
        *,
        seconds: float,
        stage: str = "compute",
        keep: bool = False,
        floor: float = 0.0,
        deadline_s: float | None = None,
    ) -> Measurement:
        """As `Runner.measure`.

        Raises:
            WorkerError: the command cannot be started any more, or ends too soon.
            TargetFailed: it fails by itself.
        """
        del stage, keep
        most = seconds + self.deadline_s if deadline_s is None else deadline_s
        last: Ended | None = None
        for _ in range(RESTARTS):
            until = math.inf
            try:
                session = self._ensured(config)
                until = time.monotonic() + most
                return self._measured(session, config, seconds, floor, until)
            except Ended as exc:
                self._check_own(exc, self._end(config))
                last = exc
                if exc.outcome == "out_of_memory" and self._sessions:
                    self.stop()  # once more with all of the memory
                elif time.monotonic() >= until or (exc.code and config != self.own):
                    break
                # Else it was through, was killed, or hung as it is: once more from the start.
            except Struck as exc:
                return Measurement(outcome=exc.outcome, reason=str(exc))
        assert last is not None
        if last.code:
            return Measurement(outcome=last.outcome, reason=str(last))
        if config != self.own:
            return Measurement(outcome="failed", reason=TOO_SOON)
        raise WorkerError(
            f"{RESTARTS} times in a row the command was through before a config was measured "
            f"({last}); give it more to train on, as more epochs"
        )

    def start(self, config: Config, *, deadline_s: float, compiled: Compiled = ANEW) -> Measurement:
        """The first step under a config in a fresh start."""
        until = time.monotonic() + deadline_s
        with Scratch() as empty:
            session: Session | None = None
            self._make_room(config)
            try:
                caches = empty_caches(str(empty)) if compiled.anew else {}
                session = self._started(config, caches, until)
                first = self._lap(session, config, 1, until, compiled)
                return Measurement(outcome="ok", first_step_s=_whole(first), steps=1)
            except (Ended, Struck) as exc:
                return Measurement(outcome=exc.outcome, reason=str(exc))
            finally:
                if session is not None:
                    session.end()

    def save(self, config: Config, file: Path) -> None:
        """As `Starter.save`, by one step more of a start that runs."""
        session = self._sessions.get(self._words(config))
        if session is not None and not session.over:
            until = time.monotonic() + self.deadline_s
            with suppress(Ended, Struck):
                self._lap(session, config, 1, until, Compiled(saves=file))

    def hand(self, config: Config, folder: Path) -> str:
        """Have a start that a config takes write the calls of a step into a folder, as `Handing`
        does; why it did not, or ''. It waits at the boundary of a step afterwards."""
        for _ in range(RESTARTS):
            try:
                until = time.monotonic() + self.deadline_s
                self._ensured(config).hand(folder, self.own, until)
            except Ended as exc:
                self._end(config)
                why = str(exc)
            except Struck as exc:
                return str(exc)
            else:
                return ""
        return why

    def verify(
        self,
        config: Config,
        *,
        against: Config,
        steps: int,
        tolerance: float,
        deadline_s: float | None = None,
    ) -> Measurement:
        """Whether a config computes what strict fp32 does, on steps that the command makes.

        `steps` is another's business: see `repeated.STEPS`.

        Raises:
            TargetFailed: the command fails by itself.
        """
        del steps
        seconds = self.deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + seconds
        asked = comparison(self._within(config), against, tolerance, tf32=self.memory > 0)
        for _ in range(RESTARTS):
            try:
                return self._compared(asked, until)
            except Ended as exc:
                self._check_own(exc, self._end(self.own))
                last = exc
                if exc.outcome == "timed_out":
                    last = Ended("timed_out", f"it was not over within {seconds:.0f} s")
                if exc.code:
                    break
        return Measurement(outcome=last.outcome, reason=str(last))

    def release(self) -> None:
        """As `Runner.release`."""

    def stop(self) -> None:
        """End the command and everything it started."""
        while self._sessions:
            self._end_one(next(iter(self._sessions)))

    def _end(self, config: Config) -> int:
        """End the start of the command that a config takes; the steps that it was told to make."""
        return self._end_one(self._words(config))

    def _end_one(self, words: tuple[str, ...]) -> int:
        session = self._sessions.pop(words, None)
        if session is None:
            return 0
        session.end()
        self._settled = {c: s for c, s in self._settled.items() if self._words(c) != words}
        return session.made

    def _check_own(self, ended: Ended, made: int) -> None:
        """See whether the command as it is goes on for as many steps as one that failed with what a
        script rather raises by itself, or that another config had failed with.

        Raises:
            TargetFailed: it fails too.
        """
        again = str(ended) in self._reasons
        self._reasons.add(str(ended))
        by_itself = ended.code and ended.outcome in ("failed", "crashed") and (ended.own or again)
        if not by_itself or made <= self._survived:
            return
        until = time.monotonic() + self.deadline_s  # what fails shortly before the end, too
        try:
            self._end(self.own)
            session, steps = self._ensured(self.own), 1
            # One more: what is raised between two steps shows in the second.
            while session.made <= made and time.monotonic() < until:
                block = self._lap(session, self.own, min(steps, made + 1 - session.made), until)
                steps = _steps(BLOCK_S / max(block.step_s, 1e-6), self.own)
        except Ended as exc:
            self._end(self.own)
            if exc.code and exc.outcome in ("failed", "crashed"):
                raise TargetFailed(
                    f"the script fails by itself, as it is, within {max(1, made)} steps ({exc}): "
                    "mend that, and the same command goes on with what was measured"
                ) from exc
        else:
            self._survived = max(self._survived, session.made)

    def _compared(self, asked: Comparison, until: float) -> Measurement:
        try:
            reason = self._ensured(self.own).compare(asked, self.own, STEPS, until)
        except Struck as exc:
            return Measurement(outcome=exc.outcome, reason=str(exc))
        return Measurement(outcome="ok", reason=reason, steps=STEPS)

    def _words(self, config: Config) -> tuple[str, ...]:
        return self._command.at(config, self.own, self._processes)

    def _within(self, config: Config) -> Config:
        return self._command.within(config, self.own)

    def _ensured(self, config: Config) -> Flight:
        """The command at its first steps, as its options set it for a config.

        Raises:
            Ended: it did not come so far, or its options set something else.
        """
        words = self._words(config)
        session = self._sessions.pop(words, None)
        if session is not None and session.over:
            session.end()
            session = None
        if session is None:
            self._make_room(config)
            session = Session(
                words,
                injected=self._injected,
                log=self._log,
                shown=self._shown,
                start_s=self.start_s,
            )
        self._sessions[words] = session
        for name in self._command.changed(config, self.own):
            _check_shown(session.seen, name, config[name])
        return session

    def _make_room(self, config: Config) -> None:
        """End the starts, what was not used for longest first, that may not run beside another."""
        while self._sessions and not self._has_room(config):
            self._end_one(next(iter(self._sessions)))

    def _has_room(self, config: Config) -> bool:
        """Whether one more start may run: a launcher of several processes holds a port, and the
        device's memory is for all."""
        if self._processes > 1 or len(self._sessions) >= MOST_TOGETHER:
            return False
        own = self.own.batch or 1
        batches = [one.seen.shape[0] for one in self._sessions.values()] + [config.batch or own]
        taken = self._peak_bytes * sum(max(1.0, batch / own) for batch in batches)
        return not self.memory or taken <= TOGETHER * self.memory

    def _started(self, config: Config, more: Mapping[str, str], until: float) -> Session:
        left = max(0.1, until - time.monotonic())
        try:
            return Session(
                self._words(config),
                injected=self._injected,
                log=self._log,
                shown=self._shown,
                more=more,
                start_s=left,
            )
        except Ended as exc:
            if exc.outcome != "timed_out":
                raise
            raise Ended("timed_out", f"{left:.0f} s were left for another start of it") from exc

    def _measured(
        self, session: Flight, config: Config, seconds: float, floor: float, until: float
    ) -> Measurement:
        first = self._lap(session, config, 1, until)
        began = time.monotonic()
        warm = self._warm(session, config, until)
        warm_s = time.monotonic() - began
        steps = _steps(BLOCK_S / max(warm.step_s, 1e-6), config, warm.turn)
        blocks: list[Block] = []
        ends = time.monotonic() + seconds
        while not _enough(blocks, floor, over=time.monotonic() >= ends):
            blocks.append(self._lap(session, config, steps, until))
        self._settled[config] = statistics.median(one.step_s for one in blocks)
        lent = _lent(blocks)
        blocks = [one.kept_up(lent) for one in blocks]
        rate, low, high = _rate(blocks, whole=session.seen.varies or lent > 0)
        peak_bytes = max(one.peak_bytes for one in (first, warm, *blocks))
        if config.batch == self.own.batch:
            self._peak_bytes = max(self._peak_bytes, peak_bytes)
        return Measurement(
            outcome="ok",
            samples_per_s=rate,
            low=low,
            high=high,
            step_s=statistics.median(one.step_s for one in blocks),
            first_step_s=_whole(first),
            peak_bytes=peak_bytes,
            steps=sum(one.steps for one in blocks),
            blocks=tuple(one.step_s for one in blocks),
            waited=min(1.0, statistics.median(one.waited / one.seconds for one in blocks)),
            warm_s=warm_s,
        )

    def _lap(
        self,
        session: Flight,
        config: Config,
        steps: int,
        until: float,
        compiled: Compiled = ANEW,
    ) -> Block:
        """Some steps, given up where a process of several hangs: the others wait for it in their
        backward passes, half an hour by NCCL's own clock. One step may compile."""
        if session.seen.processes > 1 and (steps > 1 or config == self.own):
            until = min(until, time.monotonic() + self.hangs_s)
        return session.lap(self._within(config), self.own, steps, until, compiled)

    def _warm(self, session: Flight, config: Config, until: float) -> Block:
        """Steps until they take as long as those before them: recompilations are over by then.

        Of a config that was measured before, as long as then.
        """
        began, steps = time.monotonic(), 0
        apart = VARYING if session.seen.varies else STEADY
        known = before = self._settled.get(config, 0.0)
        for _ in range(MOST_WARM):
            size = _steps(max(2, BLOCK_S / 2 / max(before, 1e-6)) if before else 2, config)
            now = self._lap(session, config, size, until)
            steps += now.steps
            steady = before > 0 and abs(now.step_s / before - 1) < apart
            enough = time.monotonic() - began >= WARM_S and steps >= WARM_STEPS
            if steady and (enough or known) and not now.engages:
                break
            before = now.step_s
        return now


def _check_shown(seen: Seen, name: str, value: Value) -> None:
    """See that a start has what an option was to set.

    Raises:
        Ended: it has something else.
    """
    assert isinstance(value, int)
    if name == BATCH:
        if abs(seen.shape[0] / value - 1) >= NEAR:
            raise Ended("failed", f"a step has {seen.shape[0]} samples, not {value}")
    elif (has := seen.own.get(name, 0)) != value:
        raise Ended("failed", f"the script has {described(Config({name: has}))}, not {value}")


def _whole(first: Block) -> float:
    """Seconds of the step with which a config begins."""
    return max(first.first_s, first.seconds)


def _lent(blocks: Sequence[Block]) -> float:
    """Share of the batches that these took and the loader's workers did not make meanwhile, in the
    process where it is largest; a single batch may be chance."""
    shares = [0.0]
    for feeds in zip(*(one.feeds for one in blocks), strict=True):
        taken = sum(feed.taken for feed in feeds)
        lent = sum(feed.lent for feed in feeds)
        if lent > 1 and taken:
            shares.append(min(lent, taken - 1) / taken)
    return max(shares)


def _rate(blocks: Sequence[Block], *, whole: bool) -> tuple[float, float, float]:
    """(Samples/s, its interval): of the median block, or of the `whole` where what some blocks pay,
    for a recompilation at worst or by waiting for data, is part of the speed."""
    rates = [one.samples / one.seconds for one in blocks]
    low, high = median_interval(rates)
    if not whole:
        return statistics.median(rates), low, high
    rate = sum(one.samples for one in blocks) / sum(one.seconds for one in blocks)
    return rate, min(low, rate), max(high, rate)


def _steps(about: float, config: Config, turn: int = 1) -> int:
    """As many, in whole turns of the loader's workers, which give their batches one after another
    and then may be waited for."""
    turn = max(turn, int(loading(config).get("num_workers") or 1))
    return max(1, round(about / turn)) * turn


def _enough(blocks: Sequence[Block], floor: float, *, over: bool) -> bool:
    """Whether these blocks tell a config's speed, or that it is below `floor` samples/s."""
    if len(blocks) >= HOPELESS_BLOCKS and max(one.samples / one.seconds for one in blocks) < floor:
        return True
    times = [one.step_s for one in blocks]
    if len(blocks) >= MIN_BLOCKS:
        low, high = median_interval(times)
        if high - low <= PRECISION * statistics.median(times):
            return True
    return len(blocks) >= 2 and over
