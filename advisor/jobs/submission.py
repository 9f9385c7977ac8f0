"""A tuning that a server is to be asked for: checked, and the code that it needs packed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from advisor.errors import TargetError, UsageError
from advisor.jobs.parcel import Parcel, pack
from advisor.jobs.spec import JobSpec
from advisor.tuners.measure.run.guarded_process import check_open

_PYTHONS = ("python", "python3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """`parcel`: None where nothing of this machine's is needed."""

    asked: JobSpec
    parcel: Parcel | None = None

    @classmethod
    def of(cls, asked: JobSpec, folder: Path) -> Submission:
        """What is asked for, of a command or a target as one would type it in this folder.

        Raises:
            UsageError: its file is not there or would not travel, or the code is too much to.
        """
        if asked.target.startswith("torchvision:"):
            return cls(asked=asked)
        file = _file(asked)
        if file and not (folder / file).is_file():
            what = asked.target or " ".join(asked.command[:2])
            raise TargetError(f"{what!r}: there is no file {file} in {folder}")
        check_open(asked.command)
        parcel = pack(folder)
        folder = folder.resolve()
        if file and not (folder / file).resolve().is_relative_to(parcel.root):
            raise UsageError(f"{file}: lies outside {parcel.root}, which is all that would be sent")
        place = folder.relative_to(parcel.root)
        asked = structs.replace(
            asked,
            target=_below(asked.target, parcel.root, folder),
            command=_elsewhere(asked.command, parcel.root, folder),
            archive=parcel.digest,
            folder="" if place == Path() else place.as_posix(),
        )
        return cls(asked=asked, parcel=parcel)


def _file(asked: JobSpec) -> str:
    """The file that is started or tuned, as it was given; '' where that is a module's to say."""
    first, *rest = asked.command or ("", asked.target)
    named = rest[0] if rest else ""
    if asked.command and not Path(first).name.startswith("python"):
        return ""
    place = named if named.endswith(".py") else named.rpartition(":")[0]
    return place if place.endswith(".py") else ""


def _elsewhere(command: Sequence[str], root: Path, folder: Path) -> tuple[str, ...]:
    """A command as another machine can start it: its own Python's programs by name alone."""
    if not command:
        return ()
    first, *rest = command
    beside = (folder / first).parent
    if "/" in first and any((beside / name).exists() for name in _PYTHONS):
        first = Path(first).name
    return first, *(_below(word, root, folder) for word in rest)


def _below(word: str, root: Path, folder: Path) -> str:
    """A path in what travels as it is called from its folder; any other word as it is."""
    if word.startswith("/") and Path(word).is_relative_to(root):
        return os.path.relpath(word, folder)
    return word
