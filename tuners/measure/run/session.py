"""Sends requests to the pilots in one start of a command, or in a script that runs already."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.errors import RecordDamaged, UsageError
from advisor.tuners import host
from advisor.tuners.act.pilot.checkpoints import MADE, remove_empty
from advisor.tuners.act.pilot.protocol import (
    ADDRESS,
    RUN,
    SECRET,
    TRAINING_OVER,
    BlockRequest,
    BlockResult,
    RankStep,
    injection_environment,
    receive,
    send,
    startup_failure,
)
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.decisions import MIN_OBSERVED_STEPS
from advisor.tuners.faults import NEEDS_OPTIMIZER, UNSTEPPED, says_out_of_memory
from advisor.tuners.measure.run.guarded_process import (
    END_S,
    KEPT_OUT,
    GuardedProcess,
    exit_text,
    inductor_folder,
    measurable,
)
from advisor.tuners.measure.runner import Block, ConfigFailed
from advisor.tuners.scratch import ScratchFolder

LOG_POLL_S = 0.2  # seconds between two checks of a command, or of its log
RANKS_S = 50.0  # seconds from the first steps of a job's first process to those of its last
CAUSE_S = 2.0  # seconds to hear from other ranks why one lost its connection to another
LAUNCHER_S = 10.0  # seconds for a launcher to end the other ranks, once one has failed
GONE = (
    "the process that trained is gone, and the command goes on without it; if the command starts "
    "several programs in turn, give the one that trains"
)
FIX_HINT = "fix that first"
T = TypeVar("T")
TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db",
    "TRACKIO_DIR": "{}/trackio",
    "TENSORBOARD_LOGGING_DIR": "{}/tensorboard",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "DISABLE_KUBEFLOW_INTEGRATION": "TRUE",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Turns experiment trackers off, or points them at a scratch folder, {}. A script may still save or
push files itself, and Lightning's loggers still write."""


class CommandProcess(GuardedProcess):
    """One start of a command, whose Python loads the pilot from the folder `injected`. Raises
    UsageError as `measurable`, and if the temporary folder's name is too long. `variables`: of its
    environment; `folder`: its current folder, default ours."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        injected: Path,
        log: Path,
        variables: Mapping[str, str] = MappingProxyType({}),
        folder: Path | None = None,
    ) -> None:
        path, self._injected = measurable(words), str(injected)
        self._folder = ScratchFolder()
        secret = secrets.token_bytes(32)
        self._address = str(self._folder.path / "pilot")
        try:
            self.listener = Listener(self._address, "AF_UNIX", backlog=64, authkey=secret)
        except OSError as exc:
            self._folder.remove()
            why = f"no socket at {self._address} ({exc}): set TMPDIR to a shorter path"
            raise UsageError(why) from exc
        scratch = self._folder.path / "tmp"
        scratch.mkdir()
        environment = {
            **{name: one for name, one in os.environ.items() if name != RUN},
            # Collect garbage before each CUDA graph capture (torch.compiler.config): a graph that
            # is freed meanwhile breaks the capture.
            "TORCH_CUDAGRAPH_GC": "1",
            **{name: value.format(scratch) for name, value in TRACKERS_OFF.items()},
            # Not in the scratch folder: the next start loads what this one compiles.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            or inductor_folder(),
            "TMPDIR": str(scratch),
            **injection_environment(injected),
            ADDRESS: self._address,
            SECRET: secret.hex(),
            **variables,
        }
        super().__init__([path, *words[1:]], log=log, environment=environment, folder=folder)

    @property
    def note(self) -> str | None:
        return startup_failure(self._address)

    @property
    def keeps_out(self) -> bool:
        """Whether no process has loaded the pilot, and one has loaded torch that never will."""
        return self.note is None and any(
            host.loaded_without(one, "libtorch", self._injected) for one in host.family(self.pid)
        )

    def accepted(self, seconds: float) -> Connection | None:
        """The next pilot's connection; None if none comes within `seconds`."""
        listening = self.listener._listener._socket  # type: ignore[attr-defined] # to wait for one
        if wait([listening], seconds):
            # A process may end before it sends anything.
            with contextlib.suppress(OSError, EOFError, AuthenticationError):
                return self.listener.accept()
        return None

    def end(self) -> None:
        super().end()
        with contextlib.suppress(OSError):
            self.listener.close()
        remove_empty(self._folder.path / MADE)
        self._folder.remove()


class AttachedScript:
    """The script that started this process; has the interface of a CommandProcess."""

    ended, keeps_out, note, first_failed = False, False, "", ()

    def __init__(self, listening: socket.socket) -> None:
        self.listener = listening

    def accepted(self, seconds: float) -> Connection | None:
        if not wait([self.listener], seconds):
            return None
        return Connection(self.listener.accept()[0].detach())

    def exit_report(self) -> tuple[int, str]:
        return 1, ""

    def end(self) -> None:
        self.listener.close()


@contextlib.contextmanager
def show_log(log: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Context manager: calls `show` with text that is written to a log, from another thread."""
    over = threading.Event()

    def follow() -> None:
        with log.open(errors="replace") as file:
            last = False
            while not last:
                last = over.wait(LOG_POLL_S)
                if said := file.read():
                    show(said)

    log.touch()
    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class RunEnded(Exception):
    """The command is over, makes no more steps, or answers nonsense."""

    def __init__(
        self, outcome: str, reason: str, code: int = 1, said: str = "", *, own: bool = False
    ) -> None:
        super().__init__(reason)
        self.outcome = outcome  # as in `Measurement`, or TRAINING_OVER, or UNCLEAR
        self.code = code  # the exit code
        self.said = said  # how the command ended, if before its first steps
        self.own = own  # whether the script more likely failed by itself than due to a config


def ran_out_of_memory(exc: BaseException | None) -> bool:
    return isinstance(exc, RunEnded) and exc.outcome == "out_of_memory"


class PilotSession:
    """The pilots of a running command, whose processes wait for requests between two blocks. Every
    method, and the constructor, may raise RunEnded; `until` is a time by time.monotonic().

    Args:
        start_s: seconds until the command's first steps, at most.
        log: the file with the command's output; None if the output was shown.
        real: whether this is the user's real run, which must not end and needs its memory.
    """

    def __init__(
        self, command: CommandProcess | AttachedScript, start_s: float, log: Path | None, real: bool
    ) -> None:
        self.command, self._log, self._real = command, log, real
        self._pipes: dict[Connection, int] = {}  # with ranks
        self.forgotten: list[Config] = []  # each request frees the code of one
        self.faults: dict[str, None] = {}  # of the script, in order
        self.watches = False  # whether later steps may show another fault
        self.made = 0  # steps requested, also those that were not reached
        try:
            self.seen = self._all_seen(start_s)  # facts of the process with the lowest rank
            command.listener.close()  # other processes that train go on unmeasured
        except BaseException:
            self.end()
            raise

    @property
    def ranks(self) -> list[int]:
        return [*self._pipes.values()]

    def block(self, request: BlockRequest, until: float) -> Block:
        """Have every process make the requested steps; raises ConfigFailed if the config fails."""
        results = self.results(request, until)
        if result := next((result for result in results if result.outcome != "ok"), None):
            raise ConfigFailed(result.outcome, result.reason)
        slowest = max(results, key=lambda result: result.seconds)
        most = ("first_s", "waited_s", "peak_bytes", "compiled", "loader_load", "prefetched")
        return Block(
            steps=slowest.steps,
            samples=sum(result.samples for result in results),
            seconds=slowest.seconds,
            extra_s=slowest.extra_s,
            **{name: max(getattr(one, name) for one in results) for name in most},
            joules=sum(one.joules for one in results) if all(r.joules for r in results) else 0.0,
            counted=slowest.counted,
            losses=tuple(map(statistics.fmean, zip(*(r.losses for r in results), strict=False))),
        )

    def results(self, request: BlockRequest, until: float) -> list[BlockResult]:
        forget = self.forgotten.pop(0) if self.forgotten else None
        self.made += request.warm + request.steps
        self.tell(dataclasses.replace(request, needs_room=self._real, forget=forget))
        answers: dict[Connection, BlockResult] = {}
        while waits := [pipe for pipe in self._pipes if pipe not in answers]:
            for pipe in self._ready(waits, until):
                answers[pipe] = self._receive(pipe, "lap", BlockResult)
        found = [answers[pipe] for pipe in self._pipes]
        if len({one.outcome for one in found}) > 1:
            found = [
                dataclasses.replace(one, reason=f"rank {rank}: {one.reason}")
                for rank, one in zip(self.ranks, found, strict=True)
            ]
        self.faults |= dict.fromkeys(fault for one in found for fault in one.faults)
        self.watches = any(one.watches for one in found)
        return found

    def rank_steps(self, steps: int, own: Config, until: float) -> list[RankStep]:
        """A step of each rank, in their order; [] unless all could tell."""
        request = BlockRequest(config=own, own=own, steps=steps, warm=2, ranks=True)
        results = self.results(request, until)
        ordered = sorted(zip(self.ranks, results, strict=True), key=lambda one: one[0])
        found = [one for _rank, result in ordered for one in result.ranks]
        return found if len(found) == len(results) else []

    def tell(self, request: BlockRequest) -> None:
        try:
            for pipe in self._pipes:
                send(pipe, to_plain(request))
        except OSError:
            raise self._end_reason(pipe) from None

    def end(self) -> None:
        """End the command, and everything it started."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        self.command.end()

    def _all_seen(self, start_s: float) -> ScriptFacts:
        seen: list[ScriptFacts] = []
        until, failed_s = time.monotonic() + start_s, math.inf
        while not seen or len(seen) < seen[0].processes:
            while (pipe := self.command.accepted(LOG_POLL_S)) is None:
                now, note = time.monotonic(), self.command.note or ""
                # One rank's failure is the job's; that of a process of no rank need not be.
                failed_s = min(failed_s, now + LAUNCHER_S) if note.startswith("rank ") else math.inf
                if self.command.ended or now > failed_s:
                    raise self._end_reason()
                if self.command.keeps_out:
                    raise RunEnded("failed", KEPT_OUT)
                for lost in wait([*self._pipes], 0):  # they wait for the others
                    self._receive(cast(Connection, lost), "lap", BlockResult)
                if now > until:
                    reason = f"only {len(seen)} of its processes reached their first steps"
                    if not seen:
                        sooner = "give a larger --budget, or a command that trains sooner"
                        so_far = f"the command has run for {start_s:.0f} s"
                        reason = self._why_no_steps(so_far, sooner)
                    raise RunEnded("timed_out", reason)
            self._ready([pipe], until)
            seen.append(self._receive(pipe, "seen", ScriptFacts))
            self._pipes[pipe] = seen[-1].rank
            until = min(until, time.monotonic() + RANKS_S)
        return min(seen, key=lambda one: one.rank)

    def _ready(self, pipes: Sequence[Connection], until: float) -> list[Connection]:
        """Those that have something to read, as soon as one has."""
        while not (ready := wait(pipes, LOG_POLL_S)):
            if self.command.ended and not wait(pipes, 0):
                raise self._end_reason()
            if time.monotonic() > until:
                raise RunEnded("timed_out", "the budget was over before the result came")
        return cast(list[Connection], ready)

    def _receive(self, pipe: Connection, what: str, cls: type[T]) -> T:
        """What a process sends next. Raises RunEnded with the cause if it, or another, failed."""
        try:
            message = receive(pipe)
            if failed := message.get("failed"):
                if failed.get("follows"):
                    raise self._cause(failed, pipe)
                raise _as_ended(failed)
            return from_plain(cls, message[what])
        except (EOFError, OSError):
            raise self._cause(None, pipe) from None
        except (KeyError, TypeError, ValueError, RecordDamaged) as exc:
            raise RunEnded("crashed", f"the pilot's answer made no sense: {exc}") from exc

    def _cause(self, followed: dict[str, Any] | None, pipe: Connection) -> RunEnded:
        """Why a job ended one of whose processes is gone (`pipe`), or said so of another one: the
        first failure that does not follow from another one, else the first process that is gone."""
        lost = None if followed else pipe
        others, until = {*self._pipes} - {pipe}, time.monotonic() + CAUSE_S
        while others and (ready := wait([*others], max(0.0, until - time.monotonic()))):
            for other in cast(list[Connection], ready):
                try:
                    failed = receive(other).get("failed")
                except (EOFError, OSError, ValueError):
                    others.discard(other)
                    lost = lost or other
                    continue
                if failed and not failed.get("follows"):
                    return _as_ended(failed)
                if failed:
                    others.discard(other)
                    followed = failed
        return self._end_reason(lost) if lost or not followed else _as_ended(followed)

    def _end_reason(self, lost: Connection | None = None) -> RunEnded:
        """A RunEnded that says why the command, or one of its processes, is over."""
        several = len(self._pipes) > 1
        until = time.monotonic() + (END_S if len(self._pipes) == 1 else LAUNCHER_S)
        while not self.command.ended and time.monotonic() < until:
            time.sleep(0.05)
        gone = f"rank {self._pipes[lost]}" if lost in self._pipes and several else ""
        code, last, ended = 1, "", "goes on without it"
        if self.command.ended:
            code, last = self.command.exit_report()
            ended = f"ended with {exit_text(code)}"
        elif self._pipes:
            more = f"{gone or 'a rank'} is gone, and others still run"
            return RunEnded("crashed", more if several else GONE)
        note = "" if self.command.note == UNSTEPPED else self.command.note
        for rank, status in self.command.first_failed:
            code, words = int(status), f": {last}" * (bool(last) and int(status) > 0)
            last = f"rank {rank} ended with {exit_text(code)}{words}"
            gone = "" if gone == f"rank {rank}" else gone
        printed = f": {last}" if last and code else ""  # the last words of a failure say why
        if self._pipes:
            named = several and not gone and self.command.first_failed
            said = f"{last}; the command {ended}" if named else f"the command {ended}{printed}"
            said = f"{gone} ended before the others; {said}" if gone else said
            # Not every signal: a config may cause a segmentation fault.
            return RunEnded("crashed", said, code, own=code > 0 or code == -signal.SIGKILL)
        mend = FIX_HINT if code else "give a command that trains for longer"
        said = "" if note and code > 0 else printed  # a killed rank leaves no note
        never = self._why_no_steps(f"the command {ended}{said}", mend)
        outcome = "out_of_memory" if says_out_of_memory(note or last) else "failed"
        return RunEnded(outcome, never, code or 1, f"it {ended}{f': {note}' if note else printed}")

    def _why_no_steps(self, so_far: str, mend: str) -> str:
        """Text on why a command made no steps; `mend`: what the user should do."""
        note, better = self.command.note, mend
        if note == UNSTEPPED:
            seen, better = note, NEEDS_OPTIMIZER
        elif note:
            seen, mend = f"it failed before a step could be measured: {note}", FIX_HINT
        elif note is not None:
            steps = f"{MIN_OBSERVED_STEPS} steps"
            seen, so_far = so_far, f"torch was imported, but no torch.optim optimizer made {steps}"
        else:
            seen, so_far = so_far, "no process of the command has imported torch"
            better = "give the command that trains, as you would type it; standard input is empty"
        mend = mend if mend == FIX_HINT else better
        where = "See its output" if self._log is None else f"Its output is in {self._log}"
        return f"{seen}; {so_far}. {where}; {mend}"


def _as_ended(failed: Mapping[str, Any]) -> RunEnded:
    """A RunEnded from what a process said of its failure."""
    outcome, code = failed["outcome"], int(failed["outcome"] != TRAINING_OVER)
    return RunEnded(outcome, failed["reason"], code, own=bool(failed.get("own")))
