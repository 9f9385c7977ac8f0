"""apply() without a target, and tuning a run while it trains: `apply(tune=...)`, `run --tune`.

Rank 0 starts one search process, `advisor.online_search`. Between steps, every rank asks this
process for the next config. The process ends when its pipe to the script closes. If it fails, the
script continues.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from advisor.arguments import Model
from advisor.cache import settings
from advisor.cache.kinds import Duration
from advisor.cache.task import permissions
from advisor.open_store import open_records
from advisor.resolve.lookups import GOES_ON, WAIT_S, advise, tell, warn_in_hook
from advisor.resolve.record_guide import RecordGuide
from advisor.resolve.request import Request
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.pilot.pilot import ACTIVE_PILOT
from advisor.tuners.act.pilot.protocol import ADDRESS, RUN, BlockRequest, BlockResult, PilotClient
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.act.ranks import Group
from advisor.tuners.faults import failure, stopped
from advisor.tuners.search.plan import Plan

PATIENCE_ALONE_S, PATIENCE_RANKS_S = 60.0, 600.0
"""Timeout for an answer of the search process, in seconds, its start included. With several ranks,
one rank may have to wait while another evaluates or writes a checkpoint."""
LEAVE_S = 10.0  # seconds for the search process to end by itself after its last answer
PERMISSIONS = ("precisions", "deterministic", "max_memory", "tolerance", "compile", "allow")
"""Arguments of apply() that limit the advice for a run."""
_searches = itertools.count()


def apply_to_script(model: Model, asked: Mapping[str, Any], *, strict: bool) -> Advice:
    """Advice that changes nothing yet. Attaches a pilot, which looks up the run's own record."""
    request = Request.attempt(model, asked, quiet=model.mode != "infer")
    guide, tune = None, asked["tune"]
    try:  # on every rank: only rank 0 looks up, but every rank has a pilot
        given = permissions({n: v for n, v in asked["permit"].given.items() if n in PERMISSIONS})
        run = dataclasses.replace(request, given=given, plan=Plan(), quiet=False)
        guide = RecordGuide(own_command(), run, strict=strict)
        if tune is not None:
            seconds = Plan.of({"budget": Duration().checked("tune", tune)}).seconds
            guide = OnlineTuner(own_command(), run, tune_s=seconds, strict=strict)
        open_records(request.cache, timeout_s=0)  # a wrong URL raises now, not in the pilot
    except Exception as exc:  # `serve` reports it
        request = dataclasses.replace(request, wrong=request.wrong or exc)
    advice = advise(request, strict=strict)
    advice.set_flags()
    if guide is None or request.wrong or settings.disabled() or not request.quiet:
        return advice
    comparer = None
    if tune is not None:
        from advisor.tuners.measure.run.recorded_steps import RecordedSteps

        comparer = RecordedSteps(careful=True)
    ACTIVE_PILOT.attach(guide, comparer)
    return advice


def release() -> None:
    """Remove everything that advisor has put into this process: the pilot, its hooks, its changes
    to models and optimizers, and every flag. The script then trains as it would without advisor.
    """
    ACTIVE_PILOT.release()


def own_command() -> list[str]:
    """How this process was started, as a person would type it."""
    python, *words = sys.orig_argv
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        found = Path(shutil.which("python") or "").parent
        return ["python" if found == Path(sys.executable).parent else python, *words]
    words = [word for word in words if word != "-u"]  # torchrun's own
    return ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1"), *words]


class OnlineTuner(RecordGuide):
    """A RecordGuide that starts a search of at most `tune_s` seconds if no record fits. Methods
    without a docstring are those of `Guide`."""

    def __init__(
        self, command: Sequence[str], asked: Request, *, tune_s: float, strict: bool = False
    ) -> None:
        super().__init__(command, dataclasses.replace(asked, quiet=True), strict=strict)
        self._tune_s = tune_s
        self._client: PilotClient | None = None
        self._folder = ""
        self._search: subprocess.Popen[bytes] | None = None
        self._early_request: BlockRequest | None = None

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        known = self.advice_for(seen)
        if known is not None:
            tell(f"tune: nothing is tried, because this run is tuned; {self._reason}")
            return known
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or seen.processes)
        if local < seen.processes:
            warn_in_hook(f"tune: a job on several machines is not tuned within its run. {GOES_ON}")
            return self.leave_unmodified()
        tell(f"tune: trying configs for {self._tune_s:g} s; every step trains")
        atexit.register(self._report_early_end, os.getpid())
        patience_s = PATIENCE_ALONE_S if seen.processes == 1 else PATIENCE_RANKS_S
        try:
            self._folder = self._shared_folder(seen)
            self._client = PilotClient(f"{self._folder}/pilot", None, patience_s=patience_s)
            request = self._client.begin(seen)
        except OSError:
            return self._search_lost()
        return self._received(request)

    def next(self, result: BlockResult) -> BlockRequest:
        if self._request.own:  # the search is over
            return super().next(result)
        assert self._client is not None
        request, self._early_request = self._early_request or self._client.next(result), None
        return self._received(request)

    def _remember(self, exc: BaseException, request: BlockRequest) -> str:
        """Report the failure of a config that is tried to the search at once. The run may end
        before its block does, and the next run would try the config again."""
        if request.steps and self._client is not None and Group.current() is None:
            outcome, reason = failure(exc)
            self._early_request = self._client.next(BlockResult(outcome=outcome, reason=reason))
        return super()._remember(exc, request)

    def failed(self, exc: BaseException) -> None:
        why = stopped(exc)
        if why == "brief":
            tell(f"tune: {exc}, before a config could be tried; use a longer run")
        if why in ("over", "unclear"):
            self._end_search()
        super().failed(exc)

    def _received(self, request: BlockRequest) -> BlockRequest:
        if request.steps:
            return request
        if not request.own:
            return self._search_lost()
        if self._search is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._search.wait(LEAVE_S)
        self._end_search()
        return self.finish(
            request.config, request.own, f"found in this run: {request.found}", say=tell
        )

    def _end_search(self, *, keep_log: bool = False) -> None:
        atexit.unregister(self._report_early_end)
        if self._search is not None:
            self._search.kill()
            self._search.communicate()
            self._search = None
            if not keep_log:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _report_early_end(self, process: int) -> None:
        """Report that the script ended during tuning; only in `process`, not in its forks."""
        if process == os.getpid():
            tell(
                f"tune: the script ended before its {self._tune_s:g} s of tuning were over; the "
                "next run continues the search"
            )

    def _search_lost(self) -> BlockRequest:
        self._end_search(keep_log=True)
        where = f"; see {self._folder}/log" if self._folder else ""
        warn_in_hook(f"the search within this run has failed{where}. {GOES_ON}")
        return self.leave_unmodified()

    def _shared_folder(self, seen: ScriptFacts) -> str:
        """The private folder of the socket and the log; '' if rank 0 could not start a search."""
        group = Group.current()
        key = f"advisor/conductor/{next(_searches)}"
        if group is not None and group.rank != 0:
            return (group.get(key, WAIT_S) or b"").decode()
        folder = ""
        try:
            folder = self._start_search(seen)
        finally:  # the other ranks wait for this key
            if group is not None:
                group.store.set(key, folder.encode())
        return folder

    def _start_search(self, seen: ScriptFacts) -> str:
        folder = tempfile.mkdtemp(prefix="advisor-")
        environment = {name: v for name, v in os.environ.items() if name not in (RUN, ADDRESS)}
        with socket.socket(socket.AF_UNIX) as listening, (Path(folder) / "log").open("wb") as log:
            listening.bind(f"{folder}/pilot")
            listening.listen(seen.processes)
            task = {
                "folder": folder,
                "command": self._command,
                "given": dict(self._asked.given),
                "tune_s": self._tune_s,
                "cache": self._asked.cache,
                "socket": listening.fileno(),
            }
            # The search process ends when its stdin closes, at the latest when this process ends.
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
            self._search.stdin.write(json.dumps(task, default=os.fspath).encode() + b"\n")
            self._search.stdin.flush()
        return folder
