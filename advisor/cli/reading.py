"""Commands that read the stores: show, report, why, emit, forget, env, completion."""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from advisor.cache.stores import store_note
from advisor.cache.task import Task
from advisor.cli.options import (
    DONE,
    FAILED,
    NEW_FILE,
    Number,
    OrCommand,
    Output,
    cache_option,
    collected,
    complain,
    json_or_text,
    row_options,
    target_argument,
)
from advisor.errors import StoreError, UsageError
from advisor.frameworks import NAMES
from advisor.open_store import open_records

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_RECORDS = 200
"""Records that a list reads."""


@click.command()
@click.argument("key", required=False)
@click.option(
    "--most",
    type=Number(min=1),
    default=MAX_RECORDS,
    show_default=True,
    help="How many records to list, the newest first.",
)
@cache_option
@json_or_text
def show(key: str | None, most: int, cache: str | None) -> Output:
    """List the records, or show the record KEY in full."""
    from advisor.command_snippets import staleness
    from advisor.report import data, tables

    records = open_records(cache, fallback=True)
    if key is not None:
        return _one(records, records.one(key), cache)
    newest = records.newest(most)
    older = records.left + len(newest[most:])
    found = [(one, staleness(one.record)) for one in newest[:most]]
    complain(records)

    def document() -> dict[str, Any]:
        rows = [
            data.as_data(one.record, cache)
            | {"stale": [*filter(None, [one.record.stale]), *map(str, differs)]}
            | {"signed": one.trusted, "store": one.store.url}
            for one, differs in found
        ]
        return {"records": rows, "damaged": records.damaged, "older": older}

    text: list[str | RenderableType] = [
        "Nothing is tuned yet; run: advisor tune -- python train.py"
    ]
    if found:
        urls = [store.url for store in records.stores] if records.stores[1:] else []
        text = [tables.listing(found, urls)]
        text += [f"store {number}: {url}" for number, url in enumerate(urls, 1)]
        if older:
            text.append(f"and {older:,} older; to list them: --most {len(found) + older}")
    elif records.damaged:
        return Output(document, ["No record can be read"], FAILED)
    elif records.unreachable:
        text = ["No record in the stores that could be read"]
    return Output(document, text)


def _one(records: Records, stored: StoredRecord, cache: str | None) -> Output:
    from rich.text import Text

    from advisor.report.data import as_data
    from advisor.report.sections import report

    artifacts = list(_artifacts(records, stored.record))
    more = {"signed": stored.trusted, "store": stored.store.url, "artifacts": artifacts}

    def lines() -> Iterator[str | RenderableType]:
        shown = report(stored.record, cache)
        yield shown.title
        yield shown.headline if stored.trusted else f"{shown.headline}  {UNSIGNED}"
        yield from filter(None, [shown.stale])
        yield from (f"  {name:<16}{value}" for name, value in shown.facts)
        yield f"  {'store':<16}{stored.store.url}"
        for one in artifacts:
            uses = ", ".join(one["uses"]) or "no advised config"
            refused = f"; refused: {one['refused']}" if one["refused"] else ""
            yield f"  {'artifacts':<16}{size(one['bytes'])} for {uses}, in {one['store']}{refused}"
        for section in shown.sections:
            yield from ("", Text(section.title, "bold"))
            yield from filter(None, [section.table])
            yield from (*section.lines, *(f"    {line}" for line in section.code))

    return Output(lambda: as_data(stored.record, cache) | more, lines())


def _artifacts(records: Records, record: Record) -> Iterator[dict[str, Any]]:
    """Generator: yields uses, size and store of each record's compiled code, and why this machine
    refuses it."""
    uses: dict[str, set[str]] = {}
    for winner in record.winners:
        uses.setdefault(compiled_digest(record, winner.choice.config), set()).add(winner.use)
    for store, label, bytes_ in records.artifacts.listed(f"{record_key(record)}/"):
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
    type=NEW_FILE,
    required=True,
    metavar="FILE",
    help="Where the page goes; - for stdout.",
)
@cache_option
def report(key: str, file: Path, cache: str | None) -> None:
    """Write the record KEY as one HTML page with charts.

    The page has no script and loads nothing from a network.
    """
    from advisor.cache.stores.filesystem import write_whole
    from advisor.report.html import page

    text = page(open_records(cache, fallback=True).get(key), cache)
    if str(file) == "-":
        click.echo(text)
    else:
        write_whole(file, text.encode())
        click.echo(f"page: {file}")


@click.command()
@click.argument("framework", type=click.Choice(NAMES), metavar=f"[{'|'.join(NAMES)}]")
@click.argument("key")
@click.option("--batch", metavar="N|free", help="A batch other than the record's, or the best one.")
@cache_option
@json_or_text
def emit(framework: str, key: str, batch: str | None, cache: str | None) -> Output:
    """Print the record KEY as a framework's configuration."""
    from advisor.frameworks import tables
    from advisor.frameworks.text import Emitted, data, text

    free = batch == "free"
    if batch is not None and not free and not (batch.isdecimal() and int(batch)):
        raise UsageError(f"--batch {batch!r}: expected a number of at least 1, or free")
    record = open_records(cache, fallback=True).get(key)
    number = int(batch) if batch and not free else None
    found = Emitted(getattr(tables, framework), record, batch=number, free=free)
    return Output(lambda: data(found), [text(found).removesuffix("\n")])


_SERVED = ("default", "nearest")
"""Values of $ADVISOR_ON_MISS without side effects; 'request' asks a server for a tuning."""


@click.command(cls=OrCommand)
@target_argument
@row_options(Task, asked=True)
@click.option("--batch", metavar="N|free", help="A batch other than --shape's, or the best one.")
@click.option("--capture", is_flag=True, help="Look up for a script that uses advice.capture.")
@click.option(
    "--on-miss",
    type=click.Choice(_SERVED),
    help="If no record fits. default: torch's defaults; nearest: the safe part of the nearest "
    "record.",
)
@click.option("--strict", is_flag=True, help="Exit code 1 if no record fits.")
@cache_option
@json_or_text
def why(
    target: str | None,
    command: tuple[str, ...],
    strict: bool,
    cache: str | None,
    **options: Any,
) -> Output:
    """Say what apply() would get here, and how other records differ.

    For a command, advisor why -- python train.py lists the records of exactly this command and
    starts nothing. `advisor run` also finds records by the model, once the script trains.
    """
    asked = collected(Task, options)
    if target is not None:
        return _why(target, asked | options | {"store": cache}, strict)
    if asked or any(options.values()):
        raise UsageError("for a command, leave out --shape and the other options of a TARGET")
    return _why_command(command, cache, strict)


def _why(target: str, asked: dict[str, Any], strict: bool) -> Output:
    """The output of `advisor why TARGET`."""
    from advisor.report.data import explained
    from advisor.resolve.lookups import look_up
    from advisor.resolve.request import Request
    from advisor.tuners.knobs import described

    batch = asked["batch"]
    if batch is not None and batch.isdecimal() and len(batch) < 10:
        asked["batch"] = int(batch)  # the request refuses other texts
    if asked["on_miss"] is None and settings.on_miss() not in _SERVED:
        asked["on_miss"] = "default"  # `why` tunes nothing
    request = Request.of(target, asked)
    served = look_up(request)
    found, batch = served.explanation, served.config.batch or request.batch
    text = [f"{served.status}: {served.reason}"] if found is None else [str(found)]
    if found is not None and found.served:
        what = described(served.config, served.default)
        text.append(f"served      {found.served}: {what}, batch {batch}")
    elif found is not None and not found.near_misses:
        newest = open_records(asked["store"]).newest(MAX_RECORDS)
        if names := sorted({one.record.target.name for one in newest}):
            text.append(f"records of  {', '.join(names)}")
    missed = strict and served.record is None
    return Output(lambda: explained(served, batch), text, FAILED if missed else DONE)


def _why_command(command: tuple[str, ...], cache: str | None, strict: bool) -> Output:
    """The output of `advisor why -- COMMAND`: its records, and what a run would get."""
    from advisor.report.data import explained
    from advisor.report.text import spread
    from advisor.resolve.commands import of_command, served_to_run, state_of
    from advisor.tuners.knobs import described

    records = open_records(cache, fallback=True)
    found = of_command(records, command)
    served = served_to_run(command, found, cache)
    rows = [(one, state_of(one.record), one.record.winner(one.record.use)) for one in found]
    complain(records)

    def document() -> dict[str, Any]:
        listed = [
            {
                "id": one.record.id,
                "state": state,
                "config": dict(advised.config),
                "speedup": advised.speedup,
                "signed": one.trusted,
            }
            for one, state, advised in rows
        ]
        would = explained(served, served.config.batch or None)
        return {"command": list(command), "records": listed, "served": would}

    def lines() -> Iterator[str]:
        yield f"looked for  {shlex.join(command)}"
        yield f"looked in   {', '.join(store.url for store in records.stores)}"
        for one, state, advised in rows:
            what = described(advised.config, one.record.baseline.config, nothing="unmodified")
            signed = "" if one.trusted else f"; {UNSIGNED}"
            yield f"{one.record.id}  {state}: {what}, {spread(advised)}{signed}"
        own = served.record.baseline.config if served.record else served.config
        by = f"{served.record.id}: " if served.record else ""
        what = described(served.config, own, nothing="nothing")
        yield f"served      {by}{what}; {served.reason}"

    return Output(document, lines(), FAILED if strict and served.record is None else DONE)


@click.command()
@click.argument("key", required=False)
@click.option("--all", "everything", is_flag=True, help="Every record.")
@cache_option
@json_or_text
def forget(key: str | None, everything: bool, cache: str | None) -> Output:
    """Remove the record KEY, or all records, unreadable ones included."""
    if (key is None) == (not everything):
        raise UsageError("name one KEY, or --all; to see the keys, run: advisor show")
    from advisor.persistence import forget_studies

    records = open_records(cache)
    versions = records.named(key)
    stuck = [f"{line}; nothing was removed from this store" for line in records.unreachable]
    counts = Counter(name.record_id for _store, name in versions)
    readable = _readable(records, counts)
    keys = {name.record_key for _store, name in versions}
    artifacts = [one for one in records.artifacts.listed() if one[1].record_key in keys]
    text = []
    for id, count in counts.items():
        what = readable[id].target.name if id in readable else "an unreadable record"
        text.append(f"forgetting {id} {what} ({count} version{'s' * (count > 1)})")
    for record in readable.values():
        forget_studies(records, record)
    records.remove([*versions, *((store, label) for store, label, _bytes in artifacts)])
    stuck += [f"{line}; this version stays" for line in records.stuck]
    for line in stuck:
        click.echo(f"advisor: {line}", err=True)
    removed = {"forgotten": list(readable), "damaged": len(counts) - len(readable)}
    return Output(lambda: removed, text or ["nothing to forget"], FAILED if stuck else DONE)


def _readable(records: Records, ids: Collection[str]) -> dict[str, Record]:
    """The readable records among some ids, by id."""
    found: list[StoredRecord] = []
    with contextlib.suppress(StoreError):
        only = next(iter(ids)).partition("@")[0] if len(ids) == 1 else ""
        found = records.held(RecordFilter(id=only))
    return {one.name.record_id: one.record for one in found if one.name.record_id in ids}


@click.command()
@click.option("--device", metavar="cuda:N|cpu", help="default: the first CUDA device, else the CPU")
@cache_option
@json_or_text
def env(device: str | None, cache: str | None) -> Output:
    """Show this machine as records describe it, and the stores."""
    from advisor.cache.codec import to_plain
    from advisor.report.tables import environment
    from advisor.tuners.environment import default_device, detect

    records = open_records(cache, fallback=True)
    found = detect(device or default_device())
    health = [(store, records.health(store)) for store in records.stores]
    rows = list(environment(found))
    for store, said in health:
        rows += [("store", store.url), ("store health", said)]
        rows += [("", note) for note in [store_note(store)] if note]
    about = [{"url": store.url, "health": said} for store, said in health]
    return Output(
        lambda: {"environment": to_plain(found), "stores": about},
        [f"{name:<16}{value}" for name, value in rows],
    )


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
def completion(shell: str) -> None:
    """Print shell completion: eval "$(advisor completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    whole = click.get_current_context().find_root().command
    click.echo(kind(whole, {}, "advisor", "_ADVISOR_COMPLETE").source())
