"""Commands that carry records from store to store: export, import, sync, gc."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from advisor import sharing
from advisor.cache.artifacts import OTHER_KEY, Label
from advisor.cache.exchange import Carried
from advisor.cache.name import Name
from advisor.cache.shown import size
from advisor.cache.stores.url import without_password
from advisor.cli.options import DONE, FAILED, cache_option, json_option, together

only_options = together(
    click.option("--target", metavar="TEXT", help="Only targets with this in the name."),
    click.option("--device", metavar="TEXT", help="Only devices with this in the name."),
    click.option("--key", "keys", multiple=True, metavar="KEY", help="Only these records."),
)
"""The fields of `sharing.Only`."""


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@only_options
@cache_option
@json_option
def export(file: Path, cache: str | None, as_json: bool, **only: Any) -> None:
    """Write records into the pack FILE. --cache pack:FILE reads it."""
    count, damaged = sharing.export(file, sharing.Only(**only), cache=cache)
    for line in damaged:
        click.echo(f"advisor: {line}", err=True)
    if as_json:
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
    where, rows = sharing.import_(file, sharing.Only(**only), cache=cache)
    click.get_current_context().exit(_carried(rows, as_json, where))


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("to", metavar="TO")
@only_options
@json_option
def sync(source: str, to: str, as_json: bool, **only: Any) -> None:
    """Copy records that are in store FROM and not in store TO. Exit code 1 if one is refused."""
    rows = sharing.sync(source, to, sharing.Only(**only))
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
@click.option("--only", "kinds", type=click.Choice(sharing.GC_KINDS), help="Only these.")
@cache_option
@json_option
def gc(remove: bool, kinds: str | None, cache: str | None, as_json: bool) -> None:
    """Show or remove older versions, old records and artifacts."""
    records, going = sharing.gc([kinds] if kinds else sharing.GC_KINDS, cache=cache)
    for line in records.unreachable:
        click.echo(f"advisor: {line}", err=True)
    there = sharing.shelved(records)
    said = "removing" if remove else "would go"
    if not as_json:
        for shelf in there:
            foreign = f", {shelf.foreign} {OTHER_KEY}" if shelf.foreign else ""
            what = f"{shelf.number}, {size(shelf.size)}{foreign}"
            click.echo(f"artifacts  {what}  ({shelf.store.url})")
        for one in going:
            click.echo(f"{said}  {one.what}  {one.reason}  ({one.store.url})")
    stuck = sharing.remove(records, going) if remove else []
    for line in stuck:
        click.echo(f"advisor: {line}; it stays", err=True)
    if as_json:
        rows = [
            {
                "store": one.store.url,
                "name": one.named.name if isinstance(one.named, Label | Path) else one.named.text,
                "reason": one.reason,
            }
            for one in going
        ]
        artifacts = [
            {
                "store": one.store.url,
                "number": one.number,
                "bytes": one.size,
                "foreign": one.foreign,
            }
            for one in there
        ]
        said_of = {"records": rows, "artifacts": artifacts, "stuck": stuck}
        click.echo(json.dumps({"removed": remove} | said_of))
    elif not going:
        click.echo("nothing to remove")
    elif not remove:
        click.echo("nothing was removed; to remove, add --yes")
    click.get_current_context().exit(FAILED if stuck else DONE)
