"""Models of every kind become a step: their inputs, outputs, hooks and modes."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import pytest
import torch

from advisor.cache.config import Config
from advisor.errors import TargetError, TargetFailed
from advisor.tuners.measure.worker import child
from advisor.tuners.measure.worker.child import Bench
from advisor.tuners.measure.workload import Workload
from tests.tuners.test_worker import job

CONFIG = Config(precision="default", cudnn_deterministic=False, batch_size=2)

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
    return Bench(job(path, batch=2, **({"shape": (3, 8, 8)} | changes)))


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(tmp_path: Path, kind: str, mode: str) -> None:
    made = bench(tmp_path, KINDS[kind], mode=mode)
    made.first_step()
    measured = made.measure(CONFIG, 0.02, "compute", False)
    assert measured.ok, measured.reason
    assert measured.low <= measured.samples_per_s <= measured.high


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
    made.first_step()
    config = CONFIG.replace(cudnn_deterministic=changes == "deterministic", channels_last=True)
    try:
        measured = made.measure(config, 0.02, "compute", False)
        assert torch.are_deterministic_algorithms_enabled() == (changes == "deterministic")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    assert measured.ok, measured.reason


def test_the_step_trains(tmp_path: Path) -> None:
    made = bench(tmp_path, "model = lambda: nn.Linear(3, 4)", shape=(3,))
    workload = made._build(CONFIG, "compute")
    before = [p.detach().clone() for p in workload.model.parameters()]
    workload.step()
    assert workload.loss is not None and workload.loss.isfinite()
    assert all(
        not torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True)
    )


def test_inference_trains_nothing(tmp_path: Path) -> None:
    made = bench(tmp_path, "model = lambda: nn.Dropout()", shape=(3,), mode="infer")
    workload = made._build(CONFIG, "compute")
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
        bench(tmp_path, source, shape=(3,)).first_step()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lraspp_mobilenet_v3_large", (3, 64, 64)),
        ("googlenet", (3, 96, 96)),
        ("r3d_18", (3, 4, 32, 32)),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning:torchvision")  # the worker ignores all
def test_torchvision(name: str, shape: tuple[int, ...]) -> None:
    made = Bench(job(Path(f"torchvision:{name}"), shape=shape, batch=2))
    made.first_step()
    measured = made.measure(CONFIG, 0.02, "compute", False)
    assert measured.ok, measured.reason


@pytest.mark.parametrize("shared", [False, True])
def test_whether_the_host_is_the_limit_is_asked_where_others_are_measured_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """It takes a step for which the device is held up."""
    monkeypatch.setattr(child, "busy_share", lambda _step, _clock, _timing: 0.5)
    made = bench(tmp_path, "model = lambda: nn.Linear(3, 4)", shape=(3,))
    made = Bench(dataclasses.replace(made._job, shares_host=shared))
    made.first_step()
    assert made.measure(CONFIG, 0.02, "compute", False).busy == (0.5 if shared else 0.0)
    assert made.measure(CONFIG, 0.02, "compute", True).busy == 0.0, "in a race"


def test_a_captured_steps_first_steps_are_all_before_its_first_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(tmp_path, "model = lambda: nn.Linear(3, 4)", shape=(3,))
    begun: list[str] = []

    def start(workload: Workload) -> None:
        begun.append("start")
        time.sleep(0.2)

    monkeypatch.setattr(Workload, "start", start)
    assert made.start(CONFIG).first_step_s >= 0.2
    assert made.measure(CONFIG, 0.02, "compute", False).first_step_s >= 0.2
    assert begun == ["start", "start"]


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
    seen = sys.modules[type(strict._loaded.factory()).__module__].seen
    try:
        strict.first_step()
        strict.describe()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    assert set(seen) == {(True, 2)}
