"""The commands of a team's server: submit, jobs, logs, cancel; serve, token."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from advisor.cache.settings import server_url
from advisor.cache.task import Task
from advisor.cli import options
from advisor.cli.options import DONE, FAILED, Number, OrCommand, Output, Parts, json_or_text, option
from advisor.client import Client, prepare
from advisor.errors import UsageError
from advisor.jobs.spec import STATES, JobSpec
from advisor.jobs.token import ROLES
from advisor.report import jobs as shown
from advisor.tuners.search.plan import Plan

_ID = Number(1, 2**31 - 1)


def _client(server: str | None) -> Client:
    """A Client of the server. Raises UsageError if no server is named."""
    url = server or server_url()
    if not url:
        raise UsageError(
            "no server: give --server URL, or set ADVISOR_CACHE to one, as https://advisor.example"
        )
    return Client(url)


server_option = option(
    "--server URL",
    "http[s]://HOST[:PORT]  [default: the first server in $ADVISOR_CACHE, else in pyproject.toml]",
)
follow_option = click.option(
    "-f", "--follow", is_flag=True, help="Show the log until the job is over."
)


@click.command(cls=OrCommand)
@options.target_argument
@option("--gpu TEXT", "A part of the GPU's name, for example H100.", default="")
@option(
    "--gpus N", "How many GPUs of one machine; 0 for the CPU.  [default: 1]", type=Number(0, 64)
)
@option("--pip REQUIREMENT", "On Ray: install this first; repeat for more.", multiple=True)
@option("--container IMAGE", "On Ray: the image to run in.")
@options.row_options(Task)
@options.row_options(Plan)
@server_option
@follow_option
@options.json_option
def submit(
    target: str | None,
    command: tuple[str, ...],
    gpu: str,
    gpus: int | None,
    pip: tuple[str, ...],
    container: str | None,
    server: str | None,
    follow: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Submit a job: the server tunes your run, or a model, on a machine that has the GPU.

    A run: advisor submit --gpu H100 --gpus 4 -- torchrun --nproc-per-node 4 train.py. The code
    is sent along: files that git tracks or does not ignore (without git, this whole folder), except
    files that .advisorignore names. A repeated request returns the same job.
    """
    given = options.collected(Plan, given) | options.collected(Task, given)
    if wrong := next((one for one in pip if len(one.split()) != 1), None):
        raise UsageError(f"--pip {wrong!r}: expected one requirement without blanks, as timm>=1.0")
    env = {name: text for name, text in (("pip", " ".join(pip)), ("container", container)) if text}
    more = {"target": target or "", "gpu": gpu, "env": env, "force": given.pop("force", False)}
    asked = JobSpec.given(command, given, gpus, **more)
    client = _client(server)
    asked, code = prepare(asked, Path.cwd())
    if code and not as_json:
        for line in shown.travels(code):
            click.echo(line)
    job = client.send(asked, code)
    page = client.page(job.id)
    if not as_json:
        for line in shown.submitted(job, page, server or ""):
            click.echo(line)
    if follow:
        _show_log(client, job.id, follow, as_json)
    elif as_json:
        sent = dataclasses.asdict(code) if code else {}
        sent |= {"archive": len(code.archive), "root": str(code.root)} if code else {}
        click.echo(
            options.json_line(dataclasses.asdict(job) | {"code": sent or None, "page": page})
        )


def _show_log(client: Client, id: int, follow: bool, as_json: bool) -> None:
    """Print a job's log, with `follow` until the job is over; then exit with its code."""
    texts = client.log(id, follow=follow)
    log = "".join(texts) if as_json else ""
    for text in texts:
        click.echo(text, nl=False)
    job = client.job(id) if follow else None
    if as_json:
        document = dataclasses.asdict(job) if job else {"id": id}
        click.echo(options.json_line(document | {"log": log}))
    elif job:
        why = f": {job.reason}" if job.reason else ""
        record = f"; to see its record: advisor show {job.record}" if job.record else ""
        click.echo(f"job {job.id} {job.state}{why}{record}", err=True)
    click.get_current_context().exit(FAILED if job and job.state != "done" else DONE)


@click.command()
@click.argument("id", required=False, type=_ID)
@option(
    "--state",
    "Only jobs in this state; repeat for more.",
    "states",
    multiple=True,
    type=click.Choice(STATES),
)
@option(
    "--most NUMBER",
    "How many jobs, the newest first.  [default: 50]",
    type=Number(1, 10_000),
    default=50,
)
@server_option
@json_or_text
def jobs(id: int | None, states: tuple[str, ...], most: int, server: str | None) -> Parts:
    """List the jobs of a server, or show the job ID."""
    client = _client(server)
    if id is not None:
        job = client.job(id)
        yield from shown.lines(job)
        yield Output(lambda: dataclasses.asdict(job))
        return
    found = client.jobs(states, most)
    none = "No jobs; to submit one: advisor submit -- python train.py"
    yield shown.listing(found) if found else none
    yield Output(lambda: {"jobs": [dataclasses.asdict(job) for job in found]})


@click.command()
@click.argument("id", type=_ID)
@follow_option
@server_option
@options.json_option
def logs(id: int, follow: bool, server: str | None, as_json: bool) -> None:
    """Show the log of the job ID. With -f the exit code is 0 if the job is done, 1 otherwise."""
    _show_log(_client(server), id, follow, as_json)


@click.command()
@click.argument("id", type=_ID)
@server_option
@json_or_text
def cancel(id: int, server: str | None) -> Parts:
    """Cancel the job ID, and end its processes. Exit code 1 if the job was over before."""
    client = _client(server)
    over = client.job(id).over  # the server answers 'cancelled' for earlier cancels too
    state = client.cancel(id)
    cancelled = state == "cancelled" and not over
    yield f"job {id} {state}" if cancelled else f"job {id}: already {state}"
    yield Output(lambda: {"id": id, "state": state}, DONE if cancelled else FAILED)


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

    run, opened = _opened(database)
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
    run, opened = _opened(database)
    text = run.new_token(opened, name, role, days)
    yield text
    yield Output(lambda: {"name": name, "role": role, "token": text})


def _opened(database: str | None) -> tuple[Any, Any]:
    """(The module that runs the server, its database). UsageError says how to install them."""
    try:
        from advisor.service import run
        from advisor.service.database import Database
    except ImportError as exc:
        raise UsageError(f"serve: {exc}; run: pip install 'torch-advisor[serve]'") from exc
    return run, Database(database)
