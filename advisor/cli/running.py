"""The command that runs another one: with the advice in force."""

from __future__ import annotations

import os
import shutil
import sys

import click

from advisor.cli.options import cache_option
from advisor.errors import UsageError


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@cache_option
def run(command: tuple[str, ...], cache: str | None) -> None:
    """Run COMMAND as it is, with the advice for it in force.

    Write it after --: advisor run -- python train.py --epochs 90. Exit code, signals, input and
    output are the command's own.
    """
    from advisor import piloting

    if shutil.which(command[0]) is None:
        raise UsageError(f"command {command[0]!r}: no such program; give it as you would type it")
    told = piloting.environment(list(command))
    if cache is not None:
        told["ADVISOR_CACHE"] = cache
    sys.stdout.flush()
    os.execvpe(command[0], list(command), {**os.environ, **told})
