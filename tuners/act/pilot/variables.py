"""Environment variables that bring a pilot into a process and say what it is to do.

Imports nothing of PyTorch: what starts a command needs none of it.
"""

from __future__ import annotations

import os
from pathlib import Path

ADDRESS, SECRET = "ADVISOR_PILOT", "ADVISOR_PILOT_KEY"
"""Where the tuning process listens, and the secret that it shares with its children."""
RUN = "ADVISOR_RUN"
"""The command that `advisor run` started, and seconds for its tuning, as JSON."""
KEEP_CHECKPOINTS = "ADVISOR_KEEP_CHECKPOINTS"
"""If set, a run that is tuned writes its checkpoints to its own folders."""


def checkpoints() -> Path | None:
    """The scratch folder for checkpoints of a run that is tuned; None if they stay in place."""
    address = os.environ.get(ADDRESS)
    if not address or os.environ.get(KEEP_CHECKPOINTS):
        return None
    return Path(address).with_name("checkpoints")


def note(address: str) -> Path:
    """A file that is there once a process has loaded torch. It holds what one of them failed with
    before its first steps."""
    return Path(address).with_name("torch")


def noted(address: str) -> str | None:
    """The content of that file; None if it is not there."""
    try:
        return note(address).read_text()
    except OSError:
        return None


def bringing(injected: Path) -> dict[str, str]:
    """The variable that makes every Python of a command import the sitecustomize of a folder."""
    path = [str(injected), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}
