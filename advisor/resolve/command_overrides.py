"""`advisor run --map`: put what a record advises into the options of a command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from advisor.cache.config import BATCH, Value
from advisor.cache.match import Query
from advisor.cache.name import command_digest
from advisor.cache.reader import RecordFilter
from advisor.cache.record import PILOT
from advisor.errors import NoRecord
from advisor.open_store import Cache, open_records
from advisor.tuners.environment import default_device, detect
from advisor.tuners.measure.run.mapped_options import MappedOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOverrides:
    """Options of a command that a record has set.

    Attributes:
        record: its id.
        said: the options, for people: '--batch-size 512'.
        batch: samples of a step with them, if one of them sets the batch; else 0.
        own_batch: the user's, in the record.
    """

    record: str
    said: str
    batch: int
    own_batch: int


def override(
    command: Sequence[str], options: Mapping[str, Value], cache: Cache = None
) -> tuple[tuple[str, ...], CommandOverrides]:
    """The command with its options set to what its record advises, batch size included.

    Nothing else is known before the start, so the record is found by the words of the command;
    numbers in them may differ.

    Args:
        options: of the command, by the knob that `--map` names.

    Raises:
        NoRecord: there is none. UsageError, StoreError.
    """
    mapped = MappedOptions(command, options)
    # Under each name: every command has its own record of a key.
    records, alike = open_records(cache), command_digest(command)
    known = [
        one.record
        for here in {detect(default_device()), detect("cpu")}
        for one in records.held(RecordFilter(command=alike, query=Query(environment=here)))
        if one.record.key.environment.device == here.device
        and set(options) <= set(one.record.key.task.map)
        and not one.record.stale
    ]
    if not known:
        listed = [word for pair in options.items() for word in ("--map", "=".join(map(str, pair)))]
        line = shlex.join(["advisor", "tune", *listed, "--", *command])
        raise NoRecord(f"this command was not tuned with {shlex.join(listed)}; run: {line}")
    exact = tuple(command)
    record = max(
        known, key=lambda one: (one.key.task.command == exact, one.provenance.created, one.id)
    )
    free, task = BATCH in mapped.names, record.key.task
    chosen = record.winner(PILOT, free=free)
    then = MappedOptions(task.command, options)
    numbers = then.numbers(chosen.config, record.baseline.config, task.processes)
    return mapped.put(numbers), CommandOverrides(
        record=record.id,
        said=mapped.described(numbers),
        batch=chosen.batch if free else 0,
        own_batch=record.batch,
    )
