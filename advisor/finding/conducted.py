"""A pilot that is tuned within its own run: what is not known yet is found in its first minutes.

Rank 0 starts one process that searches, `advisor.conducting`, and every rank asks it at the
boundaries of steps. It ends when its pipe to the script closes; whatever becomes of it, the script
goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from advisor.finding.agree import WAIT_S
from advisor.finding.lookups import tell, warn
from advisor.finding.piloted import Found, Terms
from advisor.tuners.act.pilot.protocol import ADDRESS, RUN, BlockRequest, BlockResult, PilotClient
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.act.ranks import Group
from advisor.tuners.faults import failure, stopped

PATIENCE_S, PATIENCE_RANKS_S = 60.0, 600.0
"""For an answer of the process that searches, its start included; of several ranks one may wait
for another that evaluates, or writes a checkpoint."""
LEAVE_S = 10.0
"""For that process to end by itself, once it has told every rank."""
_conductors = itertools.count()


class Conducted(Found):
    """A Guide as Found, that has what is not known searched for; see `apply(tune=...)`.

    Args:
        tune_s: seconds that the search may take.
    """

    def __init__(self, command: Sequence[str], terms: Terms, *, tune_s: float) -> None:
        super().__init__(command, terms)
        self._tune_s = tune_s
        self._line: PilotClient | None = None
        self._folder = ""
        self._conductor: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._early: BlockRequest | None = None

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        """As `Guide.begin`."""
        known = self.known(seen, searches=True)
        if known is not None:
            return known
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or seen.processes)
        if local < seen.processes:
            warn(
                "tune: a job on several machines is not tuned within its run; it goes on unmodified"
            )
            return self.left()
        tell(f"tune: tries configs for {self._tune_s:g} s; every step trains")
        self._began = time.monotonic()
        atexit.register(self._untuned, os.getpid())
        self._folder = self._shared_folder(seen)
        patience_s = PATIENCE_S if seen.processes == 1 else PATIENCE_RANKS_S
        self._line = PilotClient(f"{self._folder}/pilot", None, patience_s=patience_s)
        try:
            order = self._line.begin(seen)
        except OSError:
            return self._lost()
        return self._heard(order)

    def next(self, result: BlockResult) -> BlockRequest:
        """As `Guide.next`."""
        assert self._line is not None
        order, self._early = self._early or self._line.next(result), None
        return self._heard(order)

    def backward_failed(self, exc: Exception, order: BlockRequest) -> None:
        """As `Guide.backward_failed`. The process that searches hears of it at once, or the next
        run would try the config again: this one may end before its block does."""
        super().backward_failed(exc, order)
        if order.steps and self._line is not None and Group.current() is None:
            outcome, reason = failure(exc)
            self._early = self._line.next(BlockResult(outcome=outcome, reason=reason))

    def failed(self, exc: BaseException) -> None:
        """As `Guide.failed`."""
        why = stopped(exc)
        if why == "brief":
            tell(f"tune: {exc}, before anything could be tried; a longer run is tuned")
        if why == "over":
            atexit.unregister(self._untuned)
        if why == "over" and self._conductor is not None:
            self._end()
            shutil.rmtree(self._folder, ignore_errors=True)
        super().failed(exc)

    def _heard(self, order: BlockRequest) -> BlockRequest:
        if not order.own and not order.steps:
            return self._lost()
        if order.steps:
            return order
        if self._conductor is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._conductor.wait(LEAVE_S)
            shutil.rmtree(self._folder, ignore_errors=True)
        self._end()
        return self.stays(order.config, order.own, f"found in this run: {order.found}", say=tell)

    def _end(self) -> None:
        """Have done with the process that searches."""
        atexit.unregister(self._untuned)
        if self._conductor is not None:
            self._conductor.kill()
            self._conductor.communicate()
            self._conductor = None

    def _untuned(self, process: int) -> None:
        """The script ends while it is tuned; `process`: its own, which may fork others."""
        if process == os.getpid():
            took = time.monotonic() - self._began
            tell(
                f"tune: the script ended {took:.0f} s into the {self._tune_s:.0f} s of its tuning, "
                "and is not tuned yet; the next run goes on from there"
            )

    def _lost(self) -> BlockRequest:
        self._end()
        where = f"; see {self._folder}/log" if self._folder else ""
        warn(f"the search within this run has ended{where}. Training goes on unmodified")
        return self.left()

    def _shared_folder(self, seen: ScriptFacts) -> str:
        """The folder of the socket and the log, of this user's alone; '' where there is none."""
        group = Group.current()
        if group is None:
            return self._started(seen)
        key = f"advisor/conductor/{next(_conductors)}"
        if group.rank != 0:
            return (group.get(key, WAIT_S) or b"").decode()
        folder = self._started(seen)
        group.store.set(key, folder.encode())
        return folder

    def _started(self, seen: ScriptFacts) -> str:
        folder = tempfile.mkdtemp(prefix="advisor-")
        cache = self._terms.cache
        told = {
            "folder": folder,
            "command": self._command,
            "given": dict(self._terms.given),
            "tune_s": self._tune_s,
            "cache": cache if cache is None or isinstance(cache, str) else _urls(cache),
        }
        unwanted = (RUN, ADDRESS)  # no pilot in it
        environment = {name: v for name, v in os.environ.items() if name not in unwanted}
        with (
            socket.socket(socket.AF_UNIX) as listening,
            (Path(folder) / "log").open("wb") as log,
        ):
            listening.bind(f"{folder}/pilot")
            listening.listen(seen.processes)
            told["socket"] = listening.fileno()
            # It lives as long as its input is open, which is as long as this process.
            self._conductor = subprocess.Popen(
                [sys.executable, "-m", "advisor.conducting"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )
            assert self._conductor.stdin is not None
            self._conductor.stdin.write(json.dumps(told).encode() + b"\n")
            self._conductor.stdin.flush()
        return folder


def _urls(cache: os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> str | list[str]:
    return os.fspath(cache) if isinstance(cache, os.PathLike) else [os.fspath(u) for u in cache]
