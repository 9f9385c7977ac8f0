"""Compare the speed and the losses of two commands that train, by running both in turn."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from advisor.bootstrap import INJECTED
from advisor.cache.records import Records
from advisor.errors import TargetFailed, UsageError, WorkerError
from advisor.open_store import Cache, open_records
from advisor.persistence import lock_names, measuring
from advisor.tuners.decisions import START_S, STARTS
from advisor.tuners.measure.run.guarded_process import measurable
from advisor.tuners.measure.run.session import CommandProcess, PilotSession, RunEnded
from advisor.tuners.measure.runner import ConfigFailed
from advisor.tuners.search.in_turn import COULD_NOT_TELL, InTurn, Sides
from advisor.tuners.search.plan import MIN_BUDGET_S, Clock, Progress
from advisor.workload import new_log


class Side(NamedTuple):
    """A command to compare. `folder`: its current folder, default ours."""

    name: str  # 'A' or 'B'
    command: tuple[str, ...]
    what: str = ""  # the state of the code, such as 'main'
    folder: Path | None = None
    variables: Mapping[str, str] = MappingProxyType({})

    @property
    def shown(self) -> str:
        return f"{self.what and f'{self.what}: '}{shlex.join(self.command)}"


class CommandsCompared(NamedTuple):
    """The result of `compare_commands`. `reason`: why the verdict is 'could not tell'."""

    sides: tuple[Side, Side]
    turns: InTurn
    reason: str
    measured_s: float  # without the starts


def compare_commands(
    sides: tuple[Side, Side], *, budget_s: float, cache: Cache = None, progress: Progress
) -> CommandsCompared:
    """Start two commands, have them train in turn for at most `budget_s` seconds, and end them.

    One waits between two of its steps while the other trains; the pilots change nothing else. What
    is contained is as while tuning. `cache`: the store whose folder has the logs. Raises UsageError
    if a command is wrong, or both train different things; TargetFailed if one fails; WorkerError
    if nothing could be measured; Busy; StoreError.
    """
    for side in sides:
        measurable(side.command)
    records, turns, left_s = open_records(cache, fallback=True), InTurn(), budget_s
    with measuring(records, [word for one in sides for word in one.command], lock_names()):
        for start in range(STARTS):
            order = sides[::-1] if start % 2 else sides
            with _started(order, records, progress) as sessions:
                progress.phase("both train; now they are timed in turn")
                clock, ended = Clock(left_s), ""
                try:
                    turns.measure(sessions, clock)
                except ConfigFailed as exc:
                    raise WorkerError(str(exc)) from exc
                except RunEnded as exc:
                    ended = f"{exc}; have it train longer" if exc.outcome != "timed_out" else ""
                    if ended and exc.code:
                        raise TargetFailed(f"{sides[turns.at].name}: {exc}") from exc
                left_s -= clock.spent_s
            again = turns.unconfirmed or (ended and turns.verdict == COULD_NOT_TELL)
            if not again or left_s < MIN_BUDGET_S or start == STARTS - 1:
                break
            why = ended or "a small difference, which may be that of two starts"
            progress.notice(f"{why}; both start once more")
    if not turns.blocks[0]:
        why = "not one turn of both fitted into the budget; give a larger --budget"
        raise WorkerError(ended or why)
    why = ended or "the interval is too wide; give a larger --budget, or use a quieter machine"
    why = why if turns.verdict == COULD_NOT_TELL else ""
    return CommandsCompared(sides, turns, why, budget_s - left_s)


@contextlib.contextmanager
def _started(sides: Sequence[Side], records: Records, progress: Progress) -> Iterator[Sides]:
    """Context manager: starts both commands, one after the other, and waits for their steps."""
    with contextlib.ExitStack() as running:
        found: dict[str, PilotSession] = {}
        for side in sides:
            name, words, _what, at, env = side
            log = new_log(records, (name, *words))
            progress.phase(f"{name} starts: {side.shown}  (output: {log})")
            start = CommandProcess(words, injected=INJECTED, log=log, folder=at, variables=env)
            try:
                found[name] = PilotSession(start, START_S, log, real=False)
            except RunEnded as exc:
                fit = "both must fit into the memory at once, so give both a smaller batch: "
                why = fit if exc.outcome == "out_of_memory" and found else ""
                raise TargetFailed(f"{name}: {why}{exc}") from exc
            running.callback(found[name].end)
        both = found["A"], found["B"]
        if differs := unlike(both):
            raise UsageError(f"the commands train different things, {differs}; compare like ones")
        yield both


def unlike(sides: Sides) -> str:
    """How two commands train different things, as text; '' if they do not. Their code, settings and
    number format may differ."""
    a, b = (one.seen for one in sides)
    if a.parameters != b.parameters:
        return f"models of {a.parameters:,} and of {b.parameters:,} parameters"
    # Where sizes vary, the first steps of the two may show other ones.
    shapes = [(s.shape[0], len(s.shape)) if a.varies or b.varies else s.shape for s in (a, b)]
    said = "batches of {} and of {}".format(*("x".join(map(str, s.shape)) for s in (a, b)))
    return said if shapes[0] != shapes[1] else ""
