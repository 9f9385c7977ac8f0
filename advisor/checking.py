"""check(): compare what a script itself does with strict fp32, and measure what that costs. Also
what slows a script down and no setting can fix."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from advisor.arguments import OnEvent, progress_of, split, urls_of
from advisor.cache.config import BATCH, Config
from advisor.cache.key import Key
from advisor.cache.limit import Limit
from advisor.cache.name import command_digest
from advisor.cache.reader import RecordFilter
from advisor.cache.records import Records
from advisor.cache.settings import Cache
from advisor.errors import StoreError, UsageError, WorkerError
from advisor.open_store import open_records
from advisor.persistence import lock_names, measuring
from advisor.resolve.lookups import set_up_logging
from advisor.store import Store
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.decisions import SLOW_TURN_S
from advisor.tuners.knobs import COMPILE, FORMATS, LAYOUTS, SAVING, described_own
from advisor.tuners.measure.run import rank_shares
from advisor.tuners.measure.run.run import Run
from advisor.tuners.measure.run.session import RunEnded
from advisor.tuners.measure.runner import ConfigFailed
from advisor.tuners.search.plan import CHECK, Clock, Plan, Progress
from advisor.tuners.search.ratio import Ratio
from advisor.tuners.search.visit import Visitor
from advisor.workload import OpenWorkload, RunWorkload, without_own

COMPARING_SHARE = 0.75
"""Share of the budget for the comparison: a model with dropout may use all that it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of `check`.

    Attributes:
        own: the script's own settings, as 'bf16, torch.compile'; '' if it has none.
        faults: what is wrong, as sentences with the parameter and the figure.
        numerics: how the script compares with strict fp32, or why it was not compared.
        compared: whether it was.
        steps_per_s: of the unmodified script; 0 if it was not timed.
        untimed: why it, or a part of `without`, was not timed; ''.
        without: by setting: the speed without this setting, over the script's own.
        failed: by setting: why the script does not run without it.
    """

    own: str
    faults: tuple[str, ...]
    numerics: str
    compared: bool
    steps_per_s: float
    untimed: str
    without: dict[str, Ratio]
    failed: dict[str, str]


def check(
    what: Sequence[str],
    *,
    budget: float | str = CHECK,
    store: Store | Cache = None,
    on_event: OnEvent | None = None,
) -> Checked:
    """Find what is wrong with a script's own settings, such as autocast or torch.compile.

    The reference is strict fp32 without them, on four of the script's own batches. The limits are
    those of configs in `tune`. advisor starts the command once, unmodified, and then ends it.

    Args:
        what: a command as a list of its words.
        budget: wall seconds, or '90s', of all measuring, without the first start.
        store: where the log of the command is kept; no record is read or written.
        on_event: as in `advisor.tune`; only 'notice' and 'warning' occur.

    Raises:
        UsageError: `what` is no command, or there is no such program.
        TargetFailed: the script raised, or no training step was seen. WorkerError: it cannot be
            measured. Busy: another process measures it. StoreError.
    """
    (_, command), plan = split(what), Plan.of({"budget": budget})
    if not command:
        raise UsageError("check: expected a command, as a list of its words")
    return checked_run(command, plan, urls_of(store), progress_of(on_event), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What slows a script down: `found`, the largest gain first, none below 2%; over `seconds`, in
    which it made `steps_per_s`. `ended`: why it ended before the budget was over; ''. `of_ranks`:
    as of `rank_shares.line`, if it has several."""

    found: tuple[Limit, ...]
    steps_per_s: float
    seconds: float
    ended: str
    of_ranks: str


def checked_run(
    command: Sequence[str],
    plan: Plan,
    cache: Cache,
    progress: Progress,
    show: Callable[[str], None] | None,
) -> Checked:
    """As `check`. `show`: as in RunWorkload."""
    with _started(command, plan, open_records(cache, fallback=True), progress, show) as opened:
        return _checked(opened, Clock(plan.seconds), progress)


def limits_of(command: Sequence[str], plan: Plan, cache: Cache, progress: Progress) -> Limits:
    """Observe a command's unmodified steps. The limits go into its record too, if it was tuned.
    Raises as `check`, and WorkerError if it ends, or the budget is over, before they are observed.
    """
    records = open_records(cache, fallback=True)
    with _started(command, plan, records, progress) as opened:
        run, clock = cast(Run, opened.runner), Clock(plan.seconds)
        try:
            step_s = Visitor(run, run.baseline, clock, lambda _config: None).begin().step_s
        except ConfigFailed as exc:
            raise WorkerError(f"its steps were not timed: {exc}; {clock.larger}") from exc
        ranks = run.rank_steps(step_s, deadline_s=clock.deadline_s)
        began, found, ended, until = clock.now(), tuple[Limit, ...](), "", 0.0
        while clock.left_s > 0:
            steps = max(1, round(min(SLOW_TURN_S, clock.left_s) / step_s))
            try:
                found, until = run.limits(steps, deadline_s=clock.deadline_s), clock.now()
            except RunEnded as exc:
                ended = str(exc) if exc.outcome != "timed_out" else ""
                break
        if not until:
            why = f"its steps were not observed: {ended or 'the budget was over'}"
            raise WorkerError(f"{why}; have it train for longer, or {clock.larger}")
        ordered = tuple(sorted((*rank_shares.limits(ranks), *found), key=lambda one: -one.gain))
        try:
            _keep(records, opened.key, ordered)
        except StoreError as exc:  # a read-only folder
            progress.notice(f"they are not kept with its record: {exc}")
        return Limits(
            found=ordered,
            steps_per_s=1 / step_s,
            seconds=until - began,
            ended=ended,
            of_ranks=rank_shares.line(ranks),
        )


def _keep(records: Records, now: Key, limits: tuple[Limit, ...]) -> None:
    """Add limits to the records of a command, also of one that was tuned with other permissions."""
    for one in records.all(RecordFilter(command=command_digest(now.task.command))):
        same = (one.key.model, one.key.environment) == (now.model, now.environment)
        if same and one.batch == now.task.batch:
            revised = dataclasses.replace(one, limits=limits, revised=time.time())
            records.put(revised, revises=one)


@contextmanager
def _started(
    command: Sequence[str],
    plan: Plan,
    records: Records,
    progress: Progress,
    show: Callable[[str], None] | None = None,
) -> Iterator[OpenWorkload]:
    """Context manager: the command that has made its first steps, and that nobody else measures."""
    set_up_logging()
    workload = RunWorkload(command, {}, show=show)
    with (
        measuring(records, workload.words, lock_names(workload.device)),
        workload.open(records, progress, plan) as opened,
    ):
        space = workload.space(opened, plan, progress)
        # All of its own settings, also those that advisor would not offer here.
        opened.runner.baseline = space.default | cast(ScriptFacts, opened.seen).own
        yield opened


def _checked(opened: OpenWorkload, clock: Clock, progress: Progress) -> Checked:
    run, seen = cast(Run, opened.runner), cast(ScriptFacts, opened.seen)
    own_set = seen.own.without(BATCH, *SAVING)
    own, visitor = run.baseline, Visitor(run, run.baseline, clock, lambda _config: None)
    found = run.compare(own, deadline_s=COMPARING_SHARE * clock.deadline_s, checks=True)
    compared, rate, untimed = found.outcome in ("ok", "wrong"), 0.0, ""
    without, failed = dict[str, Ratio](), dict[str, str]()
    try:
        rate = 1 / visitor.begin().step_s
        for config in without_own(opened, own, (*FORMATS, COMPILE, *LAYOUTS)):
            name, visit = described_own(own, config), visitor.visit(config, 1.0)
            visitor.forget(config)
            if visit.ok:
                without[name] = visit.ratio
            else:
                failed[name] = visit.reason
        while run.watches and clock.left_s > 0:  # for the end of an epoch
            visitor.block(own, SLOW_TURN_S)
        if run.watches:
            progress.notice(f"no epoch ended, so its schedule was not checked; {clock.larger}")
    except (ConfigFailed, WorkerError) as exc:  # of the baseline: its time is over, or its training
        untimed = str(exc) if isinstance(exc, WorkerError) else clock.larger
        if not compared:
            why = f"the script is neither compared ({found.reason}) nor timed: {untimed}"
            raise WorkerError(why) from exc
    what = {"format": "its number format", "code": "its compiled code"}
    blamed = what.get(found.blames, "its optimizer")
    wrong = [f"{blamed} trains wrong: {found.reason}"] if found.outcome == "wrong" else []
    return Checked(
        own=described_own(own_set, Config(), nothing=""),
        faults=(*wrong, *run.faults),
        numerics=found.reason,
        compared=compared,
        steps_per_s=rate,
        untimed=untimed,
        without=without,
        failed=failed,
    )
