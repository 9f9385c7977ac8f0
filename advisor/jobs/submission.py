"""A job about to be submitted: checked, with the code that it needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from advisor.errors import TargetError, UsageError
from advisor.jobs.code_archive import CodeArchive, pack
from advisor.jobs.spec import JobSpec
from advisor.tuners.measure.run.guarded_process import check_open


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """`code`: None if the job needs none of this machine's."""

    asked: JobSpec
    code: CodeArchive | None = None

    @classmethod
    def of(cls, asked: JobSpec, folder: Path) -> Submission:
        """A job whose command or target is given as one types it in this folder.

        Raises:
            UsageError: its file is missing or would not be sent, or the code is too large.
        """
        if asked.target.startswith("torchvision:"):
            return cls(asked=asked)
        file = _file(asked)
        if file and not (folder / file).is_file():
            what = asked.target or " ".join(asked.command[:2])
            raise TargetError(f"{what!r}: there is no file {file} in {folder}")
        check_open(asked.command)
        code = pack(folder)
        folder = folder.resolve()
        if file and not (folder / file).resolve().is_relative_to(code.root):
            raise UsageError(f"{file}: lies outside {code.root}, and only that folder is sent")

        def portable(word: str) -> str:
            """A path below the root as seen from the folder; any other word unchanged."""
            inside = word.startswith("/") and Path(word).is_relative_to(code.root)
            return os.path.relpath(word, folder) if inside else word

        program, *words = asked.command or ("",)
        # A program of a virtual environment: the other machine has its own.
        beside = (folder / program).parent
        if "/" in program and any((beside / name).exists() for name in ("python", "python3")):
            program = Path(program).name
        place = folder.relative_to(code.root).as_posix()
        asked = structs.replace(
            asked,
            target=portable(asked.target),
            command=(program, *map(portable, words)) if program else (),
            archive=code.digest,
            folder="" if place == "." else place,
        )
        return cls(asked=asked, code=code)


def _file(asked: JobSpec) -> str:
    """The file that is started or tuned, as given; '' if only Python's import system knows."""
    program, *words = asked.command or ("python", asked.target)
    named = words[0] if words and Path(program).name.startswith("python") else ""
    place = named if named.endswith(".py") else named.rpartition(":")[0]
    return place if place.endswith(".py") else ""
