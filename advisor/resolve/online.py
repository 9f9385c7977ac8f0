"""Tune a run while it trains: `apply(tune=...)` and `advisor run --tune`.

Rank 0 starts one process that searches, `advisor.online_search`, and every rank asks it at the
boundaries of steps. It ends when its pipe to the script closes. Whatever happens to it, the script
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

from advisor.resolve.broadcast import WAIT_S
from advisor.resolve.lookups import tell, warn
from advisor.resolve.record_guide import RecordGuide, RunPolicy
from advisor.tuners.act.pilot.protocol import ADDRESS, RUN, BlockRequest, BlockResult, PilotClient
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.act.ranks import Group
from advisor.tuners.faults import failure, stopped

PATIENCE_S, PATIENCE_RANKS_S = 60.0, 600.0
"""For an answer of the process that searches, its start included; one of several ranks may wait
for another that evaluates, or writes a checkpoint."""
LEAVE_S = 10.0
"""For that process to end by itself after its last answer."""
_searches = itertools.count()


class OnlineTuner(RecordGuide):
    """A RecordGuide that starts a search if nothing is known. `tune_s`: seconds that it may take.
    Methods without a docstring are those of `Guide`."""

    def __init__(self, command: Sequence[str], policy: RunPolicy, *, tune_s: float) -> None:
        super().__init__(command, policy)
        self._tune_s = tune_s
        self._client: PilotClient | None = None
        self._folder = ""
        self._search: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._early: BlockRequest | None = None

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        known = self.known(seen, searches=True)
        if known is not None:
            return known
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or seen.processes)
        if local < seen.processes:
            warn(
                "tune: a job on several machines is not tuned within its run; it goes on unmodified"
            )
            return self.leave()
        tell(f"tune: tries configs for {self._tune_s:g} s; every step trains")
        self._began = time.monotonic()
        atexit.register(self._report_early_end, os.getpid())
        self._folder = self._shared_folder(seen)
        patience_s = PATIENCE_S if seen.processes == 1 else PATIENCE_RANKS_S
        self._client = PilotClient(f"{self._folder}/pilot", None, patience_s=patience_s)
        try:
            order = self._client.begin(seen)
        except OSError:
            return self._lost()
        return self._received(order)

    def next(self, result: BlockResult) -> BlockRequest:
        assert self._client is not None
        order, self._early = self._early or self._client.next(result), None
        return self._received(order)

    def backward_failed(self, exc: Exception, order: BlockRequest) -> None:
        """The search is told at once, or the next run would try the config again: this one may end
        before its block does."""
        super().backward_failed(exc, order)
        if order.steps and self._client is not None and Group.current() is None:
            outcome, reason = failure(exc)
            self._early = self._client.next(BlockResult(outcome=outcome, reason=reason))

    def failed(self, exc: BaseException) -> None:
        why = stopped(exc)
        if why == "brief":
            tell(f"tune: {exc}, before anything could be tried; a longer run is tuned")
        if why == "over":
            self._end_search()
        super().failed(exc)

    def _received(self, order: BlockRequest) -> BlockRequest:
        if not order.own and not order.steps:
            return self._lost()
        if order.steps:
            return order
        if self._search is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._search.wait(LEAVE_S)
        self._end_search()
        return self.stay(order.config, order.own, f"found in this run: {order.found}", say=tell)

    def _end_search(self, *, keep_log: bool = False) -> None:
        atexit.unregister(self._report_early_end)
        if self._search is not None:
            self._search.kill()
            self._search.communicate()
            self._search = None
            if not keep_log:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _report_early_end(self, process: int) -> None:
        """The script ends while it is tuned; `process`: its own, which may fork others."""
        if process == os.getpid():
            took = time.monotonic() - self._began
            tell(
                f"tune: the script ended {took:.0f} s into the {self._tune_s:.0f} s of its tuning, "
                "and is not tuned yet; the next run goes on from there"
            )

    def _lost(self) -> BlockRequest:
        self._end_search(keep_log=True)
        where = f"; see {self._folder}/log" if self._folder else ""
        warn(f"the search within this run has ended{where}. Training goes on unmodified")
        return self.leave()

    def _shared_folder(self, seen: ScriptFacts) -> str:
        """The folder of the socket and the log, for this user alone; '' if there is none."""
        group = Group.current()
        if group is None:
            return self._start_search(seen)
        key = f"advisor/conductor/{next(_searches)}"
        if group.rank != 0:
            return (group.get(key, WAIT_S) or b"").decode()
        folder = self._start_search(seen)
        group.store.set(key, folder.encode())
        return folder

    def _start_search(self, seen: ScriptFacts) -> str:
        folder = tempfile.mkdtemp(prefix="advisor-")
        cache = self._policy.cache
        if not isinstance(cache, str | None):
            several = [cache] if isinstance(cache, os.PathLike) else cache
            cache = [os.fspath(url) for url in several]
        environment = {name: v for name, v in os.environ.items() if name not in (RUN, ADDRESS)}
        with (
            socket.socket(socket.AF_UNIX) as listening,
            (Path(folder) / "log").open("wb") as log,
        ):
            listening.bind(f"{folder}/pilot")
            listening.listen(seen.processes)
            task = {
                "folder": folder,
                "command": self._command,
                "given": dict(self._policy.given),
                "tune_s": self._tune_s,
                "cache": cache,
                "socket": listening.fileno(),
            }
            # It lives as long as its input is open, which is as long as this process.
            self._search = subprocess.Popen(
                [sys.executable, "-m", "advisor.online_search"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )
            assert self._search.stdin is not None
            self._search.stdin.write(json.dumps(task).encode() + b"\n")
            self._search.stdin.flush()
        return folder
