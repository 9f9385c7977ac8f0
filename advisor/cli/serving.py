"""The commands that run a team's server: serve, token."""

from __future__ import annotations

from typing import Any

import click

from advisor.cli import options
from advisor.cli.options import Number, Output, Parts, json_or_text, option
from advisor.errors import UsageError
from advisor.jobs.token import ROLES

NEEDS = "pip install 'torch-advisor[serve]'"

database_option = option(
    "--database URL",
    "sqlite:////FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME  [default: "
    "$ADVISOR_DATABASE, else SQLite in your data folder]",
    envvar="ADVISOR_DATABASE",
)


def _port(_context: object, _option: object, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) <= 65535):
        raise UsageError(f"--port {text[:40]!r}: expected 0 to 65535; 0 takes any free port")
    return int(text)


@click.command()
@option("--host ADDRESS", "  [default: 127.0.0.1]", default="127.0.0.1")
@option("--port NUMBER", "0: any.  [default: 8765]", default="8765", callback=_port)
@database_option
@option(
    "--behind-proxy",
    "Only a proxy can connect: it encrypts, and sets X-Forwarded-For and -Proto.",
)
@option(
    "--executor local|ray-jobs:http://HOST|none",
    "Where submitted jobs run; repeat for several.  [default: local, this machine; none if other "
    "machines can reach the server]",
    "executors",
    multiple=True,
)
@option("--url URL", "Of this server, for workers  [default: its own address]", default="")
@options.json_option
def serve(database: str | None, executors: tuple[str, ...], as_json: bool, **where: Any) -> None:
    """Serve records to a team, and run the jobs that the team submits.

    The server runs until SIGTERM or Ctrl-C.
    """
    from advisor import __version__

    def say(address: str, token: str | None) -> None:
        shown = f"admin token, shown this once: {token}\n" if token is not None else ""
        document = options.json_line({"address": address, "admin_token": token})
        click.echo(document if as_json else f"{shown}serving on {address}")

    run, opened = _server(database)
    run.serve(opened, run.Where(**where), __version__, say, executors)


@click.command()
@click.argument("name")
@option("--role", "  [default: read]", type=click.Choice(ROLES), default="read")
@option("--days N", "Days until it expires; default: never.", type=Number(1, 36500))
@database_option
@json_or_text
def token(name: str, role: str, days: int | None, database: str | None) -> Parts:
    """Make a token called NAME, and show it once.

    Run it on the machine that has the server's database.
    """
    run, opened = _server(database)
    text = run.new_token(opened, name, role, days)
    yield text
    yield Output(lambda: {"name": name, "role": role, "token": text})


def _server(database: str | None) -> tuple[Any, Any]:
    """(The module that runs the server, its database). UsageError says how to install them."""
    try:
        from advisor.service import run
        from advisor.service.database import Database
    except ImportError as exc:
        raise UsageError(f"serve: {exc}; run: {NEEDS}") from exc
    return run, Database(database)
