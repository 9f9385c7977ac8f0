"""`advisor run --map`: what a record says of a command's options, put into the command."""

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
from advisor.opening import Cache, open_records
from advisor.tuners.environment import default_device, detect
from advisor.tuners.measure.run.mapped_options import MappedOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class InCommand:
    """What was put into a command.

    Attributes:
        record: id of the record that says so.
        said: it, for people: '--batch-size 512'.
        batch: of a step that the command then has, where that is one of its options; else 0.
        own_batch: the user's, of the record.
    """

    record: str
    said: str
    batch: int
    own_batch: int


def with_advice(
    command: Sequence[str], options: Mapping[str, Value], cache: Cache = None
) -> tuple[tuple[str, ...], InCommand]:
    """A command as the record of it sets its options; the batch is the best where it is free.

    It is found by the words of the command, as nothing else is known before the start: those that
    were tuned may differ in numbers alone.

    Args:
        options: by what `--map` calls the knob.

    Raises:
        NoRecord: there is none. UsageError, StoreError.
    """
    mapped = MappedOptions(command, options)
    # Under every name: of a key each command has its own record.
    records, alike = open_records(cache), command_digest(command)
    known = [
        record
        for here in {detect(default_device()), detect("cpu")}
        for record in records.under_each_name(
            RecordFilter(command=alike, query=Query(environment=here))
        )
        if record.key.environment.device == here.device
        and set(options) <= set(record.key.task.map)
        and not record.stale
    ]
    if not known:
        listed = [word for pair in options.items() for word in ("--map", "=".join(map(str, pair)))]
        line = shlex.join(["advisor", "tune", *listed, "--", *command])
        raise NoRecord(f"this command was not tuned with {shlex.join(listed)}; run: {line}")
    exact = tuple(command)
    record = max(
        known, key=lambda one: (one.key.task.command == exact, one.provenance.created, one.id)
    )
    free = BATCH in mapped.names
    chosen, task = record.winner(PILOT, free=free), record.key.task
    then = MappedOptions(task.command, options)
    numbers = then.numbers(chosen.config, record.baseline.config, task.processes)
    return mapped.put(numbers), InCommand(
        record=record.id,
        said=mapped.described(numbers),
        batch=chosen.batch if free else 0,
        own_batch=record.batch,
    )
