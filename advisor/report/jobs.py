"""Jobs of a server as tables and lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.cache.shown import size
from advisor.client import Job
from advisor.jobs.code_archive import CodeArchive
from advisor.report.data import Table
from advisor.report.text import age, ago, cut, rate

_NAMED = 5
"""The most names of files that are listed as not sent."""


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
    """Generator: yields lines on a job's state, attempts and trials."""
    yield f"job {job.id} {job.state}: {job.what}"
    if job.reason:
        yield f"  {job.reason}"
    yield f"  on {job.where}, submitted by {job.by} {ago(job.created)}"
    for one in job.attempts:
        why = f": {one['reason']}" if one.get("reason") else ""
        yield (
            f"  attempt {one.get('number')} {one.get('state')} on {one.get('executor')} "
            f"{one.get('device') or ''}".rstrip()
            + why
        )
    if job.trials:
        best = max(job.trials, key=lambda one: one.get("samples_per_s") or 0.0)
        many = f"{len(job.trials)} trial{'s' * (len(job.trials) != 1)}"
        yield (
            f"  {many}{'' if job.over else ' so far'}, the fastest {best.get('what')}: "
            f"{rate(best.get('samples_per_s') or 0.0)} samples/s"
        )
    if job.record:
        yield f"  to see its record: advisor show {job.record}"


def travels(code: CodeArchive) -> Iterator[str]:
    """Generator: yields lines on the files of a folder that are sent, and that are not."""
    commit = f", commit {code.commit[:12]}" if code.commit else ""
    changed = " and uncommitted changes" if code.dirty and commit else ""
    yield (
        f"code    {code.files} file{'s' * (code.files != 1)}, {size(code.size)} "
        f"({size(len(code.archive))} packed) of {code.root}{commit}{changed}"
    )
    if code.left_out:
        more = len(code.left_out) - _NAMED
        listed = ", ".join(code.left_out[:_NAMED])
        yield f"stays   {listed}{f' and {more} more' if more > 0 else ''}"
