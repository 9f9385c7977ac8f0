"""Commands that read the stores: show, report, why, forget, env, completion."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from advisor.cache import settings
from advisor.cache.artifacts import compiled_digest
from advisor.cache.name import record_key
from advisor.cache.reader import RecordFilter, StoredRecord
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.shown import size
from advisor.cache.signing import UNSIGNED
from advisor.cache.stores import note_on
from advisor.cache.task import Task
from advisor.cli.options import (
    COMMAND,
    DONE,
    FAILED,
    OrCommand,
    cache_option,
    collected,
    complain,
    console,
    json_option,
    row_options,
    say,
    target_argument,
)
from advisor.errors import StoreError, UsageError
from advisor.open_store import open_records

MAX_RECORDS = 200
"""Records that a list reads."""


@click.command()
@click.argument("key", required=False)
@click.option(
    "--most",
    type=click.IntRange(min=1),
    default=MAX_RECORDS,
    show_default=True,
    help="Of a list: so many, the newest.",
)
@cache_option
@json_option
def show(key: str | None, most: int, cache: str | None, as_json: bool) -> int:
    """List what is tuned, or show all of the record KEY."""
    from advisor.command_snippets import staleness
    from advisor.report import data, tables

    records = open_records(cache, fallback=True)
    if key is not None:
        _show(records, key, cache, as_json)
        return DONE
    newest = records.newest(most)
    older = records.left + len(newest[most:])
    found = [(one, staleness(one.record)) for one in newest[:most]]
    complain(records)
    if as_json:
        rows = [
            data.as_data(one.record, cache)
            | {"stale": [*filter(None, [one.record.stale]), *map(str, differs)]}
            | {"signed": one.trusted, "store": one.store.url}
            for one, differs in found
        ]
        click.echo(json.dumps({"records": rows, "damaged": records.damaged, "older": older}))
    elif found:
        console().print(tables.listing(found, with_store=len(records.stores) > 1))
        if older:
            click.echo(f"and {older:,} older; to list them: --most {len(found) + older}")
    elif records.damaged:
        click.echo("No record can be read")
        return FAILED
    elif records.unreachable:
        click.echo("Nothing is tuned in what could be read")
    else:
        click.echo("Nothing is tuned yet; run: advisor tune -- python train.py")
    return DONE


def _show(records: Records, key: str, cache: str | None, as_json: bool) -> None:
    """Print one record."""
    from advisor.report.data import as_data
    from advisor.report.sections import report

    held = records.one(key)
    artifacts = list(_artifacts(records, held.record))
    if as_json:
        more = {"signed": held.trusted, "store": held.store.url, "artifacts": artifacts}
        click.echo(json.dumps(as_data(held.record, cache) | more))
        return
    out, shown = console(), report(held.record, cache)
    signed = "" if held.trusted else f"  {UNSIGNED}"
    say(out, shown.title, f"{shown.headline}{signed}", *filter(None, [shown.stale]))
    say(out, *(f"  {name:<16}{value}" for name, value in shown.facts))
    say(out, f"  {'store':<16}{held.store.url}")
    for one in artifacts:
        uses = ", ".join(one["uses"]) or "nothing that is advised"
        refused = f"; refused: {one['refused']}" if one["refused"] else ""
        what = f"{size(one['bytes'])} for {uses}, in {one['store']}{refused}"
        say(out, f"  {'artifacts':<16}{what}")
    for section in shown.sections:
        say(out, "", section.title, style="bold")
        if section.table:
            out.print(section.table)
        say(out, *section.lines, *(f"    {line}" for line in section.code))


def _artifacts(records: Records, record: Record) -> Iterator[dict[str, Any]]:
    """The compiled code that is kept for a record: its uses, size and store, and why it is refused
    here."""
    uses: dict[str, set[str]] = {}
    for winner in record.winners:
        uses.setdefault(compiled_digest(record, winner.choice.config), set()).add(winner.use)
    for store, label, bytes_ in records.artifacts.listed({record_key(record)}):
        yield {
            "uses": sorted(uses.get(label.config, ())),
            "bytes": bytes_,
            "store": store.url,
            "refused": records.artifacts.fault(store, label),
        }


@click.command()
@click.argument("key")
@click.option(
    "--html",
    "file",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    required=True,
    metavar="FILE",
    help="Where the page goes; - for stdout.",
)
@cache_option
def report(key: str, file: Path, cache: str | None) -> None:
    """Write the record KEY as one HTML page with charts.

    The page has no script and loads nothing from a network.
    """
    from advisor.report.html import page, save

    text = page(open_records(cache, fallback=True).get(key), cache)
    if str(file) == "-":
        click.echo(text)
    else:
        save(text, file)
        click.echo(f"page: {file}")


_SERVED = ("default", "nearest")
"""Values of $ADVISOR_ON_MISS that serve advice; the others tune."""


@click.command(cls=OrCommand)
@target_argument
@row_options(Task, asked=True)
@click.option("--batch", metavar="N|free", help="Another batch than --shape's, or the best found.")
@click.option("--capture", is_flag=True, help="As for a script that uses advice.capture.")
@click.option(
    "--on-miss",
    type=click.Choice(_SERVED),
    help="If no record fits. default: torch's defaults; nearest: what is safe of the nearest "
    "record.",
)
@click.option("--strict", is_flag=True, help="Exit code 1 if no record fits.")
@cache_option
@json_option
@click.pass_context
def why(
    ctx: click.Context,
    /,
    target: str | None,
    batch: str | None,
    capture: bool,
    on_miss: str | None,
    strict: bool,
    cache: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Say what apply() would get here, and how other records differ.

    For a command, advisor why -- python train.py: the records of exactly this command. advisor
    starts nothing. `advisor run` also finds records by the model, once the script trains.
    """
    command, asked = ctx.meta[COMMAND], collected(Task, options)
    if bool(command) == bool(target):
        raise UsageError("give either a TARGET, or your command after --")
    if target is not None:
        own = {"batch": _batch(batch), "capture": capture, "cache": cache, "on_miss": on_miss}
        fits = _why(target, asked | own, as_json)
    elif asked or batch or capture or on_miss:
        raise UsageError("a run shows its shapes and what it permits itself; leave them out")
    else:
        fits = _why_command(command, cache, as_json)
    if strict and not fits:
        ctx.exit(FAILED)


def _batch(text: str | None) -> int | str | None:
    """As `lookup` takes it; that refuses what is no number."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else text


def _why(target: str, asked: dict[str, Any], as_json: bool) -> bool:
    """Print what a lookup finds; whether a record fits."""
    from advisor.report.data import explained
    from advisor.resolve.find import preview
    from advisor.resolve.request import Request
    from advisor.tuners.knobs import described

    if asked["on_miss"] is None and settings.on_miss() not in _SERVED:
        asked["on_miss"] = "default"  # `why` tunes nothing
    request = Request.of(target, asked)
    served = preview(request)
    found, batch = served.explanation, served.config.batch or request.batch
    if as_json:
        click.echo(json.dumps(explained(served, batch)))
    elif found is None:
        click.echo(f"{served.status}: {served.reason}")
    else:
        click.echo(str(found))
        if found.served:
            what = described(served.config, served.default)
            click.echo(f"served      {found.served}: {what}, batch {batch}")
        elif not found.near_misses:
            newest = open_records(asked["cache"]).newest(MAX_RECORDS)
            if names := sorted({one.record.target.name for one in newest}):
                click.echo(f"tuned are    {', '.join(names)}")
    return served.record is not None


def _why_command(command: tuple[str, ...], cache: str | None, as_json: bool) -> bool:
    """Print the records of a command and what a run would get; whether that is any config."""
    from advisor.report.data import explained
    from advisor.report.text import spread
    from advisor.resolve.commands import of_command, served_to_run
    from advisor.tuners.knobs import described

    records = open_records(cache, fallback=True)
    found = of_command(records, command)
    served = served_to_run(command, found, cache)
    complain(records)
    if as_json:
        rows = [
            {
                "id": one.record.id,
                "state": one.state,
                "config": dict(one.advised.config),
                "speedup": one.advised.speedup,
                "signed": one.signed,
            }
            for one in found
        ]
        would = explained(served, served.config.batch or None)
        click.echo(json.dumps({"command": list(command), "records": rows, "served": would}))
        return served.record is not None
    click.echo(f"looked for  {shlex.join(command)}")
    click.echo(f"looked in   {', '.join(store.url for store in records.stores)}")
    for one in found:
        what = described(one.advised.config, one.record.baseline.config, nothing="unmodified")
        signed = "" if one.signed else f"; {UNSIGNED}"
        click.echo(f"{one.record.id}  {one.state}: {what}, {spread(one.advised)}{signed}")
    own = served.record.baseline.config if served.record else served.config
    what = described(served.config, own, nothing="nothing")
    by = f"{served.record.id}: " if served.record else ""
    click.echo(f"served      {by}{what}; {served.reason}")
    return served.record is not None


@click.command()
@click.argument("key", required=False)
@click.option("--all", "everything", is_flag=True, help="Every record.")
@cache_option
@json_option
def forget(key: str | None, everything: bool, cache: str | None, as_json: bool) -> None:
    """Remove the record KEY, or all, unreadable ones included."""
    if (key is None) == (not everything):
        raise UsageError("name one KEY, or --all; to see the keys, run: advisor show")
    from advisor.persistence import forget_studies

    records = open_records(cache)
    versions = records.named(key)
    stuck = [f"{line}; nothing was removed there" for line in records.unreachable]
    ids = [name.record_id for _store, name in versions]
    readable = _readable(records, set(ids))
    artifacts = list(records.artifacts.listed({name.record_key for _store, name in versions}))
    if not as_json:
        for id in dict.fromkeys(ids):
            what = readable[id].target.name if id in readable else "an unreadable record"
            count = f"{ids.count(id)} version{'s' * (ids.count(id) > 1)}"
            compiled = sum(bytes_ for _store, label, bytes_ in artifacts if label.record_id == id)
            more = f", {size(compiled)} of artifacts" if compiled else ""
            click.echo(f"forgetting {id} {what} ({count}{more})")
    for record in readable.values():
        forget_studies(records, record)
    records.remove([*versions, *((store, label) for store, label, _bytes in artifacts)])
    stuck += [f"{line}; it stays" for line in records.stuck]
    for line in stuck:
        click.echo(f"advisor: {line}", err=True)
    if as_json:
        damaged = len(set(ids)) - len(readable)
        total = sum(bytes_ for _store, _label, bytes_ in artifacts)
        removed = {"forgotten": list(readable), "damaged": damaged, "artifacts_bytes": total}
        click.echo(json.dumps(removed))
    elif not versions:
        click.echo("nothing to forget")
    click.get_current_context().exit(FAILED if stuck else DONE)


def _readable(records: Records, ids: Collection[str]) -> dict[str, Record]:
    """The records of some ids, if they can be read."""
    found: list[StoredRecord] = []
    with contextlib.suppress(StoreError):
        found = records.held(
            RecordFilter(id=next(iter(ids)).partition("@")[0] if len(ids) == 1 else "")
        )
    return {one.name.record_id: one.record for one in found if one.name.record_id in ids}


@click.command()
@click.option("--device", metavar="cuda:N|cpu", help="default: the first CUDA device, else the CPU")
@cache_option
@json_option
def env(device: str | None, cache: str | None, as_json: bool) -> None:
    """Show this machine as records describe it, and the stores."""
    from advisor.cache.codec import to_plain
    from advisor.report.tables import environment
    from advisor.tuners.environment import default_device, detect

    records = open_records(cache, fallback=True)
    stores = records.stores
    found = detect(device or default_device())
    if as_json:
        about = [{"url": store.url, "health": records.health(store)} for store in stores]
        click.echo(json.dumps({"environment": to_plain(found), "stores": about}))
        return
    rows = list(environment(found))
    for store in stores:
        rows += [("store", store.url), ("store health", records.health(store))]
        rows += [("", note) for note in [note_on(store)] if note]
    for name, value in rows:
        click.echo(f"{name:<16}{value}")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
def completion(shell: str) -> None:
    """Print shell completion: eval "$(advisor completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    whole = click.get_current_context().find_root().command
    click.echo(kind(whole, {}, "advisor", "_ADVISOR_COMPLETE").source())
