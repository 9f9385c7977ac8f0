"""A run as a Runner: configs are switched at its step boundaries, and restarts are for failures."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgpack

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.errors import RecordDamaged, TargetFailed, WorkerError
from advisor.tuners.act.pilot.orders import Lap, Order
from advisor.tuners.act.pilot.seen import Seen
from advisor.tuners.knobs import KNOBS
from advisor.tuners.measure import numerics, randomness
from advisor.tuners.measure.observe import Trace
from advisor.tuners.measure.run import traced
from advisor.tuners.measure.run.command import PYTHON, Command, how
from advisor.tuners.measure.timing import BLOCK_S, MIN_BLOCKS, PRECISION, median_interval

START_S = 300.0
"""Until a command's first steps: it may read its data first."""
LOOK_S = 0.2
"""Between two looks whether a command that says nothing still runs."""
WARM_S, WARM_STEPS, MOST_WARM = 0.3, 6, 12
"""A config is warm after so many seconds and steps at least, once two laps in a row take as long;
or after so many laps."""
STEADY = 0.1
"""Two laps that differ by less than this took as long."""
HOPELESS_BLOCKS = 5
RESTARTS = 3
"""Times in a row that a command may end before a config is measured."""


class _Ended(Exception):
    """The command is over, hangs, or speaks rubbish; `code` is 0 where it ended well."""

    def __init__(self, outcome: str, reason: str, code: int = 1) -> None:
        super().__init__(reason)
        self.outcome, self.code = outcome, code


@dataclass(frozen=True, slots=True)
class _Block:
    """One lap of all processes. `samples` of all; `seconds` of the slowest; `waited` its share."""

    steps: int
    samples: int
    seconds: float
    first_s: float
    waited: float
    peak_bytes: int

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


class Run:
    """A Tester over a command, started anew where a config did not survive it.

    Args:
        command: its words.
        injected: the folder with the sitecustomize that brings the pilot.
        log: a file for what it prints.
        deadline_s: seconds until a trial is given up and the command ended.
    """

    def __init__(
        self, command: Sequence[str], *, injected: Path, log: Path, deadline_s: float
    ) -> None:
        self._words = tuple(command)
        self._injected = injected
        self._log = log
        self.deadline_s = deadline_s
        self._command: Command | None = None
        self._pipes: list[Connection] = []
        self.own = Config()
        """What the script does itself; set once its space is known."""
        self._failed: dict[str, str] = {}
        self._cuda = False
        self._traces: dict[tuple[Config, int, float], Trace] = {}
        self.restarts = 0
        self.waited: float = 0.0
        """Share of the baseline's time that it waits for data."""

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def describe(self) -> Seen:
        """Start the command, and wait for its first steps.

        Raises:
            TargetFailed: it ended before.
            WorkerError: none came in time.
        """
        try:
            return self._start({})
        except _Ended as exc:
            self._end()
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
        for _ in range(RESTARTS):
            until = time.monotonic() + most
            try:
                self._ensure()
                return self._measured(config, seconds, floor, until)
            except _Ended as exc:
                self._end()
                if exc.code == 0:
                    self.restarts += 1
                    continue  # it was through: once more from the start
                return Measurement(outcome=exc.outcome, reason=str(exc))
        raise WorkerError(
            f"the command ends before a config is measured, {RESTARTS} times in a row; give it "
            "more to train on, as more epochs"
        )

    def start(self, config: Config, *, deadline_s: float) -> Measurement:
        """The first step under a config in a fresh start with empty compiler caches."""
        until = time.monotonic() + deadline_s
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
            names = ("TORCHINDUCTOR", "TRITON")
            self._end()
            try:
                self._start({f"{name}_CACHE_DIR": f"{empty}/{name}" for name in names})
                first = self._lap(config, 1, until)
                later = self._lap(config, 2, until)
                paid = max(first.first_s, first.seconds) - later.step_s
                return Measurement(outcome="ok", first_step_s=max(0.0, paid), steps=3)
            except _Ended as exc:
                return Measurement(outcome=exc.outcome, reason=str(exc))
            finally:
                self._end()

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

        It is started anew for each that is not known yet; see `numerics.judge`.
        """
        until = time.monotonic() + (2 * self.deadline_s if deadline_s is None else deadline_s)
        same = {knob.name: config[knob.name] for knob in KNOBS if knob.autocast}
        plain = against.replace(**same)
        dtype = next((d for k in KNOBS if k.autocast and (d := k.autocast(config[k.name]))), None)
        noise = randomness.amplitude(dtype, tf32=self._cuda)
        try:
            fp32 = self._traced(against, steps, 0.0, until)
            rounded = self._traced(against, steps, noise, until)
            candidate = self._traced(config, steps, 0.0, until)
            middle = self._traced(plain, steps, 0.0, until) if plain != config else candidate
            good, reason = numerics.judge(fp32, [rounded], middle, candidate, tolerance)
        except _Ended as exc:
            outcome = "timed_out" if exc.code == 0 else exc.outcome
            return Measurement(outcome=outcome, reason=f"a run to compare with ended: {exc}")
        finally:
            self._end()
        return Measurement(outcome="ok" if good else "wrong", reason=reason, steps=steps)

    def _traced(self, config: Config, steps: int, rounding: float, until: float) -> Trace:
        key = (config, steps, rounding)
        if key not in self._traces:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                file = Path(folder) / "trace"
                told = {traced.FILE: str(file), traced.STEPS: str(steps)}
                told |= {traced.ROUNDED: repr(rounding), "PYTHONHASHSEED": "0"}
                self._start(told)
                self._lap(config, steps, until)
                self._traces[key] = traced.read(file)
        return self._traces[key]

    def release(self) -> None:
        """As `Runner.release`."""

    def stop(self) -> None:
        """End the command and everything it started."""
        self._end()

    def _ensure(self) -> None:
        if self._command is None or self._command.ended:
            self._end()
            self._start({})

    def _start(self, more: Mapping[str, str]) -> Seen:
        self._end()
        self._failed.clear()
        self._command = Command(self._words, injected=self._injected, log=self._log, more=more)
        until = time.monotonic() + START_S
        seen: list[Seen] = []
        while not seen or len(seen) < seen[0].processes:
            pipe = self._accepted(until)
            seen.append(self._heard(pipe, "seen", Seen, until))
            self._pipes.append(pipe)
        self._cuda = seen[0].device.startswith("cuda")
        return min(seen, key=lambda one: one.rank)

    def _accepted(self, until: float) -> Connection:
        assert self._command is not None
        listener = self._command.listener
        socket = listener._listener._socket  # type: ignore[attr-defined] # to wait for one
        while not wait([socket], LOOK_S):
            if self._command.ended:
                raise self._over()
            if time.monotonic() > until:
                raise _Ended(
                    "timed_out",
                    f"no training step within {START_S:.0f} s; what it printed is in {self._log}",
                )
        return listener.accept()

    def _measured(self, config: Config, seconds: float, floor: float, until: float) -> Measurement:
        first = self._lap(config, 1, until)
        warm = self._warm(config, until)
        steps = max(1, round(BLOCK_S / max(warm.step_s, 1e-6)))
        blocks: list[_Block] = []
        ends = time.monotonic() + seconds
        while True:
            blocks.append(self._lap(config, steps, until))
            times = [one.step_s for one in blocks]
            rate = statistics.median(one.samples / one.seconds for one in blocks)
            if len(blocks) >= HOPELESS_BLOCKS and rate < floor:
                break
            if len(blocks) >= MIN_BLOCKS:
                low_s, high_s = median_interval(times)
                if high_s - low_s <= PRECISION * statistics.median(times):
                    break
            if len(blocks) >= 2 and time.monotonic() >= ends:
                break
        rates = [one.samples / one.seconds for one in blocks]
        low, high = median_interval(rates)
        if config == self.own:
            self.waited = statistics.median(one.waited / one.seconds for one in blocks)
        return Measurement(
            outcome="ok",
            samples_per_s=statistics.median(rates),
            low=low,
            high=high,
            step_s=statistics.median(times),
            first_step_s=max(0.0, max(first.first_s, first.seconds) - warm.step_s),
            peak_bytes=max(one.peak_bytes for one in (first, warm, *blocks)),
            steps=sum(one.steps for one in blocks),
            blocks=tuple(times),
        )

    def _warm(self, config: Config, until: float) -> _Block:
        """Steps until they take as long as those before them: recompilations are over by then."""
        began, steps = time.monotonic(), 0
        before: _Block | None = None
        size = 2
        for _ in range(MOST_WARM):
            now = self._lap(config, size, until)
            steps += now.steps
            steady = before is not None and abs(now.step_s / before.step_s - 1) < STEADY
            enough = time.monotonic() - began >= WARM_S and steps >= WARM_STEPS
            if steady and enough:
                break
            before = now
            size = max(2, round(BLOCK_S / 2 / max(now.step_s, 1e-6)))
        return now

    def _lap(self, config: Config, steps: int, until: float) -> _Block:
        """Have every process make these steps with a config."""
        order = msgpack.packb(to_plain(Order(config=config, steps=steps, own=self.own)))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(order)
        except OSError:
            raise self._over() from None
        laps = [self._heard(pipe, "lap", Lap, until) for pipe in self._pipes]
        slowest = max(laps, key=lambda lap: lap.seconds)
        return _Block(
            steps=slowest.steps,
            samples=sum(lap.samples for lap in laps),
            seconds=slowest.seconds,
            first_s=max(lap.first_s for lap in laps),
            waited=max(lap.waited_s for lap in laps),
            peak_bytes=max(lap.peak_bytes for lap in laps),
        )

    def _heard(self, pipe: Connection, what: str, cls: type[Any], until: float) -> Any:
        assert self._command is not None
        try:
            while not pipe.poll(LOOK_S):
                if self._command.ended and not pipe.poll(0):
                    raise self._over()
                if time.monotonic() > until:
                    raise _Ended("timed_out", "no step within the deadline")
            message = msgpack.unpackb(pipe.recv_bytes())
            if "failed" in message:
                self._failed = message["failed"]
                raise self._over()
            return from_plain(cls, message[what])
        except (EOFError, OSError):
            raise self._over() from None
        except (KeyError, ValueError, RecordDamaged) as exc:
            raise _Ended("crashed", f"the pilot's answer made no sense: {exc}") from exc

    def _over(self) -> _Ended:
        """Why a command is over, or one of its processes is."""
        assert self._command is not None
        if self._failed:
            return _Ended(self._failed["outcome"], self._failed["reason"])
        until = time.monotonic() + END_S
        while not self._command.ended and time.monotonic() < until:
            time.sleep(0.05)
        if not self._command.ended:
            return _Ended("crashed", "one of its processes is gone, others are not")
        code, said = self._command.obituary()
        if not self._pipes:
            return _Ended("failed", self._never(code, said), code or 1)
        return _Ended("crashed", f"the command ended with {how(code)}: {said}", code)

    def _never(self, code: int, said: str) -> str:
        """What to say of a command in which no step was seen."""
        if any(word in PYTHON for word in self._words):
            return "python -I and -E keep advisor out: it comes by PYTHONPATH; leave them out"
        seen = f"it ended with {how(code)}{f': {said}' if said else ''}"
        return (
            f"no training step was seen in the command: {seen}. What it printed is in {self._log}"
        )

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        if self._command is not None:
            self._command.end()
            self._command = None


END_S = 15.0
"""For a command whose process is gone to be over."""
