"""What was tuned for a command, and what a run of it would be served; it is not started."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.cache.record import Choice, Record
from advisor.cache.records import Records
from advisor.command_snippets import staleness
from advisor.open_store import Cache
from advisor.resolve.failures import Failures
from advisor.resolve.find import preview
from advisor.resolve.request import Request
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.environment import default_device, detect
from advisor.tuners.measure.run.guarded_process import isolated

MAX_READ = 1_000
"""Of the newest records: a store holds some for each model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfCommand:
    """A record of a command.

    Attributes:
        state: 'exact', 'nothing else raced', 'stale: ...' or 'of another device: ...'.
        fits: whether it is of this device, and something was raced.
        signed: by the reader or their team.
    """

    record: Record
    state: str
    fits: bool
    signed: bool

    @property
    def advised(self) -> Choice:
        return self.record.winner(self.record.use)


def of_command(records: Records, command: Sequence[str]) -> list[OfCommand]:
    """The records of a command as it was typed, the newest first.

    Raises:
        UsageError: what CUDA_VISIBLE_DEVICES or the stores say is wrong.
    """
    newest = records.newest(MAX_READ)
    return [
        _described(one.record, one.trusted)
        for one in newest
        if one.record.key.task.command == tuple(command)
    ]


def _described(record: Record, signed: bool) -> OfCommand:
    device = record.key.environment.device
    here = detect(_device_for(record)).device == device
    differs = [*filter(None, [record.stale]), *map(str, staleness(record) if here else ())]
    state = f"stale: {', '.join(differs)}" if differs else "exact"
    if not here:
        state = f"of another device: {device.name}"
    elif not differs and not record.compares:
        state = "nothing else raced"
    return OfCommand(record=record, state=state, fits=here and record.compares, signed=signed)


def _device_for(record: Record) -> str:
    return "cpu" if record.key.environment.device.kind == "cpu" else default_device()


def served_to_run(command: Sequence[str], found: Sequence[OfCommand], cache: Cache) -> Served:
    """What `advisor run` would serve a command with these records, if its model and inputs are
    still those that were tuned.

    Raises:
        AdvisorError: the device or the settings are wrong, or no store can be read.
    """
    if option := isolated(command):
        return Served(status="miss", reason=f"python {option} keeps advisor out")
    if not found:
        return Served(
            status="miss",
            reason="no record is of exactly this command; `advisor run` also finds one of the "
            f"same model and inputs. To tune: advisor tune -- {shlex.join(command)}",
        )
    record = next((one.record for one in found if one.fits), found[0].record)
    key = record.key
    request = Request.of_run(
        key.task, {}, model=key.model, device=_device_for(record), cache=cache, on_miss="default"
    )
    served = preview(request)
    if served.record is None:
        return served
    if why := Failures(cache, key.model, key.task).of(served.config, served.record):
        return Served(status="miss", reason=f"this run failed with it ({why})")
    return served
