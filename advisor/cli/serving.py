"""The commands that run a team's server: serve, token."""

from __future__ import annotations

from typing import Any

import click

from advisor.cli.options import Number, Output, json_or_text
from advisor.errors import UsageError
from advisor.service.roles import ROLES

NEEDS = "pip install 'torch-advisor[serve]'"

database_option = click.option(
    "--database",
    metavar="URL",
    envvar="ADVISOR_DATABASE",
    help="sqlite:////FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME  [default: "
    "$ADVISOR_DATABASE, else SQLite in your data folder]",
)


def _port(_context: object, _option: object, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) <= 65535):
        raise UsageError(f"--port {text[:40]!r}: expected 0 to 65535; 0 takes any free port")
    return int(text)


@click.command()
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", show_default=True)
@click.option(
    "--port", metavar="NUMBER", default="8765", callback=_port, help="0: any.  [default: 8765]"
)
@database_option
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

    run, opened = _server(database)
    run.serve(opened, run.Where(**where), __version__, _say, executors)


def _say(address: str, token: str | None) -> None:
    if token is not None:
        click.echo(f"admin token, shown this once: {token}")
    click.echo(f"serving on {address}")


@click.command()
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="read", help="  [default: read]")
@click.option("--days", type=Number(1, 36500), help="Days until it expires; default: never.")
@database_option
@json_or_text
def token(name: str, role: str, days: int | None, database: str | None) -> Output:
    """Make a token called NAME, and show it once.

    Run it on the machine that has the server's database.
    """
    run, opened = _server(database)
    text = run.new_token(opened, name, role, days)
    return Output(lambda: {"name": name, "role": role, "token": text}, [text])


def _server(database: str | None) -> tuple[Any, Any]:
    """The module that runs the server, and its database.

    Raises:
        UsageError: the extra 'serve' is not installed; the message says how to install it.
    """
    try:
        from advisor.service import run
        from advisor.service.database import Database
    except ImportError as exc:
        raise UsageError(f"serve: {exc}; run: {NEEDS}") from exc
    return run, Database(database)
