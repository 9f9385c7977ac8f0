"""Models of every kind become a step: their inputs, outputs, hooks and modes."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import pytest
import torch

from advisor.cache.config import Config
from advisor.errors import AdvisorWarning, TargetError, TargetFailed
from advisor.tuners.act.capture.captured_graph import RECORDERS
from advisor.tuners.measure.runner import ConfigFailed
from advisor.tuners.measure.samples import worst_update
from advisor.tuners.measure.worker import bench as benches
from advisor.tuners.measure.worker.bench import Bench
from advisor.tuners.measure.worker.child import describe
from advisor.tuners.measure.workload import RepeatableWorkload, Workload
from tests.tuners.aten_recorder import AtenRecorder
from tests.tuners.test_worker import job

CONFIG = Config(precision="default", cudnn_deterministic=False, batch_size=2)
FP32 = CONFIG.replace(precision="fp32")

HEAD = """
from collections import namedtuple
from types import SimpleNamespace
import torch
from torch import nn

class Between(nn.Module):
    def __init__(self, layer, before, after):
        super().__init__()
        self.layer, self.before, self.after = layer, before, after

    def forward(self, *given, **named):
        return self.after(self.layer(self.before(*given, **named)))

def convolution(after): return Between(nn.Conv2d(3, 4, 3), lambda x: x, after)
def linear(before): return Between(nn.Linear(3, 4), before, lambda y: y)
def mean(y): return y.mean((2, 3))
Outputs = namedtuple("Outputs", ["logits", "aux_logits"])
"""
KINDS = {
    "a dict of outputs": "model = lambda: convolution(lambda y: {'out': y, 'aux': y * 2})",
    "a named tuple with auxiliary logits": (
        "model = lambda: convolution(lambda y: Outputs(mean(y), mean(y) * 2))"
    ),
    "an object with logits": (
        "model = lambda: convolution(lambda y: SimpleNamespace(logits=mean(y), states=None))"
    ),
    "a loss of its own": """
        model = lambda: convolution(lambda y: [y, "text"])
        def loss(output, target):
            assert output[1] == "text" and target.shape == output[0].shape
            return output[0].abs().sum()
    """,
    "the usual loss of its own": """
        model = lambda: convolution(mean)
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    """,
    "dict inputs": """
        model = lambda: linear(lambda *, left, right: left + right)
        def make_batch(batch_size, device):
            x = torch.randn(batch_size, 3, device=device)
            return {"left": x, "right": x}, torch.zeros(batch_size, dtype=torch.long)
    """,
    "tuple inputs and no target": """
        model = lambda: linear(lambda left, right: left + right)
        def make_batch(batch_size, device):
            x = torch.randn(batch_size, 3, device=device)
            return (x, x), None
    """,
}


def bench(folder: Path, source: str, **changes: object) -> Bench:
    path = folder / "kind.py"
    path.write_text(HEAD + textwrap.dedent(source))
    return Bench(job(path, **({"shape": (3, 8, 8), "batch": 2} | changes)))


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(tmp_path: Path, kind: str, mode: str) -> None:
    made = bench(tmp_path, KINDS[kind], mode=mode)
    describe(made)
    block = made.block(CONFIG, 2, 1)
    assert (block.steps, block.samples) == (2, 4)
    compared = made.compare(CONFIG, FP32, 60.0)
    assert compared.ok, compared


LINEAR = "model = lambda: nn.Linear(3, 4)"
TEXT = "model = lambda: Between(nn.Linear(3, 4), lambda x: x, lambda _y: 'text')"
NO_BATCH = f"{LINEAR}\nmake_batch = lambda batch_size, device: 5"


@pytest.mark.parametrize(
    ("source", "how"),
    [
        (
            "model = lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4))",
            {"dtype": "int64", "vocab": 50, "shape": (7,)},
        ),
        ("model = lambda: nn.Conv3d(3, 4, 2)", {"shape": (3, 4, 4, 4)}),
        (LINEAR, {"optimizer": "adamw", "shape": (3,)}),
        (LINEAR, {"deterministic": True, "shape": (3,)}),
        (LINEAR + ".double()", {"dtype": "float64", "shape": (3,)}),
        ("model = lambda: nn.Dropout()", {"mode": "infer", "shape": (3,)}),
    ],
)
@pytest.mark.usefixtures("flags_restored")
def test_inputs_and_modes(tmp_path: Path, source: str, how: dict[str, object]) -> None:
    made, deterministic = bench(tmp_path, source, **how), "deterministic" in how
    describe(made)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    config = CONFIG.replace(cudnn_deterministic=deterministic, channels_last=True)
    assert made.block(config, 2, 1).steps == 2
    workload = made._built[config].workload
    assert workload.model.training == (workload.loss is not None) == ("mode" not in how)
    assert torch.are_deterministic_algorithms_enabled() == deterministic


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("model = lambda: nn.Flatten()", TargetFailed, "no trainable parameter"),
        (TEXT, TargetError, r"output \(str\) holds no floating-point tensor; define loss"),
        (NO_BATCH, TargetFailed, r"make_batch must return \(inputs, target\)"),
        (f"{LINEAR}\ndef loss(output, target): raise KeyError('mine')\n", TargetError, "mine"),
    ],
)
def test_refused(tmp_path: Path, source: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        describe(bench(tmp_path, source, shape=(3,)))


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))
"""
EIGHT = CONFIG.at(8)


def eight(folder: Path, **changes: object) -> Bench:
    return bench(folder, NET, shape=(3,), **({"batch": 8} | changes))


def subject(made: Bench) -> RepeatableWorkload:
    return RepeatableWorkload(made.new_model, made._workload, made.device)


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[AtenRecorder]:
    """What captures on a CPU here."""
    made: list[AtenRecorder] = []
    monkeypatch.setitem(RECORDERS, "cpu", lambda: made.append(AtenRecorder()) or made[-1])
    return made


def test_built_workloads_are_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = eight(tmp_path)
    three = [EIGHT, EIGHT.replace(channels_last=True), EIGHT.replace(precision="fp32")]
    kept = []
    for _ in range(2):
        for config in three:
            made.block(config, 1, 1)
        kept.append({config: built.workload for config, built in made._built.items()})
    assert list(kept[0]) == three and kept[0] == kept[1]
    monkeypatch.setattr(made, "_free_bytes", lambda: 0)
    made.block(EIGHT.at(4), 1, 1)
    assert list(made._built) == [EIGHT.at(4)]


def test_out_of_memory_builds_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = eight(tmp_path)
    made.block(EIGHT, 1, 1)
    plain = Workload.start

    def start(workload: Workload) -> None:
        if made._built:
            raise torch.OutOfMemoryError("out of memory")
        plain(workload)

    monkeypatch.setattr(Workload, "start", start)
    other = EIGHT.replace(precision="fp32")
    assert made.block(other, 1, 1).steps == 1 and list(made._built) == [other]
    monkeypatch.setattr(Workload, "start", lambda _: torch.empty(2**60))
    with pytest.raises(ConfigFailed) as failed:
        made.block(EIGHT, 1, 1)
    assert failed.value.outcome == "out_of_memory" and made.healthy and not made._built


def test_settling_steps_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = eight(tmp_path)
    count = [0]
    plain = Workload.step

    def step(workload: Workload) -> None:
        count[0] += 1
        plain(workload)

    monkeypatch.setattr(Workload, "step", step)
    graphs = iter([3, 5])
    monkeypatch.setattr(benches, "graphs_compiled", lambda: next(graphs, 5))
    block = made.block(EIGHT, 5, 1)
    assert count[0] == 1 + 1 + 5 and (block.steps, block.samples, block.compiled) == (5, 40, 2)
    count[0] = 0
    assert made.block(EIGHT, 5, 2).first_s == 0.0 and count[0] == 7


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"fused_optimizer": True},
        {"precision": "fp16"},
        {"precision": "fp16", "step_graph": True},
    ],
)
def test_gradients_are_those_of_the_loss_and_updates_those_of_the_optimizer(
    tmp_path: Path, optimizer: str, knobs: dict[str, object]
) -> None:
    """A GradScaler's factor is in neither, whoever divides by it."""
    made = eight(tmp_path, optimizer=optimizer)
    config = EIGHT.replace(**knobs)  # type: ignore[arg-type]
    made.block(config, 2, 1)
    held = subject(made)
    ours, theirs = (held.sample(one, 0, 0).gradients for one in (config, FP32.at(8)))
    for name in ("last.weight", "last.bias", "first.weight"):
        slope = float(torch.dot(ours[name], theirs[name]) / theirs[name].square().sum())
        assert slope == pytest.approx(1.0, abs=0.05), name
    part, name = held.optimizer_error(config)
    assert part < 1e-4, name


@pytest.mark.parametrize("knobs", [{}, {"step_graph": True}])
def test_a_setting_that_the_optimizer_lost_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, bool]
) -> None:
    plain = Workload._optimizer

    def without_decay(workload: Workload) -> torch.optim.Optimizer:
        (made := plain(workload)).param_groups[0]["weight_decay"] = 0.0
        return made

    monkeypatch.setattr(Workload, "_optimizer", without_decay)
    part, name = subject(eight(tmp_path, optimizer="adamw")).optimizer_error(EIGHT.replace(**knobs))
    assert part > 1e-4 and name
    # As does an update that is not a number.
    wanted, found = torch.tensor([1.0, 1.5]), torch.tensor([1.0, math.nan])
    part, name = worst_update([("w", torch.ones(2), wanted, found)])
    assert math.isnan(part) and name == "w"


def test_a_captured_step_is_compared(tmp_path: Path, recorders: list[AtenRecorder]) -> None:
    made = eight(tmp_path)
    captured = EIGHT.replace(step_graph=True)
    made.block(captured, 3, 1)
    (own,) = recorders
    before = own.replays, own.recordings
    compared = made.compare(captured, FP32.at(8), 60.0)
    assert compared.ok, compared
    made.block(captured, 3, 1)
    assert own.replays > before[0] and own.recordings == before[1], "nothing is captured anew"


def test_an_uncapturable_step_fails(tmp_path: Path) -> None:
    source = NET.replace("return self.last(", "float(x.sum())\n        return self.last(")
    made = bench(tmp_path, source, shape=(3,))
    with pytest.warns(AdvisorWarning), pytest.raises(ConfigFailed, match="no CUDA graph") as failed:
        made.block(CONFIG.replace(step_graph=True), 1, 1)
    assert failed.value.outcome == "failed"


def test_a_fault_under_autocast_is_found(tmp_path: Path) -> None:
    source = NET.replace(
        "        return self.last(torch.relu(self.norm(self.first(x))))",
        "        y = self.last(torch.relu(self.norm(self.first(x))))\n"
        "        return y + torch.is_autocast_enabled('cpu') * 0.3 * y.detach()",
    )
    made = bench(tmp_path, source, shape=(3,), batch=64)
    bf16 = FP32.at(64).replace(precision="bf16")
    made.block(bf16, 1, 1)
    compared = made.compare(bf16, FP32.at(64), 60.0)
    assert (compared.outcome, compared.blames) == ("wrong", "format"), compared
