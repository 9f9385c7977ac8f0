"""Tests `advisor patch`: what the patched script trains, and where the edits go."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import advisor as api
from advisor.cache.config import Config
from advisor.cache.record import Record
from advisor.errors import NoRecord, UsageError
from advisor.frameworks.patching import Patch
from advisor.open_store import open_records
from advisor.tuners.act.pilot.pilot import ActivePilot
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.knobs import TORCH
from tests.cache import examples
from tests.face.commands import advisor
from tests.runs.forked import Looks
from tests.runs.test_apply import record_of

SCRIPT = """
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def train(net, batches, optimizer, losses):
    net.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def evaluate(net, batches):
    net.eval()
    with torch.no_grad():
        return [net(x).dtype for x, _y in batches]


torch.manual_seed(0)
data = TensorDataset(torch.randn(72, 3, 8, 8), torch.randint(4, (72,)))
loader = DataLoader(data, batch_size=16, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4)
)
model = model.to("cpu")
# The weights stay for some epochs: `advisor run` begins with unmodified steps.
optimizer = optim.SGD(model.parameters(), lr=0.0)
losses, dtypes = [], []
for epoch in range(12):
    if epoch == 6:
        losses.clear()
        for group in optimizer.param_groups:
            group["lr"] = 0.5
    train(model, loader, optimizer, losses)
    dtypes += evaluate(model, loader)
"""
COMMAND = ("python", "train.py")


def recorded(config: dict[str, Any], optimizer: str = "sgd", **of_task: Any) -> Record:
    """A record for `advisor run`, of a GPU, that advises these values."""
    base = Config(TORCH).at(64)
    task = replace(examples.TASK, command=COMMAND, optimizer=optimizer, **of_task)
    won, own = examples.choice(base.replace(**config), 3000.0, 1.5), examples.choice(base)
    made = examples.record(replace(examples.KEY, task=task), input=Config())
    return replace(made, baseline=own, winners=examples.winners(own, won, pilot=won))


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    api.release()
    PROCESS_FLAGS.release()


def applied(diff: str, *program: str) -> str:
    """The script after a program has applied the diff to it."""
    done = subprocess.run(program, input=diff.encode(), capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path("train.py").read_bytes().decode()


def patched(source: str, config: dict[str, Any], **of_task: Any) -> tuple[str, list[str]]:
    """(The patched script, the edits that are left)."""
    Path("train.py").write_bytes(source.encode())
    made = Patch(recorded(config, **of_task), Path("train.py"))
    return applied(made.diff, "patch", "-p1") if made.diff else source, made.left


@pytest.mark.parametrize(
    "config",
    [
        {"precision": "bf16"},
        {"channels_last": True, "fused_optimizer": True},
        {"precision": "bf16", "channels_last": True, "fused_optimizer": True, "num_workers": 1},
    ],
    ids=lambda config: "+".join(config),
)
def test_the_patched_script_trains_as_advisor_run(config: dict[str, Any]) -> None:
    """All losses are equal in every bit, and evaluation stays in float32."""
    Path("train.py").write_text(SCRIPT)
    guide, pilot = Looks(), ActivePilot()
    pilot.attach(guide)
    plain = runpy.run_path("train.py")
    pilot.release()
    record = record_of(guide.seen, Config(config))
    open_records(None).put(record)
    advice = api.apply()
    advised = runpy.run_path("train.py")
    assert advice.status == "exact"
    api.release()
    done = advisor(Path.cwd(), "patch", record.id)
    assert (done.returncode, done.stderr) == (0, "")
    source = applied(done.stdout, "git", "apply")
    assert "import advisor" not in source
    alone = runpy.run_path("train.py")
    assert len(alone["losses"]) == 30 and alone["losses"][-1] < alone["losses"][0]
    assert alone["losses"] == advised["losses"]
    assert "precision" not in config or alone["losses"] != plain["losses"]
    assert set(alone["dtypes"]) == {torch.float32}
