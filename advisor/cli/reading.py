"""Commands about what is there: show, report, why, forget, env, completion."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from advisor.cache import settings
from advisor.cache.artifacts import compiled_digest
from advisor.cache.name import StoreKey, record_key
from advisor.cache.reader import RecordFilter, StoredRecord
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.seal import UNSIGNED
from advisor.cache.shown import size
from advisor.cache.stores import Store, note_on
from advisor.cache.task import Task
from advisor.cli.options import (
    COMMAND,
    DONE,
    FAILED,
    OrCommand,
    cache_option,
    collected,
    complain,
    complete_files,
    console,
    json_option,
    row_options,
)
from advisor.errors import StoreError, UsageError
from advisor.opening import open_records

MOST = 200
"""Records that are read for a list."""


@click.command()
@click.argument("key", required=False)
@click.option(
    "--most",
    type=click.IntRange(min=1),
    default=MOST,
    show_default=True,
    help="Of a list: so many, the newest.",
)
@cache_option
@json_option
def show(key: str | None, most: int, cache: str | None, as_json: bool) -> int:
    """List what is tuned, or show the record KEY whole."""
    from advisor.printed import staleness
    from advisor.report import data, tables

    records = open_records(cache, fallback=True)
    if key is not None:
        held = records.one(key)
        if as_json:
            more = {"signed": held.trusted, "store": held.store.url}
            more["artifacts"] = _artifacts(records, held.record)
            click.echo(json.dumps(data.as_data(held.record, cache) | more))
        else:
            _show(held, cache, _artifacts(records, held.record))
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
    elif not found and records.damaged:
        click.echo("No record can be read")
        return FAILED
    elif not found and records.unreachable:
        click.echo("Nothing is tuned in what could be read")
    elif not found:
        click.echo("Nothing is tuned yet; run: advisor tune -- python train.py")
    else:
        console().print(tables.listing(found, with_store=len(records.stores) > 1))
        if older:
            click.echo(f"and {older:,} older; to list them: --most {len(found) + older}")
    return DONE


def _artifacts(records: Records, record: Record) -> list[dict[str, Any]]:
    """What is kept of what was compiled for a record: for which uses, how large, where, and why
    that is refused."""
    uses: dict[str, list[str]] = {}
    for winner in record.winners:
        uses.setdefault(compiled_digest(record, winner.choice.config), []).append(winner.use)
    artifacts = records.artifacts
    return [
        {
            "uses": sorted({*uses.get(label.config, ())}),
            "bytes": bytes_,
            "store": store.url,
            "refused": artifacts.fault(store, label),
        }
        for store, label, bytes_ in artifacts.listed({record_key(record)})
    ]


def _show(held: StoredRecord, cache: str | None, artifacts: list[dict[str, Any]]) -> None:
    from advisor.report.sections import report

    out, shown = console(), report(held.record, cache)

    def say(*lines: str, style: str = "") -> None:
        for line in lines:
            out.print(line, style=style, highlight=False, markup=False, soft_wrap=True)

    signed = "" if held.trusted else f"  {UNSIGNED}"
    say(shown.title, f"{shown.headline}{signed}", *filter(None, [shown.stale]))
    say(*(f"  {name:<16}{value}" for name, value in shown.facts))
    say(f"  {'store':<16}{held.store.url}")
    for one in artifacts:
        uses = ", ".join(one["uses"]) or "nothing that is advised"
        refused = f"; refused: {one['refused']}" if one["refused"] else ""
        say(f"  {'artifacts':<16}{size(one['bytes'])} for {uses}, in {one['store']}{refused}")
    for section in shown.sections:
        say("", section.title, style="bold")
        if section.table:
            out.print(section.table)
        say(*section.lines, *(f"    {line}" for line in section.code))


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
    """Write the record KEY as one page: charts, tables, no script, nothing from a network."""
    from advisor.report.html import page, save

    text = page(open_records(cache, fallback=True).get(key), cache)
    if str(file) == "-":
        click.echo(text)
    else:
        save(text, file)
        click.echo(f"page: {file}")


_SERVED = ("default", "nearest")
"""Of settings.ON_MISS, what says which advice a miss is served."""


@click.command(cls=OrCommand)
@click.argument("target", required=False, shell_complete=complete_files)
@row_options(Task, asked=True)
@click.option("--batch", metavar="N|free", help="Another batch than --shape's, or the best found.")
@click.option("--capture", is_flag=True, help="As for a script that uses advice.capture.")
@click.option(
    "--on-miss",
    type=click.Choice(_SERVED),
    help="What a miss is served. default: torch's defaults; nearest: what is safe of the nearest "
    "record.",
)
@click.option("--strict", is_flag=True, help="Exit code 1 where nothing fits.")
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
    """Say what apply() would be served for TARGET here, and in what other records differ.

    Of a run, advisor why -- python train.py: what was tuned for that very command. Nothing is
    started. `advisor run` looks by the model, which shows once the script trains.
    """
    command = ctx.meta[COMMAND]
    if bool(command) == bool(target):
        raise UsageError("give a TARGET, or your command after --, one of them")
    if target is None:
        if collected(Task, options) or batch or capture or on_miss:
            raise UsageError("a run shows its shapes and what it permits itself; leave them out")
        found = _why_run(command, cache, as_json)
        ctx.exit(FAILED if strict and not found else DONE)
    from advisor.finding.find import preview
    from advisor.finding.request import Request
    from advisor.report.data import explained
    from advisor.tuners.knobs import described

    asked = collected(Task, options)
    if on_miss is None and settings.on_miss() not in _SERVED:
        on_miss = "default"  # this command asks for no tuning
    own = {"batch": _batch(batch), "capture": capture, "cache": cache, "on_miss": on_miss}
    request = Request.of(target, asked | own)
    served = preview(request)
    explanation, size = served.explanation, served.config.batch or request.batch
    if as_json:
        click.echo(json.dumps(explained(served, size)))
    elif explanation is None:
        click.echo(f"{served.status}: {served.reason}")
    else:
        click.echo(str(explanation))
        if explanation.served:
            what = described(served.config, served.default)
            click.echo(f"served      {explanation.served}: {what}, batch {size}")
        elif not explanation.near_misses:
            newest = open_records(cache).newest(MOST)
            if names := sorted({one.record.target.name for one in newest}):
                click.echo(f"tuned are    {', '.join(names)}")
    if strict and served.record is None:
        ctx.exit(FAILED)


def _why_run(command: tuple[str, ...], cache: str | None, as_json: bool) -> bool:
    """Show the records of a command as it was typed, and what a run would be served. Returns
    whether that is any config."""
    from advisor.finding.commands import of_command, served_to_run
    from advisor.report.data import explained
    from advisor.report.text import spread
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
        what = described(one.advised.config, one.record.baseline.config, nothing="as it is")
        signed = "" if one.signed else f"; {UNSIGNED}"
        click.echo(f"{one.record.id}  {one.state}: {what}, {spread(one.advised)}{signed}")
    own = served.record.baseline.config if served.record else served.config
    what = described(served.config, own, nothing="nothing")
    by = f"{served.record.id}: " if served.record else ""
    click.echo(f"served      {by}{what}; {served.reason}")
    return served.record is not None


def _batch(text: str | None) -> int | str | None:
    """As `lookup` takes it, which refuses what is no number."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else text


@click.command()
@click.argument("key", required=False)
@click.option("--all", "everything", is_flag=True, help="Every record.")
@cache_option
@json_option
def forget(key: str | None, everything: bool, cache: str | None, as_json: bool) -> None:
    """Remove the record KEY, or all, unreadable ones included."""
    if (key is None) == (not everything):
        raise UsageError("name one KEY, or --all; to see the keys, run: advisor show")
    from advisor.keeping import forget_studies

    records = open_records(cache)
    going = records.named(key)
    away = records.unreachable
    chosen: dict[str, list[tuple[Store, StoreKey]]] = {}
    for store, name in going:
        chosen.setdefault(name.record_id, []).append((store, name))
    readable = _readable(records, chosen)
    kept = list(records.artifacts.listed({name.record_key for _store, name in going}))
    if not as_json:
        for id, versions in chosen.items():
            what = readable[id].target.name if id in readable else "an unreadable record"
            count = f"{len(versions)} version{'s' * (len(versions) > 1)}"
            if compiled := sum(bytes_ for _store, label, bytes_ in kept if label.record_id == id):
                count += f", {size(compiled)} of artifacts"
            click.echo(f"forgetting {id} {what} ({count})")
    for record in readable.values():
        forget_studies(records, record)
    records.remove([*going, *((store, label) for store, label, _size in kept)])
    stuck = [f"{line}; nothing was removed there" for line in away]
    stuck += [f"{line}; it stays" for line in records.stuck]
    for line in stuck:
        click.echo(f"advisor: {line}", err=True)
    if as_json:
        damaged = len(chosen) - len(readable)
        total = sum(bytes_ for _store, _label, bytes_ in kept)
        said = {"forgotten": list(readable), "damaged": damaged, "artifacts_bytes": total}
        click.echo(json.dumps(said))
    elif not going:
        click.echo("nothing to forget")
    click.get_current_context().exit(FAILED if stuck else DONE)


def _readable(records: Records, ids: Collection[str]) -> dict[str, Record]:
    """Those of some ids whose record can be read."""
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
    """Show the environment as a key sees it, and the store."""
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
