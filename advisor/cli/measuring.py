"""Commands that measure: tune, explain, verify."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    INTERRUPTED,
    LOADER,
    UNFINISHED,
    Command,
    OrCommand,
    Time,
    cache_option,
    collected,
    complete_files,
    console,
    data_args_option,
    data_option,
    environment,
    json_option,
    loader_option,
    map_option,
    mapped,
    row_options,
)
from advisor.errors import UsageError
from advisor.tuners.act.pilot.protocol import KEEP_CHECKPOINTS
from advisor.tuners.search.plan import ENOUGH, EXPLAIN, VERIFY, Plan

if TYPE_CHECKING:
    from advisor.tuning import Tuned


@click.command(cls=OrCommand)
@click.argument("target", required=False, shell_complete=complete_files)
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
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Append each trial as it ends to FILE, as a line of JSON.",
)
@click.option(
    "--for",
    "reader",
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
    reader: str | None,
    **options: Any,
) -> None:
    """Measure TARGET, or your own run, and remember the fastest safe config.

    TARGET: model.py, model.py:Net, package.module:factory or torchvision:resnet50.

    A run: advisor tune -- python train.py --epochs 100, the command as you would type it. Configs
    are switched between its own steps, on its own data; then it is ended.
    """
    command = ctx.meta[COMMAND]
    if bool(command) == bool(target):
        raise UsageError("give a TARGET and --shape, or your command after --, one of them")
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
    # What can be refused without torch, which takes seconds to import, was refused.
    from advisor.report import data, tables
    from advisor.report.progress import Shown
    from advisor.report.text import age
    from advisor.tuning import tuned
    from advisor.workload import RunWorkload, TargetWorkload, Workload

    shown = Shown(console(stderr=True, quiet=quiet), budget_s=plan.seconds, events=events)
    overriding = LOADER.get(loader or "", {})
    kept = {KEEP_CHECKPOINTS: "1"} if keep_checkpoints else {}
    with shown as progress, environment(overriding | kept):
        show = progress.output if show_output else None
        workload: Workload = (
            RunWorkload(command, permitted, show=show) if task is None else TargetWorkload(task)
        )
        found = tuned(workload, plan, cache=cache, progress=progress)
    if as_json:
        done = "tuned" if found.finished else "unfinished"
        status = "known" if found.known or found.earlier else done
        click.echo(json.dumps({"status": status, "record": data.as_data(found.record, cache)}))
        ctx.exit(_exit_code(found, reader))
    out = console()
    if found.known:
        made = age(found.record.provenance.created)
        old = "just now" if made == "now" else f"{made} ago"
        out.print(f"Already tuned, {old}; --force measures again.\n", highlight=False)
    else:
        out.print()
    out.print(tables.verdict(found.record))
    out.print()
    lines = [*tables.summary(found.record, cache), *found.remarks]
    if found.interrupted and not found.earlier:
        lines.append("Interrupted: the best so far is kept; the same command continues.")
    if found.finished:
        record = found.record
        with environment(overriding):
            short = any(one.endswith(ENOUGH) for one in found.remarks)
            lines += tables.start(record, cache, command, url=reader or "", short=short)
    elif not found.interrupted:
        lines += ["", _unfinished(found.record, plan, reader)]
    for line in one_remedy(lines):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    ctx.exit(_exit_code(found, reader))


def _exit_code(found: Tuned, reader: str | None) -> int:
    """Of `tune`; who tunes for another reader learns that it has to go on."""
    if found.interrupted:
        return INTERRUPTED
    return UNFINISHED if reader and not found.finished else DONE


_LARGER = "Give a larger --budget."


def one_remedy(lines: Sequence[str]) -> Iterator[str]:
    """Lines without the remedies that a named budget makes needless: the same command goes on with
    it, and measures what leads again."""
    from advisor.report import tables

    named = any(line.endswith(ENOUGH) for line in lines)
    for line in lines:
        needless = (f" {tables.AGAIN}", f" {_LARGER}") if named else ()
        yield next((line.removesuffix(one) for one in needless if line.endswith(one)), line)


def _unfinished(record: Record, plan: Plan, reader: str | None) -> str:
    """Why nothing was measured beside the baseline, and what to give."""
    from advisor.report.text import duration

    beside = f"beside {record.key.task.baseline}"
    most, default = plan.trials, record.baseline.config
    tried = any(one.measurement.ok and one.config != default for one in record.trials)
    if most is not None and record.provenance.trials >= most and not tried:
        return (
            f"Not tuned yet: --trials {most} left nothing to race {beside}. Give a larger "
            "--trials, or none."
        )
    return (
        f"Not tuned yet: {duration(plan.seconds)} left too little time to measure anything "
        f"{beside}. {_LARGER}"
    )


target_option = click.option(
    "--target",
    metavar="TARGET",
    help="What is run  [default: the record's own file, if it is under this folder]",
)


def _meant(ctx: click.Context, model: Model) -> Model | Sequence[str]:
    """What is run: the command after --, else the model.

    Raises:
        UsageError: both are given.
    """
    command: Sequence[str] = ctx.meta[COMMAND]
    if command and (model.target or model.data):
        raise UsageError("give --target and --data, or your command after --, one of them")
    return command or model


def _say(event: Mapping[str, Any]) -> None:
    """Show on stderr what must be said before a command is started."""
    line = f"advisor: {event['text']}"
    console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def _budget(default: str) -> Callable[[Command], Command]:
    return click.option(
        "--budget",
        type=Time(),
        default=default,
        show_default=True,
        metavar="TIME",
        help="Wall time of all measuring; the first start is not counted.",
    )


@click.command(cls=OrCommand)
@click.argument("key")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also a bar chart, as .png or .svg.",
)
@_budget(EXPLAIN)
@target_option
@data_option
@data_args_option
@map_option
@cache_option
@json_option
@click.pass_context
def explain(
    ctx: click.Context,
    key: str,
    plot: Path | None,
    budget: float,
    target: str | None,
    data: str | None,
    data_args: tuple[str, ...],
    map: tuple[str, ...],
    cache: str | None,
    as_json: bool,
) -> None:
    """Measure what each knob of the record KEY's advice contributes.

    What contributes nothing is set back in the advice. Of a run give its command too, as you would
    type it: advisor explain KEY -- python train.py. With --data of a model's own data also what
    bounds the training, and what a sample costs.
    """
    from advisor import remeasuring
    from advisor.report import data as shapes
    from advisor.report import feeding, tables
    from advisor.report import plots as charts

    if plot is not None:
        charts.check(plot)
    arguments = checked(Task, {"data_args": data_args or None}).get("data_args")
    found = remeasuring.explain(
        key,
        _meant(ctx, Model(target, data=data, data_args=arguments)),
        map=mapped(map),
        budget=budget,
        store=cache,
        on_event=_say,
    )
    if plot is not None and found.record.parts:
        charts.parts(found.record, plot)
    if as_json:
        shown = shapes.as_data(found.record, cache)
        costs = to_plain(found.costs) if found.costs else None
        told = {"dropped": list(found.dropped), "costs": costs, "record": shown}
        click.echo(json.dumps(told))
        return
    out = console()
    for line in feeding.explained(found.record, found.costs, data or ""):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    if not found.record.parts:
        out.print(f"Nothing to explain: the advice is {found.record.key.task.baseline}.")
        return
    out.print(tables.parts(found.record))
    if found.dropped:
        baseline = found.record.key.task.baseline
        out.print(f"\nSet back to {baseline}, as no slower: " + ", ".join(found.dropped))
    for line in tables.caveats_of(found.record):
        out.print(f"\n{line}", highlight=False, markup=False, soft_wrap=True)
    if plot is not None:
        out.print(f"\nchart: {plot}", highlight=False, markup=False)


_LAST = {
    "holds": "the record holds",
    "does not hold": "marked stale: ",
    "could not tell": "could not tell whether the record holds: ",
}


@click.command(cls=OrCommand)
@click.argument("key")
@_budget(VERIFY)
@target_option
@map_option
@cache_option
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    key: str,
    budget: float,
    target: str | None,
    map: tuple[str, ...],
    cache: str | None,
    as_json: bool,
) -> None:
    """Measure the record KEY again: does it still hold?

    Of a run give its command too, as you would type it: advisor verify KEY -- python train.py.

    Exit code 0: it holds. 1: it does not, and is marked stale; or that could not be told, as the
    last line says, and nothing is changed: use a quieter machine or a larger --budget.
    """
    from advisor import remeasuring
    from advisor.report.text import spread

    found = remeasuring.verify(
        key,
        _meant(ctx, Model(target)),
        map=mapped(map),
        budget=budget,
        store=cache,
        on_event=_say,
    )
    record = found.record
    if as_json:
        click.echo(
            json.dumps(
                {
                    "verdict": found.verdict,
                    "holds": found.holds,
                    "reason": found.reason,
                    "numerics": found.numerics,
                    "samples_per_s": {
                        "default": found.samples_per_s[0],
                        record.use: found.samples_per_s[1],
                    },
                    "now": {
                        use: {"ratio": now.mean, "low": now.low, "high": now.high}
                        for use, now in found.now.items()
                    },
                    "then": {
                        use: {"ratio": c.speedup, "low": c.speedup_low, "high": c.speedup_high}
                        for use in found.now
                        for c in [record.winner(use)]
                    },
                    "differs": list(found.differs),
                }
            )
        )
    else:
        for use, now in found.now.items():
            seen = speedup(now.mean, now.low, now.high)
            click.echo(f"{use:<9}tuned {spread(record.winner(use))}  now {seen}")
        then, speed = record.winner(record.use), found.samples_per_s[1]
        click.echo(f"samples/s tuned {then.samples_per_s:,.4g}  now {speed:,.4g}")
        for difference in found.differs:
            click.echo(f"changed since: {difference}")
        click.echo(found.numerics)
        click.echo(_LAST[found.verdict] + found.reason)
    ctx.exit(DONE if found.holds else FAILED)
