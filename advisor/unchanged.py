"""Whether a command was tuned already, told without starting it: nothing that it may depend on has
changed since. Where that is not sure it is started, and its model says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from advisor.cache.codec import to_plain
from advisor.cache.key import fingerprint
from advisor.cache.record import Provenance, Record
from advisor.cache.records import Records
from advisor.cache.stores.filesystem import write_whole
from advisor.errors import AdvisorError
from advisor.printed import staleness
from advisor.tuners.search.plan import Plan, suffices

SUFFIXES = (".py", ".sh", ".yaml", ".yml", ".toml", ".ini", ".cfg")
"""Of files below the working folder by which a script may train something else."""
MOST_FILES = 20_000
"""That are looked at below it; where there are more, it is not told."""
_VOLATILE = ("_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "WINDOWID", "PYTEST_CURRENT_TEST")
_OF_TERMINALS = ("SSH_", "TERM", "TMUX", "XDG_SESSION", "DBUS_", "VTE_")
"""Variables that are not the same in another terminal, and decide nothing."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One call of `advisor tune -- COMMAND`: what it would measure, if it were started.

    Args:
        permitted: fields of a Task, as `RunWorkload` takes them.
    """

    records: Records
    command: tuple[str, ...]
    permitted: Mapping[str, Any]
    plan: Plan

    def state(self) -> str:
        """A digest of all that it may depend on; '' where that cannot be told."""
        plan = dataclasses.replace(self.plan, budget_s=None, trials=None, force=False)
        try:
            files = sorted(_files(self.command))
            folder = str(Path.cwd())
        except OSError:
            return ""
        asked = [to_plain(plan), {name: to_plain(v) for name, v in self.permitted.items()}]
        return fingerprint([asked, list(self.command), folder, files, _variables()])

    def known(self) -> Record | None:
        """The record of this call, if it was made and nothing has changed since."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AdvisorError):
            kept = json.loads(self._file.read_text())
            if not kept["state"] or kept["state"] != self.state():
                return None
            record = self.records.get(kept["record"])
            same = record.key.task.command == self.command and not record.stale
            made = record.provenance
            enough = suffices(made.effort, self.plan.effort) and not larger(self.plan, made)
            enough = enough and record.compares
            if same and enough and not staleness(record) and _are_installed(record.key.libraries):
                return record
        return None

    def remember(self, record: Record, before: str) -> None:
        """That it is tuned; `before`: its state when it was started."""
        with contextlib.suppress(OSError, AdvisorError):
            if before and before == self.state():
                made = {"state": before, "record": record.id}
                write_whole(self._file, json.dumps(made).encode())

    @property
    def _file(self) -> Path:
        name = fingerprint(list(self.command))[:12]
        return self.records.studies.parent / "runs" / f"{name}.json"


def larger(plan: Plan, made: Provenance) -> bool:
    """Whether a larger budget was typed than a record was made with: its tuning goes on."""
    return plan.budget_s is not None and plan.budget_s > made.budget_s


def _files(command: Sequence[str]) -> Iterator[list[Any]]:
    """What the words of a command name, and what below the working folder says what it does: path,
    size and time of the last change.

    Raises:
        OSError: the working folder is gone.
    """
    named = [Path(word.rpartition("=")[2]) for word in command]
    below = (
        Path(folder) / name
        for folder, folders, names in _walk(Path.cwd())
        for name in names
        if name.endswith(SUFFIXES)
    )
    for path in (*named, *below):
        with contextlib.suppress(OSError, ValueError):
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                yield [str(path), found.st_size, found.st_mtime_ns]


def _walk(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    seen = 0
    for folder, folders, names in os.walk(top):
        folders[:] = [one for one in folders if not one.startswith(".") and one != "__pycache__"]
        seen += len(names)
        yield folder, folders, names
        if seen > MOST_FILES:
            raise OSError("too many files to tell")


def _variables() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _VOLATILE and not name.startswith(_OF_TERMINALS)
    }


def _are_installed(libraries: Sequence[str]) -> bool:
    """Whether these are there, each in its version."""
    try:
        return all(
            metadata.version(name) == version
            for name, _, version in (one.partition("==") for one in libraries)
        )
    except metadata.PackageNotFoundError:
        return False
