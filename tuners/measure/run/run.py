"""A run as a Runner: configs are switched at the step boundaries of a command that trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from advisor.cache.config import BATCH, Config, Value
from advisor.cache.limit import Limit
from advisor.cache.shown import size
from advisor.errors import TargetFailed, UsageError, WorkerError
from advisor.tuners import knobs
from advisor.tuners.act.pilot.parts import FIXED, micro_batches, size_of
from advisor.tuners.act.pilot.protocol import (
    KEEP_CHECKPOINTS,
    LEAST_MEMORY,
    MAX_MEMORY,
    TRAINING_OVER,
    UNCLEAR,
    BlockRequest,
    CompareRequest,
    RankStep,
)
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.decisions import HEADROOM, START_S, STARTS
from advisor.tuners.measure.run.mapped_options import MappedOptions
from advisor.tuners.measure.run.rank_shares import steps_to_profile
from advisor.tuners.measure.run.session import (
    AttachedScript,
    CommandProcess,
    PilotSession,
    RunEnded,
    show_log,
)
from advisor.tuners.measure.runner import NO_TIME, UNVERIFIED, Block, Compared, ConfigFailed, Runner

T = TypeVar("T")
SAVE_TIMEOUT_S = 30.0  # for saving compiled code
_EVERY_WAY = " ".join(knobs.SAVING)
_UNSUITED = "the script runs out of memory, and with advisor's ways to save memory it fails"
_TOO_LARGE = "with that, too, it runs out of memory"
RETRY_HINT = "fix that, then give the same command again"


class Run:
    """A Runner: a command that is measured, and restarted when it ends.

    Args:
        injected: the folder with the sitecustomize that attaches the pilot.
        show: called with the command's output, as it comes, from another thread.
        options: the command's options that set knobs, by the knob's name in `--map`.
        max_memory: bytes of the device that the command may use; 0: all.
        saves: whether the first start saves memory already.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        injected: Path,
        log: Path,
        show: Callable[[str], None] | None = None,
        options: Mapping[str, Value] | None = None,
        max_memory: int = 0,
        saves: bool = False,
    ) -> None:
        self.command = MappedOptions(command, options or {})
        self._injected, self._log = injected, log
        self._variables = {MAX_MEMORY: str(max_memory)} if max_memory else {}
        self._variables |= {LEAST_MEMORY: _EVERY_WAY} if saves else {}
        # Set once the search space is known: the script's own config, the tolerance of comparisons
        # as in `Task`, and the device's memory in bytes (0: unknown).
        self.baseline, self.tolerance, self.memory = Config(), 0.0, 0
        # By the words of the command; the last one used comes last.
        self._sessions: dict[tuple[str, ...], PilotSession] = {}
        self._processes = 1
        self.faults: dict[str, None] = {}  # of the script, in the order in which they were found
        self.refusal = ""  # why its blocks are not checkpointed
        self._survived = 0  # steps that the unmodified command made
        self._reasons: set[str] = set()  # why starts failed
        self._peak_bytes = 0  # of a step at the script's own batch
        self._with_host_bytes = 0  # its peak if activations on the host were on the device
        self.counted = Config()  # the FLOPs of a sample, as of `StepFlops.end`
        self._shown = show is not None
        self._showing: AbstractContextManager[None] = show_log(log, show) if show else nullcontext()

    def __enter__(self) -> Self:
        self._showing.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.stop()
        self._showing.__exit__(*exc)

    def describe(self) -> ScriptFacts:
        """Start the command and return its facts. If it runs out of memory, start it again with
        every way to save memory; if it fails with these, without checkpointing, whose second calls
        keep what is in a block on the device. Raises TargetFailed if the command ends before its
        first steps, WorkerError if the steps do not come in time."""
        try:
            seen = self._running(self.baseline, time.monotonic() + START_S).seen
        except RunEnded as exc:
            if exc.outcome == "timed_out":
                raise WorkerError(str(exc)) from exc
            without = exc.outcome == "out_of_memory"
            if self._saves == knobs.OFFLOAD and without:
                raise TargetFailed(self._why_nothing_fits(exc), "") from exc
            if not self._saves and not without:
                raise TargetFailed(str(exc), "") from exc
            if self._saves == knobs.OFFLOAD:
                raise TargetFailed(f"{_UNSUITED}: {self.refusal or exc}", "") from exc
            if self._saves:
                # Blocks that cannot be called twice, or whose second calls take too much.
                said = (exc.said or str(exc)).rpartition("NotRecomputable: checkpointing: ")[2]
                self.refusal = _TOO_LARGE if without else said
            self._variables[LEAST_MEMORY] = knobs.OFFLOAD if self._saves else _EVERY_WAY
            return self.describe()
        self._processes = seen.processes
        self._with_host_bytes = size_of(seen.memory, "peak", "host")
        return seen

    @property
    def _saves(self) -> str:
        return self._variables.get(LEAST_MEMORY, "")

    def _why_nothing_fits(self, exc: RunEnded) -> str:
        """Why the script runs out of memory although it takes the least; measured without a limit
        if the user gave one."""
        if self.refusal == _TOO_LARGE:
            self._variables[LEAST_MEMORY] = _EVERY_WAY
        limit = int(self._variables.pop(MAX_MEMORY, 0))
        if not limit:
            said = exc.said or str(exc)
            return f"nothing fits, also with the least memory: {said}; give it a smaller batch"
        needs, mend = "more", "give it a smaller batch, or a larger --memory"
        with suppress(RunEnded):
            seen = self._running(self.baseline, time.monotonic() + START_S).seen
            memory, calls = seen.memory, micro_batches(seen.others)
            batch = seen.shape[0] // (seen.processes * calls)
            fixed, peak = size_of(memory, *FIXED), size_of(memory, "peak")
            held = f"weights, gradients and optimizer state take {size(fixed)}"
            needs = f"{size(peak)}, of which {held}"
            parts = (n for n in range(2, batch + 1) if batch % n == 0)
            if steps := next((n for n in parts if fixed + (peak - fixed) / n <= limit), 0):
                part = f"{batch // steps}, with {calls * steps} steps of accumulation"
                mend = f"by this, a batch of {part}, would fit; or give a larger --memory"
            if fixed > limit:
                mend = "share them among several GPUs, as with FSDP, or give a larger --memory"
        return f"nothing fits into {size(limit)}: with the least memory it needs {needs}; {mend}"

    def try_option(self, name: str, value: Value) -> None:
        """Raise UsageError unless the command's option for knob `name` sets it to `value`."""
        config = self.baseline.replace(**{name: value})
        try:
            self._running(config, time.monotonic() + START_S)
        except RunEnded as exc:
            if exc.outcome in ("out_of_memory", "timed_out"):
                return  # the option was accepted
            number = self.command.numbers(config, self.baseline, self._processes)[name]
            said = self.command.described({name: number})
            raise UsageError(f"map: with {said} {exc.said or exc}") from exc

    def block(
        self, config: Config, steps: int, *, warm: int = 1, deadline_s: float, batch: int = 0
    ) -> Block:
        """As Runner. With `batch`, one recorded call of the model and its backward are repeated
        with so many samples, cut or repeated; the script goes on as if nothing had happened."""
        within = self.command.within(config, self.baseline)
        request = BlockRequest(config=within, own=self.baseline, steps=steps, warm=warm)
        if batch:
            asked = comparison(within, self.baseline, 0.0, deadline_s, batch=batch, passes=steps)
            request = BlockRequest(config=self.baseline, own=self.baseline, compare=asked, steps=1)
        try:
            block = self._attempt(config, deadline_s, lambda at, until: at.block(request, until))
            self.counted = block.counted or self.counted
        except RunEnded as exc:
            crashes = exc.code and exc.outcome in ("failed", "crashed")
            if exc.own or (crashes and config == self.baseline):
                raise _by_itself(exc) from exc
            mend = "have it train for longer, or for more epochs"
            if exc.outcome == TRAINING_OVER:
                mend = "give a command that trains one model alone"
            elif exc.outcome == "out_of_memory":
                mend = "memory runs out after the first steps; give it a smaller batch"
            raise WorkerError(f"{exc}; {mend}") from exc
        if config.batch == self.baseline.batch:
            self._peak_bytes = max(self._peak_bytes, block.peak_bytes)
        return block

    @property
    def watches(self) -> bool:
        """Whether later blocks may add to `faults`."""
        return any(one.watches for one in self._sessions.values())

    def compare(self, config: Config, *, deadline_s: float, checks: bool = False) -> Compared:
        """As Runner; `checks`: see CompareRequest. Later blocks then add to `faults`, too."""
        within, own = self.command.within(config, self.baseline), self.baseline
        if own.get(knobs.OFFLOAD) and 0 < HEADROOM * self._with_host_bytes <= self.memory:
            own = own.replace(**{knobs.OFFLOAD: False})  # the same numbers in less time
        asked = comparison(within, own, self.tolerance, deadline_s, checks=checks)
        request = BlockRequest(config=self.baseline, own=self.baseline, steps=1, compare=asked)
        try:
            results = self._attempt(config, deadline_s, lambda at, till: at.results(request, till))
        except (ConfigFailed, RunEnded) as exc:
            ended = f"the command ended during the comparison: {exc}"
            return Compared(UNVERIFIED, NO_TIME if exc.outcome == "timed_out" else ended)
        # The first process with another outcome than 'ok' decides.
        worst = next((result for result in results if result.outcome != "ok"), results[0])
        return Compared(worst.outcome, worst.reason, worst.blames)

    def limits(self, steps: int, *, deadline_s: float) -> tuple[Limit, ...]:
        """What slows the unmodified script down, since it started. Raises RunEnded if it ends."""
        own, until = self.baseline, time.monotonic() + deadline_s
        request = BlockRequest(config=own, own=own, steps=steps, limits=True)
        return self._running(own, until).results(request, until)[0].limits

    def rank_steps(self, step_s: float, *, deadline_s: float) -> list[RankStep]:
        """As `PilotSession.rank_steps`, of the unmodified script, whose steps take about `step_s`;
        [] if it does not run any more, or ends meanwhile."""
        own, until = self.baseline, time.monotonic() + deadline_s
        session = self._sessions.get(self._words(own))
        with suppress(RunEnded):
            if session is not None and self._processes > 1:
                return session.rank_steps(steps_to_profile(step_s), own, until)
        return []

    def _attempt(
        self, config: Config, deadline_s: float, act: Callable[[PilotSession, float], T]
    ) -> T:
        """Call `act` with the running command, and again if it ends; may raise RunEnded."""
        until = time.monotonic() + deadline_s
        last: RunEnded | None = None
        runs = self._words(config) in self._sessions
        for _ in range(STARTS):
            try:
                return act(self._running(config, until), until)
            except RunEnded as exc:
                if exc.outcome == UNCLEAR:
                    raise TargetFailed(str(exc), "") from exc
                made = self._end(self._words(config))
                if exc.outcome == "timed_out":
                    if last is not None and config == self.baseline:
                        break
                    again = "the budget was over before it had started again"
                    raise ConfigFailed(exc.outcome, str(exc) if runs else again) from exc
                self._check_unmodified(exc, made, until)
                if exc.outcome == "out_of_memory" and self._sessions:
                    self.stop()  # try again with all of the memory
                elif exc.outcome == "out_of_memory" and config == self.baseline:
                    raise
                elif exc.code and config != self.baseline:
                    raise ConfigFailed(exc.outcome, str(exc)) from exc
                # Else the command was done, or was killed unmodified: start it again.
                last, runs = exc, False
        assert last is not None
        raise last

    def forget(self, config: Config) -> None:
        if (session := self._sessions.get(self._words(config))) is not None:
            session.forgotten.append(self.command.within(config, self.baseline))

    def save(self, config: Config, file: Path) -> None:
        session, own = self._sessions.get(self._words(config)), self.baseline
        if session is not None and not session.command.ended:
            request = BlockRequest(config=own, own=own, steps=1, saves=str(file))
            with suppress(RunEnded):
                session.results(request, time.monotonic() + SAVE_TIMEOUT_S)

    def stop(self) -> None:
        while self._sessions:
            self._end(next(iter(self._sessions)))

    def _end(self, words: tuple[str, ...]) -> int:
        if (session := self._sessions.pop(words, None)) is None:
            return 0
        session.end()
        return session.made

    def _check_unmodified(self, ended: RunEnded, made: int, until: float) -> None:
        """If a failure may be the script's own, as it looks so or another config failed in the same
        way, raise TargetFailed unless the unmodified command survives as many steps."""
        again = str(ended) in self._reasons
        self._reasons.add(str(ended))
        by_itself = ended.code and ended.outcome in ("failed", "crashed") and (ended.own or again)
        if not by_itself or made <= self._survived:
            return
        own, words = self.baseline, self._words(self.baseline)
        try:
            self._end(words)
            session = self._running(own, until)
            # One step more: an exception between two steps shows in the second.
            while session.made <= made and time.monotonic() < until:
                steps = max(1, min(made + 1 - session.made, 16))
                session.block(BlockRequest(config=own, own=own, steps=steps), until)
            self._survived = max(self._survived, session.made)
        except ConfigFailed:
            return
        except RunEnded as exc:
            self._end(words)
            if exc.code and exc.outcome in ("failed", "crashed"):
                raise _by_itself(exc) from exc

    def _words(self, config: Config) -> tuple[str, ...]:
        return self.command.at(config, self.baseline, self._processes)

    def _running(self, config: Config, until: float) -> PilotSession:
        """Return a session of the command with its options set for a config. Raises RunEnded if it
        does not reach its first steps, or its options set something else."""
        words = self._words(config)
        if words in self._sessions and self._sessions[words].command.ended:
            self._end(words)
        session = self._sessions.pop(words, None)
        if session is None:
            while self._sessions and not self._has_room(config):
                self._end(next(iter(self._sessions)))
            session = self._start(words, max(1.0, until - time.monotonic()))
        self._sessions[words] = session
        for name in self.command.changed(config, self.baseline):
            _check_shown(session.seen, name, config[name], self.baseline.batch)
        return session

    def _start(self, words: tuple[str, ...], start_s: float) -> PilotSession:
        command = CommandProcess(
            words, injected=self._injected, log=self._log, variables=self._variables
        )
        log = None if self._shown else self._log
        session = PilotSession(command, start_s, log, real=False)
        session.faults = self.faults  # those of earlier starts stay
        return session

    def _has_room(self, config: Config) -> bool:
        # A launcher of several processes holds a port, so there can be only one.
        if self._processes > 1 or len(self._sessions) >= STARTS:
            return False
        own = self.baseline.batch or 1
        batches = [one.seen.shape[0] for one in self._sessions.values()] + [config.batch or own]
        taken = self._peak_bytes * math.fsum(max(1.0, batch / own) for batch in batches)
        return not self.memory or HEADROOM * taken <= self.memory


def _by_itself(exc: RunEnded) -> TargetFailed:
    lacks = any(one in str(exc) for one in ("FileNotFoundError", "FileExistsError"))
    keep = f"; if it needs its checkpoints in place, set {KEEP_CHECKPOINTS}=1" * lacks
    return TargetFailed(f"the script fails by itself ({exc}): {RETRY_HINT}{keep}", "")


def comparison(
    config: Config, own: Config, tolerance: float, left_s: float, *, checks: bool = False, **of: int
) -> CompareRequest:
    """The request that compares a config; `checks`: it is `own`, see CompareRequest."""
    fp32 = knobs.reference(own) if checks else knobs.strict(own)
    return CompareRequest(
        fp32=fp32, candidate=config, tolerance=tolerance, left_s=left_s, checks=checks, **of
    )


def _check_shown(seen: ScriptFacts, name: str, value: Value, own_batch: int) -> None:
    """Raise RunEnded unless the script has the value that its option was to set."""
    assert isinstance(value, int)
    if name == BATCH:
        # Not exactly equal: the last batch of an epoch is shorter.
        if abs(seen.shape[0] - value) >= abs(seen.shape[0] - own_batch):
            raise RunEnded("failed", f"a step has {seen.shape[0]} samples, not {value}")
    elif (has := seen.own.get(name, 0)) != value:
        shown = knobs.described(Config({name: has}))
        raise RunEnded("failed", f"the script has {shown}, not {value}")


class AttachedRun(Run):
    """A Runner in a script that goes on after its tuning: a config that fails costs one step. Once
    the script is over, `block` and `compare` raise WorkerError. They ignore `deadline_s`."""

    def __init__(self, script: AttachedScript, command: Sequence[str], *, log: Path) -> None:
        super().__init__(command, injected=Path(), log=log)
        self._script = script

    def compare(self, config: Config, *, deadline_s: float, checks: bool = False) -> Compared:
        """As Run; any outcome but 'ok' and 'wrong' becomes UNVERIFIED."""
        found = super().compare(config, deadline_s=deadline_s, checks=checks)
        return found if found.outcome in ("ok", "wrong") else Compared(UNVERIFIED, found.reason)

    def leave(self, config: Config, found: str) -> None:
        """Have the script train on with a config, to its end; `found`: see `BlockRequest`."""
        session = self._running(config, time.monotonic() + START_S)
        session.tell(BlockRequest(config=config, own=self.baseline, found=found))

    def rank_steps(self, step_s: float, *, deadline_s: float) -> list[RankStep]:
        return []  # a real run is not profiled

    def stop(self) -> None:
        """Do nothing: the script is the user's, and goes on; see `leave`."""

    def _attempt(
        self, config: Config, deadline_s: float, act: Callable[[PilotSession, float], T]
    ) -> T:
        until = time.monotonic() + START_S
        try:
            return act(self._running(config, until), until)
        except RunEnded as exc:
            raise WorkerError(f"the script is over: {exc}") from exc

    def _start(self, words: tuple[str, ...], start_s: float) -> PilotSession:
        return PilotSession(self._script, start_s, self._log, real=True)


_: type[Runner] = Run
