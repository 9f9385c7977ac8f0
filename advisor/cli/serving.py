"""The commands that run a team's server: serve, token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import click

from advisor.cli.options import Number, json_option
from advisor.errors import UsageError
from advisor.service.roles import ROLES

NEEDS = "pip install 'torch-advisor[serve]'"

Command = Callable[..., None]


def _database_option(command: Command) -> Command:
    return click.option(
        "--database",
        metavar="URL",
        envvar="ADVISOR_DATABASE",
        help="sqlite:////FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME  [default: "
        "$ADVISOR_DATABASE, else SQLite in your data folder]",
    )(command)


def _port(_context: object, _option: object, text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > 65535:
        raise UsageError(f"--port {text[:40]!r}: expected 0 to 65535; 0 takes any free port")
    return int(text)


@click.command()
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="  [default: 127.0.0.1]")
@click.option(
    "--port", metavar="NUMBER", default="8765", callback=_port, help="0: any.  [default: 8765]"
)
@_database_option
@click.option(
    "--behind-proxy",
    is_flag=True,
    help="Only a proxy can connect: it encrypts, and sets X-Forwarded-For and -Proto.",
)
@click.option(
    "--executor",
    "executors",
    multiple=True,
    metavar="local|ray-jobs:http://HOST|none",
    help="Where submitted jobs run; repeat for several.  [default: local, this machine; none if "
    "other machines can reach the server]",
)
@click.option(
    "--url", default="", help="URL of this server for workers  [default: its own address]"
)
def serve(database: str | None, executors: tuple[str, ...], **where: Any) -> None:
    """Serve records to a team, and run the jobs that the team submits.

    The server runs until SIGTERM or Ctrl-C.
    """
    from advisor import __version__

    run = _run()
    run.serve(_opened(database), run.Where(**where), __version__, _say, executors)


def _say(address: str, token: str | None) -> None:
    if token is not None:
        click.echo(f"admin token, shown this once: {token}")
    click.echo(f"serving on {address}")


@click.command()
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="read", help="  [default: read]")
@click.option("--days", type=Number(1, 36500), help="Days until it expires; default: never.")
@_database_option
@json_option
def token(name: str, role: str, days: int | None, database: str | None, as_json: bool) -> None:
    """Make a token called NAME, and show it once.

    Run it on the machine that has the server's database.
    """
    run = _run()
    text = run.new_token(_opened(database), name, role, days)
    click.echo(json.dumps({"name": name, "role": role, "token": text}) if as_json else text)


def _run() -> Any:
    """The module that runs the server.

    Raises:
        UsageError: the extra 'serve' is not installed; the message says how to install it.
    """
    try:
        from advisor.service import run
    except ImportError as exc:
        raise UsageError(f"serve: {exc}; run: {NEEDS}") from exc
    return run


def _opened(database: str | None) -> Any:
    from advisor.service.database import Database

    return Database(database)
