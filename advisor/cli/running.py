"""The command that runs another one: with the advice in force."""

from __future__ import annotations

import os
import sys

import click

from advisor.cli.options import cache_option
from advisor.tuners.measure.run.words import isolated, program


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@cache_option
def run(command: tuple[str, ...], cache: str | None) -> None:
    """Run COMMAND as it is, with the advice for it in force.

    Write it after --: advisor run -- python train.py --epochs 90. Exit code, signals, input and
    output are the command's own.
    """
    from advisor import piloting

    path = program(command)
    if option := isolated(command):
        click.echo(f"advisor: python {option} keeps advisor out; it runs as it is", err=True)
    told = piloting.environment(list(command))
    if cache is not None:
        told["ADVISOR_CACHE"] = cache
    sys.stdout.flush()
    os.execve(path, list(command), {**os.environ, **told})
