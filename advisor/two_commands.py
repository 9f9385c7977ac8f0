"""Compare the speed and the losses of two commands that train, or of one command in two states of
the code, by running both in turn."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from advisor.bootstrap import INJECTED, OTHER_TREE
from advisor.cache.records import Records
from advisor.errors import TargetFailed, UsageError, WorkerError
from advisor.jobs.code_archive import git
from advisor.open_store import Cache, open_records
from advisor.persistence import lock_names, measuring
from advisor.tuners.decisions import START_S, STARTS
from advisor.tuners.measure.run.guarded_process import measurable
from advisor.tuners.measure.run.session import CommandProcess, PilotSession, RunEnded
from advisor.tuners.measure.runner import ConfigFailed
from advisor.tuners.scratch import ScratchFolder
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
    if a command is wrong, both train different things, or the budget is too short for one turn;
    TargetFailed if one fails; WorkerError if nothing could be measured; Busy; StoreError.
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
                    said = f"{sides[turns.at].name}: {exc}"
                    ended = f"{said}; have it train longer" if exc.outcome != "timed_out" else ""
                    if ended and exc.code:
                        raise TargetFailed(said) from exc
                left_s -= clock.spent_s
            again = turns.unconfirmed or (ended and turns.verdict == COULD_NOT_TELL)
            if not again or left_s < MIN_BUDGET_S or start == STARTS - 1:
                break
            why = ended or "a difference, which may be that of two starts"
            progress.notice(f"{why}; both start once more")
    if not turns.blocks[0]:
        why = "not one turn of both fitted into the budget; give a larger --budget"
        raise WorkerError(ended) if ended else UsageError(why)
    why = ended or turns.doubt if turns.verdict == COULD_NOT_TELL else ""
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


@contextlib.contextmanager
def worktree_of(ref: str, command: tuple[str, ...]) -> Iterator[tuple[tuple[Side, Side], str]]:
    """Context manager: yields a command in a temporary worktree of a commit, the same command in
    the current folder, and a line on both.

    Files that git does not track, such as data and virtual environments, are linked from the
    current tree where the commit has none of that name. Caches of compiled Python are not. Raises
    UsageError if there is no such commit, or the current folder is in no repository, or not in it.
    """
    root = Path(git(f"--ref {ref!r} needs a git repository", "rev-parse", "--show-toplevel"))
    below = git("--ref", "rev-parse", "--show-prefix")
    unknown = f"--ref {ref!r}: no such branch, tag or commit; see git branch -a"
    commit = git(unknown, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}")
    tracked = git("--ref", "-C", str(root), "ls-files", "-z").split("\0")
    if inside := {*command} & {str(root / name) for name in tracked if name}:
        raise UsageError(f"--ref {ref!r}: give {min(inside)} relative to this folder")
    changes = git("--ref", "status", "--porcelain", "--untracked-files=no").splitlines()
    others = git("--ref", "-C", str(root), "ls-files", "--others", "--directory", "-z")
    with ScratchFolder() as scratch:
        tree = scratch / "tree"
        # Without the user's hooks, which are for the user's own checkouts.
        add = ("-c", "core.hooksPath=/dev/null", "worktree", "add", "--quiet", "--detach")
        try:
            git(f"--ref {ref!r}", *add, str(tree), commit)
            if not (tree / below).is_dir():
                raise UsageError(f"--ref {ref!r}: that commit has no folder {below!r}")
            for name in filter(None, others.split("\0")):
                new = tree / name
                if new.name != "__pycache__" and not new.exists():
                    with contextlib.suppress(OSError):  # the commit has a file as its parent
                        new.parent.mkdir(parents=True, exist_ok=True)
                        new.symlink_to(root / name)
            first = Side("A", command, ref, tree / below, {OTHER_TREE: f"{root}/"})
            said = f"A is {ref} ({commit[:9]}), B this folder with {len(changes)} changed files"
            second = Side("B", command, "this folder")
            yield (first, second), f"{said}; files that git does not track are the same for both"
        finally:
            with contextlib.suppress(UsageError):  # it was not added
                git("--ref", "-C", str(root), "worktree", "remove", "--force", str(tree))
