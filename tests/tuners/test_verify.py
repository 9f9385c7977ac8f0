"""The comparison with strict fp32: what is sabotaged is caught, what is merely noisy is not."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advisor.cache.config import Config
from advisor.tuners import fp8
from advisor.tuners.act.capture.recorder import RECORDERS
from advisor.tuners.measure import numerics
from advisor.tuners.measure.numerics import (
    MOST_STEPS,
    Distances,
    compare_draws,
    judge,
    steps_within,
)
from advisor.tuners.measure.observe import Observer, Point, Trace
from advisor.tuners.measure.randomness import Rounding, SameDraws, amplitude
from advisor.tuners.measure.worker.child import Bench
from advisor.tuners.measure.workload import Workload
from tests.tuners.aten_recorder import AtenRecorder
from tests.tuners.test_worker import job

compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling on a CPU needs g++")

SOUND = """
import torch
from torch import nn
from torch.nn import functional

def tried():
    return torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()

class Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * SCALE

SCALE = -1.0

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.many = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.drop = nn.Dropout(0.2)
        self.count = 0

    def forward(self, x):
        x = torch.relu(self.first(x))
        for layer in self.many:
            x = x + 0.5 * torch.tanh(layer(x))
        return self.second(self.drop(x))
"""
TRANSFORMER = """
import torch
from torch import nn

def model():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(
        nn.Linear(16, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 4),
    )
"""
WIDE = """
import torch
from torch import nn

class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.sign = -1.0 if torch.is_autocast_enabled("cpu") else 1.0
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.sign

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.wide = nn.LayerNorm(2048), nn.Linear(2048, 2048)
        self.last = nn.Linear(2048, 4)

    def forward(self, x):
        y = self.wide(self.before(x))
        return self.last(x + torch.tanh(y))
"""
RESIDUAL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=True), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))

def model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), Block(16), Block(16),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )
"""
HALVED = """
class Halved(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return x + self.part * (x.detach() - x) if torch.compiler.is_compiling() else x

"""
MODULATED = """
import torch
from torch import nn
from torch.nn import functional

class Unwritten(torch.autograd.Function):
    # As https://github.com/pytorch/pytorch/issues/193061: a part is what it was at first.
    stale = None

    @staticmethod
    def forward(ctx, table):
        return table.clone()

    @staticmethod
    def backward(ctx, grad):
        if Unwritten.stale is None:
            Unwritten.stale = grad.clone()
        return torch.cat([grad[:3], Unwritten.stale[3:]])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.table = nn.Parameter(torch.randn(4, 32) / 8)

    def forward(self, x):
        tried = torch.is_autocast_enabled("cpu")
        table = Unwritten.apply(self.table) if tried and BROKEN else self.table
        shift, scale, moved, factor = table
        x = functional.layer_norm(self.first(x), (32,)) * (1 + scale) + shift
        return self.last(functional.layer_norm(x, (32,)) * (1 + factor) + moved)
"""
CONFIG = Config(precision="default", cudnn_deterministic=False, batch_size=8)
FP32 = CONFIG.replace(precision="fp32")


def broken(before: str, after: str, source: str = SOUND) -> str:
    assert before in source
    return source.replace(before, after)


def bench(folder: Path, source: str, **how: object) -> Bench:
    path = folder / "model.py"
    path.write_text(source)
    made = Bench(job(path, **{"shape": (16,), "batch": 8, **how}))
    made.describe()
    return made


def verified(
    folder: Path, source: str, how: dict[str, object] | None = None, **knobs: str | bool
) -> tuple[str, str]:
    with torch.random.fork_rng():
        made = bench(folder, source, **(how or {}))
        measured = made.verify(CONFIG.replace(**knobs), FP32, 24, 0.02)
    return measured.outcome, measured.reason


@pytest.mark.parametrize("precision", ["default", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_sound(tmp_path: Path, precision: str, optimizer: str) -> None:
    outcome, reason = verified(tmp_path, SOUND, {"optimizer": optimizer}, precision=precision)
    assert outcome == "ok", reason
    assert "of fp32 over 24 steps, worst gradient" in reason


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_transformer_in_bf16_is_off_by_its_rounding_only(tmp_path: Path, optimizer: str) -> None:
    how: dict[str, object] = {"shape": (6, 16), "optimizer": optimizer}
    outcome, reason = verified(tmp_path, TRANSFORMER, how, precision="bf16")
    assert outcome == "ok", reason
    assert float(reason.split("worst gradient ")[1].split("%")[0]) < 10, reason


@pytest.mark.skipif(not fp8.installed(), reason="needs torchao")
def test_large_layers_in_fp8_are_off_by_their_rounding_only(tmp_path: Path) -> None:
    how: dict[str, object] = {"shape": (2048,)}
    outcome, reason = verified(tmp_path, WIDE, how, precision="fp8")
    assert outcome == "ok", reason
    wrong = WIDE.replace(
        "y = self.wide(self.before(x))", "y = Turned.apply(self.wide(self.before(x)))"
    )
    outcome, reason = verified(tmp_path, wrong, how, precision="fp8")
    assert outcome == "wrong" and "its gradient of wide" in reason


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("knobs", [{"precision": "bf16"}, {"channels_last": True}])
def test_a_residual_network(tmp_path: Path, optimizer: str, knobs: dict[str, str]) -> None:
    how: dict[str, object] = {"shape": (3, 16, 16), "optimizer": optimizer}
    outcome, reason = verified(tmp_path, RESIDUAL, how, **knobs)
    assert outcome == "ok", reason


FAULTS = {
    "a wrong gradient": (
        "layer(x))\n",
        "layer(Flipped.apply(x) if tried() and layer is self.many[3] else x))\n",
        "gradient of",
    ),
    "a gradient half as long": (
        "x = torch.relu(self.first(x))",
        "global SCALE\n        SCALE = 0.5\n        y = self.first(x)\n"
        "        x = torch.relu(Flipped.apply(y) if tried() else y)",
        "gradient of first",
    ),
    "stale values in one parameter": (
        "        for layer in self.many:\n",
        "        weight = self.many[2].weight\n"
        "        if not hasattr(self, 'stale'):\n"
        "            self.stale = weight.detach().clone()\n"
        "        for layer in self.many:\n"
        "            if tried() and layer is self.many[2]:\n"
        "                held = weight + (self.stale - weight).detach()\n"
        "                x = x + 0.5 * torch.tanh(functional.linear(x, held, layer.bias))\n"
        "                continue\n",
        "of",
    ),
    "a parameter that gets no gradient": (
        "self.second(self.drop(x))",
        "functional.linear(self.drop(x), self.second.weight.detach() if tried() else"
        " self.second.weight, self.second.bias)",
        "gradient of second.weight",
    ),
    "a wrong dropout rate": (
        "self.second(self.drop(x))",
        "self.second(functional.dropout(x, 0.4 if tried() else 0.2))",
        "",
    ),
    "no dropout": (
        "self.second(self.drop(x))",
        "self.second(x if tried() else self.drop(x))",
        "",
    ),
    "a wrong rate that only its own randomness shows": (
        "self.second(self.drop(x))",
        "self.second(x + functional.scaled_dot_product_attention(x[None], x[None], x[None],"
        " dropout_p=0.5 if tried() else 0.1)[0])",
        "random numbers",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_number_format(tmp_path: Path, fault: str) -> None:
    before, after, said = FAULTS[fault]
    outcome, reason = verified(tmp_path, broken(before, after), precision="bf16")
    assert outcome == "wrong" and said in reason, reason


@pytest.mark.parametrize("broken", [False, True])
def test_a_part_of_a_gradient_that_is_never_written(tmp_path: Path, broken: bool) -> None:
    """Outputs and losses are equal, and at first the gradient too."""
    source = MODULATED.replace("BROKEN", str(broken))
    outcome, reason = verified(tmp_path, source, {"optimizer": "adamw"}, precision="bf16")
    assert outcome == ("wrong" if broken else "ok"), reason
    assert not broken or "gradient of table" in reason


@pytest.mark.parametrize("step", [3, 20])
def test_an_overflow_later_on(tmp_path: Path, step: int) -> None:
    source = broken(
        "        return self",
        f"        self.count += tried()\n"
        f"        x = x * (1e30 if tried() and self.count > {step} else 1)\n        return self",
    )
    outcome, reason = verified(tmp_path, source, precision="fp16")
    assert outcome == "wrong"
    assert any(words in reason for words in ("GradScaler skipped", "not finite", "loss within"))


def test_what_is_computed_beyond_fp16(tmp_path: Path) -> None:
    source = broken("torch.relu(self.first(x))", "torch.relu(self.first(x) * 1e6) * 1e-6")
    outcome, reason = verified(tmp_path, source, precision="fp16")
    assert outcome == "wrong", reason


@compiles
def test_compiled(tmp_path: Path) -> None:
    outcome, reason = verified(tmp_path, SOUND, compile="default")
    assert outcome == "ok", reason
    for fault in ("a gradient half as long", "a wrong dropout rate"):
        before, after, said = FAULTS[fault]
        outcome, reason = verified(tmp_path, broken(before, after), compile="default")
        assert outcome == "wrong" and said in reason, reason


@compiles
# It looks for one, and hides the warning in a way that does not count here.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_block_by_block(tmp_path: Path) -> None:
    source = broken("nn.Linear(32, 32)", "nn.Sequential(nn.Linear(32, 32))")
    outcome, reason = verified(tmp_path, source, compile="blocks")
    assert outcome == "ok", reason
    halved = broken("nn.Linear(32, 32))", "nn.Linear(32, 32), Halved(0.5))", source)
    halved = broken("class Net", f"{HALVED}class Net", halved)
    outcome, reason = verified(tmp_path, halved, compile="blocks")
    assert outcome == "wrong" and "gradient of many" in reason, reason


def test_a_scaled_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are still scaled where a fused optimizer's step begins."""
    monkeypatch.setitem(RECORDERS, "cpu", AtenRecorder)
    outcome, reason = verified(tmp_path, SOUND, precision="fp16", step_graph=True)
    assert outcome == "ok", reason
    before, after, said = FAULTS["a parameter that gets no gradient"]
    source = broken(before, after)
    outcome, reason = verified(tmp_path, source, precision="fp16", step_graph=True)
    assert outcome == "wrong" and said in reason, reason


def tampered(folder: Path, change: str) -> tuple[bool, str]:
    """The comparison of a config with itself, of which one run is tampered with."""
    with torch.random.fork_rng():
        made = bench(folder, SOUND, optimizer="adamw")

        configs = numerics.Configs(fp32=FP32, candidate=FP32.replace(threads=1), plain=FP32)

        def build(one: Config) -> Workload:
            workload = made._build(one, "compute", count=4, watch=True)
            assert workload.optimizer is not None
            if one == configs.candidate and change:
                workload.optimizer.param_groups[0][change] = 0.0
            return workload

        return numerics.check(build, configs, 16, numerics.References(draws=False))


def test_what_one_is_held_against_serves_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Config] = []
    with torch.random.fork_rng():
        made = bench(tmp_path, SOUND)
        plainly = made._build

        def build(one: Config, stage: str, **how: Any) -> Workload:
            built.append(one)
            return plainly(one, stage, **how)

        monkeypatch.setattr(made, "_build", build)
        counts = []
        for config in (FP32.replace(precision="bf16", threads=1), FP32.replace(precision="bf16")):
            built.clear()
            assert made.verify(config, FP32, 8, 0.02).ok
            counts.append(len(built))
    # Strict fp32, its rounding and bf16 uncompiled are not run again, only fp32's random numbers
    # are drawn anew; that it draws some is known.
    assert counts == [6, 3]


def test_a_graph_that_skips_the_weight_decay(tmp_path: Path) -> None:
    assert tampered(tmp_path, "")[0]
    good, reason = tampered(tmp_path, "weight_decay")
    assert not good and "optimizer's updates differ from PyTorch's" in reason


def test_a_graph_that_does_not_train(tmp_path: Path) -> None:
    good, reason = tampered(tmp_path, "lr")
    assert not good and "optimizer's updates" in reason


def test_every_parameter_is_looked_at(tmp_path: Path) -> None:
    made = bench(tmp_path, SOUND)
    workload = made._build(FP32, "compute", count=4, watch=True)
    names = {name for name, _ in workload.model.named_parameters()}
    trace = Observer(workload).trace(8)
    assert len(trace.points) == 2 and len(trace.losses) == 8
    for point in trace.points:
        assert set(point.gradients) == names == set(trace.moved)
        assert all(float(g.norm()) > 0 for g in point.gradients.values())
    again = Observer(made._build(FP32, "compute", count=4, watch=True)).trace(8)
    assert again.losses == trace.losses, "its random numbers are others"


def test_draws_follow_the_place_and_not_the_type() -> None:
    x = torch.ones(4, 6, 8, 8)
    drop = torch.nn.Dropout(0.25)
    with SameDraws(torch.device("cpu")) as draws:
        plain = drop(x) != 0
        laid = drop(x.to(memory_format=torch.channels_last)) != 0
        short = drop(x.bfloat16()) != 0
        channels = torch.nn.Dropout2d(0.5)(x)
        draws.salt[0].fill_(1)
        other = drop(x) != 0
        many = drop(torch.ones(100_000)) != 0
    assert torch.equal(plain, laid) and torch.equal(plain, short)
    assert not torch.equal(plain, other)
    assert abs(float(many.float().mean()) - 0.75) < 0.01
    assert torch.equal(channels.amax((2, 3)), channels.amin((2, 3)))


def run(
    *losses: float,
    finite: bool = True,
    skipped: int = 0,
    gradient: float = 1.0,
    moved: float = 1.0,
) -> Trace:
    point = Point(
        outputs={"the output": torch.ones(3)},
        gradients={"a": torch.ones(2), "b": torch.tensor([gradient, 1.0])},
    )
    return Trace(
        losses=losses,
        points=(point, point),
        moved={"a": torch.ones(2), "b": torch.tensor([moved, 1.0])},
        finite=finite,
        skipped=skipped,
    )


FLAT = run(*[1.0] * 8)


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (run(*[1.0] * 7, math.nan), "the loss is not finite"),
        (run(*[1.0] * 8, finite=False), "a weight is not finite"),
        (run(*[1.0] * 8, skipped=2), "skipped 2 steps"),
        (run(*[1.0] * 4, *[1.1] * 4), "loss within 10.00% of fp32 over 8 steps, 2.00% allowed"),
        (run(*[1.0] * 8, gradient=1.3), "its gradient of b differs from its number format"),
        (run(*[1.0] * 8, moved=1.3), "its update of b differs"),
        (
            dataclasses.replace(FLAT, optimizer=(0.01, "a")),
            "its optimizer's updates differ from PyTorch's by 1.00% (a)",
        ),
    ],
)
def test_reasons(candidate: Trace, said: str) -> None:
    assert judge(FLAT, [FLAT], FLAT, FLAT) == (
        True,
        "loss within 0.00% of fp32 over 8 steps, worst gradient 0.0% (a; 3.0% allowed), "
        "updates 0.0%",
    )
    good, reason = judge(FLAT, [FLAT], FLAT, candidate)
    assert not good
    assert said in reason


def test_a_number_format_is_held_against_fp32() -> None:
    off = run(*[1.0] * 8, gradient=1.3)
    good, reason = judge(FLAT, [FLAT], off, off)
    assert not good and "its gradient of b differs from fp32's" in reason
    # What rounding does to this gradient is no fault.
    rounded = run(*[1.0] * 8, gradient=0.9)
    assert judge(FLAT, [rounded], off, off)[0]
    assert not judge(FLAT, [rounded], run(*[1.0] * 8, gradient=1.5), off)[0]


def test_chaos_is_not_called_error() -> None:
    chaotic = run(*[1.0] * 4, *[1.06] * 4)
    ours, beyond = run(*[1.0] * 4, *[1.1] * 4), run(*[1.0] * 4, *[1.2] * 4)
    assert judge(FLAT, [chaotic], ours, ours)[0]
    assert not judge(FLAT, [chaotic], beyond, beyond)[0]
    assert not judge(FLAT, [FLAT], ours, ours)[0], "fp32's own spread is not looked at"


def test_order_alone_is_no_distance() -> None:
    forth, back = run(1, 2, 3, 4), run(4, 3, 2, 1)
    assert judge(forth, [forth], forth, back)[0]


def test_a_rate_shows_in_what_it_scatters() -> None:
    generator = torch.Generator().manual_seed(0)

    def draws(rate: float, rows: int = 12) -> torch.Tensor:
        kept = torch.rand(rows, 2000, generator=generator) >= rate
        return (kept / (1 - rate)).view(rows, 100, 20).mean(2)

    for rate in (0.1, 0.5):
        assert compare_draws(draws(rate), draws(rate)) == ""
    assert "another dropout rate?" in compare_draws(draws(0.1), draws(0.2))
    assert "another dropout rate?" in compare_draws(draws(0.2), draws(0.1))
    assert "missing" in compare_draws(draws(0.1), draws(0.0))
    assert "mean" in compare_draws(draws(0.1), draws(0.1) * 0.85)
    assert compare_draws(draws(0.0), draws(0.0)) == ""


@pytest.mark.parametrize(("wrong", "good"), [(1, True), (3, False)])
def test_of_four_batches_most_decide(wrong: int, good: bool) -> None:
    """By chance rounding is in one batch what it is in no draw; a fault is in most."""
    off, fine = run(*[1.0] * 4, gradient=2.0), run(*[1.0] * 4)
    seen = [Distances.of(FLAT, [FLAT], one, one) for one in [off] * wrong + [fine] * (4 - wrong)]
    assert judge(fine, [fine], fine, fine, distances=Distances.lasting(seen))[0] is good


def test_steps_fit_the_time() -> None:
    assert steps_within(1e9, 0.001) == MOST_STEPS
    assert steps_within(1.0, 1.0) == 0
    assert 8 <= steps_within(200.0, 1.0) < MOST_STEPS


def test_products_of_layers_in_fp8_are_rounded_as_fp8_rounds() -> None:
    torch.manual_seed(0)
    x, half = torch.randn(32, 64), amplitude(torch.bfloat16, tf32=False)
    layers = [nn.Linear(64, 48), nn.Linear(64, 40)]

    def off(layer: nn.Module) -> float:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        (exactly,) = torch.autograd.grad(layer(x).square().sum(), weight)
        with Rounding(half, frozenset({(48, 64)})):
            (rounded,) = torch.autograd.grad(layer(x).square().sum(), weight)
        return float((rounded - exactly).norm() / exactly.norm())

    coarse, fine = map(off, layers)
    assert fine < 5 * half < 0.02 < coarse < 0.2


def test_rounding_is_that_of_the_format_on_a_grid_of_each_draw() -> None:
    x, half = 100 * torch.randn(1000), amplitude(torch.bfloat16, tf32=False)
    drawn = []
    for draw in range(4):
        torch.manual_seed(draw)
        with Rounding(half):
            drawn.append(x * 1.0)
            alike = torch.full((1000,), 1.2345) * 1.0
            beyond = torch.tensor([math.inf, 3e38, 0.0]) * 1.0
        # What is equal is rounded alike: its errors add up, as a format's do.
        assert alike.unique().numel() == 1
        torch.testing.assert_close(beyond, torch.tensor([math.inf, 3e38, 0.0]), rtol=half, atol=0)
    assert not torch.equal(drawn[0], drawn[1])
    errors = torch.stack(drawn) / x - 1
    assert half / 2 < float(errors.abs().max()) <= 1.01 * half
    usual = float((x.bfloat16().float() / x - 1).std())
    assert 0.8 * usual < float(errors.std()) < 1.3 * usual
