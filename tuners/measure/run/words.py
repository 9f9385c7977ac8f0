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
    """The path of a command's program; raises UsageError if there is none."""
    word = words[0]
    if found := shutil.which(word):
        return found
    if _VARIABLE.fullmatch(word):
        why = "a variable is set by a shell; put env before it"
    elif Path(word).is_dir():
        why = "a folder is no program; give the command as you would type it"
    elif not Path(word).is_file():
        why = "no such program; give the command as you would type it"
    else:
        by = "python" if word.endswith(".py") else "the program that runs it, as bash,"
        why = f"this file is no program; put {by} before it"
    raise UsageError(f"command {word!r}: {why}")


def measurable(words: Sequence[str]) -> str:
    """The path of a command's program; raises UsageError if there is none, its Python is isolated,
    or a word cannot be typed on one line."""
    path = program(words)
    check_open(words)
    if odd := next((word for word in words if not word.isprintable()), None):
        raise UsageError(f"command: {odd!r:.80} is no text on one line; put it into a script")
    return path


def check_open(words: Sequence[str]) -> None:
    """Raise UsageError where a command's Python is isolated, so that no pilot gets in."""
    if option := isolated(words):
        raise UsageError(f"python {option} keeps advisor out of the command; leave {option} out")


def isolated(words: Sequence[str]) -> str:
    """The option that has a command's Python ignore PYTHONPATH; '' for none."""
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
