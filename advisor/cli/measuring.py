"""Commands that measure: tune, explain, verify."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.arguments import Model
from advisor.cache.codec import to_plain
from advisor.cache.record import Record
from advisor.cache.shown import speedup
from advisor.cache.task import Task, checked, permissions
from advisor.cli.options import (
    COMMAND,
    DONE,
    FAILED,
    FILE,
    INTERRUPTED,
    LOADER,
    UNFINISHED,
    Command,
    OrCommand,
    cache_option,
    collected,
    console,
    data_args_option,
    data_option,
    json_option,
    loader_option,
    map_option,
    mapped,
    row_options,
    say,
    target_argument,
    together,
)
from advisor.errors import UsageError
from advisor.tuners.act.pilot.protocol import KEEP_CHECKPOINTS
from advisor.tuners.search.plan import EXPLAIN, VERIFY, Plan

if TYPE_CHECKING:
    from advisor.tuning import Tuned


@click.command(cls=OrCommand)
@target_argument
@row_options(Task)
@row_options(Plan)
@cache_option
@json_option
@click.option("--quiet", is_flag=True, help="No progress, only the result.")
@loader_option
@click.option("--show-output", is_flag=True, help="Of a run: show what it prints, on stderr.")
@click.option(
    "--keep-checkpoints",
    is_flag=True,
    help="Of a run: write its checkpoints where it says, not to a scratch folder.",
)
@click.option(
    "--events",
    type=FILE,
    metavar="FILE",
    help="Append each trial to FILE when it ends, as a line of JSON.",
)
@click.option(
    "--for",
    "url",
    metavar="URL",
    help="Print commands for another machine, where the record will be in this store.",
)
@click.pass_context
def tune(
    ctx: click.Context,
    /,
    target: str | None,
    cache: str | None,
    as_json: bool,
    quiet: bool,
    show_output: bool,
    loader: str | None,
    keep_checkpoints: bool,
    events: Path | None,
    url: str | None,
    **options: Any,
) -> None:
    """Find the fastest safe config for your run, or for a model.

    \b
    advisor tune -- python train.py --epochs 100
    advisor tune model.py --shape 64x3x256x256

    For a run, type your command after --. advisor starts it once, switches configs between its
    steps, on its own data, and then ends it.

    TARGET is a model on its own, trained on made-up data: model.py, model.py:Net,
    package.module:factory or torchvision:resnet50.
    """
    command = ctx.meta[COMMAND]
    if bool(command) == bool(target):
        raise UsageError("give either a TARGET and --shape, or your command after --")
    if show_output and target:
        raise UsageError("--show-output is for a command after --; a TARGET's output is not kept")
    if loader and target:
        raise UsageError("--loader is for a command after --; a TARGET's is tuned with --data")
    if keep_checkpoints and target:
        raise UsageError("--keep-checkpoints is for a command after --; a TARGET saves none")
    plan = Plan.of(collected(Plan, options))
    given = collected(Task, options)
    permitted = permissions(given) if command else {}
    task = Task.of(target, given) if target else None
    # Importing torch takes seconds: wrong options were refused before.
    from advisor.report.progress import Shown
    from advisor.tuning import tuned
    from advisor.workload import RunWorkload, TargetWorkload, Workload

    variables = dict(LOADER.get(loader or "", {}))
    kept = {KEEP_CHECKPOINTS: "1"} if keep_checkpoints else {}
    os.environ.update(variables | kept)  # for the run that is started, and the lines to copy
    progress = Shown(console(stderr=True, quiet=quiet), budget_s=plan.seconds, events=events)
    show = progress.output if show_output else None
    workload: Workload = (
        RunWorkload(command, permitted, show=show) if task is None else TargetWorkload(task)
    )
    found = tuned(workload, plan, cache=cache, progress=progress)
    if as_json:
        from advisor.report.data import as_data

        done = "tuned" if found.finished else "unfinished"
        status = "known" if found.known or found.earlier else done
        click.echo(json.dumps({"status": status, "record": as_data(found.record, cache)}))
    else:
        _print_tuned(found, plan, command, cache, url)
    if found.interrupted:
        ctx.exit(INTERRUPTED)
    # Only a worker, which tunes for another machine, has to know that it must go on.
    ctx.exit(UNFINISHED if url and not found.finished else DONE)


def _print_tuned(
    found: Tuned, plan: Plan, command: Sequence[str], cache: str | None, url: str | None
) -> None:
    from advisor.report import tables
    from advisor.report.text import age

    out, record = console(), found.record
    if found.known:
        made = age(record.provenance.created)
        old = "just now" if made == "now" else f"{made} ago"
        say(out, f"Already tuned, {old}; --force measures again.")
    say(out, "")
    out.print(tables.verdict(record))
    say(out, "", *tables.summary(record, short=found.short), *found.remarks)
    if found.interrupted and not found.earlier:
        say(out, "Interrupted: the best so far is kept; the same command continues.")
    if found.finished:
        say(out, *tables.start(record, cache, command, url=url or "", short=found.short))
    elif not found.interrupted:
        say(out, "", unfinished(record, plan, short=found.short))


def unfinished(record: Record, plan: Plan, *, short: bool = False) -> str:
    """Why nothing was measured beside the baseline, and what to do."""
    from advisor.report.text import duration

    baseline, most = record.baseline.config, plan.trials
    tried = any(one.measurement.ok and one.config != baseline for one in record.trials)
    name = record.key.task.baseline
    if most is not None and record.provenance.trials >= most and not tried:
        return (
            f"Not tuned yet: --trials {most} left nothing to compare with {name}. Give a larger "
            "--trials, or none."
        )
    larger = "" if short else " Give a larger --budget."
    return (
        f"Not tuned yet: {duration(plan.seconds)} was too short to compare anything with "
        f"{name}.{larger}"
    )


def _again_options(budget: str) -> Callable[[Command], Command]:
    """The options of commands that measure a record again."""
    return together(
        click.option(
            "--budget",
            default=budget,
            show_default=True,
            metavar="TIME",
            help="Wall time of all measuring; the first start is not counted.",
        ),
        click.option(
            "--target",
            metavar="TARGET",
            help="What is run  [default: the record's own file, if it is under this folder]",
        ),
        map_option,
        cache_option,
        json_option,
    )


def _again(ctx: click.Context, model: Model, budget: float, map: Any, cache: str | None) -> Any:
    """The arguments of `explain` and `verify` after the key.

    Raises:
        UsageError: a model and a command are given.
    """
    command: Sequence[str] = ctx.meta[COMMAND]
    if command and (model.target or model.data):
        raise UsageError("give either --target and --data, or your command after --")
    return {
        "what": command or model,
        "map": mapped(map),
        "budget": budget,
        "store": cache,
        "on_event": _warn,
    }


def _warn(event: Mapping[str, Any]) -> None:
    say(console(stderr=True), f"advisor: {event['text']}")


@click.command(cls=OrCommand)
@click.argument("key")
@click.option("--plot", type=FILE, metavar="FILE", help="Also a bar chart, as .png or .svg.")
@data_option
@data_args_option
@_again_options(EXPLAIN)
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    key: str,
    plot: Path | None,
    data: str | None,
    data_args: tuple[str, ...],
    target: str | None,
    as_json: bool,
    **again: Any,
) -> None:
    """Measure what each knob of the record KEY's advice contributes.

    Knobs that contribute nothing leave the advice. For the record of a run, give its command as
    you would type it: advisor explain KEY -- python train.py. With --data it also says what limits
    the training, and what a sample costs.
    """
    from advisor import verification
    from advisor.report import feeding, plots, tables
    from advisor.report.data import as_data

    if plot is not None:
        plots.check(plot)
    arguments = checked(Task, {"data_args": data_args or None}).get("data_args")
    model = Model(target, data=data, data_args=arguments)
    found = verification.explain(key, **_again(ctx, model, **again))
    record, baseline = found.record, found.record.key.task.baseline
    if plot is not None and record.parts:
        plots.parts(record, plot)
    if as_json:
        costs = to_plain(found.costs) if found.costs else None
        shown = {"dropped": list(found.dropped), "costs": costs}
        click.echo(json.dumps({**shown, "record": as_data(record, again["cache"])}))
        return
    out = console()
    say(out, *feeding.explained(record, found.costs, data or ""))
    if not record.parts:
        say(out, f"Nothing to explain: the advice is {baseline}.")
        return
    out.print(tables.parts(record))
    if found.dropped:
        say(out, f"\nRemoved from the advice, as no slower without: {', '.join(found.dropped)}")
    say(out, *(f"\n{line}" for line in tables.caveats_of(record)))
    if plot is not None:
        say(out, f"\nchart: {plot}")


_LAST = {
    "holds": "the record holds",
    "does not hold": "marked stale: ",
    "could not tell": "could not tell whether the record holds: ",
}


@click.command(cls=OrCommand)
@click.argument("key")
@_again_options(VERIFY)
@click.pass_context
def verify(
    ctx: click.Context, /, key: str, target: str | None, as_json: bool, **again: Any
) -> None:
    """Measure the record KEY again: does it still hold?

    For the record of a run, give its command as you would type it: advisor verify KEY -- python
    train.py.

    Exit code 0: it holds. 1: it does not, and is marked stale; or advisor could not tell, as the
    last line says, and changes nothing: use a quieter machine or a larger --budget.
    """
    from advisor import verification
    from advisor.report.text import spread

    found = verification.verify(key, **_again(ctx, Model(target), **again))
    record, (default, speed) = found.record, found.samples_per_s
    then = {use: record.winner(use) for use in found.now}
    if as_json:
        shown = {
            "verdict": found.verdict,
            "holds": found.holds,
            "reason": found.reason,
            "numerics": found.numerics,
            "samples_per_s": {"default": default, record.use: speed},
            "now": {use: _ratio(r.mean, r.low, r.high) for use, r in found.now.items()},
            "then": {
                use: _ratio(choice.speedup, choice.speedup_low, choice.speedup_high)
                for use, choice in then.items()
            },
            "differs": list(found.differs),
        }
        click.echo(json.dumps(shown))
    else:
        for use, now in found.now.items():
            seen = speedup(now.mean, now.low, now.high)
            click.echo(f"{use:<9}tuned {spread(then[use])}  now {seen}")
        tuned = record.winner(record.use).samples_per_s
        click.echo(f"samples/s tuned {tuned:,.4g}  now {speed:,.4g}")
        for difference in found.differs:
            click.echo(f"changed since: {difference}")
        click.echo(found.numerics)
        click.echo(_LAST[found.verdict] + found.reason)
    ctx.exit(DONE if found.holds else FAILED)


def _ratio(mean: float, low: float, high: float) -> dict[str, float]:
    return {"ratio": mean, "low": low, "high": high}
