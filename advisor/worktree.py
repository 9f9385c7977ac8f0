"""A commit of the current git repository in a temporary worktree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from advisor.bootstrap import OTHER_TREE
from advisor.errors import UsageError
from advisor.jobs.code_archive import git
from advisor.tuners.scratch import ScratchFolder
from advisor.two_commands import Side


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
