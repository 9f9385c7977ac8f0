"""A run as a Tester: configs are switched at its step boundaries; restarts are for failures."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.errors import TargetFailed, WorkerError
from advisor.tuners.act.pilot.seen import Seen
from advisor.tuners.knobs import FEEDS, KNOBS, loading
from advisor.tuners.measure import numerics, randomness
from advisor.tuners.measure.observe import Trace
from advisor.tuners.measure.run import traced
from advisor.tuners.measure.run.command import Shown
from advisor.tuners.measure.run.session import START_S, Block, Ended, Flight, Session, Struck
from advisor.tuners.measure.timing import BLOCK_S, MIN_BLOCKS, PRECISION, median_interval

WARM_S, WARM_STEPS, MOST_WARM = 0.3, 6, 12
"""A config is warm after so many seconds and steps at least, once two laps in a row take as long;
or after so many laps."""
STEADY = 0.1
"""Two laps that differ by less than this took as long."""
HOPELESS_BLOCKS = 5
"""As many slower ones, and the exact speed is of no interest."""
RESTARTS = 3
"""Times in a row that a command may end before a config is measured."""
ROUNDED = 2
"""Runs that show what rounding does to a run: each goes its own way, and a run is not repeated
exactly even without."""
TOGETHER = 0.7
"""Of the device's memory that runs to compare with may take at once."""


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
    """

    start_s = START_S

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
        self._traces: dict[_Traced, Trace] = {}
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
                if exc.outcome == "timed_out" or (exc.code and config != self.own):
                    break
                continue  # it was through, or was killed as it is: once more from the start
            except Struck as exc:
                return Measurement(outcome=exc.outcome, reason=str(exc))
            self._peak_bytes = max(self._peak_bytes, measured.peak_bytes)
            return measured
        assert last is not None
        if last.code:
            return Measurement(outcome=last.outcome, reason=str(last))
        if config != self.own:
            return Measurement(outcome="failed", reason="the command ends before it is measured")
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
            if self._alone(1):
                self.stop()
            try:
                session = self._started({f"{n}_CACHE_DIR": f"{empty}/{n}" for n in names}, until)
                first = session.lap(config, self.own, 1, until)
                later = session.lap(config, self.own, 2, until)
                paid = max(first.first_s, first.seconds) - later.step_s
                return Measurement(outcome="ok", first_step_s=max(0.0, paid), steps=3)
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
        """Whether the command trains with a config as with another, strict fp32.

        It is started for each run that is not known yet, all at once where memory and a single
        process allow; see `numerics.judge`. Its data is loaded as by itself in all of them: workers
        draw other numbers for it.
        """
        config = config.replace(**{name: against[name] for name in FEEDS if name in against})
        until = time.monotonic() + (2 * self.deadline_s if deadline_s is None else deadline_s)
        same = {knob.name: config[knob.name] for knob in KNOBS if knob.autocast}
        dtype = next((d for k in KNOBS if k.autocast and (d := k.autocast(config[k.name]))), None)
        noise = randomness.amplitude(dtype, tf32=self.memory > 0)
        fp32, candidate = _Traced(against, steps), _Traced(config, steps)
        plain = _Traced(against.replace(**same), steps)
        rounded = [_Traced(against, steps, noise, n) for n in range(ROUNDED)]
        try:
            self._trace(dict.fromkeys([fp32, *rounded, plain, candidate]), until)
        except Ended as exc:
            outcome = "timed_out" if exc.code == 0 else exc.outcome
            return Measurement(outcome=outcome, reason=f"a run to compare with ended: {exc}")
        good, reason = numerics.judge(
            self._traces[fp32],
            [self._traces[one] for one in rounded],
            self._traces[plain],
            self._traces[candidate],
            tolerance,
        )
        return Measurement(outcome="ok" if good else "wrong", reason=reason, steps=steps)

    def release(self) -> None:
        """As `Runner.release`."""

    def stop(self) -> None:
        """End the command and everything it started."""
        if self._session is not None:
            self._session.end()
            self._session = None

    def _ensured(self) -> Flight:
        if self._session is None or self._session.over:
            self.stop()
            self._session = Session(
                self._words, injected=self._injected, log=self._log, start_s=self.start_s
            )
        return self._session

    def _alone(self, others: int) -> bool:
        """Whether so many others may not run beside the session: a launcher of several processes
        holds a port, and the device's memory is for all of them."""
        several = self._session is not None and self._session.seen.processes > 1
        taken = (others + 1) * self._peak_bytes
        return several or bool(self.memory and taken > TOGETHER * self.memory)

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
        first = session.lap(config, self.own, 1, until)
        warm = self._warm(session, config, until)
        steps = _steps(BLOCK_S / max(warm.step_s, 1e-6), config)
        blocks: list[Block] = []
        ends = time.monotonic() + seconds
        while not _enough(blocks, floor, over=time.monotonic() >= ends):
            blocks.append(session.lap(config, self.own, steps, until))
        rates = [one.samples / one.seconds for one in blocks]
        low, high = median_interval(rates)
        return Measurement(
            outcome="ok",
            samples_per_s=statistics.median(rates),
            low=low,
            high=high,
            step_s=statistics.median(one.step_s for one in blocks),
            first_step_s=max(0.0, max(first.first_s, first.seconds) - warm.step_s),
            peak_bytes=max(one.peak_bytes for one in (first, warm, *blocks)),
            steps=sum(one.steps for one in blocks),
            blocks=tuple(one.step_s for one in blocks),
            waited=min(1.0, statistics.median(one.waited / one.seconds for one in blocks)),
        )

    def _warm(self, session: Flight, config: Config, until: float) -> Block:
        """Steps until they take as long as those before them: recompilations are over by then."""
        began, steps = time.monotonic(), 0
        before: Block | None = None
        size = _steps(2, config)
        for _ in range(MOST_WARM):
            now = session.lap(config, self.own, size, until)
            steps += now.steps
            steady = before is not None and abs(now.step_s / before.step_s - 1) < STEADY
            if steady and time.monotonic() - began >= WARM_S and steps >= WARM_STEPS:
                break
            before = now
            size = _steps(max(2, BLOCK_S / 2 / max(now.step_s, 1e-6)), config)
        return now

    def _trace(self, wanted: Iterable[_Traced], until: float) -> None:
        """Have all of these in `_traces`."""
        missing = [one for one in wanted if one not in self._traces]
        if alone := self._alone(len(missing)):
            self.stop()

        def trace(one: _Traced) -> None:
            self._traces[one] = self._traced(one, until)  # kept, whatever becomes of the others

        with ThreadPoolExecutor(1 if alone else len(missing) or 1) as pool:
            list(pool.map(trace, missing))

    def _traced(self, wanted: _Traced, until: float) -> Trace:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            file = Path(folder) / "trace"
            told = {traced.FILE: str(file), traced.STEPS: str(wanted.steps)}
            told |= {traced.ROUNDED: repr(wanted.rounding), traced.DRAW: str(wanted.draw)}
            session = self._started({**told, "PYTHONHASHSEED": "0"}, until)
            try:
                session.lap(wanted.config, self.own, wanted.steps, until)
                return traced.read(file)
            finally:
                session.end()


@dataclass(frozen=True, slots=True)
class _Traced:
    """One run to compare. `rounding`: of results, relatively; `draw` of that rounding."""

    config: Config
    steps: int
    rounding: float = 0.0
    draw: int = 0


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
