"""advisor emit."""

from __future__ import annotations

import json

import click

from advisor.cli.options import cache_option, json_option
from advisor.errors import UsageError
from advisor.frameworks import NAMES
from advisor.open_store import open_records


@click.command()
@click.argument("framework", type=click.Choice(NAMES), metavar=f"[{'|'.join(NAMES)}]")
@click.argument("key")
@click.option("--batch", metavar="N|free", help="Another batch than the record's, or the best.")
@cache_option
@json_option
def emit(framework: str, key: str, batch: str | None, cache: str | None, as_json: bool) -> None:
    """Print the record KEY as a framework's configuration."""
    from advisor.frameworks import tables
    from advisor.frameworks.text import Emitted, data, text

    free = batch == "free"
    if batch is not None and not free and not (batch.isdecimal() and int(batch)):
        raise UsageError(f"--batch {batch!r}: expected a number of at least 1, or free")
    record = open_records(cache, fallback=True).get(key)
    found = Emitted(
        getattr(tables, framework),
        record,
        batch=int(batch) if batch is not None and not free else None,
        free=free,
    )
    click.echo(json.dumps(data(found)) if as_json else text(found), nl=as_json)
