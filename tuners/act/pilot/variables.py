"""How a pilot comes into a process: by variables of its environment, which say what it is to do.

Imports nothing of PyTorch: what starts a command has no need of it.
"""

from __future__ import annotations

import os
from pathlib import Path

ADDRESS, SECRET = "ADVISOR_PILOT", "ADVISOR_PILOT_KEY"
"""Where the tuning process listens, and what it knows its children by."""
RUN = "ADVISOR_RUN"
"""The command that `advisor run` started, and seconds for its tuning, as JSON."""

KEEP_CHECKPOINTS = "ADVISOR_KEEP_CHECKPOINTS"
"""Set where a run that is tuned is to write its checkpoints where it says."""


def checkpoints() -> Path | None:
    """The folder for the checkpoints of a run that is tuned; None where they are as ever."""
    address = os.environ.get(ADDRESS)
    if not address or os.environ.get(KEEP_CHECKPOINTS):
        return None
    return Path(address).with_name("checkpoints")


def note(address: str) -> Path:
    """A file that is there once a process has loaded torch; in it, what one of them failed with
    before its first steps."""
    return Path(address).with_name("torch")


def noted(address: str) -> str | None:
    """What is in that file; None where it is not there."""
    try:
        return note(address).read_text()
    except OSError:
        return None


def bringing(injected: Path) -> dict[str, str]:
    """The variable by which every Python of a command looks into a folder first: the one with the
    sitecustomize that brings the pilot."""
    path = [str(injected), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}
