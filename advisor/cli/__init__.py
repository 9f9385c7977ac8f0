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

MAX_WORD = 300
"""Characters of a word in an error. Of a longer word, only the start is shown."""
_MODULES = {
    "jobs": ("submit", "jobs", "logs", "cancel"),
    "measuring": ("tune", "explain", "verify"),
    "reading": ("show", "report", "why", "emit", "forget", "env", "completion"),
    "running": ("run",),
    "serving": ("serve", "token"),
    "sharing": ("export", "import", "sync", "gc"),
}
"""The commands of each module. Only the module in use is imported: `advisor run` must be fast."""
_HELP = {
    "Tune and run": ("tune", "run"),
    "Records": ("show", "why", "report", "emit", "explain", "verify", "forget", "gc"),
    "Stores": ("export", "import", "sync"),
    "A team's server": ("submit", "jobs", "logs", "cancel", "serve", "token"),
    "This machine": ("env", "completion"),
}
"""The commands as `advisor --help` lists them."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(name for names in _MODULES.values() for name in names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for module, names in _MODULES.items():
            if cmd_name in names:
                name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
                loaded = importlib.import_module(f"advisor.cli.{module}")
                command: click.Command = getattr(loaded, name)
                return command
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in _HELP.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [(name, one.get_short_help_str(100)) for name, one in commands if one], 10
                )


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the fastest safe way to train a model on this machine, and start every run with it.",
)
@click.version_option(advisor.__version__, message="advisor %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(WRONG_USAGE)


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit code."""
    try:
        code = cli.main(arguments, prog_name="advisor", standalone_mode=False)
        sys.stdout.flush()
        facts = sys.modules.get("advisor.tuners.torch_facts")
        if arguments is None and facts is not None:
            facts.keep()
        return code if isinstance(code, int) else DONE
    except click.ClickException as exc:
        return _refuse(exc.format_message() + _where_to_read(exc), WRONG_USAGE)
    except AdvisorError as exc:
        code = WRONG_USAGE if isinstance(exc, UsageError) else FAILED
        return _refuse(str(exc), code, exc.details)
    except OSError as exc:
        if exc.filename is not None:
            return _refuse(f"{os.fsdecode(exc.filename)}: {exc.strerror}", FAILED)
        if exc.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # The pipe is closed or the disk full: flushing at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED if exc.errno == errno.EPIPE else _refuse(f"output: {exc.strerror}", FAILED)
    except (KeyboardInterrupt, click.Abort):
        return _refuse("interrupted; to continue, run the same command again", INTERRUPTED)


def _where_to_read(exc: click.ClickException) -> str:
    """' (see: COMMAND --help)'; '' for a wrong value, whose message says what is allowed."""
    ctx = getattr(exc, "ctx", None)
    if ctx is None or type(exc) is click.BadParameter:
        return ""
    return f" (see: {ctx.command_path} --help)"


def _refuse(message: str, code: int, details: str = "") -> int:
    if details:
        click.echo(details.rstrip(), err=True)
    words = (word if len(word) <= MAX_WORD else f"{word[:80]}..." for word in message.split())
    click.echo("advisor: " + " ".join(words), err=True)
    return code
