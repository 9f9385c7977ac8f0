"""Compiled artifacts of a record: a script loads them, or refuses them and compiles again."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import advisor
from advisor.cache.artifacts import Purpose, StoredArtifacts
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.stores import ByteStore
from advisor.errors import StoreError
from advisor.open_store import open_records
from advisor.tuners.act import advice_usage, gate
from advisor.tuners.act import artifacts as acting
from advisor.tuners.act.artifacts import Fetch, saved, use_stable_keys
from advisor.tuners.environment import detect, tools
from advisor.tuners.knobs import strict
from advisor.tuners.measure.worker.parent import Worker
from advisor.tuners.measure.worker.wire import WorkerJob
from tests.builders import measured, verified
from tests.cache.examples import choice, winners
from tests.face import test_apply

SHAPE = (4, 3, 8, 8)
DEFAULT = test_apply.DEFAULT.replace(compile="none")
COMPILED = DEFAULT.replace(compile="default")
SMALL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        return self.head(x.mean((2, 3)))
"""
"""A model with few kernels, as the C++ compiler takes seconds for each."""
SCRIPT = """
import multiprocessing  # before torch, as unstable cache keys depend on it

from model import Net

import torch

import advisor

advice = advisor.apply("model.py:Net", shape=(4, 3, 8, 8))
net = advice.prepare(Net())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, **advice.optimizer)
for _ in range(2):
    loss = net(advice.place(torch.randn(4, 3, 8, 8))).square().mean()
    advice.step(loss, optimizer)

from torch._dynamo.utils import counters

print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
print(advice.report())
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "model.py").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    advice_usage._last.clear()  # no report at exit
    advisor.release()


@pytest.fixture
def record(here: Path) -> Record:
    """A record of model.py:Net, whose best config is compiled."""
    fast, base = choice(COMPILED, 150.0, 1.5), choice(DEFAULT, 100.0)
    made = replace(
        test_apply.store_record(),
        baseline=base,
        winners=winners(base, fast, pilot=fast),
        trials=(measured(DEFAULT, 100.0), measured(COMPILED, 150.0), verified(COMPILED)),
    )
    records = open_records(None)
    records.remove(records.versions())
    records.put(made)
    return made


def purpose(record: Record) -> Purpose:
    return Purpose.of(record, COMPILED, detect("cpu"), tools())


def store_artifact(data: bytes, artifact_purpose: Purpose) -> tuple[ByteStore, str]:
    """Store an artifact. Returns its store and its key."""
    records: Records = open_records(None)
    (store,) = records.stores
    assert records.artifacts.keep(data, artifact_purpose, store)
    (key,) = store.sizes()
    return store, key


@pytest.mark.long
def test_a_fresh_process_loads_what_the_worker_compiled(record: Record, tmp_path: Path) -> None:
    file = tmp_path / "saved"
    with Worker(WorkerJob(task=record.key.task, device="cpu", seed=0), deadline_s=240) as worker:
        for config in (DEFAULT, strict(worker.baseline), COMPILED):
            worker.block(config, 1, deadline_s=240)
        worker.save(COMPILED, file)
    artifact = saved(file)
    assert artifact is not None and artifact[0] == tools()
    store_artifact(artifact[1], purpose(record))
    (tmp_path / "train.py").write_text(SCRIPT)
    empty = {f"{name}_CACHE_DIR": str(tmp_path / name) for name in ("TORCHINDUCTOR", "TRITON")}
    lines = subprocess.run(
        [sys.executable, "train.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | empty,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert lines[0] == "2 0"  # hits for forward and backward, in an empty local cache
    assert "of artifacts loaded from disk:" in lines[-1]


def flip_a_bit(store: ByteStore, key: str) -> None:
    data = bytearray(store.get(key) or b"")
    data[-1] ^= 1
    store.put(key, bytes(data))


def sign_as_another(store: ByteStore, key: str) -> None:
    """Another signing key changes only the name of the artifact."""
    data = store.get(key)
    assert data is not None and store.delete(key)
    store.put(f"{key[:-12]}{'ab' * 6}", data)


@pytest.mark.parametrize(
    ("version", "damage", "why"),
    [
        (torch.__version__, flip_a_bit, "not signed by you or your team, or changed since"),
        (torch.__version__, sign_as_another, "signed with another's key"),
        ("2.0.0", lambda *_: None, f"made for torch 2.0.0, here {torch.__version__}"),
    ],
)
def test_foreign_or_changed_artifacts_are_refused_in_one_line(
    record: Record,
    version: str,
    damage: Callable[[ByteStore, str], None],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(*store_artifact(b"no pickle", replace(purpose(record), torch=version)))
    advice = advisor.lookup("model.py:Net", shape=SHAPE)
    assert advice.config["compile"] == "default" and advice.artifacts is not None
    with caplog.at_level(logging.WARNING, "advisor"):
        advice.artifacts.load()
        advice.artifacts.load()
    line = f"artifacts: {why}; refused; compiled anew"
    messages = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert messages == [line]
    assert line in advice.report()


def test_missing_artifacts_give_no_warning(
    record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    advice = advisor.apply("model.py:Net", shape=SHAPE)
    assert advice.artifacts is not None
    advice.artifacts.load()
    assert advice.artifacts.said == ""
    assert not any(one.levelno >= logging.WARNING for one in caplog.records)
    # A config that is not compiled needs no artifacts.
    with pytest.warns(advisor.AdvisorWarning):
        assert advisor.lookup("model.py:Net", shape=(4, 3, 9, 9)).artifacts is None
    test_apply.store_record(dtype="float64")
    other = advisor.lookup(advisor.Model("model.py:Net", dtype="float64"), shape=SHAPE)
    assert other.status == "exact" and other.artifacts is None


@pytest.mark.parametrize(
    ("most_s", "why"),
    [(0.01, "not found within 0.01 s"), (60.0, "cache redis://gone: refused")],
    ids=["slow", "unreachable"],
)
def test_the_wait_for_a_store_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most_s: float, why: str
) -> None:
    answers = threading.Event()

    def find() -> StoredArtifacts | None:
        answers.wait(60 if most_s < 1 else 0)
        raise StoreError("cache redis://gone: refused")

    monkeypatch.setattr(acting, "AWAITED_S", most_s)
    fetch = Fetch(find)
    fetch.begin()
    fetch.load()
    answers.set()
    assert fetch.said == f"artifacts: {why}; compiled anew"
    assert len(caplog.records) == 1


def test_artifacts_are_loaded_right_before_the_first_call() -> None:
    model, order = nn.Identity(), []
    options = {"sizes": False, "inference": False, "before": lambda: order.append("load")}
    gate.attach(model, **options)
    assert model._compiled_call_impl is None  # not compiled yet
    model._compiled_call_impl = lambda x: order.append("call")
    gate.attach(model, **options)
    assert order == []
    model(torch.ones(1))
    model(torch.ones(1))
    assert order == ["load", "call", "call"]


def test_stable_keys_do_not_depend_on_the_order_of_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import FxGraphCachePickler

    graph = torch.fx.symbolic_trace(nn.Identity())

    def key() -> bytes:
        return FxGraphCachePickler(graph).dumps([torch.channels_last, torch.float32])

    own = key()
    monkeypatch.setattr(sys, "torch", torch, raising=False)  # sys is now the first module with it
    assert key() != own
    for _twice in range(2):
        use_stable_keys()
    stable = key()
    monkeypatch.delattr(sys, "torch")
    assert key() == stable != own
    advisor.release()
    assert key() == own
