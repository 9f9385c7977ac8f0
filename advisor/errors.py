"""Every error and warning of advisor.

AdvisorError
├── UsageError            an argument, option or variable is wrong (exit code 2)
│   └── TargetError       the target's own code or name is wrong
├── TargetFailed          the target was loaded, and its code failed when run
├── StoreError            the store cannot be read or written
│   ├── StoreDamaged      it is no store any more; `advisor tune` moves it aside
│   └── RecordDamaged     one record in it cannot be read
│       └── RecordNewer   because a newer version of advisor wrote it
├── NoRecord              nothing tuned fits
├── RanksDiffer           the processes of one job would train differently, and hang
├── WorkerError           no worker could measure
└── Busy                  another process measures the same, or on this device
AdvisorWarning            why `apply` changes nothing, or serves a stale record

All but UsageError and its kind mean exit code 1. Each message is one line: value, rule, remedy.
"""

from __future__ import annotations

from pathlib import Path


def printable(text: str) -> str:
    """The text with '?' for each character that could steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


class AdvisorError(Exception):
    """What advisor raises on purpose; its text is for the user."""


class UsageError(AdvisorError):
    """Something was asked in a wrong way."""


class TargetError(UsageError):
    """The target cannot be loaded. `details`: the traceback of the user's code, or ''."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class TargetFailed(AdvisorError):
    """The target was loaded but fails. `details`: the traceback of the user's code, or ''."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class StoreError(AdvisorError):
    """The store cannot be used now: unwritable, unreadable or locked."""

    def __str__(self) -> str:
        return printable(super().__str__())  # a server or a database may have said part of it


class Unauthorized(StoreError):
    """A server's token holds no more, or may not do that: no waiting helps."""


class StoreDamaged(StoreError):
    """The store at `path` is corrupt."""

    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = path


class RecordDamaged(StoreError):
    """Stored data is no record that this version can read."""


class RecordNewer(RecordDamaged):
    """A newer version of advisor wrote it, in a form that this one cannot read."""


class NoRecord(AdvisorError):
    """Nothing that was tuned answers the question."""


class RanksDiffer(AdvisorError):
    """Ranks of one process group have different advice."""


class WorkerError(AdvisorError):
    """No worker process could be started, or none survived."""


class Busy(AdvisorError):
    """Another process measures the same now, or on the same device."""


class AdvisorWarning(UserWarning):
    """Advice is missing or stale; the training run is unharmed."""
