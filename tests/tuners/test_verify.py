"""The comparison with strict fp32: what is sabotaged is caught, what is merely noisy is not."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from advisor.cache.config import Config
from advisor.tuners.measure.numerics import MOST_STEPS, Trace, judge, steps_within
from advisor.tuners.measure.worker.child import Bench
from tests.tuners.test_worker import job

SOUND = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.second(self.drop(x))
"""
OVERFLOWS = SOUND.replace("torch.relu(self.first(x))", "torch.relu(self.first(x) * 1e6) * 1e-6")
WRONG_COMPILED = SOUND.replace(
    "        return self",
    "        if torch.compiler.is_compiling():\n            x = -x\n        return self",
)
WRONG_BACKWARD = SOUND.replace(
    "        return self",
    "        if torch.is_autocast_enabled('cpu') and x.requires_grad:\n"
    "            x.register_hook(lambda grad: -grad)\n        return self",
)
NAN_LATER = SOUND.replace(
    "        return self",
    "        if torch.is_autocast_enabled('cpu'):\n"
    "            self.count = getattr(self, 'count', 0) + 1\n"
    "            x = x * (float('nan') if self.count > 6 else 1)\n        return self",
)
CONFIG = Config(precision="default", cudnn_deterministic=False, batch_size=8)


def verified(folder: Path, source: str, **knobs: str) -> tuple[str, str]:
    path = folder / "model.py"
    path.write_text(source)
    with torch.random.fork_rng():
        bench = Bench(job(path, shape=(16,), batch=8))
        fp32 = CONFIG.replace(precision="fp32")
        measured = bench.verify(CONFIG.replace(**knobs), fp32, 16, 0.02)
    return measured.outcome, measured.reason


@pytest.mark.parametrize("precision", ["default", "bf16", "fp16"])
def test_sound(tmp_path: Path, precision: str) -> None:
    outcome, reason = verified(tmp_path, SOUND, precision=precision)
    assert outcome == "ok", reason
    assert "of fp32 over 16 steps" in reason


@pytest.mark.parametrize(
    ("source", "precision", "said"),
    [
        (OVERFLOWS, "fp16", "GradScaler skipped|not finite|outputs differ"),
        (WRONG_BACKWARD, "bf16", "weight updates differ from fp32's by"),
        (NAN_LATER, "bf16", "the loss is not finite"),
    ],
)
def test_sabotaged(tmp_path: Path, source: str, precision: str, said: str) -> None:
    outcome, reason = verified(tmp_path, source, precision=precision)
    assert outcome == "wrong"
    assert any(words in reason for words in said.split("|")), reason


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling on a CPU needs g++")
def test_wrong_when_compiled(tmp_path: Path) -> None:
    outcome, reason = verified(tmp_path, WRONG_COMPILED, compile="default")
    assert outcome == "wrong", reason
    outcome, reason = verified(tmp_path, SOUND.replace("0.2", "0.0"), compile="default")
    assert outcome == "ok", reason


def run(*losses: float, finite: bool = True, skipped: int = 0, output: float = 1.0) -> Trace:
    return Trace(
        losses=losses,
        outputs=(torch.tensor([output]),),
        moved=(torch.tensor([1.0]),),
        finite=finite,
        skipped=skipped,
    )


FLAT = run(*[1.0] * 8)


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (run(*[1.0] * 7, math.nan), "the loss is not finite"),
        (run(*[1.0] * 8, finite=False), "weights are not finite"),
        (run(*[1.0] * 8, skipped=2), "skipped 2 steps"),
        (run(*[1.0] * 4, *[1.1] * 4), "loss within 10.00% of fp32 over 8 steps, 2.00% allowed"),
        (run(*[1.0] * 8, output=1.3), "first outputs differ from fp32's by 30%"),
    ],
)
def test_reasons(candidate: Trace, said: str) -> None:
    assert judge(FLAT, FLAT, FLAT, FLAT)[0]
    good, reason = judge(FLAT, FLAT, FLAT, candidate)
    assert not good
    assert said in reason


def test_chaos_is_not_called_error() -> None:
    chaotic = run(*[1.0] * 4, *[1.06] * 4)
    assert judge(FLAT, chaotic, FLAT, run(*[1.0] * 4, *[1.1] * 4))[0]
    assert not judge(FLAT, chaotic, FLAT, run(*[1.0] * 4, *[1.2] * 4))[0]


def test_order_alone_is_no_distance() -> None:
    forth, back = run(1, 2, 3, 4), run(4, 3, 2, 1)
    assert judge(forth, forth, forth, back)[0]


def test_steps_fit_the_time() -> None:
    assert steps_within(1e9, 0.001) == MOST_STEPS
    assert steps_within(1.0, 1.0) == 0
    assert steps_within(8.5 * 11, 1.0) == 8
