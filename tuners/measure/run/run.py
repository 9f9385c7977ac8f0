"""A run as a Tester: configs are switched at its step boundaries; restarts are for failures."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.errors import TargetFailed, WorkerError
from advisor.tuners.act.pilot.orders import Comparison
from advisor.tuners.act.pilot.seen import Seen
from advisor.tuners.knobs import loading
from advisor.tuners.measure.run.command import Shown
from advisor.tuners.measure.run.repeated import STEPS, comparison
from advisor.tuners.measure.run.session import START_S, Block, Ended, Flight, Session, Struck
from advisor.tuners.measure.runner import TOO_SOON
from advisor.tuners.measure.timing import BLOCK_S, MIN_BLOCKS, PRECISION, median_interval

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
"""Of the device's memory that two starts may take at once."""


class Run:
    """A command that is measured, started anew where a config did not survive it.

    Args:
        command: its words; `log` for what it prints.
        injected: the folder with the sitecustomize that brings the pilot.
        deadline_s: seconds until a trial is given up and the command ended.
        show: called with what the command prints, as it comes, from another thread.

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
    ) -> None:
        self._words = tuple(command)
        self._injected = injected
        self._log = log
        self.deadline_s = deadline_s
        self.own = Config()
        self.memory = 0
        self._session: Session | None = None
        self._settled: dict[Config, float] = {}
        """Seconds of a step of what this session has measured."""
        self._peak_bytes = 0
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
            return self._ensured().seen
        except Ended as exc:
            if exc.outcome == "timed_out":
                raise WorkerError(str(exc)) from exc
            raise TargetFailed(str(exc), "") from exc

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
        """
        del stage, keep
        most = seconds + self.deadline_s if deadline_s is None else deadline_s
        last: Ended | None = None
        for _ in range(RESTARTS):
            until = time.monotonic() + most
            try:
                measured = self._measured(config, seconds, floor, until)
            except Ended as exc:
                self.stop()
                last = exc
                if time.monotonic() >= until or (exc.code and config != self.own):
                    break
                continue  # it was through, was killed, or hung as it is: once more from the start
            except Struck as exc:
                return Measurement(outcome=exc.outcome, reason=str(exc))
            self._peak_bytes = max(self._peak_bytes, measured.peak_bytes)
            return measured
        assert last is not None
        if last.code:
            return Measurement(outcome=last.outcome, reason=str(last))
        if config != self.own:
            return Measurement(outcome="failed", reason=TOO_SOON)
        raise WorkerError(
            f"the command ends before a config is measured, {RESTARTS} times in a row; give it "
            "more to train on, as more epochs"
        )

    def start(self, config: Config, *, deadline_s: float) -> Measurement:
        """The first step under a config in a fresh start with empty compiler caches."""
        until = time.monotonic() + deadline_s
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
            names = ("TORCHINDUCTOR", "TRITON")
            session: Session | None = None
            if self._alone():
                self.stop()
            try:
                session = self._started({f"{n}_CACHE_DIR": f"{empty}/{n}" for n in names}, until)
                first = session.lap(config, self.own, 1, until)
                return Measurement(outcome="ok", first_step_s=_whole(first), steps=1)
            except (Ended, Struck) as exc:
                return Measurement(outcome=exc.outcome, reason=str(exc))
            finally:
                if session is not None:
                    session.end()

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
        """
        del steps
        seconds = self.deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + seconds
        asked = comparison(config, against, tolerance, tf32=self.memory > 0)
        for _ in range(RESTARTS):
            try:
                return self._compared(asked, until)
            except Ended as exc:
                self.stop()
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
        if self._session is not None:
            self._session.end()
            self._session = None
            self._settled.clear()

    def _compared(self, asked: Comparison, until: float) -> Measurement:
        try:
            reason = self._ensured().compare(asked, self.own, STEPS, until)
        except Struck as exc:
            return Measurement(outcome=exc.outcome, reason=str(exc))
        return Measurement(outcome="ok", reason=reason, steps=STEPS)

    def _ensured(self) -> Flight:
        if self._session is None or self._session.over:
            self.stop()
            self._session = Session(
                self._words, injected=self._injected, log=self._log, start_s=self.start_s
            )
        return self._session

    def _alone(self) -> bool:
        """Whether no other start may run beside the session: a launcher of several processes holds
        a port, and the device's memory is for both."""
        several = self._session is not None and self._session.seen.processes > 1
        return several or bool(self.memory and 2 * self._peak_bytes > TOGETHER * self.memory)

    def _started(self, more: Mapping[str, str], until: float) -> Session:
        left = max(0.1, until - time.monotonic())
        try:
            return Session(
                self._words, injected=self._injected, log=self._log, more=more, start_s=left
            )
        except Ended as exc:
            if exc.outcome != "timed_out":
                raise
            raise Ended("timed_out", f"{left:.0f} s were left for another start of it") from exc

    def _measured(self, config: Config, seconds: float, floor: float, until: float) -> Measurement:
        session = self._ensured()
        first = self._lap(session, config, 1, until)
        warm = self._warm(session, config, until)
        steps = _steps(BLOCK_S / max(warm.step_s, 1e-6), config)
        blocks: list[Block] = []
        ends = time.monotonic() + seconds
        while not _enough(blocks, floor, over=time.monotonic() >= ends):
            blocks.append(self._lap(session, config, steps, until))
        rate, low, high = _rate(blocks, varies=session.seen.varies)
        self._settled[config] = statistics.median(one.step_s for one in blocks)
        return Measurement(
            outcome="ok",
            samples_per_s=rate,
            low=low,
            high=high,
            step_s=self._settled[config],
            first_step_s=_whole(first),
            peak_bytes=max(one.peak_bytes for one in (first, warm, *blocks)),
            steps=sum(one.steps for one in blocks),
            blocks=tuple(one.step_s for one in blocks),
            waited=min(1.0, statistics.median(one.waited / one.seconds for one in blocks)),
        )

    def _lap(self, session: Flight, config: Config, steps: int, until: float) -> Block:
        """Some steps, given up where a process of several hangs: the others wait for it in their
        backward passes, half an hour by NCCL's own clock. One step may compile."""
        if session.seen.processes > 1 and (steps > 1 or config == self.own):
            until = min(until, time.monotonic() + self.hangs_s)
        return session.lap(config, self.own, steps, until)

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
            if steady and (enough or known):
                break
            before = now.step_s
        return now


def _whole(first: Block) -> float:
    """Seconds of the step with which a config begins."""
    return max(first.first_s, first.seconds)


def _rate(blocks: Sequence[Block], *, varies: bool) -> tuple[float, float, float]:
    """(Samples/s, its interval): of the median block; where shapes vary of all blocks, as what is
    paid for some shapes, a recompilation at worst, is part of their speed."""
    rates = [one.samples / one.seconds for one in blocks]
    low, high = median_interval(rates)
    if not varies:
        return statistics.median(rates), low, high
    whole = sum(one.samples for one in blocks) / sum(one.seconds for one in blocks)
    return whole, min(low, whole), max(high, whole)


def _steps(about: float, config: Config) -> int:
    """As many, in whole turns of the loader's workers, which give their batches one after another
    and then may be waited for."""
    workers = int(loading(config).get("num_workers") or 1)
    return max(1, round(about / workers)) * workers


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
