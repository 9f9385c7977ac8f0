"""Workloads of all kinds of models: inputs, outputs, hooks and modes."""

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
from advisor.tuners.measure.worker import bench as bench_module
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

class Wrapped(nn.Module):
    def __init__(self, layer, before, after):
        super().__init__()
        self.layer, self.before, self.after = layer, before, after

    def forward(self, *given, **named):
        return self.after(self.layer(self.before(*given, **named)))

def convolution(after): return Wrapped(nn.Conv2d(3, 4, 3), lambda x: x, after)
def linear(before): return Wrapped(nn.Linear(3, 4), before, lambda y: y)
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
    "custom loss": """
        model = lambda: convolution(lambda y: [y, "text"])
        def loss(output, target):
            assert output[1] == "text" and target.shape == output[0].shape
            return output[0].abs().sum()
    """,
    "cross-entropy loss with options": """
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


def make_bench(folder: Path, source: str, **changes: object) -> Bench:
    path = folder / "kind.py"
    path.write_text(HEAD + textwrap.dedent(source))
    return Bench(job(path, **({"shape": (3, 8, 8), "batch": 2} | changes)))


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_outputs_losses_and_batches_are_compared(tmp_path: Path, kind: str, mode: str) -> None:
    bench = make_bench(tmp_path, KINDS[kind], mode=mode)
    describe(bench)
    block = bench.block(CONFIG, 2, 1)
    assert (block.steps, block.samples) == (2, 4)
    compared = bench.compare(CONFIG, FP32, 60.0)
    assert compared.ok, compared


LINEAR = "model = lambda: nn.Linear(3, 4)"
TEXT = "model = lambda: Wrapped(nn.Linear(3, 4), lambda x: x, lambda _y: 'text')"
NO_BATCH = f"{LINEAR}\nmake_batch = lambda batch_size, device: 5"


@pytest.mark.parametrize(
    ("source", "options"),
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
def test_all_inputs_and_modes_run(tmp_path: Path, source: str, options: dict[str, object]) -> None:
    bench, deterministic = make_bench(tmp_path, source, **options), "deterministic" in options
    describe(bench)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    config = CONFIG.replace(cudnn_deterministic=deterministic, channels_last=True)
    assert bench.block(config, 2, 1).steps == 2
    workload = bench._built[config].workload
    assert workload.model.training == (workload.loss is not None) == ("mode" not in options)
    assert torch.are_deterministic_algorithms_enabled() == deterministic


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("model = lambda: nn.Flatten()", TargetFailed, "no trainable parameter"),
        (TEXT, TargetError, r"output \(str\) holds no floating-point tensor; define loss"),
        (NO_BATCH, TargetFailed, r"make_batch must return \(inputs, target\)"),
        (f"{LINEAR}\ndef loss(output, target): raise KeyError('mine')\n", TargetError, "mine"),
    ],
)
def test_invalid_targets_are_refused(
    tmp_path: Path, source: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        describe(make_bench(tmp_path, source, shape=(3,)))


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))
"""
BATCH_8 = CONFIG.at(8)


def net_bench(folder: Path, **changes: object) -> Bench:
    return make_bench(folder, NET, shape=(3,), **({"batch": 8} | changes))


def repeatable(bench: Bench) -> RepeatableWorkload:
    return RepeatableWorkload(bench.new_model, bench._workload)


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[AtenRecorder]:
    """The recorders that stand in for CUDA graphs on a CPU."""
    created: list[AtenRecorder] = []
    monkeypatch.setitem(RECORDERS, "cpu", lambda: created.append(AtenRecorder()) or created[-1])
    return created


def test_built_workloads_are_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = net_bench(tmp_path)
    configs = [BATCH_8, BATCH_8.replace(channels_last=True), BATCH_8.replace(precision="fp32")]
    kept = []
    for _ in range(2):
        for config in configs:
            bench.block(config, 1, 1)
        kept.append({config: built.workload for config, built in bench._built.items()})
    assert list(kept[0]) == configs and kept[0] == kept[1]
    monkeypatch.setattr(bench, "_free_bytes", lambda: 0)
    bench.block(BATCH_8.at(4), 1, 1)
    assert list(bench._built) == [BATCH_8.at(4)]


def test_out_of_memory_frees_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = net_bench(tmp_path)
    bench.block(BATCH_8, 1, 1)
    plain = Workload.start

    def start(workload: Workload) -> None:
        if bench._built:
            raise torch.OutOfMemoryError("out of memory")
        plain(workload)

    monkeypatch.setattr(Workload, "start", start)
    second = BATCH_8.replace(precision="fp32")
    assert bench.block(second, 1, 1).steps == 1 and list(bench._built) == [second]
    monkeypatch.setattr(Workload, "start", lambda _: torch.empty(2**60))
    with pytest.raises(ConfigFailed) as failed:
        bench.block(BATCH_8, 1, 1)
    assert failed.value.outcome == "out_of_memory" and bench.healthy and not bench._built


def test_warm_up_steps_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = net_bench(tmp_path)
    count = [0]
    plain = Workload.step

    def step(workload: Workload) -> None:
        count[0] += 1
        plain(workload)

    monkeypatch.setattr(Workload, "step", step)
    graphs = iter([3, 5])
    monkeypatch.setattr(bench_module, "graphs_compiled", lambda: next(graphs, 5))
    block = bench.block(BATCH_8, 5, 1)
    assert count[0] == 1 + 1 + 5 and (block.steps, block.samples, block.compiled) == (5, 40, 2)
    count[0] = 0
    assert bench.block(BATCH_8, 5, 2).first_s == 0.0 and count[0] == 7


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
def test_gradients_and_updates_of_a_sample_are_unscaled(
    tmp_path: Path, optimizer: str, knobs: dict[str, object]
) -> None:
    """A GradScaler's factor appears in neither the gradients nor the updates."""
    bench = net_bench(tmp_path, optimizer=optimizer)
    config = BATCH_8.replace(**knobs)  # type: ignore[arg-type]
    bench.block(config, 2, 1)
    workload = repeatable(bench)
    ours, theirs = (workload.sample(one, 0, 0).gradients for one in (config, FP32.at(8)))
    for name in ("last.weight", "last.bias", "first.weight"):
        slope = float(torch.dot(ours[name], theirs[name]) / theirs[name].square().sum())
        assert slope == pytest.approx(1.0, abs=0.05), name
    error, name = workload.optimizer_error(config)
    assert error < 1e-4, name


@pytest.mark.parametrize("knobs", [{}, {"step_graph": True}])
def test_lost_optimizer_setting_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, bool]
) -> None:
    plain = Workload._optimizer

    def without_decay(workload: Workload) -> torch.optim.Optimizer:
        (optimizer := plain(workload)).param_groups[0]["weight_decay"] = 0.0
        return optimizer

    monkeypatch.setattr(Workload, "_optimizer", without_decay)
    workload = repeatable(net_bench(tmp_path, optimizer="adamw"))
    error, name = workload.optimizer_error(BATCH_8.replace(**knobs))
    assert error > 1e-4 and name
    expected, actual = torch.tensor([1.0, 1.5]), torch.tensor([1.0, math.nan])
    error, name = worst_update([("w", torch.ones(2), expected, actual)])
    assert math.isnan(error) and name == "w"  # a NaN update is detected too


def test_captured_step_is_compared(tmp_path: Path, recorders: list[AtenRecorder]) -> None:
    bench = net_bench(tmp_path)
    captured = BATCH_8.replace(step_graph=True)
    bench.block(captured, 3, 1)
    (recorder,) = recorders
    replays, recordings = recorder.replays, recorder.recordings
    compared = bench.compare(captured, FP32.at(8), 60.0)
    assert compared.ok, compared
    bench.block(captured, 3, 1)
    assert recorder.replays > replays and recorder.recordings == recordings, "captured again"


def test_uncapturable_step_fails(tmp_path: Path) -> None:
    source = NET.replace("return self.last(", "float(x.sum())\n        return self.last(")
    bench = make_bench(tmp_path, source, shape=(3,))
    with pytest.warns(AdvisorWarning), pytest.raises(ConfigFailed, match="no CUDA graph") as failed:
        bench.block(CONFIG.replace(step_graph=True), 1, 1)
    assert failed.value.outcome == "failed"


def test_fault_under_autocast_is_found(tmp_path: Path) -> None:
    source = NET.replace(
        "        return self.last(torch.relu(self.norm(self.first(x))))",
        "        y = self.last(torch.relu(self.norm(self.first(x))))\n"
        "        return y + torch.is_autocast_enabled('cpu') * 0.3 * y.detach()",
    )
    bench = make_bench(tmp_path, source, shape=(3,), batch=64)
    bf16 = FP32.at(64).replace(precision="bf16")
    bench.block(bf16, 1, 1)
    compared = bench.compare(bf16, FP32.at(64), 60.0)
    assert (compared.outcome, compared.blames) == ("wrong", "format"), compared
