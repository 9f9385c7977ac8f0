"""Commands that copy, tidy and remove records: export, import, sync, gc, forget."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from advisor.cache import exchange, garbage
from advisor.cache.artifacts import Label
from advisor.cache.exchange import CopyResult
from advisor.cache.name import Name
from advisor.cache.reader import RecordFilter
from advisor.cache.record import Record, Wanted
from advisor.cache.stores.url import without_password
from advisor.cli import options
from advisor.cli.options import DONE, FAILED, Output, Parts, json_or_text, option, warn
from advisor.errors import StoreError, UsageError
from advisor.open_store import open_records
from advisor.persistence import forget_studies

only_options = options.option_group(
    option("--target TEXT", "Only records whose target's name has TEXT."),
    option("--device TEXT", "Only records whose device's name has TEXT."),
    option("--key KEY", "Only these records.", "keys", multiple=True),
)
"""Options that become the arguments of `_only`."""


def _only(target: str | None, device: str | None, keys: tuple[str, ...]) -> Wanted:
    parts = [key.partition("@") for key in keys or ("",)]

    def wanted(record: Record) -> bool:
        id, name = record.key.id, record.key.environment.device.name.lower()
        named = any(id.startswith(a) and b in ("", str(record.batch)) for a, _, b in parts)
        return named and (target or "") in record.target.name and (device or "").lower() in name

    return wanted


@click.command()
@click.argument("file", type=options.NEW_FILE)
@only_options
@options.cache
@json_or_text
def export(file: Path, cache: str | None, **only: Any) -> Parts:
    """Write records into the pack FILE. To read the pack: --cache pack:FILE."""
    records = open_records(cache)
    count = exchange.export(records, file, _only(**only))
    options.complain(records)
    damaged = [*records.unreachable, *records.damaged]
    yield f"{count} record{'s' * (count != 1)} in {file}"
    yield Output(lambda: {"file": str(file), "records": count, "damaged": damaged})


@click.command(name="import")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@only_options
@options.cache
@json_or_text
def import_(file: Path, cache: str | None, **only: Any) -> Parts:
    """Import the records of the pack FILE. Exit code 1 if a record is refused."""
    store, rows = exchange.unpack(file, open_records(cache), _only(**only))
    return _copied(rows, store.url)


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("to", metavar="TO")
@only_options
@json_or_text
def sync(source: str, to: str, **only: Any) -> Parts:
    """Copy records that are in store FROM and not in TO. Exit code 1 if a record is refused."""
    return _copied(exchange.sync(open_records([source, to]), _only(**only)), to)


def _copied(rows: Iterable[CopyResult], where: str) -> Parts:
    """Yields the outcome of each record after its copy."""
    listed, counts = [], Counter[str]()
    for row in rows:
        counts[row.outcome] += 1
        listed.append({"name": row.name, "outcome": row.outcome, "reason": row.reason})
        name = Name.parse(row.name) or Label.parse(row.name)
        id = name.record_id if name else ascii(row.name[:60])
        line = f"{row.outcome:<8} {id}  {row.target or row.reason}"
        if row.outcome == "refused":
            click.echo(line, err=True)
        elif row.outcome != "known":
            yield line
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    yield f"{without_password(where)}: {said or 'no records'}"
    yield Output(lambda: {"records": listed}, code=FAILED if counts["refused"] else DONE)


@click.command()
@option("--yes", "Remove them. Without --yes, only list them.", "remove")
@option("--only", "Only this kind.", "kinds", type=click.Choice(garbage.KINDS))
@options.cache
@json_or_text
def gc(remove: bool, kinds: str | None, cache: str | None) -> Parts:
    """List or remove superseded and damaged records, and oversized artifacts."""
    records = open_records(cache)
    going = garbage.find_garbage(records, [kinds] if kinds else garbage.KINDS)
    options.complain(records)
    if remove:
        records.remove((one.store, one.key) for one in going)
    for line in records.stuck:
        warn(f"{line}; this version stays")
    said = "removing" if remove else "would go"
    for one in going:
        yield f"{said}  {one.key.record_id}  {one.reason}  ({one.store.url})"
    if not going:
        yield "nothing to remove"
    elif not remove:
        yield "nothing was removed; to remove, add --yes"
    rows = [{"store": one.store.url, "name": one.name, "reason": one.reason} for one in going]
    data = {"removed": remove, "records": rows, "stuck": records.stuck}
    yield Output(lambda: data, code=FAILED if records.stuck else DONE)


@click.command()
@click.argument("key", required=False)
@option("--all", "Every record.", "everything")
@options.cache
@json_or_text
def forget(key: str | None, everything: bool, cache: str | None) -> Parts:
    """Remove the record KEY, or all records, unreadable ones included."""
    if (key is None) == (not everything):
        raise UsageError("name one KEY, or --all; to see the keys, run: advisor show")
    records = open_records(cache)
    versions = records.versions() if key is None else records.named(key)
    stuck = [f"{line}; nothing was removed from this store" for line in records.unreachable]
    readable: dict[str, Record] = {}
    with contextlib.suppress(StoreError):
        held = records.held(RecordFilter(id=(key or "").partition("@")[0]))
        named = {name.record_id for _store, name in versions}
        readable = {one.name.record_id: one.record for one in held if one.name.record_id in named}
    keys = {name.record_key for _store, name in versions}
    artifacts = [one for one in records.artifacts.listed() if one[1].record_key in keys]
    for record in readable.values():
        forget_studies(records, record)
    gone = records.remove([*versions, *((store, label) for store, label, _bytes in artifacts)])
    counts = Counter(one.record_id for one in gone if isinstance(one, Name))
    stuck += [f"{line}; this version stays" for line in records.stuck]
    for line in stuck:
        warn(line)
    for id, count in counts.items():
        what = readable[id].target.name if id in readable else "an unreadable record"
        yield f"forgetting {id} {what} ({count} version{'s' * (count > 1)})"
    if not versions:
        yield "nothing to forget"
    forgotten = [id for id in readable if id in counts]
    removed = {"forgotten": forgotten, "damaged": len(counts) - len(forgotten)}
    yield Output(lambda: removed, code=FAILED if stuck else DONE)
