"""Find out without starting a command that it was tuned already, and that nothing it depends on
has changed. In doubt, advisor starts the command and looks at its model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from advisor.cache.codec import to_plain
from advisor.cache.key import fingerprint
from advisor.cache.match import Query, compare
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.stores.filesystem import write_whole
from advisor.command_snippets import device_for
from advisor.errors import AdvisorError
from advisor.tuners.environment import detect, interconnect
from advisor.tuners.search.plan import Plan, suffices

WATCHED = (".py", ".sh", ".yaml", ".yml", ".toml", ".ini", ".cfg")
"""Endings of files below the working folder that may affect what a script trains."""
MAX_WATCHED = 20_000  # with more files below the working folder, advisor starts the command
_VOLATILE = ("_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "WINDOWID", "PYTEST_CURRENT_TEST")
_OF_TERMINALS = ("SSH_", "TERM", "TMUX", "XDG_SESSION", "DBUS_", "VTE_")
"""Names, and starts of names, of variables that depend on the terminal and affect no training."""


class CommandCall:
    """One call of `advisor tune -- COMMAND`. `permitted`: fields of a Task."""

    def __init__(
        self, records: Records, command: tuple[str, ...], permitted: Mapping[str, Any], plan: Plan
    ) -> None:
        self.records, self.command, self.permitted, self.plan = records, command, permitted, plan
        name = f"{fingerprint(list(command))[:12]}.json"
        self._file = records.studies.parent / "runs" / name
        self._state = self._state_now()

    def _state_now(self) -> str:
        """A digest of everything that the result may depend on; '' if a part is unknown."""
        plan = dataclasses.replace(self.plan, budget_s=None, trials=None, force=False)
        try:
            files, folder = sorted(_files(self.command)), str(Path.cwd())
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
        """The record of an earlier equal call, or None if anything has changed since."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AdvisorError):
            kept = json.loads(self._file.read_text())
            if not self._state or kept["state"] != self._state:
                return None
            record = self.records.one(kept["record"]).record
            key = record.key
            device = device_for(record)
            links = interconnect(device, key.task.processes)
            here = Query(environment=detect(device), threads=key.threads, interconnect=links)
            same = key.task.command == self.command and compare(here, key)[0] == "exact"
            if same and record.compares and not too_little(record, self.plan):
                return record
        return None

    def remember(self, record: Record) -> None:
        """Note the record of this call, unless the state has changed since the call began."""
        with contextlib.suppress(OSError, AdvisorError):
            if self._state and self._state == self._state_now():
                made = {"state": self._state, "record": record.id}
                write_whole(self._file, json.dumps(made).encode())


def too_little(known: Record, plan: Plan) -> str:
    """Why a record does not suffice for a plan, and what the call does; '' if it suffices."""
    made = known.provenance
    if known.stale:
        return f"the record is marked stale ({known.stale}): measuring again"
    if not suffices(made.effort, plan.effort):
        return f"already tuned {made.how}; continuing with --effort {plan.effort}"
    if plan.seconds > made.budget_s:
        spent = f"already tuned with --budget {made.budget_s:g}s"
        return f"{spent}; continuing with {plan.seconds:g}s"
    return ""


def _files(command: Sequence[str]) -> Iterator[list[Any]]:
    """Generator: yields [path, size, time of change] of each file that a command names, and of the
    files with WATCHED below the working folder. Raises OSError if that folder was removed, or has
    too many files."""
    paths = [Path(word.rpartition("=")[2]) for word in command]
    seen = 0
    for folder, below, names in os.walk(Path.cwd()):
        below[:] = [one for one in below if not one.startswith(".") and one != "__pycache__"]
        paths += [Path(folder) / name for name in names if name.endswith(WATCHED)]
        seen += len(names)
        if seen > MAX_WATCHED:
            raise OSError("too many files")
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                yield [str(path), found.st_size, found.st_mtime_ns]
