"""advisor run: start a command with its advice."""

from __future__ import annotations

import os
import sys

import click

from advisor.cache.kinds import Duration
from advisor.cache.task import permissions
from advisor.cli import options
from advisor.cli.options import OrCommand, warn
from advisor.errors import NoRecord, StoreError, UsageError
from advisor.tuners.measure.run.guarded_process import KEPT_OUT, isolated, program, replaces_path


@click.command(cls=OrCommand)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND...")
@options.cache
@options.option(
    "--tune TIME",
    "If no record fits, try configs between the steps of the run's first TIME, then continue with "
    "the best.",
)
@options.option(
    "--log",
    "Write config, speed-up, samples/s and MFU into the run that the script has open.",
    type=click.Choice(("wandb", "mlflow", "tensorboard")),
)
@options.map_option
@options.loader
def run(
    command: tuple[str, ...],
    cache: str | None,
    tune: str | None,
    log: str | None,
    map: tuple[str, ...],
    loader: str | None,
) -> None:
    """Run your command with the advice that was found for it.

    Type it after --: advisor run -- python train.py --epochs 90. Exit code, signals, input and
    output are the command's own.
    """
    from advisor import bootstrap

    path, words, tune_s, overrides = program(command), command, 0.0, None
    if option := isolated(command):
        warn(f"python {option} keeps advisor out; the run is unmodified")
    elif replaces_path(command):
        warn(KEPT_OUT)
    named = permissions({"map": map or None}).get("map")
    if tune is not None:
        from advisor.tuners.search.plan import Plan

        tune_s = Plan.of({"budget": Duration().checked("tune", tune)}).seconds
        if named:
            raise UsageError("--map restarts your command and --tune does not; give one of them")
    if named:
        from advisor.resolve.commands import override

        try:
            words, overrides = override(command, named, cache)
            warn(f"set {overrides.said}, as record {overrides.record} advises")
        except (NoRecord, StoreError) as exc:
            warn(f"{exc}. Its options stay as they are")
    variables = bootstrap.environment(list(command), tune_s, overrides, log or "")
    variables |= options.LOADER.get(loader or "", {})
    if cache is not None:
        variables["ADVISOR_CACHE"] = cache
    sys.stdout.flush()
    try:
        os.execve(path, list(words), os.environ | variables)
    except OSError as exc:  # for example of a script without a #! line
        why = f"{exc.strerror}; put its interpreter, such as bash, before it"
        raise UsageError(f"command {command[0]!r}: {why}") from exc
