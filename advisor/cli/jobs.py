"""The commands of jobs: submit, jobs, logs, cancel."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.cache.settings import server_url
from advisor.cache.task import Task
from advisor.cli.options import (
    DONE,
    FAILED,
    Number,
    OrCommand,
    Output,
    collected,
    json_option,
    json_or_text,
    row_options,
    target_argument,
)
from advisor.errors import UsageError
from advisor.jobs.spec import STATES, WAITING
from advisor.tuners.search.plan import Plan

if TYPE_CHECKING:
    from advisor.client import Client, Job
    from advisor.jobs.submission import Submission

_ID = Number(1, 2**31 - 1)

server_option = click.option(
    "--server",
    metavar="URL",
    help="http[s]://HOST[:PORT]  [default: the first server in $ADVISOR_CACHE, else in "
    "pyproject.toml]",
)


def _client(server: str | None) -> Client:
    """A Client of the server. Raises UsageError if no server is named."""
    from advisor.client import Client

    url = server or server_url()
    if not url:
        raise UsageError(
            "no server: give --server URL, or set ADVISOR_CACHE to one, as https://advisor.example"
        )
    return Client(url)


@click.command(cls=OrCommand)
@target_argument
@click.option(
    "--gpu", metavar="TEXT", default="", help="A part of the GPU's name, for example H100."
)
@click.option(
    "--gpus",
    type=Number(0, 64),
    metavar="N",
    help="How many GPUs of one machine; 0 for the CPU.  [default: 1]",
)
@click.option(
    "--pip",
    multiple=True,
    metavar="REQUIREMENT",
    help="On Ray: install this first; repeat for more.",
)
@click.option("--container", metavar="IMAGE", help="On Ray: the image to run in.")
@row_options(Task)
@row_options(Plan)
@server_option
@click.option("-f", "--follow", is_flag=True, help="Show the log until the job is over.")
@json_option
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
    **options: Any,
) -> None:
    """Submit a job: the server tunes your run, or a model, on a machine that has the GPU.

    A run: advisor submit --gpu H100 --gpus 4 -- torchrun --nproc-per-node 4 train.py. The code
    is sent along: files that git tracks or does not ignore (without git, this whole folder), except
    files that .advisorignore names. A repeated request returns the same job.
    """
    given = collected(Plan, options) | collected(Task, options)
    from advisor.jobs.spec import JobSpec
    from advisor.jobs.submission import Submission
    from advisor.report import jobs as shown

    asked = JobSpec.given(
        command=command,
        target=target or "",
        force=given.pop("force", False),
        options=given,
        gpu=gpu,
        gpus=gpus,
        env=_environment(pip, container),
    )
    client = _client(server)
    submission = Submission.of(asked, Path.cwd())
    if submission.code is not None and not as_json:
        for line in shown.travels(submission.code):
            click.echo(line)
    job = client.ask(submission)
    if not as_json:
        click.echo(_greeting(job, server))
        click.echo(f"watch   {client.page(job.id)}")
        if job.reason and job.state in WAITING:
            click.echo(f"waits   {job.reason}")
    if follow:
        click.get_current_context().exit(_followed(client, job.id, as_json))
    if as_json:
        told = {"code": _code(submission), "page": client.page(job.id)}
        click.echo(json.dumps(dataclasses.asdict(job) | told))


def _environment(pip: tuple[str, ...], container: str | None) -> dict[str, str]:
    if wrong := next((one for one in pip if len(one.split()) != 1), None):
        raise UsageError(f"--pip {wrong!r}: expected one requirement without blanks, as timm>=1.0")
    found = {"pip": " ".join(pip), "container": container or ""}
    return {name: text for name, text in found.items() if text}


def _greeting(job: Job, server: str | None) -> str:
    where = f" --server {server}" if server else ""
    if job.new:
        return f"job {job.id} {job.state}; to follow it: advisor logs -f {job.id}{where}"
    if job.state == "done":
        return f"job {job.id}: already done; --force measures again"
    return f"job {job.id}: already submitted; {job.state}"


def _code(submission: Submission) -> dict[str, Any] | None:
    if submission.code is None:
        return None
    told = dataclasses.asdict(submission.code)
    return told | {"archive": len(submission.code.archive), "root": str(submission.code.root)}


def _followed(client: Client, id: int, as_json: bool) -> int:
    """Show a job's log until the job is over. Returns the exit code."""
    texts = []
    for text in client.log(id, follow=True):
        if as_json:
            texts.append(text)
        else:
            click.echo(text, nl=False)
    job = client.job(id)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(job) | {"log": "".join(texts)}))
    else:
        why = f": {job.reason}" if job.reason else ""
        record = f"; to see its record: advisor show {job.record}" if job.record else ""
        click.echo(f"job {job.id} {job.state}{why}{record}", err=True)
    return DONE if job.state == "done" else FAILED


@click.command()
@click.argument("id", required=False, type=_ID)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(STATES),
    help="Only jobs in this state; repeat for more.",
)
@click.option(
    "--most",
    type=Number(1, 10_000),
    default=50,
    help="How many jobs, the newest first.  [default: 50]",
)
@server_option
@json_or_text
def jobs(id: int | None, states: tuple[str, ...], most: int, server: str | None) -> Output:
    """List the jobs of a server, or show the job ID."""
    from advisor.report import jobs as shown

    client = _client(server)
    if id is not None:
        job = client.job(id)
        return Output(lambda: dataclasses.asdict(job), shown.lines(job))
    found = client.jobs(states, most)
    none = "No jobs; to submit one: advisor submit -- python train.py"
    data = {"jobs": [dataclasses.asdict(job) for job in found]}
    return Output(lambda: data, [shown.listing(found) if found else none])


@click.command()
@click.argument("id", type=_ID)
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the job is over.")
@server_option
@json_option
def logs(id: int, follow: bool, server: str | None, as_json: bool) -> None:
    """Show the log of the job ID. With -f the exit code is 0 if the job is done, 1 otherwise."""
    client = _client(server)
    if follow:
        click.get_current_context().exit(_followed(client, id, as_json))
    text = client.log(id)
    if as_json:
        click.echo(json.dumps({"id": id, "log": "".join(text)}))
        return
    for part in text:
        click.echo(part, nl=False)


@click.command()
@click.argument("id", type=_ID)
@server_option
@json_or_text
def cancel(id: int, server: str | None) -> Output:
    """Cancel the job ID, and end its processes. Exit code 1 if the job was over before."""
    client = _client(server)
    over = client.job(id).over  # the server answers 'cancelled' for earlier cancels too
    state = client.cancel(id)
    cancelled = state == "cancelled" and not over
    text = f"job {id} {state}" if cancelled else f"job {id}: already {state}"
    return Output(lambda: {"id": id, "state": state}, [text], DONE if cancelled else FAILED)
