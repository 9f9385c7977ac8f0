"""Every error and warning of advisor.

AdvisorError
├── UsageError            an argument, option or variable is wrong (exit code 2)
│   └── TargetError       the target's own code or name is wrong
├── TargetFailed          the target was loaded, and its code failed when run
├── StoreError            the store cannot be read or written
│   ├── StoreDamaged      the store is corrupt; `advisor tune` moves it aside
│   └── RecordDamaged     one record in it cannot be read
│       └── RecordNewer   because a newer version of advisor wrote it
├── NoRecord              no record fits
├── RanksDiffer           the processes of one job would train differently, and hang
├── WorkerError           no worker could measure
└── Busy                  another process measures this workload or uses this device
AdvisorWarning            why `apply` changes nothing, or that it uses a stale record

Exit code 2 for UsageError and TargetError, 1 for others. A message is one line with a remedy.
"""

from __future__ import annotations

from typing import Any


def printable(text: str, keep: str = "") -> str:
    """The text with '?' for each character that could steer a terminal, except those in `keep`."""
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)


def reason(exc: BaseException) -> str:
    """The text of an error; for an OSError without its number and path."""
    return getattr(exc, "strerror", None) or str(exc)


class AdvisorError(Exception):
    """An error that advisor raises on purpose, with a text for the user. `details`: the traceback
    of the user's code, or ''."""

    def __init__(self, message: str = "", details: str = "") -> None:
        super().__init__(message)
        self.details = details


class UsageError(AdvisorError):
    """An argument, option or variable is wrong."""


def check_type(name: str, value: object, cls: Any, expected: str = "") -> None:
    """Raise UsageError if the argument `name` is not an instance of `cls` (a class or several)."""
    if not isinstance(value, cls):
        raise UsageError(f"{name} {value!r}: expected {expected or f'advisor.{cls.__name__}(...)'}")


class TargetError(UsageError):
    """The target cannot be loaded."""


class TargetFailed(AdvisorError):
    """The target was loaded but fails."""


class StoreError(AdvisorError):
    """The store cannot be used now: unwritable, unreadable or locked."""

    def __str__(self) -> str:
        return printable(super().__str__())  # parts may come from a server


class Unauthorized(StoreError):
    """A server rejects the token, or its role does not allow this. Retrying is useless."""


class StoreDamaged(StoreError):
    """The store is corrupt."""


class RecordDamaged(StoreError):
    """Stored data is no record that this version can read."""


class RecordNewer(RecordDamaged):
    """A newer version of advisor wrote the record, in a format that this one cannot read."""


class NoRecord(AdvisorError):
    """No record fits the request."""


class RanksDiffer(AdvisorError):
    """The ranks of a process group have different advice."""


class WorkerError(AdvisorError):
    """No worker process could be started, or none survived."""


class Busy(AdvisorError):
    """Another process is measuring the same workload, or on the same device."""


class AdvisorWarning(UserWarning):
    """Advice is missing or stale; the training run is unharmed."""
