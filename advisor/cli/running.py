"""advisor run: start a command with its advice."""

from __future__ import annotations

import os
import sys

import click

from advisor.cli.options import (
    LOADER,
    OfCommand,
    cache_option,
    loader_option,
    map_option,
    mapped,
)
from advisor.errors import NoRecord, StoreError, UsageError
from advisor.tuners.measure.run.guarded_process import isolated, program


@click.command(cls=OfCommand)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@cache_option
@click.option(
    "--tune",
    "budget",
    metavar="TIME",
    help="If no record fits, try configs between the steps of the run's first TIME, then continue "
    "with the best.",
)
@map_option
@loader_option
def run(
    command: tuple[str, ...],
    cache: str | None,
    budget: str | None,
    map: tuple[str, ...],
    loader: str | None,
) -> None:
    """Run your command with the advice that was found for it.

    Type it after --: advisor run -- python train.py --epochs 90. Exit code, signals, input and
    output are the command's own.
    """
    from advisor import bootstrap

    path, tune_s = program(command), 0.0
    if option := isolated(command):
        click.echo(f"advisor: python {option} keeps advisor out; the run is unmodified", err=True)
    named = mapped(map)
    if budget is not None:
        from advisor.tuners.search.plan import Plan

        tune_s = Plan.of({"budget": budget}).seconds
        if named:
            raise UsageError("--map restarts your command and --tune does not; give one of them")
    words, options = command, None
    if named:
        from advisor.resolve.commands import override

        try:
            words, options = override(command, named, cache)
            click.echo(f"advisor: set {options.said}, as record {options.record} advises", err=True)
        except (NoRecord, StoreError) as exc:
            click.echo(f"advisor: {exc}. The run is unmodified", err=True)
    variables = bootstrap.environment(list(command), tune_s, options)
    variables |= LOADER.get(loader or "", {})
    if cache is not None:
        variables["ADVISOR_CACHE"] = cache
    sys.stdout.flush()
    try:
        os.execve(path, list(words), {**os.environ, **variables})
    except OSError as exc:  # for example of a script without a #! line
        why = f"{exc.strerror}; put its interpreter, such as bash, before it"
        raise UsageError(f"command {command[0]!r}: {why}") from exc
