"""The words of a command: whether there is such a program, and whether a pilot gets into it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from advisor.errors import UsageError

_ISOLATED = re.compile(r"-[A-Za-z]*[IES][A-Za-z]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


def program(words: Sequence[str]) -> str:
    """The path of a command's program.

    Raises:
        UsageError: there is none.
    """
    found = shutil.which(words[0])
    if found is None:
        raise UsageError(f"command {words[0]!r}: {_why_none(words[0])}")
    return found


def _why_none(word: str) -> str:
    """Why a command's first word is no program, and what to do."""
    if _VARIABLE.fullmatch(word):
        return "a variable is set by a shell; put env before it"
    if Path(word).is_dir():
        return "a folder is no program; give the command as you would type it"
    if not Path(word).is_file():
        return "no such program; give the command as you would type it"
    by = "python" if word.endswith(".py") else "the program that runs it, as bash,"
    return f"this file is no program; put {by} before it"


def measurable(words: Sequence[str]) -> str:
    """The path of the program of a command that a pilot gets into.

    Raises:
        UsageError: there is none, its Python is isolated, or a word cannot be typed on one line.
    """
    path = program(words)
    check_open(words)
    if odd := next((word for word in words if not word.isprintable()), None):
        raise UsageError(f"command: {odd!r:.80} is no text on one line; put it into a script")
    return path


def check_open(words: Sequence[str]) -> None:
    """Raise UsageError where no pilot gets into a command, as its Python is isolated."""
    if option := isolated(words):
        raise UsageError(f"python {option} keeps advisor out of the command; leave {option} out")


def isolated(words: Sequence[str]) -> str:
    """The option with which a command's Python looks into no folder of advisor's; '' for none."""
    for at, word in enumerate(words):
        if Path(word).name.startswith("python"):
            options = iter(words[at + 1 :])
            for option in options:
                if not option.startswith("-") or option in ("-c", "-m"):
                    break
                if option in ("-W", "-X"):
                    next(options, None)
                elif _ISOLATED.fullmatch(option):
                    return option
    return ""
