"""The command that runs another one: with the advice in force."""

from __future__ import annotations

import os
import sys

import click

from advisor.cli.options import OfCommand, Time, cache_option
from advisor.tuners.measure.run.words import isolated, program


@click.command(cls=OfCommand)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@cache_option
@click.option(
    "--tune",
    "tune_s",
    type=Time(),
    metavar="TIME",
    help="Nothing known yet: so much of the run's first time tries configs at its step boundaries, "
    "then it goes on with the best.",
)
def run(command: tuple[str, ...], cache: str | None, tune_s: float | None) -> None:
    """Run COMMAND as it is, with the advice for it in force.

    Write it after --: advisor run -- python train.py --epochs 90. Exit code, signals, input and
    output are the command's own.
    """
    from advisor import piloting

    path = program(command)
    if option := isolated(command):
        click.echo(f"advisor: python {option} keeps advisor out; it runs as it is", err=True)
    if tune_s:
        from advisor.tuners.search.plan import Plan

        Plan.of({"budget": tune_s})
    told = piloting.environment(list(command), tune_s or 0.0)
    if cache is not None:
        told["ADVISOR_CACHE"] = cache
    sys.stdout.flush()
    os.execve(path, list(command), {**os.environ, **told})
