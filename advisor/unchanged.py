"""Whether a command was tuned already, without starting it: nothing that it may depend on has
changed since. If that is not sure it is started, and its model says.
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
from advisor.command_snippets import staleness
from advisor.errors import AdvisorError
from advisor.tuners.search.plan import Plan, suffices

SUFFIXES = (".py", ".sh", ".yaml", ".yml", ".toml", ".ini", ".cfg")
"""Files below the working folder that may change what a script trains."""
MAX_FILES = 20_000
"""Below the working folder; with more of them the command is started."""
_VOLATILE = ("_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "WINDOWID", "PYTEST_CURRENT_TEST")
_OF_TERMINALS = ("SSH_", "TERM", "TMUX", "XDG_SESSION", "DBUS_", "VTE_")
"""Variables that differ in another terminal, and decide nothing."""


@dataclass(frozen=True, slots=True)
class CommandCall:
    """One call of `advisor tune -- COMMAND`.

    Args:
        permitted: fields of a Task, as RunWorkload takes them.
    """

    records: Records
    command: tuple[str, ...]
    permitted: Mapping[str, Any]
    plan: Plan

    def state(self) -> str:
        """A digest of all that the result may depend on; '' if that is not known."""
        plan = dataclasses.replace(self.plan, budget_s=None, trials=None, force=False)
        try:
            files = sorted(_files(self.command))
            folder = str(Path.cwd())
        except OSError:
            return ""
        variables = {
            name: value
            for name, value in os.environ.items()
            if name not in _VOLATILE and not name.startswith(_OF_TERMINALS)
        }
        asked = [to_plain(plan), {name: to_plain(v) for name, v in self.permitted.items()}]
        return fingerprint([asked, list(self.command), folder, files, variables])

    def known(self) -> Record | None:
        """The record of this call, if it was made and nothing has changed since."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AdvisorError):
            kept = json.loads(self._file.read_text())
            if not kept["state"] or kept["state"] != self.state():
                return None
            record = self.records.get(kept["record"])
            made, same = record.provenance, record.key.task.command == self.command
            enough = suffices(made.effort, self.plan.effort) and not larger(self.plan, made)
            sound = same and enough and record.compares and not record.stale
            if sound and not staleness(record) and _are_installed(record.key.libraries):
                return record
        return None

    def remember(self, record: Record, before: str) -> None:
        """Keep that it is tuned; `before`: its state when it was started."""
        with contextlib.suppress(OSError, AdvisorError):
            if before and before == self.state():
                made = {"state": before, "record": record.id}
                write_whole(self._file, json.dumps(made).encode())

    @property
    def _file(self) -> Path:
        name = fingerprint(list(self.command))[:12]
        return self.records.studies.parent / "runs" / f"{name}.json"


def larger(plan: Plan, made: Provenance) -> bool:
    """Whether the budget is larger than the one a record was made with: its tuning goes on."""
    return plan.budget_s is not None and plan.budget_s > made.budget_s


def _files(command: Sequence[str]) -> Iterator[list[Any]]:
    """The files that a command names, and those with SUFFIXES below the working folder: path, size
    and time of the last change.

    Raises:
        OSError: the working folder is gone, or has too many files.
    """
    paths = [Path(word.rpartition("=")[2]) for word in command]
    seen = 0
    for folder, below, names in os.walk(Path.cwd()):
        below[:] = [one for one in below if not one.startswith(".") and one != "__pycache__"]
        paths += [Path(folder) / name for name in names if name.endswith(SUFFIXES)]
        seen += len(names)
        if seen > MAX_FILES:
            raise OSError("too many files")
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                yield [str(path), found.st_size, found.st_mtime_ns]


def _are_installed(libraries: Sequence[str]) -> bool:
    """Whether these are installed in these versions, as 'torchvision==0.26.0'."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        pairs = [one.partition("==")[::2] for one in libraries]
        return all(metadata.version(name) == version for name, version in pairs)
    return False
