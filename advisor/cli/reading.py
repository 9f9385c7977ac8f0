"""Commands about what is there: show, why, forget, env, version, completion."""

from __future__ import annotations

import json
from typing import Any

import click
from click.shell_completion import get_completion_class

import advisor
from advisor import opening, printed, tuning
from advisor.cache.record import Record
from advisor.cache.stores import note_on
from advisor.cli.options import (
    DONE,
    FAILED,
    WRONG_USAGE,
    Listed,
    Shape,
    cache_option,
    complain,
    complete_files,
    console,
    json_option,
    keywords,
)
from advisor.errors import AdvisorWarning, RecordDamaged, UsageError
from advisor.finding import answer, lookups


@click.command()
@click.argument("key", required=False)
@cache_option
@json_option
def show(key: str | None, cache: str | None, as_json: bool) -> None:
    """List what is tuned, or show the record KEY whole."""
    from advisor import report

    records = opening.open_records(cache, fallback=True)
    out = console()
    if key is not None:
        record = records.get(key)
        if as_json:
            click.echo(json.dumps(report.as_data(record, cache)))
            return
        target = record.target
        out.print(
            f"[bold]{target.name}[/bold]  {record.key.inputs}  {record.key.mode}", highlight=False
        )
        for name, value in report.environment(record.key.environment):
            out.print(f"  {name:<16}{value}", highlight=False, markup=False)
        out.print()
        out.print(report.verdict(record, out.width))
        out.print()
        out.print(report.trials(record))
        out.print()
        if record.parts:
            out.print(report.parts(record))
            out.print()
        if paying := answer.break_even(record):
            out.print(report.horizon(record, paying))
            out.print()
        for line in report.summary(record, cache):
            out.print(line, highlight=False, markup=False, soft_wrap=True)
        return
    newest_first = sorted(records.all(), key=lambda record: -record.provenance.created)
    found = [(record, printed.staleness(record)) for record in newest_first]
    complain(records)
    if as_json:
        rows = [
            report.as_data(record, cache)
            | {"stale": [*filter(None, [record.stale]), *map(str, differs)]}
            for record, differs in found
        ]
        click.echo(json.dumps({"records": rows, "damaged": records.damaged}))
    elif not found:
        click.echo("Nothing is tuned yet; run: advisor tune model.py --shape 64x3x224x224")
    else:
        out.print(report.listing(found))


@click.command()
@click.argument("target", shell_complete=complete_files)
@click.option(
    "--shape", "shapes", type=Shape(), multiple=True, metavar="BATCHxSAMPLE", help="As apply()."
)
@click.option("--dtype", help="Of the input.")
@click.option("--mode", type=click.Choice(["train", "infer"]), default="train", show_default=True)
@click.option("--device", metavar="cuda:N|cpu", help="Default: as in a script.")
@click.option(
    "--optimizer", type=click.Choice(["sgd", "adamw"]), help="Default: whatever was tuned."
)
@click.option("--model-arg", "model_args", multiple=True, metavar="NAME=VALUE", help="As tune's.")
@click.option("--deterministic", is_flag=True, help="Only deterministic configs.")
@click.option("--precisions", type=Listed("tf32,bf16"), metavar="LIST", help="Only these.")
@click.option(
    "--on-miss",
    type=click.Choice(lookups.ON_MISS),
    help="default: torch's defaults; nearest: what is safe of the nearest record; error: raise.",
)
@cache_option
@json_option
def why(
    target: str,
    shapes: tuple[tuple[int, ...], ...],
    model_args: tuple[str, ...],
    deterministic: bool,
    on_miss: str | None,
    cache: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Say what apply() would be served for TARGET here, and in what other records differ."""
    import warnings

    from advisor import report

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AdvisorWarning)
        advice = lookups.lookup(
            target,
            shape=(shapes[0] if len(shapes) == 1 else shapes) or None,
            model_args=keywords(model_args) or None,
            deterministic=deterministic or None,
            cache=cache,
            on_miss="default" if on_miss == "error" else on_miss,
            **options,
        )
    explanation = advice.explanation
    if explanation is None and not as_json:  # it did not come as far as looking
        raise UsageError(advice.reason)
    if as_json:
        click.echo(json.dumps(report.explained(advice)))
    else:
        click.echo(str(explanation))
        assert explanation is not None
        if not explanation.seen:
            names = sorted({record.target.name for record in opening.open_records(cache).all()})
            if names:
                click.echo(f"tuned are    {', '.join(names)}")
    if explanation is None:
        click.get_current_context().exit(WRONG_USAGE)
    if on_miss == "error" and advice.status == "miss":
        click.get_current_context().exit(FAILED)


@click.command()
@click.argument("key", required=False)
@click.option("--all", "everything", is_flag=True, help="Every record.")
@cache_option
@json_option
def forget(key: str | None, everything: bool, cache: str | None, as_json: bool) -> None:
    """Remove the record KEY, or all, unreadable ones included."""
    if (key is None) == (not everything):
        raise UsageError("name one KEY, or --all; to see the keys, run: advisor show")
    records = opening.open_records(cache)
    chosen: list[Record] = []
    damaged = 0
    away: list[str] = []
    try:
        chosen = records.all()
        away = records.unreachable
        if key is not None:
            wanted = records.get(key).id  # all its batches
            chosen = [record for record in chosen if record.id == wanted]
    except RecordDamaged:
        damaged = records.delete_damaged(str(key))
    for record in chosen:
        tuning.forget(records, record)
    damaged += records.delete_damaged() if everything else 0
    stuck = [*away, *(records.damaged if everything else ())]
    for line in stuck:
        click.echo(f"advisor: {line}; nothing was removed there", err=True)
    if as_json:
        ids = [record.id for record in chosen]
        click.echo(json.dumps({"forgotten": ids, "damaged": damaged}))
    else:
        lines = [f"forgot {record.id} {record.target.name}" for record in chosen]
        if damaged:
            lines.append(f"removed {damaged} unreadable record{'s' if damaged > 1 else ''}")
        click.echo("\n".join(lines) or "nothing to forget")
    click.get_current_context().exit(FAILED if stuck else DONE)


@click.command()
@click.option(
    "--device", metavar="cuda:N|cpu", help="Default: the first CUDA device, else the CPU."
)
@cache_option
@json_option
def env(device: str | None, cache: str | None, as_json: bool) -> None:
    """Show the environment as a key sees it, and the store."""
    from advisor import report
    from advisor.cache.codec import to_plain
    from advisor.tuners.environment import default_device, detect

    records = opening.open_records(cache, fallback=True)
    stores = records.stores
    found = detect(device or default_device())
    if as_json:
        about = [{"url": store.url, "health": records.health(store)} for store in stores]
        click.echo(json.dumps({"environment": to_plain(found), "stores": about}))
        return
    rows = list(report.environment(found))
    for store in stores:
        rows += [("store", store.url), ("store health", records.health(store))]
        rows += [("", note) for note in [note_on(store)] if note]
    for name, value in rows:
        click.echo(f"{name:<16}{value}")


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Show advisor's version."""
    click.echo(json.dumps({"version": advisor.__version__}) if as_json else advisor.__version__)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
def completion(shell: str) -> None:
    """Print shell completion: eval "$(advisor completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    whole = click.get_current_context().find_root().command
    click.echo(kind(whole, {}, "advisor", "_ADVISOR_COMPLETE").source())
