"""Several input shapes: tuned as one mix and looked up as one mix."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import advisor as package
from advisor.cache.record import LOOP, Record
from advisor.cache.records import Records
from advisor.cache.stores import open_stores
from advisor.errors import TargetFailed
from advisor.tuners.measure.worker.bench import Bench
from advisor.tuners.measure.worker.child import describe
from tests.face.commands import MODEL, advisor, env_of
from tests.face.unmeasured import fake_worker
from tests.tuners.test_worker import config, job

SHAPES = [(2, 3, 10, 10), (6, 3, 6, 6), (4, 3, 8, 8)]
SHAPE_OPTIONS = [word for shape in SHAPES for word in ("--shape", "x".join(map(str, shape)))]
QUICK = ("--budget", "10s", "--effort", "quick")
TEXT = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))
"""
HOOK = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 4)

def make_batch(batch_size, device{more}):
    return torch.randn(batch_size, 3, device=device), torch.zeros(batch_size, dtype=torch.long)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mix")
    (folder / "model.py").write_text(MODEL)
    with fake_worker({("channels_last", True): 2.0}):
        done = advisor(folder, "tune", "model.py", *SHAPE_OPTIONS, *QUICK, **env_of(folder))
    assert done.returncode == 0, done.stderr
    assert "4x3x8x8 + 6x3x6x6 + 2x3x10x10" in done.stderr
    return folder


def only_record() -> Record:
    (record,) = Records(open_stores()).all()
    return record


def test_one_record_holds_all_shapes(tuned: Path) -> None:
    record = only_record()
    assert record.key.task.mix == ((4, 3, 8, 8), (6, 3, 6, 6), (2, 3, 10, 10))
    assert not any(one.free for one in record.winners) and record.batch == 4
    assert record.winner(LOOP, free=True) == record.winner(LOOP)
    assert {trial.config.batch for trial in record.trials} == {4}
    assert "4x3x8x8 + 6x3x6x6" in advisor(tuned, "show", record.id).stdout


def test_lookup_needs_all_shapes_of_the_mix_in_any_order(tuned: Path) -> None:
    target = str(tuned / "model.py")
    for shapes in (SHAPES, SHAPES[::-1], ["6x3x6x6", "2x3x10x10", "4x3x8x8"]):
        advice = package.lookup(target, shape=shapes, strict=True)
        assert advice.status == "exact" and advice.batch_size == 4
    for shapes in (SHAPES[:2], (4, 3, 8, 8), "4x3x8x8"):
        with warnings.catch_warnings(record=True, action="always") as caught:
            assert package.lookup(target, shape=shapes).status == "miss"
        (one,) = caught
        assert "shapes 4x3x8x8+6x3x6x6+2x3x10x10 -> " in str(one.message)


def test_verify_measures_the_whole_mix(tuned: Path) -> None:
    with fake_worker({("channels_last", True): 2.0}):
        done = advisor(tuned, "verify", only_record().id, "--budget", "60s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("the record holds\n")


def test_a_step_runs_texts_of_every_length(tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text(TEXT)
    fields = {"mix": [(4, 16), (4, 32)], "dtype": "int64", "vocab": 50}
    bench = Bench(job(tmp_path / "text.py", **fields))
    describe(bench)
    # A step runs one batch of each length: 8 samples.
    assert bench.block(config(4), 2, 1).samples == 16


def test_make_batch_for_a_mix_needs_a_shape_argument(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(HOOK.format(more=""))
    (tmp_path / "three.py").write_text(HOOK.format(more=", shape"))
    mix = [(4, 3), (8, 3)]
    with pytest.raises(TargetFailed, match=r"make_batch\(batch_size, device, shape\)"):
        describe(Bench(job(tmp_path / "two.py", mix=mix)))
    describe(Bench(job(tmp_path / "three.py", mix=mix)))
