"""Jobs of a server as tables and lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from advisor.cache.shown import size
from advisor.client import Job
from advisor.jobs.code_archive import CodeArchive
from advisor.jobs.spec import WAITING
from advisor.report.data import Table
from advisor.report.text import age, ago, cut, rate

_NAMED = 5  # the most names of files that are listed as not sent


def listing(jobs: Sequence[Job]) -> Table:
    table = Table(
        "Jobs, the newest first",
        ("ID", "state", "what", "where", "since", "by", "reason"),
        right=("ID",),
        whole=("state", "where", "since"),
        spare=("by", "reason"),
    )
    for job in jobs:
        table.row(
            str(job.id),
            job.state,
            cut(job.what),
            job.where,
            age(job.changed),
            job.by,
            cut(job.reason) or (f"record {job.record}" if job.record else ""),
            warns=job.state == "failed",
        )
    return table


def lines(job: Job) -> Iterator[str]:
    """Yields lines on a job's state, attempts and trials."""
    yield f"job {job.id} {job.state}: {job.what}"
    if job.reason:
        yield f"  {job.reason}"
    yield f"  on {job.where}, submitted by {job.by} {ago(job.created)}"
    for one in job.attempts:
        where = f"{one.get('executor')} {one.get('device') or ''}".rstrip()
        why = f": {one['reason']}" if one.get("reason") else ""
        yield f"  attempt {one.get('number')} {one.get('state')} on {where}{why}"
    if job.trials:
        best = max(job.trials, key=_speed)
        many = f"{len(job.trials)} trial{'s' * (len(job.trials) != 1)}{' so far' * (not job.over)}"
        yield f"  {many}, the fastest {best.get('what')}: {rate(_speed(best))} samples/s"
    if job.record:
        yield f"  to see its record: advisor show {job.record}"


def _speed(trial: Mapping[str, Any]) -> float:
    return trial.get("samples_per_s") or 0.0


def travels(code: CodeArchive) -> Iterator[str]:
    """Yields lines on the files of a folder that are sent, and that are not."""
    commit = f", commit {code.commit[:12]}" if code.commit else ""
    changed = " and uncommitted changes" if code.dirty and commit else ""
    packed = f"{size(code.size)} ({size(len(code.archive))} packed) of {code.root}"
    yield f"code    {code.files} file{'s' * (code.files != 1)}, {packed}{commit}{changed}"
    if code.left_out:
        more = len(code.left_out) - _NAMED
        listed = ", ".join(code.left_out[:_NAMED])
        yield f"stays   {listed}{f' and {more} more' if more > 0 else ''}"


def submitted(job: Job, page: str, server: str) -> Iterator[str]:
    """Yields lines on a job that was just submitted; `server`: as the user named it, or ''."""
    if job.new:
        where = f" --server {server}" if server else ""
        yield f"job {job.id} {job.state}; to follow it: advisor logs -f {job.id}{where}"
    elif job.state == "done":
        yield f"job {job.id}: already done; --force measures again"
    else:
        yield f"job {job.id}: already submitted; {job.state}"
    yield f"watch   {page}"
    if job.reason and job.state in WAITING:
        yield f"waits   {job.reason}"
