"""The pilot's guide in an ordinary run: it looks up the advice for the run's model."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shlex
from collections.abc import Callable, Collection, Sequence

from advisor.cache import settings
from advisor.cache.config import Config
from advisor.cache.record import Record
from advisor.command_snippets import tune_again
from advisor.errors import AdvisorError, NoRecord
from advisor.resolve import tracking
from advisor.resolve.commands import CommandOverrides, saves_memory
from advisor.resolve.failures import Failures
from advisor.resolve.lookups import (
    GOES_ON,
    known_to_any_rank,
    look_up,
    serve,
    warn_in_hook,
    warn_of_failure,
)
from advisor.resolve.request import Request
from advisor.tuners import knobs
from advisor.tuners.act.advice_usage import defer_to_pilot, disclaim_other_models, is_followed
from advisor.tuners.act.pilot.protocol import BlockRequest, BlockResult
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.faults import failure, is_out_of_memory, lost_rank, may_be_config_error, stopped

_log = logging.getLogger("advisor")

NOTED = "advisor: "  # start of a note on an exception
_UNTRAINED = ": nothing was looked up or tuned, and the run was unmodified"
_NOT_IN_FORCE = "advised, and not in force"
_UNOFFERED = "the wrapper of this script's model does not permit it"


class RecordGuide:
    """A Guide that looks up once, and makes one request. Methods without a docstring are those of
    `Guide`. `asked`: the user's permissions and options; `quiet` if a miss starts a search.
    `overrides`: options of the command that a record has set."""

    def __init__(
        self,
        command: Sequence[str],
        asked: Request,
        overrides: CommandOverrides | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self._command, self._asked, self._overrides = tuple(command), asked, overrides
        self._flags_before = Config()
        self._request, self._reason = BlockRequest(config=Config()), ""
        self._seen: ScriptFacts | None = None
        self._failures: Failures | None = None
        self._strict, self._status = strict, ""
        self._record: Record | None = None
        self._dropped = False  # the advice failed

    def saves_memory(self, device: str) -> Collection[str]:
        try:
            return saves_memory(self._command, device, self._asked.cache)
        except AdvisorError:
            return ()  # the lookup at the first steps reports it

    def takes_over(self) -> bool:
        if is_followed():
            _log.info("the script follows its advice by itself; the pilot stays away")
            return False
        self._flags_before = PROCESS_FLAGS.config
        PROCESS_FLAGS.release()
        return True

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        return self.advice_for(seen) or self.leave_unmodified()

    def leave_unmodified(self) -> BlockRequest:
        """The request to leave the script unmodified. Restores the flags that apply() had set."""
        PROCESS_FLAGS.put(self._flags_before)
        if self._seen is not None:
            disclaim_other_models(self._seen.model)
            if knobs.OFFLOAD in self._seen.own:
                warn_in_hook("the run takes the least memory, as when this command was tuned")
        return BlockRequest(config=Config())

    def advice_for(self, seen: ScriptFacts) -> BlockRequest | None:
        """The request with the advice for a run. None if no record fits, or if a search is to start
        and the record compares nothing."""
        asked, overrides = self._asked, self._overrides
        task = seen.task(self._command, asked.given)
        self._seen, self._failures = seen, Failures(asked.cache, seen.model, task)
        own_batch = overrides.own_batch if overrides and overrides.batch == task.batch else None
        names = ("model", "device", "threads", "interconnect")
        shown = {name: getattr(seen, name) for name in names}
        self._wanted = asked.of_run(task, own_batch, **shown)
        advice = serve(self._wanted, strict=self._strict)
        self._strict = False  # only for the run's first model
        self._record = record = advice.record
        if overrides is not None and (why := overrides.mismatch(record, task.batch)):
            warn_in_hook(why)
        if record is None or (asked.quiet and not record.compares):
            warn_in_hook(advice.served.notice)
            return None
        self._status = advice.status
        config, own = _followed(record, advice.config, seen)
        if why := known_to_any_rank(self._failures.of(config, record)):
            line = tune_again(dataclasses.replace(record, stale=why), asked.cache)
            warn_in_hook(
                f"the advice is left out: this run failed with it ({why}). {GOES_ON}. To measure "
                f"again: {line}"
            )
            return self.finish(own, own, f"{knobs.described(config, own)} failed: {why}")
        warn_in_hook(advice.served.notice)
        base, reason = record.baseline.config, advice.served.reason
        if unoffered := _unoffered(advice.config.changed(base), seen):
            reason = _without(unoffered, _UNOFFERED, reason, alone=config == own)
        if advice.artifacts is not None and knobs.compiles(config):
            advice.artifacts.load()  # the next call of the model compiles
            reason += f"; {advice.artifacts.said}" if advice.artifacts.said else ""
        feeds = advice.config.changed(base).only(*knobs.INPUT_PIPELINE)
        if left := feeds.only(*(name for name in feeds if config.get(name) != feeds[name])):
            quiet = settings.is_on("ADVISOR_KEEP_LOADER")
            reason = _without(left, _why_unfed(seen), reason, alone=config == own, quiet=quiet)
        elif config == own and advice.config != base and not unoffered:
            reason = "the script itself already does what is advised"
        return self.finish(config, own, reason)

    def finish(
        self, config: Config, own: Config, reason: str, *, say: Callable[[str], None] = _log.info
    ) -> BlockRequest:
        """Make the last request. Report it now, and by every advice that the pilot replaces."""
        assert self._seen is not None
        what = knobs.described(config, own, nothing=self._seen.task(self._command, {}).baseline)
        line = f"in force: {what}; {reason.removeprefix(f'{what}: ')}"
        say(line)
        defer_to_pilot(line, self._status)
        timed = tracking.TIMED if tracking.SINKS and not self._seen.rank else 0
        self._request, self._reason = BlockRequest(config=config, own=own, warm=timed), reason
        return self._request

    def next(self, result: BlockResult) -> BlockRequest:
        """The last request without timed steps, once these are timed for the trackers."""
        request = self._request
        if self._dropped:
            return BlockRequest(config=request.own, own=request.own)
        if result.outcome != "ok" or result.compiled:
            return request
        assert self._seen is not None
        if self._record is None:  # a search within this run has stored it
            with contextlib.suppress(AdvisorError):
                self._record = look_up(self._wanted).record
        rate = result.samples * self._seen.processes / result.seconds
        found = tracking.figures(request.config, request.own, rate, self._record)
        while tracking.SINKS:
            tracking.SINKS.pop()(found)
        return dataclasses.replace(request, warm=0)

    def failed(self, exc: BaseException) -> None:
        _log.info("the pilot ends: %s", exc)
        why = stopped(exc)
        if why == "unclear" and self._strict:
            raise NoRecord(str(exc)) from exc
        if is_out_of_memory(exc) and self._request.config == self._request.own:
            line = f"advisor fit -- {shlex.join(self._command)}"
            warn_of_failure(f"memory ran out; to find the fastest way to train that fits: {line}")
        if why in ("untrained", "unclear", "over"):
            warn_in_hook(f"{exc}{_UNTRAINED if why == 'untrained' else f'. {GOES_ON}'}")

    def script_failed(self, exc: BaseException, request: BlockRequest) -> None:
        noted = any(note.startswith(NOTED) for note in getattr(exc, "__notes__", ()))
        # While configs are tried, any exception may be theirs: the script may read what is inside
        # its model, as by `numpy()`.
        tries = request.steps > 0 and isinstance(exc, Exception)
        possible = request.config != request.own and (tries or may_be_config_error(exc))
        if possible and not noted:  # else `backward_failed` has reported it
            warn_of_failure(f"the script ended {self._blame(exc, request)}")

    def config_dropped(self, exc: BaseException) -> None:
        if stopped(exc) == "unfed":  # the loader's part was dropped; the rest stays in force
            config, own = self._request.config, self._request.own
            left = config.changed(own).only(*knobs.INPUT_PIPELINE)
            fed = config | own.only(*left)
            quiet, alone = settings.is_on("ADVISOR_KEEP_LOADER"), fed == own
            said = _without(left, str(exc), self._reason, alone=alone, quiet=quiet)
            self.finish(fed, own, said)
            return
        self._dropped = True
        warn_of_failure(
            f"the advice failed ({type(exc).__name__}: {exc}). The failed call is repeated without "
            "it, and training goes on without it"
        )

    def backward_failed(self, exc: Exception, request: BlockRequest) -> None:
        self._dropped = True
        if lost := lost_rank(exc):
            exc.add_note(f"{NOTED}another rank is gone ({lost}), so this one ends too")
            return
        exc.add_note(f"{NOTED}backward raised this {self._blame(exc, request)}")

    def _blame(self, exc: BaseException, request: BlockRequest) -> str:
        """A message about the config under which a script failed, which is remembered."""
        said = f"under advice, a possible cause: {knobs.described(request.config, request.own)}"
        said += self._remember(exc, request)
        return f"{said}. ADVISOR_DISABLE=1 runs the script unmodified"

    def _remember(self, exc: BaseException, request: BlockRequest) -> str:
        """If the config in force may be the cause, store that: the next start leaves the config
        out. Returns this for the user."""
        if request.steps or not may_be_config_error(exc):
            return ""
        assert self._failures is not None
        kept = self._failures.keep(request.config, failure(exc)[1])
        return "; the next start leaves it out" if kept else "; that could not be stored"


def _followed(record: Record, advised: Config, seen: ScriptFacts) -> tuple[Config, Config]:
    """(The config of a run that follows a record, the run's own config)."""
    base = record.baseline.config
    own = base | seen.own.only(*base)
    changed = advised.changed(base)
    left = {*seen.kept, *_unoffered(changed, seen)}
    config = own | changed.only(*own).without(*left)
    if knobs.workers(config) > max(seen.workers, knobs.workers(own)):
        config = config.replace(**{knobs.WORKERS: seen.workers})
    return config, own


def _unoffered(changed: Config, seen: ScriptFacts) -> Config:
    """The advised settings of wrappers that this script does not offer, unless it has them."""
    wrapper = (name for name in changed if name in knobs.BY_NAME and knobs.BY_NAME[name].wrapper)
    return changed.only(
        *(n for n in wrapper if n not in seen.wrapped and seen.own.get(n) != changed[n])
    )


def _without(left: Config, why: str, reason: str, *, alone: bool, quiet: bool = False) -> str:
    """Say what advice is not in force; `quiet`: only in the log. Returns the reason for the rest of
    it; `alone`: there is no rest."""
    what = knobs.described(left, Config())
    say = _log.info if quiet else warn_in_hook
    say(f"{what}: {_NOT_IN_FORCE}; {why}")
    if alone:
        return f"{what}: all that is {_NOT_IN_FORCE}"
    return f"without {what}, with which it was measured: {reason}"


def _why_unfed(seen: ScriptFacts) -> str:
    """Why a run's loader does not get the advised settings."""
    if seen.workers:
        return f"there is room for only {seen.workers} now"
    if own := seen.own.get(knobs.WORKERS):
        return f"the loader keeps its own {own} workers; see --loader override"
    of_loader = (why for why in seen.limits if why.startswith("the loader: "))
    return next(of_loader, "no DataLoader is seen to feed the steps")
