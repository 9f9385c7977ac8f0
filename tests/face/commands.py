"""Run `advisor` as a user does: through its main() in this process, or in a new process."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import jsonschema
import pytest

import advisor as package
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
LINEAR = """
import torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range({steps}):
    optimizer.zero_grad()
    loss = model(torch.randn(32, 8)).square().mean()
    loss.backward()
    optimizer.step()
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
"""keep_pace() starts steps at a fixed rate on any host. After a late step, the next ones catch
up."""
LAYERED = PACE + MODEL.replace(
    "    def forward(self, x):\n",
    "    def forward(self, x):\n"
    "        laid_out = x.is_contiguous(memory_format=torch.channels_last)\n"
    "        keep_pace(self, 0.015 if laid_out else 0.03)\n",
)
"""A model that is twice as fast with channels_last. No other knob matters."""
SHAPE = "4x3x8x8"
COMMAND = Path(sys.executable).with_name("advisor")

Done = subprocess.CompletedProcess[str]


TOO_BUSY = r"could not be measured: too few steps came|too small .* give at least \d+s"
"""What a tuning says if the host is too busy to measure even the baseline."""


def env_of(folder: Path) -> dict[str, str]:
    """Environment variables that put the store and the signing key into a folder."""
    return {"ADVISOR_CACHE": str(folder / "store"), "XDG_DATA_HOME": str(folder / "data")}


def offer_bf16(patch: pytest.MonkeyPatch) -> None:
    """Make `advisor`, called in this process, try bf16 on any CPU. Without bf16 kernels, plain
    layers still compute in it, slowly."""
    patch.setattr("advisor.tuners.environment.cpu_has_bf16", lambda: True)


def advisor(folder: Path, *arguments: str, process: bool = False, **env: str) -> Done:
    """Run `advisor` in a folder. A non-zero exit code does not raise.

    It runs in this process, which saves the seconds of importing torch. Its output is captured at
    the file descriptors. The folder, the environment and the warnings are restored afterwards.
    `process`: run it in a new process instead.
    """
    if process:
        return _run_process([str(COMMAND), *arguments], folder, env)
    with (
        mock.patch.dict(os.environ),
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(folder)
        for name, value in env.items():
            patch.setenv(name, value)
        # The file of the installed command is in no project.
        patch.setattr(sys.modules["__main__"], "__file__", str(COMMAND), raising=False)
        with _capture_output(out, err), _fresh_warnings():
            try:
                code = main(list(arguments))
            except SystemExit as exc:  # click ends a completion this way
                code = int(exc.code or 0)
        done = Done(arguments, code, _read(out), _read(err))
    if "--json" in arguments[: arguments.index("--") if "--" in arguments else None]:
        check_document(arguments[0], done.stdout.splitlines()[-1])
    return done


def check_document(name: str, line: str) -> Any:
    """A line of JSON, parsed: the document `name` of `advisor schema`, or an error, and no more."""
    document = json.loads(line, parse_constant=lambda constant: pytest.fail(constant))
    _validator("error" if "error" in document else name).validate(document)
    return document


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    """Validates strictly what `advisor schema` calls `name`."""
    file = Path(str(package.__file__)).with_name("report") / "templates" / "schema.json"
    definitions = json.loads(file.read_text())["$defs"]
    extended = ("Record", "Job", "served")  # some documents add fields to these

    def close(schema: Any, name: str = "") -> None:
        if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
            schema["unevaluatedProperties"] = name in extended
        for part in schema.values() if isinstance(schema, dict) else schema:
            if isinstance(part, dict | list):
                close(part)

    for one, schema in definitions.items():
        close(schema, one)
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": definitions})


def run_json(folder: Path, command: str, *arguments: str) -> Any:
    """Parsed output of `advisor COMMAND --json` in a folder. The command must succeed."""
    done = advisor(folder, command, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextlib.contextmanager
def _capture_output(out: TextIO, err: TextIO) -> Iterator[None]:
    """Capture the output of Python and of child processes, which write to the descriptors."""
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
def _fresh_warnings() -> Iterator[None]:
    """Print each warning once. Afterwards, remove the log handlers that the command added."""
    log = logging.getLogger("advisor")
    handlers, level = list(log.handlers), log.level
    with warnings.catch_warnings(action="default"):
        warnings.showwarning = lambda *args: print(
            warnings.formatwarning(*args[:4]), end="", file=sys.stderr
        )
        try:
            yield
        finally:
            log.handlers[:] = handlers
            log.setLevel(level)


def _run_process(command: list[str], folder: Path, env: dict[str, str]) -> Done:
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )


def _read(stream: TextIO) -> str:
    stream.seek(0)
    return stream.read()


def run_script(folder: Path, source: str, *, process: bool = False, **env: str) -> Done:
    """Write a Python script into a folder and run it.

    It runs in a fork of a process that has imported torch, which saves seconds.
    `process`: run it in a new process instead.
    """
    path = folder / "train.py"
    path.write_text(source)
    if not process:
        return forks.run(path, cwd=folder, env=os.environ | env)
    return _run_process([sys.executable, str(path)], folder, env)


def run_example(script: str, *arguments: str) -> list[str]:
    """Lines that a script of examples/ prints."""
    root = Path(__file__).parents[2]
    folder, env = root / "examples", os.environ | {"PYTHONPATH": str(root)}
    done = forks.run(folder / script, *arguments, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
