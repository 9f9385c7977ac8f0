"""What was tuned for a command, by its words: it is not started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from advisor.cache.record import Choice, Record
from advisor.cache.records import Records
from advisor.printed import staleness
from advisor.tuners.environment import default_device, detect

MOST = 1_000
"""Records that are read, the newest: a store holds some for each model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfCommand:
    """A record of a command.

    Attributes:
        state: 'exact', 'nothing else raced', 'stale: ...' or 'of another device: ...'.
        fits: whether it is of this device, and something was raced.
        signed: as `StoredRecord.trusted`.
    """

    record: Record
    state: str
    fits: bool
    signed: bool

    @property
    def advised(self) -> Choice:
        """What a run is served of it."""
        return self.record.winner(self.record.use)


def of_command(records: Records, command: Sequence[str]) -> list[OfCommand]:
    """The records of a command as it was typed, the newest first.

    Raises:
        UsageError: what CUDA_VISIBLE_DEVICES or the stores say is wrong.
    """
    newest = records.newest(MOST)
    return [
        _described(one.record, one.trusted)
        for one in newest
        if one.record.key.task.command == tuple(command)
    ]


def _described(record: Record, signed: bool) -> OfCommand:
    device = record.key.environment.device
    here = detect("cpu" if device.kind == "cpu" else default_device()).device == device
    differs = [*filter(None, [record.stale]), *map(str, staleness(record) if here else ())]
    state = f"stale: {', '.join(differs)}" if differs else "exact"
    if not here:
        state = f"of another device: {device.name}"
    elif not differs and not record.compares:
        state = "nothing else raced"
    return OfCommand(record=record, state=state, fits=here and record.compares, signed=signed)
