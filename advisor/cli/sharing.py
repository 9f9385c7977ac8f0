"""Commands that copy and tidy records: export, import, sync, gc."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from advisor.cache import exchange, garbage
from advisor.cache.artifacts import Label
from advisor.cache.exchange import CopyResult, Wanted
from advisor.cache.name import Name
from advisor.cache.record import Record
from advisor.cache.stores.url import without_password
from advisor.cli.options import (
    DONE,
    FAILED,
    FILE,
    NEW_FILE,
    Output,
    cache_option,
    complain,
    json_option,
    json_or_text,
    together,
)
from advisor.open_store import open_records

only_options = together(
    click.option("--target", metavar="TEXT", help="Only records whose target's name has TEXT."),
    click.option("--device", metavar="TEXT", help="Only records whose device's name has TEXT."),
    click.option("--key", "keys", multiple=True, metavar="KEY", help="Only these records."),
)
"""Options that become the arguments of `_only`."""


def _only(target: str | None, device: str | None, keys: Sequence[str]) -> Wanted:
    def named(key: str, record: Record) -> bool:
        start, _, batch = key.partition("@")
        return record.key.id.startswith(start) and batch in ("", str(record.batch))

    def wanted(record: Record) -> bool:
        name = record.key.environment.device.name.lower()
        return (
            (target is None or target in record.target.name)
            and (device is None or device.lower() in name)
            and (not keys or any(named(key, record) for key in keys))
        )

    return wanted


@click.command()
@click.argument("file", type=NEW_FILE)
@only_options
@cache_option
@json_or_text
def export(file: Path, cache: str | None, **only: Any) -> Output:
    """Write records into the pack FILE. To read the pack: --cache pack:FILE."""
    records = open_records(cache)
    count = exchange.export(records, file, _only(**only))
    complain(records)
    damaged = [*records.unreachable, *records.damaged]
    data = {"file": str(file), "records": count, "damaged": damaged}
    return Output(lambda: data, [f"{count} record{'s' * (count != 1)} in {file}"])


@click.command(name="import")
@click.argument("file", type=FILE)
@only_options
@cache_option
@json_option
def import_(file: Path, cache: str | None, as_json: bool, **only: Any) -> None:
    """Import the records of the pack FILE. Exit code 1 if a record is refused."""
    store, rows = exchange.unpack(file, open_records(cache), _only(**only))
    click.get_current_context().exit(_carried(rows, as_json, store.url))


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("to", metavar="TO")
@only_options
@json_option
def sync(source: str, to: str, as_json: bool, **only: Any) -> None:
    """Copy records that are in store FROM and not in TO. Exit code 1 if a record is refused."""
    rows = exchange.sync(open_records([source, to]), _only(**only))
    click.get_current_context().exit(_carried(rows, as_json, to))


def _carried(rows: Iterable[CopyResult], as_json: bool, where: str) -> int:
    """Show each record's outcome as it is copied. Returns the exit code."""
    counts: dict[str, int] = {}
    listed = []
    for row in rows:
        counts[row.outcome] = counts.get(row.outcome, 0) + 1
        listed.append({"name": row.name, "outcome": row.outcome, "reason": row.reason})
        if as_json or row.outcome == "known":
            continue
        name = Name.parse(row.name) or Label.parse(row.name)
        id = name.record_id if name else ascii(row.name[:60])
        what = f"{id}  {row.target or row.reason}"
        click.echo(f"{row.outcome:<8} {what}", err=row.outcome == "refused")
    if as_json:
        click.echo(json.dumps({"records": listed}))
    else:
        said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        click.echo(f"{without_password(where)}: {said or 'no records'}")
    return FAILED if counts.get("refused") else DONE


@click.command()
@click.option("--yes", "remove", is_flag=True, help="Remove them. Without --yes, only list them.")
@click.option("--only", "kinds", type=click.Choice(garbage.KINDS), help="Only this kind.")
@cache_option
@json_or_text
def gc(remove: bool, kinds: str | None, cache: str | None) -> Output:
    """List or remove superseded, stale and damaged records, and oversized artifacts."""
    records = open_records(cache)
    going = garbage.all_garbage(records, [kinds] if kinds else garbage.KINDS)
    complain(records)
    if remove:
        records.remove((one.store, one.key) for one in going)
    stuck = records.stuck
    for line in stuck:
        click.echo(f"advisor: {line}; this version stays", err=True)
    said = "removing" if remove else "would go"
    text = [f"{said}  {gone.key.record_id}  {gone.reason}  ({gone.store.url})" for gone in going]
    if not remove or not going:
        last = "nothing was removed; to remove, add --yes" if going else "nothing to remove"
        text.append(last)
    rows = [{"store": one.store.url, "name": one.name, "reason": one.reason} for one in going]
    data = {"removed": remove, "records": rows, "stuck": stuck}
    return Output(lambda: data, text, FAILED if stuck else DONE)
