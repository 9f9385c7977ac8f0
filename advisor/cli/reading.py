"""Commands that read the stores: show, report, why, emit, patch, env, completion."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from advisor.cache.artifacts import compiled_digest
from advisor.cache.codec import to_plain
from advisor.cache.name import record_key
from advisor.cache.reader import StoredRecord
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.shown import size
from advisor.cache.signing import UNSIGNED
from advisor.cache.stores import store_note
from advisor.cache.task import Task
from advisor.cli import options
from advisor.cli.options import DONE, FAILED, OrCommand, Output, Parts, json_or_text, option, warn
from advisor.command_snippets import staleness
from advisor.errors import UsageError
from advisor.frameworks import NAMES
from advisor.open_store import open_records
from advisor.report import sections
from advisor.report.document import as_data, explained
from advisor.report.text import spread
from advisor.resolve.commands import of_command, served_to_run, state_of
from advisor.resolve.lookups import look_up
from advisor.resolve.request import Request
from advisor.tuners.environment import default_device, detect
from advisor.tuners.knobs import described

RECORDS_SHOWN = 200  # records that a list reads


@click.command()
@click.argument("key", required=False)
@option(
    "--most N",
    "How many records to list, the newest first.",
    type=options.Number(min=1),
    default=RECORDS_SHOWN,
    show_default=True,
)
@options.cache
@json_or_text
def show(key: str | None, most: int, cache: str | None) -> Parts:
    """List the records, or show the record KEY in full."""
    records = open_records(cache, fallback=True)
    if key is not None:
        yield from _one(records, records.one(key), cache)
        return
    newest = records.newest(most)
    older = records.left + len(newest[most:])
    found = [(one, staleness(one.record)) for one in newest[:most]]
    options.complain(records)
    if found:
        urls = [store.url for store in records.stores] if records.stores[1:] else []
        yield sections.listing(found, urls)
        yield from (f"store {number}: {url}" for number, url in enumerate(urls, 1))
        if older:
            yield f"and {older:,} older; to list them: --most {len(found) + older}"
    elif records.damaged:
        yield "No record can be read"
    elif records.unreachable:
        yield "No record in the stores that could be read"
    else:
        yield "Nothing is tuned yet; run: advisor tune -- python train.py"

    def document() -> dict[str, Any]:
        rows = [
            as_data(one.record, cache)
            | {"stale": sections.changes(one.record, differs)}
            | {"signed": one.trusted, "store": one.store.url}
            for one, differs in found
        ]
        return {"records": rows, "damaged": records.damaged, "older": older}

    unread = not found and (records.damaged or records.unreachable)
    yield Output(document, code=FAILED if unread else DONE)


def _one(records: Records, stored: StoredRecord, cache: str | None) -> Parts:
    artifacts = list(_artifacts(records, stored.record))
    shown = sections.report(stored.record, cache)
    facts = [*shown.facts, ("store", stored.store.url)]
    for one in artifacts:
        uses = ", ".join(one["uses"]) or "no advised config"
        refused = f"; refused: {one['refused']}" if one["refused"] else ""
        facts.append(("artifacts", f"{size(one['bytes'])} for {uses}, in {one['store']}{refused}"))
    yield shown.title
    yield shown.headline if stored.trusted else f"{shown.headline}  {UNSIGNED}"
    yield from filter(None, [shown.stale])
    yield from (f"  {name:<16}{value}" for name, value in facts)
    for section in shown.sections:
        yield from section.text()
    more = {"signed": stored.trusted, "store": stored.store.url, "artifacts": artifacts}
    yield Output(lambda: as_data(stored.record, cache) | more)


def _artifacts(records: Records, record: Record) -> Iterator[dict[str, Any]]:
    """Generator: yields uses, size and store of each record's compiled code, and why this machine
    refuses it."""
    compiled = [(compiled_digest(record, one.choice.config), one.use) for one in record.winners]
    for store, label, bytes_ in records.artifacts.listed(f"{record_key(record)}/"):
        yield {
            "uses": sorted({use for config, use in compiled if config == label.config}),
            "bytes": bytes_,
            "store": store.url,
            "refused": records.artifacts.fault(store, label),
        }


@click.command()
@click.argument("key")
@option(
    "--html FILE",
    "Where the page goes; - for stdout.",
    "file",
    type=options.NEW_FILE,
    required=True,
)
@options.cache
@json_or_text
def report(key: str, file: Path, cache: str | None) -> Parts:
    """Write the record KEY as one HTML page with charts.

    The page has no script and loads nothing from a network.
    """
    from advisor.cache.stores.filesystem import write_whole
    from advisor.report.html import page

    text = page(open_records(cache, fallback=True).one(key).record, cache)
    if to_file := str(file) != "-":
        write_whole(file, text.encode())
    yield f"page: {file}" if to_file else text
    yield Output(lambda: {"file": str(file)} if to_file else {"html": text})


@click.command()
@click.argument("framework", type=click.Choice(NAMES), metavar="FRAMEWORK")
@click.argument("key")
@option("--batch N|free", "A batch other than the record's, or the best one.")
@options.cache
@json_or_text
def emit(framework: str, key: str, batch: str | None, cache: str | None) -> Parts:
    """Print the record KEY as a framework's configuration.

    FRAMEWORK is hf (transformers), lightning, accelerate or timm.
    """
    from advisor.frameworks import tables, text

    free = batch == "free"
    if batch is not None and not free and not (batch.isdecimal() and int(batch)):
        raise UsageError(f"--batch {batch!r}: expected a number of at least 1, or free")
    record = open_records(cache, fallback=True).one(key).record
    number = int(batch) if batch and not free else None
    found = text.Emitted(getattr(tables, framework), record, batch=number, free=free)
    yield text.text(found).removesuffix("\n")
    yield Output(lambda: text.data(found))


@click.command()
@click.argument("key")
@click.argument("script", required=False, type=click.Path(path_type=Path))
@options.cache
@json_or_text
def patch(key: str, script: Path | None, cache: str | None) -> Parts:
    """Print the record KEY as a diff of your SCRIPT, for patch -p1 or git apply."""
    from advisor.frameworks.patching import ScriptPatch

    record = open_records(cache, fallback=True).one(key).record
    command = record.key.task.command
    scripts = [Path(word) for word in command if word.endswith(".py")]
    if script is None and not scripts:
        raise UsageError(f"{record.id} names no script; give it: advisor patch {key} train.py")
    made, state = ScriptPatch(record, script or scripts[0]), state_of(record)
    if state != "exact":
        warn(f"record {record.id} is {state}")
    if made.diff:
        yield made.diff.removesuffix("\n")
    if made.arguments:
        warn(f"start it as: {shlex.join([*command, *made.arguments])}")
    for one in made.left:
        warn(f"left to you: {one}")
    if not made.config:
        warn(f"record {record.id} advises your unmodified script")
    found = {"diff": made.diff, "arguments": made.arguments, "left": made.left}
    yield Output(lambda: found, code=options.UNFINISHED if made.left else DONE)


@click.command(cls=OrCommand)
@options.target_argument
@options.row_options(Task, asked=True)
@option("--batch N|free", "A batch other than --shape's, or the best one.")
@option("--capture", "Look up for a script that uses advice.capture.")
@option("--strict", "Exit code 1 if no record fits.")
@options.cache
@json_or_text
def why(
    target: str | None, command: tuple[str, ...], strict: bool, cache: str | None, **given: Any
) -> Parts:
    """Say what apply() would get here, and how other records differ.

    For a command, advisor why -- python train.py lists the records of exactly this command and
    starts nothing. `advisor run` also finds records by the model, once the script trains.
    """
    asked = options.collected(Task, given)
    if target is not None:
        yield from _why(target, asked | given | {"store": cache}, strict)
    elif asked or any(given.values()):
        raise UsageError("for a command, leave out --shape and the other options of a TARGET")
    else:
        yield from _why_command(command, cache, strict)


def _why(target: str, asked: dict[str, Any], strict: bool) -> Parts:
    """The output of `advisor why TARGET`."""
    batch = asked["batch"]
    if batch is not None and batch.isdecimal() and len(batch) < 10:
        asked["batch"] = int(batch)  # the request refuses other texts
    request = Request.of(target, asked)
    served = look_up(request)
    found, batch = served.explanation, served.config.batch or request.batch
    yield f"{served.status}: {served.reason}" if found is None else str(found)
    if found is not None and found.served:
        what = described(served.config, served.default)
        yield f"served      {found.served}: {what}, batch {batch}"
    elif found is not None and not found.near_misses:
        newest = open_records(asked["store"]).newest(RECORDS_SHOWN)
        if names := sorted({one.record.target.name for one in newest}):
            yield f"records of  {', '.join(names)}"
    missed = strict and served.record is None
    yield Output(lambda: explained(served, batch), code=FAILED if missed else DONE)


def _why_command(command: tuple[str, ...], cache: str | None, strict: bool) -> Parts:
    """The output of `advisor why -- COMMAND`: its records, and what a run would get."""
    records = open_records(cache, fallback=True)
    found = of_command(records, command)
    served = served_to_run(command, found, cache)
    options.complain(records)
    yield f"looked for  {shlex.join(command)}"
    yield f"looked in   {', '.join(store.url for store in records.stores)}"
    listed: list[dict[str, Any]] = []
    for one in found:
        id, state, advised = one.record.id, state_of(one.record), one.record.winner(one.record.use)
        config, said = dict(advised.config), {"speedup": advised.speedup, "signed": one.trusted}
        listed.append({"id": id, "state": state, "config": config, **said})
        what = sections.called(one.record, advised.config)
        yield f"{id}  {state}: {what}, {spread(advised)}{'' if one.trusted else f'; {UNSIGNED}'}"
    own = served.record.baseline.config if served.record else served.config
    by = f"{served.record.id}: " if served.record else ""
    yield f"served      {by}{described(served.config, own, nothing='nothing')}; {served.reason}"
    if len({one.record.key.model for one in found}) > 1:
        yield "This command has trained several models. `advisor run` uses the record of its model."
    would = explained(served, served.config.batch or None)
    yield Output(
        lambda: {"command": list(command), "records": listed, "served": would},
        code=FAILED if strict and served.record is None else DONE,
    )


@click.command()
@option("--device cuda:N|cpu", "default: the first CUDA device, else the CPU")
@options.cache
@json_or_text
def env(device: str | None, cache: str | None) -> Parts:
    """Show this machine as records describe it, and the stores."""
    records = open_records(cache, fallback=True)
    found = detect(device or default_device())
    rows, stores = sections.environment(found), []
    for store in records.stores:
        health = records.health(store)
        stores.append({"url": store.url, "health": health})
        rows += [("store", store.url), ("store health", health)]
        rows += [("", note) for note in [store_note(store)] if note]
    yield from (f"{name:<16}{value}" for name, value in rows)
    yield Output(lambda: {"environment": to_plain(found), "stores": stores})


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
@json_or_text
def completion(shell: str) -> Parts:
    """Print shell completion: eval "$(advisor completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    whole = click.get_current_context().find_root().command
    source = kind(whole, {}, "advisor", "_ADVISOR_COMPLETE").source()
    yield source
    yield Output(lambda: {"shell": shell, "source": source})


@click.command()
@json_or_text
def schema() -> Parts:
    """Print the JSON Schema of what --json and --events print, by command."""
    text = resources.files("advisor.report").joinpath("templates/schema.json").read_text()
    yield text.rstrip()
    yield Output(lambda: json.loads(text))
