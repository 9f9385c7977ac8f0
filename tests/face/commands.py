"""Running `advisor` as a user does: its own main() in this process, or a process of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import pytest

from advisor.cli import main
from tests import forks

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
PACE = """
import time

DUE = {}
AFTER_A_BREAK_S = 0.1

def keep_pace(model, step_s):
    due, now = DUE.get(id(model), 0.0) + step_s, time.perf_counter()
    DUE[id(model)] = due = due if due > now - AFTER_A_BREAK_S else now
    time.sleep(max(0.0, due - now))
"""
"""Steps begin at a steady pace on any host: what one comes late, however long it computes, the next
ones catch up."""
LAYERED = PACE + MODEL.replace(
    "    def forward(self, x):\n",
    "    def forward(self, x):\n"
    "        laid_out = x.is_contiguous(memory_format=torch.channels_last)\n"
    "        keep_pace(self, 0.015 if laid_out else 0.03)\n",
)
"""For which channels_last is twice as fast, and nothing else matters."""
SHAPE = "4x3x8x8"
COMMAND = Path(sys.executable).with_name("advisor")

Done = subprocess.CompletedProcess[str]


def own(folder: Path) -> dict[str, str]:
    """The environment of a store, and of a key that signs, which belong to a folder."""
    return {"ADVISOR_CACHE": str(folder / "store"), "XDG_DATA_HOME": str(folder / "data")}


def take_over(folder: Path) -> None:
    """Copy what a folder `own`s to where this test has its own, so that it may spoil it."""
    for name, variable in (("store", "ADVISOR_CACHE"), ("data", "XDG_DATA_HOME")):
        shutil.copytree(folder / name, os.environ[variable])


def offer_bf16(patch: pytest.MonkeyPatch) -> None:
    """Have `advisor`, called in this process, try bf16 on a CPU without kernels for it, too: plain
    layers compute in it there, slowly."""
    patch.setattr("advisor.tuners.environment.cpu_has_bf16", lambda: True)


def advisor(folder: Path, *arguments: str, process: bool = False, **env: str) -> Done:
    """Run `advisor` in a folder; never raises for its exit code.

    In this process, which saves seconds of importing torch: what it prints is caught where a
    process would write it, and the folder, the environment and the warnings are put back.
    `process`: in one of its own, where that is the point.
    """
    if process:
        return _process([str(COMMAND), *arguments], folder, env)
    with (
        mock.patch.dict(os.environ),
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(folder)
        for name, value in env.items():
            patch.setenv(name, value)
        # A command's own file lies in no project.
        patch.setattr(sys.modules["__main__"], "__file__", str(COMMAND), raising=False)
        with _written_to(out, err), _as_at_the_start():
            try:
                code = main(list(arguments))
            except SystemExit as exc:  # how click ends a completion
                code = int(exc.code or 0)
        return Done(arguments, code, _text(out), _text(err))


def printed(folder: Path, command: str, *arguments: str) -> Any:
    """What `advisor COMMAND --json` prints in a folder, where it succeeds."""
    done = advisor(folder, command, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextlib.contextmanager
def _written_to(out: TextIO, err: TextIO) -> Iterator[None]:
    """Python's output and that of whatever is started, which has the descriptors alone."""
    kept = os.dup(1), os.dup(2)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            yield
        finally:
            for stream, number, copy in zip((out, err), (1, 2), kept, strict=True):
                stream.flush()
                os.dup2(copy, number)
                os.close(copy)


@contextlib.contextmanager
def _as_at_the_start() -> Iterator[None]:
    """Warnings are printed, once, and no handler of an earlier command is left."""
    log = logging.getLogger("advisor")
    handlers, level = list(log.handlers), log.level
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda *said: print(
            warnings.formatwarning(*said[:4]), end="", file=sys.stderr
        )
        try:
            yield
        finally:
            log.handlers[:] = handlers
            log.setLevel(level)


def _process(words: list[str], folder: Path, env: dict[str, str]) -> Done:
    return subprocess.run(
        words,
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )


def _text(stream: TextIO) -> str:
    stream.seek(0)
    return stream.read()


def script(folder: Path, source: str, *, process: bool = False, **env: str) -> Done:
    """Run a Python script that lies in a folder.

    In a fork of a process that has imported torch, which saves seconds; `process`: in one of its
    own, where that is the point.
    """
    path = folder / "train.py"
    path.write_text(source)
    if not process:
        return forks.run(path, cwd=folder, env=os.environ | env)
    return _process([sys.executable, str(path)], folder, env)


def said_by(script: str, *words: str) -> list[str]:
    """The lines that a script of examples/ prints."""
    root = Path(__file__).parents[2]
    folder, env = root / "examples", os.environ | {"PYTHONPATH": str(root)}
    done = forks.run(folder / script, *words, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
