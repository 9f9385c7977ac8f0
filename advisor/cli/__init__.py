"""The command line: arguments, exit codes; the only place that prints."""

from __future__ import annotations

import errno
import importlib
import keyword
import os
import sys

import click

import advisor
from advisor.cli.options import DONE, FAILED, INTERRUPTED, WRONG_USAGE
from advisor.errors import AdvisorError, UsageError

_ROOMS = {
    "tune": "measuring",
    "run": "running",
    "show": "reading",
    "report": "reading",
    "why": "reading",
    "emit": "emitting",
    "explain": "measuring",
    "verify": "measuring",
    "export": "sharing",
    "import": "sharing",
    "sync": "sharing",
    "gc": "sharing",
    "submit": "jobs",
    "jobs": "jobs",
    "logs": "jobs",
    "cancel": "jobs",
    "serve": "serving",
    "token": "serving",
    "forget": "reading",
    "env": "reading",
    "completion": "reading",
}
"""Where each command is: `advisor run` is part of every start, and loads its own room alone."""


class _Commands(click.Group):
    """Those of the rooms, each loaded when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_ROOMS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ROOMS:
            return None
        room = importlib.import_module(f"advisor.cli.{_ROOMS[cmd_name]}")
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        command: click.Command = getattr(room, name)
        return command


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the fastest safe way to train a model here, by measuring, and remember it.",
)
@click.version_option(advisor.__version__, message="advisor %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(WRONG_USAGE)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    try:
        code = cli.main(arguments, prog_name="advisor", standalone_mode=False)
        sys.stdout.flush()
        facts = sys.modules.get("advisor.tuners.torch_facts")
        if arguments is None and facts is not None:
            facts.keep()
        return code if isinstance(code, int) else DONE
    except click.ClickException as exc:
        return _refuse(exc.format_message() + _where_to_read(exc), WRONG_USAGE)
    except UsageError as exc:
        return _refuse(str(exc), WRONG_USAGE, getattr(exc, "details", ""))
    except AdvisorError as exc:
        return _refuse(str(exc), FAILED, getattr(exc, "details", ""))
    except OSError as exc:
        if exc.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Nobody reads on, or nothing can be written: what is still held back would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED if exc.errno == errno.EPIPE else _refuse(f"output: {exc.strerror}", FAILED)
    except (KeyboardInterrupt, click.Abort):
        return _refuse("interrupted; the same command goes on from here", INTERRUPTED)


def _where_to_read(exc: click.ClickException) -> str:
    """Which help lists what is allowed, where the message does not: a wrong value's does."""
    ctx = getattr(exc, "ctx", None)
    if ctx is None or type(exc) is click.BadParameter:
        return ""
    return f" (see: {ctx.command_path} --help)"


def _refuse(message: str, code: int, details: str = "") -> int:
    if details:
        click.echo(details.rstrip(), err=True)
    click.echo("advisor: " + " ".join(message.split()), err=True)
    return code
