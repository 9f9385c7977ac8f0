"""Checks a job before it is submitted, and packs its code."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import structs

from advisor.errors import TargetError, UsageError
from advisor.jobs.code_archive import CodeArchive, pack
from advisor.jobs.spec import JobSpec
from advisor.tuners.measure.run.guarded_process import check_open, program

LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed")
"""Programs that a worker's machine may have even if this machine does not."""


def prepare(asked: JobSpec, folder: Path) -> tuple[JobSpec, CodeArchive | None]:
    """Check a job that was typed in this folder. Returns (the job as another machine can run it,
    its code; None if it needs none from this machine).

    Raises:
        UsageError: the job's program or file is missing or would not be sent, or the code is too
            large.
    """
    if asked.target.startswith("torchvision:"):
        return asked, None
    file = _file(asked)
    if file and not (folder / file).is_file():
        what = asked.target or " ".join(asked.command[:2])
        raise TargetError(f"{what!r}: there is no file {file} in {folder}")
    check_open(asked.command)
    # A misspelt program is refused. The worker may have launchers, absolute paths, those of `env`.
    word = next(iter(asked.command), "/")
    known = asked.env or word.startswith(("/", *LAUNCHERS))
    if not known and not ("/" in word and (folder / word).is_file()):
        program(asked.command)
    code = pack(folder)
    folder = folder.resolve()
    if file and not (folder / file).resolve().is_relative_to(code.root):
        raise UsageError(f"{file}: lies outside {code.root}, and only that folder is sent")

    def portable(word: str) -> str:
        """A path below the root as seen from the folder; any other word unchanged."""
        inside = word.startswith("/") and Path(word).is_relative_to(code.root)
        return os.path.relpath(word, folder) if inside else word

    started, *words = asked.command or ("",)
    # Only the name of a virtual environment's program: the worker has its own.
    beside = (folder / started).parent
    if "/" in started and any((beside / name).exists() for name in ("python", "python3")):
        started = Path(started).name
    place = folder.relative_to(code.root).as_posix()
    target, command = portable(asked.target), (started, *map(portable, words)) if started else ()
    place = "" if place == "." else place
    sent = structs.replace(asked, target=target, command=command, archive=code.digest, folder=place)
    return sent, code


def _file(asked: JobSpec) -> str:
    """The Python file that the job starts or tunes, as typed; '' for a module or a program."""
    started, *words = asked.command or ("python", asked.target)
    named = words[0] if words and Path(started).name.startswith("python") else ""
    place = named if named.endswith(".py") else named.rpartition(":")[0]
    return place if place.endswith(".py") else ""
