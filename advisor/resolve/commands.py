"""The records of a command, found without starting it: for `advisor why -- COMMAND`, and for
`advisor run --map`, which sets options of the command to the values that a record advises."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from advisor.cache.config import BATCH, Value
from advisor.cache.key import Environment
from advisor.cache.match import Query
from advisor.cache.name import command_digest
from advisor.cache.reader import RecordFilter, StoredRecord
from advisor.cache.record import PILOT, Record
from advisor.cache.records import Records
from advisor.command_snippets import device_for, staleness
from advisor.errors import NoRecord
from advisor.open_store import Cache, open_records
from advisor.resolve.failures import Failures
from advisor.resolve.lookups import look_up
from advisor.resolve.request import Request
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.environment import default_device, detect
from advisor.tuners.knobs import SAVING
from advisor.tuners.measure.run.guarded_process import isolated
from advisor.tuners.measure.run.mapped_options import MappedOptions

MAX_READ = 1_000  # the most records that are read, the newest first


def of_command(records: Records, command: Sequence[str]) -> list[StoredRecord]:
    """The records of exactly this command, the newest first."""
    return [r for r in records.newest(MAX_READ) if r.record.key.task.command == tuple(command)]


def saves_memory(command: Sequence[str], device: str, cache: Cache) -> tuple[str, ...]:
    """The knobs by which this command, with any numbers in it, had to save memory when it was tuned
    last on a device. Raises StoreError if no store can be read."""
    last = _last(_with_any_numbers(open_records(cache), command, detect(device)), command)
    return tuple(last.baseline.config.only(*SAVING)) if last is not None else ()


def _with_any_numbers(
    records: Records, command: Sequence[str], here: Environment
) -> Iterator[Record]:
    """Generator: yields the records of a command, whatever the numbers in it, on a device."""
    wanted = RecordFilter(command=command_digest(command), query=Query(environment=here))
    held = (one.record for one in records.held(wanted))
    yield from (one for one in held if one.key.environment.device == here.device)


def _last(known: Iterable[Record], command: Sequence[str]) -> Record | None:
    """The newest record of exactly this command, else the newest; None if there is none."""
    exact = tuple(command)
    return max(
        known,
        key=lambda one: (one.key.task.command == exact, one.provenance.created, one.id),
        default=None,
    )


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
    record = next((one for one in known if one.compares and _is_of_this_device(one)), known[0])
    key, device = record.key, device_for(record)
    asked = Request(cache=cache, device=device, model=key.model)
    # A launcher may set the threads of several processes, as torchrun does.
    threads = key.threads if key.task.processes > 1 else None
    served = look_up(asked.of_run(key.task, threads=threads))
    if served.record is None:
        return served
    if why := Failures(cache, key.model, key.task).of(served.config, served.record):
        return Served(status="miss", reason=f"this run failed with the advice ({why})")
    return served


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOverrides:
    """Options of a command that the record with the id `record` has set; `said`: these options.

    `batch`: the samples per step that they set, 0 for none; `own_batch`: the user's batch.
    """

    record: str
    said: str
    batch: int
    own_batch: int

    def mismatch(self, served: Record | None, batch: int) -> str:
        """A warning if the command trains another model or batch than the record says; else ''."""
        if self.batch and batch != self.batch:
            what = f"has {batch} samples a step, not {self.batch}"
        elif served is None or served.id != self.record:
            what = f"is of record {served.id}" if served else "has no record"
        else:
            return ""
        return f"{self.said} was set as record {self.record} advises, and this run {what}"


def override(
    command: Sequence[str], options: Mapping[str, Value], cache: Cache = None
) -> tuple[tuple[str, ...], CommandOverrides]:
    """(The command with its options set to what its record advises, these options). The model is
    unknown before the start, so the record is found by the words of the command, whatever the
    numbers in them.

    `options`: of the command, by the knob that `--map` names. Raises NoRecord if no record fits.
    """
    mapped = MappedOptions(command, options)
    # Search under each name, because every command has its own record of a key.
    records = open_records(cache)
    known = (
        one
        for here in {detect(default_device()), detect("cpu")}
        for one in _with_any_numbers(records, command, here)
        if set(options) <= set(one.key.task.map) and not one.stale
    )
    if (record := _last(known, command)) is None:
        words = [word for pair in options.items() for word in ("--map", "=".join(map(str, pair)))]
        line = shlex.join(["advisor", "tune", *words, "--", *command])
        raise NoRecord(f"this command was not tuned with {shlex.join(words)}; run: {line}")
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
