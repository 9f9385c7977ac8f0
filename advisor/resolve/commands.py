"""The records of a command, and the advice of a run, without starting the command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from advisor.cache.reader import StoredRecord
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.command_snippets import device_for, staleness
from advisor.open_store import Cache
from advisor.resolve.failures import Failures
from advisor.resolve.lookups import preview
from advisor.resolve.request import Request
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.environment import detect
from advisor.tuners.measure.run.guarded_process import isolated

MAX_READ = 1_000
"""The most records that are read, the newest first."""


def of_command(records: Records, command: Sequence[str]) -> list[StoredRecord]:
    """The records of exactly this command, the newest first."""
    newest = records.newest(MAX_READ)
    return [one for one in newest if one.record.key.task.command == tuple(command)]


def state_of(record: Record) -> str:
    """'exact', 'nothing else raced', 'stale: ...' or 'of another device: ...'."""
    if not _is_of_this_device(record):
        return f"of another device: {record.key.environment.device.name}"
    if differs := [*filter(None, [record.stale]), *map(str, staleness(record))]:
        return f"stale: {', '.join(differs)}"
    return "exact" if record.compares else "nothing else raced"


def _is_of_this_device(record: Record) -> bool:
    return detect(device_for(record)).device == record.key.environment.device


def served_to_run(command: Sequence[str], found: Sequence[StoredRecord], cache: Cache) -> Served:
    """The Served that `advisor run` would give a command with the records `found`, if its model and
    inputs have not changed. Raises AdvisorError as `look_up`."""
    if option := isolated(command):
        return Served(status="miss", reason=f"python {option} keeps advisor out")
    if not found:
        why = (
            "no record has exactly this command; `advisor run` also finds one of the same model "
            f"and inputs. To tune: advisor tune -- {shlex.join(command)}"
        )
        return Served(status="miss", reason=why)
    known = [one.record for one in found]
    raced = (one for one in known if one.compares and _is_of_this_device(one))
    record = next(raced, known[0])
    key, device = record.key, device_for(record)
    asked = Request(cache=cache, on_miss="default", device=device, model=key.model)
    served = preview(asked.of_run(key.task))
    if served.record is None:
        return served
    if why := Failures(cache, key.model, key.task).of(served.config, served.record):
        return Served(status="miss", reason=f"this run failed with the advice ({why})")
    return served
