"""What a pilot is told in an ordinary run: the advice for the model that it sees there."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.cache import settings
from advisor.cache.config import Config
from advisor.cache.match import Match, Query
from advisor.cache.record import PILOT, Record
from advisor.errors import NoRecord
from advisor.finding.answer import Answer
from advisor.finding.failures import Failures
from advisor.finding.in_command import InCommand
from advisor.finding.lookups import Lookup, Offer, served, set_up_logging, warn
from advisor.finding.request import Request
from advisor.opening import Cache
from advisor.printed import tune_again
from advisor.tuners import knobs
from advisor.tuners.act.advice_usage import defer_to_pilot, disclaim_other_models, is_followed
from advisor.tuners.act.pilot.protocol import BlockRequest, BlockResult
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.faults import failure, may_be_config_error, stopped

if TYPE_CHECKING:
    pass

_log = logging.getLogger("advisor")

NOTED = "advisor: "
"""What a note on an exception begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On what terms a run is advised.

    Attributes:
        given: fields of a Task that the user permits.
        cache, on_miss, strict: as `apply` takes them.
        folder: where it was started, None where that is not known.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    cache: Cache = None
    on_miss: str | None = None
    strict: bool = False
    folder: Path | None = None


class Found:
    """A Guide that looks up, and then says nothing more.

    Args:
        command: of the run, for what is printed.
        options: what a record has set of the command's options.
    """

    def __init__(
        self, command: Sequence[str], terms: Terms, options: InCommand | None = None
    ) -> None:
        self._command, self._terms, self._options = tuple(command), terms, options
        self._put = Config()
        self._order, self._reason = BlockRequest(config=Config()), ""
        self._seen: ScriptFacts | None = None
        self._strict = terms.strict

    def takes_over(self) -> bool:
        """As `Guide.takes_over`."""
        if is_followed():
            _log.info("the script follows its advice by itself; the pilot stays away")
            return False
        self._put = PROCESS_FLAGS.config
        PROCESS_FLAGS.release()
        return True

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        """As `Guide.begin`.

        Raises:
            AdvisorError: where it is to be strict, why there is nothing.
        """
        return self.known(seen) or self.left()

    def left(self) -> BlockRequest:
        """The script goes on as it was, with the flags that advice had set."""
        PROCESS_FLAGS.put(self._put)
        if self._seen is not None:
            disclaim_other_models(self._seen.model)
        return BlockRequest(config=Config())

    def known(self, seen: ScriptFacts, *, searches: bool = False) -> BlockRequest | None:
        """What was found for a run, None where that is nothing.

        Args:
            searches: what is not known is searched for, so that of a miss nothing is said, and a
                record in which nothing was raced yet is none.

        Raises:
            AdvisorError: where it is to be strict, why there is nothing.
        """
        set_up_logging()
        self._seen = seen
        lookup = _OfRun(seen, self._command, self._terms)
        if self._options is not None and self._options.batch == lookup.batch:
            lookup.take_free(self._options.own_batch)
        lookup.leaves = (NoRecord,) if searches else ()
        advice = served(lookup, device=seen.device, strict=self._strict)
        self._strict = False  # no later model of the run is to end it
        record = advice.record
        if self._options is not None:
            _warn_of_another(self._options, record, lookup.batch)
        if record is None or (searches and not record.compares):
            return None
        config, own = _followed(record, advice.config, seen)
        reason = advice.served.reason
        if advice.artifacts is not None and knobs.compiles(config):
            advice.artifacts.load()  # the next call of the model compiles
            reason += f"; {advice.artifacts.said}" if advice.artifacts.said else ""
        if left := _left_out(record, advice.config, config):
            self._say_left(left, _why_unfed(seen))
            reason = _without(left, reason, alone=config == own)
        elif config == own and advice.config != record.baseline.config and not lookup.left_out:
            reason = "it has itself what is advised"
        return self.stays(config, own, reason)

    def stays(
        self, config: Config, own: Config, reason: str, *, say: Callable[[str], None] = _log.info
    ) -> BlockRequest:
        """The last order; see `in_force`."""
        self._order, self._reason = in_force(config, own, reason, say=say), reason
        return self._order

    @staticmethod
    def _say_left(left: Config, why: str) -> None:
        """Say what is advised for the loader and not in force; where that was asked for, in the log
        alone."""
        say = _log.info if settings.keeps_loader() else warn
        say(f"{knobs.described(left, Config())}: advised, and not in force; {why}")

    def next(self, result: BlockResult) -> BlockRequest:
        """Never asked: there is nothing to say but the first order."""
        raise NotImplementedError

    def failed(self, exc: BaseException) -> None:
        """As `Guide.failed`.

        Raises:
            NoRecord: where it is to be strict, why there is nothing.
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
        """As `Guide.script_failed`; of what was lost in backward all is said."""
        said = any(note.startswith(NOTED) for note in getattr(exc, "__notes__", ()))
        if may_be_config_error(exc) and not said:
            warn(f"the script ended {self._blamed(exc, order)}")

    def config_dropped(self, exc: BaseException) -> None:
        """As `Guide.config_dropped`; what a loader is not given is left out of what is in force."""
        if stopped(exc) == "unfed":
            config, own = self._order.config, self._order.own
            left = config.changed(own).only(*knobs.INPUT_PIPELINE)
            self._say_left(left, str(exc))
            fed = config.replace(**own.only(*left))
            self.stays(fed, own, _without(left, self._reason, alone=fed == own))
            return
        warn(
            f"the advice failed ({type(exc).__name__}: {exc}). What failed is done again without "
            "it, and training goes on so"
        )

    def backward_failed(self, exc: Exception, order: BlockRequest) -> None:
        """As `Guide.backward_failed`."""
        exc.add_note(f"{NOTED}backward raised this {self._blamed(exc, order)}")

    def _blamed(self, exc: BaseException, order: BlockRequest) -> str:
        """What is said of a config under which a script failed; advice that may be why is kept as
        failed."""
        said = f"under advice, which may be why: {knobs.described(order.config, order.own)}"
        if may_be_config_error(exc) and not order.steps:
            assert self._seen is not None
            task = self._seen.task(self._command, self._terms.given)
            failures = Failures(self._terms.cache, self._seen.model, task)
            kept = failures.keep(order.config, failure(exc)[1])
            said += "; the next start does without it" if kept else "; that could not be kept"
        return f"{said}. ADVISOR_DISABLE=1 runs the script unmodified"


def in_force(
    config: Config, own: Config, reason: str, *, say: Callable[[str], None] = _log.info
) -> BlockRequest:
    """The last order: said so, and by every advice in whose place it is."""
    what = "your unmodified script" if config == own else knobs.described(config, own)
    line = f"in force: {what}; {reason.removeprefix(f'{what}: ')}"
    say(line)
    defer_to_pilot(line)
    return BlockRequest(config=config, own=own)


def _warn_of_another(options: InCommand, record: Record | None, batch: int) -> None:
    """What was put into the command by its words alone is held against what it trains."""
    if record is not None and record.id != options.record:
        what = f"is of record {record.id}"
    elif options.batch and batch != options.batch:
        what = f"has {batch} samples a step, not {options.batch}"
    elif record is None:
        what = "is none that was tuned"
    else:
        return
    warn(f"{options.said} was set as record {options.record} advises, and this run {what}")


def _followed(record: Record, advised: Config, seen: ScriptFacts) -> tuple[Config, Config]:
    """(What a run comes to with a config of a record, what it has itself)."""
    base = record.baseline.config
    own = base.replace(**{name: seen.own[name] for name in seen.own if name in base})
    changed = advised.changed(base)
    config = own.replace(**{n: v for n, v in changed.items() if n in own and n not in seen.kept})
    if knobs.workers(config) > max(seen.workers, knobs.workers(own)):
        config = config.replace(**{knobs.WORKERS: seen.workers})
    return config, own


def _left_out(record: Record, advised: Config, config: Config) -> Config:
    """What is advised for the loader and no part of the config that a run comes to."""
    feeds = advised.changed(record.baseline.config).only(*knobs.INPUT_PIPELINE)
    return Config({name: value for name, value in feeds.items() if config.get(name) != value})


def _why_unfed(seen: ScriptFacts) -> str:
    """Why a run's loader is not given what is advised for it."""
    if seen.workers:
        return f"there is room for {seen.workers} now"
    if own := seen.own.get(knobs.WORKERS):
        return f"the loader has {own} of its own, and keeps them; see --loader override"
    of_loader = (why for why in seen.limits if why.startswith("the loader: "))
    return next(of_loader, "no DataLoader is seen to feed the steps")


def _without(left: Config, reason: str, *, alone: bool) -> str:
    """Why a config is in force, of whose advice that is left out; `alone`: nothing else is."""
    if alone:
        return f"{knobs.described(left, Config())}: all that is advised, and not in force"
    return f"without {knobs.described(left, Config())}, with which it was measured: {reason}"


class _OfRun(Lookup):
    """A lookup with the model in hand, of which a running script shows what makes its key."""

    goes_on = "as the script is"

    def __init__(self, seen: ScriptFacts, command: tuple[str, ...], terms: Terms) -> None:
        super().__init__(None, {})
        self._seen, self._terms = seen, terms
        self._task = seen.task(command, terms.given)
        self._shapes, self._free = self._task.shapes, False

    @property
    def cache(self) -> Cache:
        return self._terms.cache

    @property
    def batch(self) -> int:
        """Samples of a step, as the run is."""
        return self._task.batch

    def take_free(self, own_batch: int) -> None:
        """Look for the record of that batch, and take its best config with the batch free."""
        self._shapes, self._free = ((own_batch, *self._task.sample),), True

    def _requested(self) -> Request:
        task = self._task
        shown = ("command", "shapes", "dtype", "mode", "optimizer", "processes", "others", "script")
        seen = {name: getattr(task, name) for name in shown} | {"shapes": self._shapes}
        return Request(
            target=None,
            given=seen | dict(self._terms.given),
            batch=self._shapes[0][0],
            free=self._free,
            use=PILOT,
            device=self._seen.device,
            on_miss=self._terms.on_miss,
            cache=self._terms.cache,
        )

    def _folder(self) -> Path | None:
        return self._terms.folder

    def _queried(self, request: Request) -> Query:
        from advisor.tuners.environment import detect

        return Query(
            environment=detect(request.device),
            given=request.given,
            model=self._seen.model,
            threads=self._seen.threads if request.device == "cpu" else 0,
        )

    def _served(self, request: Request, match: Match, answered: Answer) -> Offer:
        record = match.record
        assert record is not None
        config, own = _followed(record, answered.config, self._seen)
        if why := Failures(request.cache, self._seen.model, self._task).of(config, record):
            line = tune_again(dataclasses.replace(record, stale=why), request.cache)
            warn(
                f"the advice is left out: this run failed with it ({why}). Training goes on as the "
                f"script is. To measure again: {line}"
            )
            self.left_out = True
            answered = Answer(config=own, reason=f"{knobs.described(config, own)} failed: {why}")
        return super()._served(request, match, answered)
