"""Models of every kind become a step: their inputs, outputs, hooks and modes."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from advisor.cache.config import Config
from advisor.errors import AdvisorWarning, TargetError, TargetFailed
from advisor.tuners.act.capture.captured_graph import RECORDERS
from advisor.tuners.decisions import POINTS
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

KINDS = {
    "a dict of outputs": """
        class Net(nn.Conv2d):
            def __init__(self): super().__init__(3, 4, 3)
            def forward(self, x):
                y = super().forward(x)
                return {"out": y, "aux": y * 2}
    """,
    "a named tuple with auxiliary logits": """
        from collections import namedtuple
        Outputs = namedtuple("Outputs", ["logits", "aux_logits"])
        class Net(nn.Conv2d):
            def __init__(self): super().__init__(3, 4, 3)
            def forward(self, x):
                y = super().forward(x).mean((2, 3))
                return Outputs(y, y * 2)
    """,
    "an object with logits": """
        from types import SimpleNamespace
        class Net(nn.Conv2d):
            def __init__(self): super().__init__(3, 4, 3)
            def forward(self, x):
                y = super().forward(x).mean((2, 3))
                return SimpleNamespace(logits=y, hidden_states=None)
    """,
    "a loss of its own": """
        class Net(nn.Conv2d):
            def __init__(self): super().__init__(3, 4, 3)
            def forward(self, x): return [super().forward(x), "text"]
        def loss(output, target):
            assert output[1] == "text" and target.shape == output[0].shape
            return output[0].abs().sum()
    """,
    "the usual loss of its own": """
        class Net(nn.Conv2d):
            def __init__(self): super().__init__(3, 4, 3)
            def forward(self, x): return super().forward(x).mean((2, 3))
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    """,
    "dict inputs": """
        class Net(nn.Linear):
            def __init__(self): super().__init__(3, 4)
            def forward(self, *, left, right): return super().forward(left + right)
        def make_batch(batch_size, device):
            x = torch.randn(batch_size, 3, device=device)
            return {"left": x, "right": x}, torch.zeros(batch_size, dtype=torch.long)
    """,
    "tuple inputs and no target": """
        class Net(nn.Linear):
            def __init__(self): super().__init__(3, 4)
            def forward(self, left, right): return super().forward(left + right)
        def make_batch(batch_size, device):
            x = torch.randn(batch_size, 3, device=device)
            return (x, x), None
    """,
}


def bench(folder: Path, source: str, **changes: object) -> Bench:
    lines = source.splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    path = folder / "kind.py"
    path.write_text(
        "import torch\nfrom torch import nn\n" + "\n".join(line[indent:] for line in lines)
    )
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


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("model = lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4))", "int64"),
        ("model = lambda: nn.Conv3d(3, 4, 2)", "5-D"),
        ("model = lambda: nn.Linear(3, 4)", "adamw"),
        ("model = lambda: nn.Linear(3, 4)", "deterministic"),
        ("model = lambda: nn.Linear(3, 4).double()", "float64"),
    ],
)
def test_inputs_and_modes(tmp_path: Path, source: str, changes: str) -> None:
    how: dict[str, dict[str, object]] = {
        "int64": {"dtype": "int64", "vocab": 50, "shape": (7,)},
        "5-D": {"shape": (3, 4, 4, 4)},
        "adamw": {"optimizer": "adamw", "shape": (3,)},
        "deterministic": {"deterministic": True, "shape": (3,)},
        "float64": {"dtype": "float64", "shape": (3,)},
    }
    made = bench(tmp_path, source, **how[changes])
    describe(made)
    config = CONFIG.replace(cudnn_deterministic=changes == "deterministic", channels_last=True)
    try:
        assert made.block(config, 2, 1).steps == 2
        assert torch.are_deterministic_algorithms_enabled() == (changes == "deterministic")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def test_the_step_trains(tmp_path: Path) -> None:
    made = bench(tmp_path, "model = lambda: nn.Linear(3, 4)", shape=(3,))
    workload = made.workload(CONFIG)
    before = [p.detach().clone() for p in workload.model.parameters()]
    workload.step()
    assert workload.loss is not None and workload.loss.isfinite()
    assert all(
        not torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True)
    )


def test_inference_trains_nothing(tmp_path: Path) -> None:
    made = bench(tmp_path, "model = lambda: nn.Dropout()", shape=(3,), mode="infer")
    workload = made.workload(CONFIG)
    workload.step()
    assert workload.loss is None and not workload.model.training


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("model = lambda: nn.Flatten()", TargetFailed, "no trainable parameter"),
        (
            "class Net(nn.Linear):\n"
            "    def __init__(self): super().__init__(3, 4)\n"
            "    def forward(self, x): super().forward(x); return 'text'\n",
            TargetError,
            r"output \(str\) holds no floating-point tensor; define loss",
        ),
        (
            "model = lambda: nn.Linear(3, 4)\ndef make_batch(batch_size, device): return 5\n",
            TargetFailed,
            r"make_batch must return \(inputs, target\)",
        ),
        (
            "model = lambda: nn.Linear(3, 4)\ndef loss(output, target): raise KeyError('mine')\n",
            TargetError,
            "mine",
        ),
    ],
)
def test_refused(tmp_path: Path, source: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        describe(bench(tmp_path, source, shape=(3,)))


def test_torchvision() -> None:
    path = Path("torchvision:lraspp_mobilenet_v3_large")
    made = Bench(job(path, shape=(3, 64, 64), batch=2))
    describe(made)
    assert made.block(CONFIG, 1, 1).steps == 1


def test_the_first_step_is_as_the_task_asks(tmp_path: Path) -> None:
    spy = """
        seen = []
        class Net(nn.Linear):
            def __init__(self): super().__init__(3, 4)
            def forward(self, x):
                seen.append((torch.are_deterministic_algorithms_enabled(), len(x)))
                return super().forward(x)
    """
    strict = bench(tmp_path, spy, shape=(3,), deterministic=True)
    seen = sys.modules[type(strict.loaded.factory()).__module__].seen
    try:
        describe(strict)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    assert set(seen) == {(True, 2)}


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


def test_what_was_built_is_kept_and_dropped_when_memory_runs_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = eight(tmp_path)
    three = [EIGHT, EIGHT.replace(channels_last=True), EIGHT.replace(precision="fp32")]
    for config in (*three, three[0]):
        made.block(config, 1, 1)
    workloads = {config: built.workload for config, built in made._built.items()}
    assert list(workloads) == three
    for config in three:
        made.block(config, 1, 1)
        assert made._built[config].workload is workloads[config]
    monkeypatch.setattr(made, "_free_bytes", lambda: 0)
    made.block(EIGHT.at(4), 1, 1)
    assert list(made._built) == [EIGHT.at(4)]


def test_what_does_not_fit_beside_others_is_built_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_block_has_the_steps_after_those_that_settle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_samples_are_of_the_same_weights_and_batches_under_every_config(tmp_path: Path) -> None:
    made = eight(tmp_path)
    one, other = EIGHT, EIGHT.replace(precision="fp32")
    for config in (one, other):
        made.block(config, 3, 1)
    held = subject(made)
    workload = made._built[one].workload
    for point in (*range(POINTS), POINTS):
        first, second = (held.sample(config, point, 0) for config in (one, other))
        ones, others = (found.outputs | found.gradients for found in (first, second))
        names = {"output", *(name for name, _ in workload.model.named_parameters())}
        assert ones.keys() == others.keys() == names
        for name, tensor in ones.items():
            torch.testing.assert_close(tensor, others[name])
        assert first.loss == pytest.approx(second.loss) and not first.gradients["unused.bias"].any()
    points = [held.sample(one, point, 0).gradients["last.weight"] for point in range(POINTS)]
    assert not any(torch.equal(points[0], two) for two in points[1:]), "a batch each"
    nudged = held.sample(one, POINTS, 0).gradients["last.weight"]
    assert not torch.equal(nudged, points[0])
    torch.testing.assert_close(nudged, points[0], rtol=1e-2, atol=1e-4)
    held.restore([workload])
    fresh = dict(made.new_model().named_parameters())
    assert all(torch.equal(p, fresh[name]) for name, p in workload.model.named_parameters())
    assert workload.optimizer is not None
    states = workload.optimizer.state.values()
    assert states and not any(bool(v.any()) for one in states for v in one.values())
    assert made.block(one, 2, 1).steps == 2


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, knobs: dict[str, object]
) -> None:
    """A GradScaler's factor is in neither, whoever divides by it."""
    monkeypatch.setitem(RECORDERS, "cpu", AtenRecorder)
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


def test_an_update_that_is_not_a_number_shows() -> None:
    wanted, found = torch.tensor([1.0, 1.5]), torch.tensor([1.0, math.nan])
    part, name = worst_update([("w", torch.ones(2), wanted, found)])
    assert math.isnan(part) and name == "w"


@pytest.mark.parametrize("knobs", [{}, {"step_graph": True}])
def test_a_setting_that_the_optimizer_lost_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, object]
) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", AtenRecorder)
    plain = Workload._optimizer

    def without_decay(workload: Workload) -> torch.optim.Optimizer:
        made = plain(workload)
        for group in made.param_groups:
            group["weight_decay"] = 0.0
        return made

    monkeypatch.setattr(Workload, "_optimizer", without_decay)
    made = eight(tmp_path, optimizer="adamw")
    part, name = subject(made).optimizer_error(EIGHT.replace(**knobs))  # type: ignore[arg-type]
    assert part > 1e-4 and name


def test_what_a_captured_step_is_compared_by_is_its_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders: list[AtenRecorder] = []

    def recorder() -> AtenRecorder:
        recorders.append(AtenRecorder())
        return recorders[-1]

    monkeypatch.setitem(RECORDERS, "cpu", recorder)
    made = eight(tmp_path)
    captured = EIGHT.replace(step_graph=True)
    made.block(captured, 3, 1)
    (own,) = recorders
    before = own.replays, own.recordings
    compared = made.compare(captured, FP32.at(8), 60.0)
    assert compared.ok, compared
    assert own.replays > before[0] and own.recordings == before[1], "nothing is captured anew"
    made.block(captured, 3, 1)
    assert own.recordings == before[1]


def test_what_cannot_be_captured_failed_by_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", AtenRecorder)
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


def test_dropout_is_compared_by_draws(tmp_path: Path) -> None:
    source = NET.replace("torch.relu(", "nn.functional.dropout(").replace("(x)))", "(x)), 0.1)")
    made = bench(tmp_path, source, shape=(3,), batch=8)
    assert made.compare(EIGHT, FP32.at(8), 60.0).outcome in ("ok", "unverified")
