"""The command that runs another one: with the advice in force."""

from __future__ import annotations

import os
import shutil
import sys

import click

from advisor.cli.options import Time, cache_option
from advisor.errors import UsageError
from advisor.tuners.search.plan import Plan


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@cache_option
@click.option(
    "--tune",
    "tune_s",
    type=Time(),
    default=0.0,
    metavar="TIME",
    help="Nothing known yet: so much of the run's first time tries configs at its step boundaries, "
    "then it goes on with the best. What changes numerics cannot be compared with fp32 so.",
)
def run(command: tuple[str, ...], cache: str | None, tune_s: float) -> None:
    """Run COMMAND as it is, with the advice for it in force.

    Write it after --: advisor run -- python train.py --epochs 90. Exit code, signals, input and
    output are the command's own.
    """
    from advisor import piloting

    if shutil.which(command[0]) is None:
        raise UsageError(f"command {command[0]!r}: no such program; give it as you would type it")
    if tune_s:
        Plan.of({"budget": tune_s})
    told = piloting.environment(list(command), tune_s)
    if cache is not None:
        told["ADVISOR_CACHE"] = cache
    sys.stdout.flush()
    os.execvpe(command[0], list(command), {**os.environ, **told})
