"""The command line: arguments, exit codes; the only place that prints."""

from __future__ import annotations

import errno
import functools
import importlib
import keyword
import os
import sys

import click

import advisor
from advisor.cli.options import DONE, FAILED, INTERRUPTED, WRONG_USAGE, json_line, warn
from advisor.errors import AdvisorError, UsageError

MAX_WORD = 300  # characters of a word in an error; of a longer word, only the start is shown
_COMMANDS = {
    "Tune and run": {**dict.fromkeys(("tune", "fit"), "measuring"), "run": "running"},
    "Check and compare": dict.fromkeys(("check", "compare"), "measuring"),
    "Records": {
        **dict.fromkeys(("show", "why", "report", "emit", "patch"), "reading"),
        **dict.fromkeys(("explain", "verify"), "measuring"),
        **dict.fromkeys(("forget", "gc"), "sharing"),
    },
    "Stores": dict.fromkeys(("export", "import", "sync"), "sharing"),
    "A team's server": dict.fromkeys(
        ("submit", "jobs", "logs", "cancel", "serve", "token"), "jobs"
    ),
    "This machine": dict.fromkeys(("env", "completion", "schema"), "reading"),
}
"""The commands and their modules, as `advisor --help` lists them. Only the module in use is
imported: `advisor run` must be fast."""
_MODULES = {name: module for names in _COMMANDS.values() for name, module in names.items()}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        loaded = importlib.import_module(f"advisor.cli.{_MODULES[cmd_name]}")
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        command: click.Command = getattr(loaded, name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in _COMMANDS.items():
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
    """Run a command. Returns the exit code. With --json, an error is a document too."""
    words = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in words[: words.index("--") if "--" in words else None]
    refuse = functools.partial(_refuse, as_json=as_json)
    try:
        code = cli.main(arguments, prog_name="advisor", standalone_mode=False)
        sys.stdout.flush()
        facts = sys.modules.get("advisor.tuners.torch_facts")
        if arguments is None and facts is not None:
            facts.keep()
        return code if isinstance(code, int) else DONE
    except click.ClickException as exc:
        # The message on a wrong value says what is allowed.
        ctx = None if type(exc) is click.BadParameter else getattr(exc, "ctx", None)
        see = f" (see: {ctx.command_path} --help)" if ctx else ""
        return refuse(exc.format_message() + see, WRONG_USAGE, "UsageError")
    except AdvisorError as exc:
        if exc.details:
            click.echo(exc.details.rstrip(), err=True)
        code = WRONG_USAGE if isinstance(exc, UsageError) else FAILED
        return refuse(str(exc), code, type(exc).__name__)
    except OSError as exc:
        if exc.filename is not None:
            return refuse(f"{os.fsdecode(exc.filename)}: {exc.strerror}", FAILED, "OSError")
        if exc.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # The pipe is closed or the disk full: flushing at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        full = f"output: {exc.strerror}"
        return FAILED if exc.errno == errno.EPIPE else refuse(full, FAILED, "OSError")
    except (KeyboardInterrupt, click.Abort):
        again = "; to continue, run the same command again" * (words[:1] in (["tune"], ["fit"]))
        return refuse(f"interrupted{again}", INTERRUPTED, "Interrupted")


def _refuse(message: str, code: int, kind: str, *, as_json: bool) -> int:
    """Print an error on one line; `as_json`: as a document too. Returns the exit code."""
    words = (word if len(word) <= MAX_WORD else f"{word[:80]}..." for word in message.split())
    line = " ".join(words)
    warn(line)
    if as_json:
        about = {"kind": kind, "message": line, "exit_code": code}
        click.echo(json_line({"error": about}))
    return code
