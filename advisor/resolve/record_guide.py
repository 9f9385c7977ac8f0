"""The pilot's guide in an ordinary run: the advice for the model that it sees there."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor.cache import settings
from advisor.cache.config import Config
from advisor.cache.record import Record
from advisor.cache.task import Task
from advisor.command_snippets import tune_again
from advisor.errors import NoRecord
from advisor.open_store import Cache
from advisor.resolve.command_overrides import CommandOverrides
from advisor.resolve.failures import Failures
from advisor.resolve.lookups import serve, warn, warn_of
from advisor.resolve.request import Request
from advisor.tuners import knobs
from advisor.tuners.act.advice_usage import defer_to_pilot, disclaim_other_models, is_followed
from advisor.tuners.act.pilot.protocol import BlockRequest, BlockResult
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.faults import failure, may_be_config_error, stopped

_log = logging.getLogger("advisor")

NOTED = "advisor: "
"""Start of a note on an exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """What the user of a run permits and asks for.

    Attributes:
        given: fields of a Task.
        cache, on_miss, strict: as `apply` takes them.
        folder: where the run was started, if that is known.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    cache: Cache = None
    on_miss: str | None = None
    strict: bool = False
    folder: Path | None = None


class RecordGuide:
    """A Guide that looks up once: its first request is its last.

    Args:
        command: of the run, for messages.
        overrides: options of the command that a record has set.
    """

    def __init__(
        self, command: Sequence[str], policy: RunPolicy, overrides: CommandOverrides | None = None
    ) -> None:
        self._command, self._policy, self._overrides = tuple(command), policy, overrides
        self._flags_before = Config()
        self._order, self._reason = BlockRequest(config=Config()), ""
        self._seen: ScriptFacts | None = None
        self._strict = policy.strict

    def takes_over(self) -> bool:
        """As `Guide.takes_over`."""
        if is_followed():
            _log.info("the script follows its advice by itself; the pilot stays away")
            return False
        self._flags_before = PROCESS_FLAGS.config
        PROCESS_FLAGS.release()
        return True

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        """As `Guide.begin`.

        Raises:
            AdvisorError: why there is no advice, if the policy is strict.
        """
        return self.known(seen) or self.leave()

    def leave(self) -> BlockRequest:
        """The script goes on unmodified, with the flags that advice had set."""
        PROCESS_FLAGS.put(self._flags_before)
        if self._seen is not None:
            disclaim_other_models(self._seen.model)
        return BlockRequest(config=Config())

    def known(self, seen: ScriptFacts, *, searches: bool = False) -> BlockRequest | None:
        """The request for what was tuned for a run; None if nothing was.

        Args:
            searches: a miss starts a search: it is not reported, and a record without a race is
                one.

        Raises:
            AdvisorError: why there is no advice, if the policy is strict.
        """
        self._seen = seen
        asked = {"device": seen.device, "cache": self._policy.cache, "quiet": searches}
        advice, notices = serve(
            lambda: self._request(seen, quiet=searches),
            asked,
            strict=self._strict,
            goes_on="as the script is",
        )
        self._strict = False  # it is for the run's first model
        record, reason = advice.record, advice.served.reason
        if self._overrides is not None:
            _warn_of_other_run(self._overrides, record, self._task(seen).batch)
        if record is None or (searches and not record.compares):
            warn_of(notices)
            return None
        config, own = _followed(record, advice.config, seen)
        if why := self._failures(seen).of(config, record):
            line = tune_again(dataclasses.replace(record, stale=why), self._policy.cache)
            warn(
                f"the advice is left out: this run failed with it ({why}). Training goes on as the "
                f"script is. To measure again: {line}"
            )
            return self.stay(own, own, f"{knobs.described(config, own)} failed: {why}")
        warn_of(notices)
        if advice.artifacts is not None and knobs.compiles(config):
            advice.artifacts.load()  # the next call of the model compiles
            reason += f"; {advice.artifacts.said}" if advice.artifacts.said else ""
        if left := _left_out(record, advice.config, config):
            self._report_left_out(left, _why_unfed(seen))
            reason = _without(left, reason, alone=config == own)
        elif config == own and advice.config != record.baseline.config:
            reason = "it has itself what is advised"
        return self.stay(config, own, reason)

    def _request(self, seen: ScriptFacts, *, quiet: bool) -> Request:
        task, overrides, policy = self._task(seen), self._overrides, self._policy
        return Request.of_run(
            task,
            policy.given,
            own_batch=overrides.own_batch if overrides and overrides.batch == task.batch else None,
            model=seen.model,
            device=seen.device,
            threads=seen.threads,
            cache=policy.cache,
            on_miss=policy.on_miss,
            folder=policy.folder,
            quiet=quiet,
        )

    def _task(self, seen: ScriptFacts) -> Task:
        return seen.task(self._command, self._policy.given)

    def _failures(self, seen: ScriptFacts) -> Failures:
        return Failures(self._policy.cache, seen.model, self._task(seen))

    def stay(
        self, config: Config, own: Config, reason: str, *, say: Callable[[str], None] = _log.info
    ) -> BlockRequest:
        """The last request, reported here and by every advice that it replaces."""
        what = "your unmodified script" if config == own else knobs.described(config, own)
        line = f"in force: {what}; {reason.removeprefix(f'{what}: ')}"
        say(line)
        defer_to_pilot(line)
        self._order, self._reason = BlockRequest(config=config, own=own), reason
        return self._order

    @staticmethod
    def _report_left_out(left: Config, why: str) -> None:
        """Report advice for the loader that is not in force; only in the log if that was asked."""
        say = _log.info if settings.keeps_loader() else warn
        say(f"{knobs.described(left, Config())}: advised, and not in force; {why}")

    def next(self, result: BlockResult) -> BlockRequest:
        """Never asked: the first request is the last."""
        raise NotImplementedError

    def failed(self, exc: BaseException) -> None:
        """As `Guide.failed`.

        Raises:
            NoRecord: why there is no advice, if the policy is strict.
        """
        _log.info("the pilot ends: %s", exc)
        why = stopped(exc)
        if why == "unclear" and self._strict:
            raise NoRecord(str(exc)) from exc
        if why == "untrained":
            warn(str(exc))
        if why in ("unclear", "over"):
            warn(f"{exc}. Training goes on unmodified")

    def script_failed(self, exc: BaseException, order: BlockRequest) -> None:
        """As `Guide.script_failed`, unless `backward_failed` has reported it."""
        noted = any(note.startswith(NOTED) for note in getattr(exc, "__notes__", ()))
        if may_be_config_error(exc) and not noted:
            warn(f"the script ended {self._blamed(exc, order)}")

    def config_dropped(self, exc: BaseException) -> None:
        """As `Guide.config_dropped`. If it was the loader's part, the rest stays in force."""
        if stopped(exc) == "unfed":
            config, own = self._order.config, self._order.own
            left = config.changed(own).only(*knobs.INPUT_PIPELINE)
            self._report_left_out(left, str(exc))
            fed = config.replace(**own.only(*left))
            self.stay(fed, own, _without(left, self._reason, alone=fed == own))
            return
        warn(
            f"the advice failed ({type(exc).__name__}: {exc}). What failed is done again without "
            "it, and training goes on so"
        )

    def backward_failed(self, exc: Exception, order: BlockRequest) -> None:
        """As `Guide.backward_failed`."""
        exc.add_note(f"{NOTED}backward raised this {self._blamed(exc, order)}")

    def _blamed(self, exc: BaseException, order: BlockRequest) -> str:
        """What is said of a config under which a script failed. If it may be the cause, the next
        start leaves it out."""
        said = f"under advice, which may be why: {knobs.described(order.config, order.own)}"
        if may_be_config_error(exc) and not order.steps:
            assert self._seen is not None
            kept = self._failures(self._seen).keep(order.config, failure(exc)[1])
            said += "; the next start does without it" if kept else "; that could not be kept"
        return f"{said}. ADVISOR_DISABLE=1 runs the script unmodified"


def _warn_of_other_run(overrides: CommandOverrides, record: Record | None, batch: int) -> None:
    """Options were set by the words of the command: warn if its model is not the record's."""
    if record is not None and record.id != overrides.record:
        what = f"is of record {record.id}"
    elif overrides.batch and batch != overrides.batch:
        what = f"has {batch} samples a step, not {overrides.batch}"
    elif record is None:
        what = "is none that was tuned"
    else:
        return
    warn(f"{overrides.said} was set as record {overrides.record} advises, and this run {what}")


def _followed(record: Record, advised: Config, seen: ScriptFacts) -> tuple[Config, Config]:
    """(The config of a run that follows a record, the run's own config)."""
    base = record.baseline.config
    own = base.replace(**{name: seen.own[name] for name in seen.own if name in base})
    changed = advised.changed(base)
    config = own.replace(**{n: v for n, v in changed.items() if n in own and n not in seen.kept})
    if knobs.workers(config) > max(seen.workers, knobs.workers(own)):
        config = config.replace(**{knobs.WORKERS: seen.workers})
    return config, own


def _left_out(record: Record, advised: Config, config: Config) -> Config:
    """What is advised for the loader and is no part of the run's config."""
    feeds = advised.changed(record.baseline.config).only(*knobs.INPUT_PIPELINE)
    return Config({name: value for name, value in feeds.items() if config.get(name) != value})


def _why_unfed(seen: ScriptFacts) -> str:
    """Why a run's loader does not get what is advised for it."""
    if seen.workers:
        return f"there is room for {seen.workers} now"
    if own := seen.own.get(knobs.WORKERS):
        return f"the loader has {own} of its own, and keeps them; see --loader override"
    of_loader = (why for why in seen.limits if why.startswith("the loader: "))
    return next(of_loader, "no DataLoader is seen to feed the steps")


def _without(left: Config, reason: str, *, alone: bool) -> str:
    """Why the rest of a config is in force; `alone`: nothing is left of it."""
    if alone:
        return f"{knobs.described(left, Config())}: all that is advised, and not in force"
    return f"without {knobs.described(left, Config())}, with which it was measured: {reason}"
