"""Commands that copy and tidy records: export, import, sync, gc."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from advisor.cache import exchange, garbage
from advisor.cache.artifacts import OTHER_KEY, Label
from advisor.cache.exchange import Carried, Wanted
from advisor.cache.name import Name
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.shown import size
from advisor.cache.stores.url import without_password
from advisor.cli.options import DONE, FAILED, cache_option, complain, json_option, together
from advisor.errors import StoreError
from advisor.open_store import open_records

only_options = together(
    click.option("--target", metavar="TEXT", help="Only targets with this in the name."),
    click.option("--device", metavar="TEXT", help="Only devices with this in the name."),
    click.option("--key", "keys", multiple=True, metavar="KEY", help="Only these records."),
)
"""The arguments of `_only`."""


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
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@only_options
@cache_option
@json_option
def export(file: Path, cache: str | None, as_json: bool, **only: Any) -> None:
    """Write records into the pack FILE. --cache pack:FILE reads it."""
    records = open_records(cache)
    count = exchange.export(records, file, _only(**only))
    complain(records)
    if as_json:
        damaged = [*records.unreachable, *records.damaged]
        click.echo(json.dumps({"file": str(file), "records": count, "damaged": damaged}))
    else:
        click.echo(f"{count} record{'s' * (count != 1)} in {file}")


@click.command(name="import")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@only_options
@cache_option
@json_option
def import_(file: Path, cache: str | None, as_json: bool, **only: Any) -> None:
    """Take the records of the pack FILE. Exit code 1 if one is refused."""
    store, rows = exchange.unpack(file, open_records(cache), _only(**only))
    click.get_current_context().exit(_carried(rows, as_json, store.url))


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("to", metavar="TO")
@only_options
@json_option
def sync(source: str, to: str, as_json: bool, **only: Any) -> None:
    """Copy records that are in store FROM and not in store TO. Exit code 1 if one is refused."""
    rows = exchange.sync(open_records([source, to]), _only(**only))
    click.get_current_context().exit(_carried(rows, as_json, to))


def _carried(rows: Iterable[Carried], as_json: bool, where: str) -> int:
    """Show what became of each record, as it happens; the exit code."""
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
        click.echo(f"{said or 'nothing'} to {without_password(where)}")
    return FAILED if counts.get("refused") else DONE


@click.command()
@click.option("--yes", "remove", is_flag=True, help="Remove; without, only say what would go.")
@click.option("--only", "kinds", type=click.Choice(garbage.KINDS), help="Only these.")
@cache_option
@json_option
def gc(remove: bool, kinds: str | None, cache: str | None, as_json: bool) -> None:
    """Show or remove older versions, old records and artifacts."""
    records = open_records(cache)
    going = garbage.all_garbage(records, [kinds] if kinds else garbage.KINDS)
    complain(records)
    there = list(_artifacts(records))
    said = "removing" if remove else "would go"
    if not as_json:
        for one in there:
            foreign = f", {one['foreign']} {OTHER_KEY}" if one["foreign"] else ""
            what = f"{one['number']}, {size(one['bytes'])}{foreign}"
            click.echo(f"artifacts  {what}  ({one['store']})")
        for gone in going:
            click.echo(f"{said}  {gone.what}  {gone.reason}  ({gone.store.url})")
    stuck = garbage.remove(going) if remove else []
    for line in stuck:
        click.echo(f"advisor: {line}; it stays", err=True)
    if as_json:
        rows = [{"store": one.store.url, "name": one.name, "reason": one.reason} for one in going]
        found = {"removed": remove, "records": rows, "artifacts": there, "stuck": stuck}
        click.echo(json.dumps(found))
    elif not going:
        click.echo("nothing to remove")
    elif not remove:
        click.echo("nothing was removed; to remove, add --yes")
    click.get_current_context().exit(FAILED if stuck else DONE)


def _artifacts(records: Records) -> Iterator[dict[str, Any]]:
    """The number and bytes of artifacts in each store that has some; `foreign`: how many of them
    neither the reader nor their team signed."""
    for store in records.stores:
        with contextlib.suppress(StoreError):
            if there := records.artifacts.on(store):
                yield {
                    "store": store.url,
                    "number": len(there),
                    "bytes": sum(there.values()),
                    "foreign": sum(not label.trusted for label in there),
                }
