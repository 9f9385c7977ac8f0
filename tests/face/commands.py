"""Running `advisor` as a user does: through its real entry point, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))
"""
SHAPE = "4x3x8x8"
QUICK = ("--budget", "6s", "--batches", "8", "--trials", "5")


def advisor(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `advisor` in a folder; never raises for its exit code."""
    return subprocess.run(
        [str(Path(sys.executable).with_name("advisor")), *arguments],
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )


def script(folder: Path, source: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script that lies in a folder."""
    path = folder / "train.py"
    path.write_text(source)
    return subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
    )
