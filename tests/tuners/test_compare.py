"""Comparison of configs with strict fp32: correct configs pass, planted faults are found.

All tests run on the CPU from fixed seeds, with bf16 autocast and torch.compile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from advisor.cache.config import Config
from advisor.tuners.decisions import POINTS
from advisor.tuners.measure.compare import References
from advisor.tuners.measure.run.recorded_state import RecordedUpdates
from advisor.tuners.measure.runner import UNVERIFIED
from advisor.tuners.measure.samples import Overflow, Sample, perturb, sampled

FP32 = Config(precision="fp32", compile="none", fused_optimizer=False)
BF16 = FP32.replace(precision="bf16")
COMPILED, COMPILED_BF16 = FP32.replace(compile="default"), BF16.replace(compile="default")


pytestmark = pytest.mark.usefixtures("flags_restored")


class Encoder(nn.Module):
    """Attention, norms, embeddings, and a key bias whose gradient is pure rounding noise."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.key, self.query = nn.Linear(32, 32), nn.Linear(32, 32)
        self.last = nn.Linear(32, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(tokens))
        query, key = self.query(hidden), self.key(hidden)
        pooled = functional.scaled_dot_product_attention(query, key, hidden)
        return self.last(pooled.mean(1))


def make_mlp(dropout: float = 0.1) -> nn.Module:
    first, second = nn.Linear(16, 64), nn.Linear(64, 64)
    hidden = [(one, nn.ReLU(), nn.Dropout(dropout)) for one in (first, second)]
    return nn.Sequential(*hidden[0], *hidden[1], nn.Linear(64, 8))


def make_convnet() -> nn.Module:
    """Convolutions with a bias before a BatchNorm, whose gradient is pure rounding noise."""
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1, stride=2)
    layers = [first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    draws: bool = False


random_tokens = functools.partial(torch.randint, 50, (32, 12))
MODELS = {
    "mlp": Model(make_mlp, functools.partial(torch.randn, 32, 16), draws=True),
    "convnet": Model(make_convnet, functools.partial(torch.randn, 16, 3, 12, 12)),
    "attention": Model(lambda: Encoder(0.0), random_tokens),
    "dropout": Model(lambda: Encoder(0.1), random_tokens, draws=True),
}


@functools.cache
def built_model(kind: str) -> tuple[nn.Module, Any, list[Tensor]]:
    """Return a model, its compiled form (cached) and its initial weights."""
    torch.manual_seed(0)
    model = MODELS[kind].make()
    initial = [p.detach().clone() for p in model.parameters()]
    return model, torch.compile(model, backend="eager"), initial


class Step:
    """A Subject whose compiled code may have a fault.

    Attributes:
        fault: a fault of the compiled code. "lost": bf16 makes one gradient zero.
        passes: number of passes by config.
        other_masks: whether bf16 draws other dropout masks from a seed, as on a GPU.
    """

    def __init__(self, kind: str, fault: str = "") -> None:
        model = MODELS[kind]
        self.model, self._compiled, self._initial = built_model(kind)
        self.draws, self.fault = model.draws, fault
        torch.manual_seed(1)
        self._batches = [(x := model.batch(), torch.randint(8, (len(x),))) for _ in range(4)]
        self.passes: dict[Config, int] = {}
        self.other_masks = False

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        self.passes[config] = self.passes.get(config, 0) + 1
        weights = dict(self.model.named_parameters())
        with torch.no_grad():
            for weight, initial in zip(weights.values(), self._initial, strict=True):
                weight.copy_(initial)
        perturb(list(weights.values()), point)
        torch.manual_seed(seed)
        if self.other_masks and config["precision"] == "bf16":
            torch.rand(1)
        inputs, labels = self._batches[point % POINTS]
        compiled = config["compile"] != "none"
        with torch.autocast("cpu", torch.bfloat16, enabled=config["precision"] == "bf16"):
            output = self._run(inputs, self.fault if compiled else "", compiled=compiled)
        loss = functional.cross_entropy(output.float(), labels)
        grads = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        gradients = dict(zip(weights, map(sampled, grads), strict=True))
        if compiled:
            self._plant_fault(gradients)
        elif config["precision"] == "bf16" and self.fault == "lost":
            gradients["query.weight"] = torch.zeros_like(gradients["query.weight"])
        return Sample(outputs={"output 0": sampled(output)}, gradients=gradients, loss=loss.item())

    def _run(self, inputs: Tensor, fault: str, *, compiled: bool) -> Tensor:
        if fault == "stale":
            name, weight = list(self.model.named_parameters())[-2]
            stale = weight + (self._initial[-2] - weight).detach()
            return torch.func.functional_call(self.model, {name: stale}, (inputs,))
        dropouts = [m for m in self.model.modules() if isinstance(m, nn.Dropout)]
        if fault == "dropout":
            for one in dropouts:
                one.p *= 2
        try:
            return self._compiled(inputs) if compiled and not self.fault else self.model(inputs)
        finally:
            if fault == "dropout":
                for one in dropouts:
                    one.p /= 2

    def _plant_fault(self, gradients: dict[str, Tensor]) -> None:
        if self.fault == "overflow":
            raise Overflow("no loss scale")
        if self.fault == "failing":
            raise RuntimeError("no such kernel")
        if self.fault.startswith("bias "):
            usual = torch.cat([one.flatten() for one in gradients.values()]).square().mean().sqrt()
            gradients["0.bias"] = gradients["0.bias"] + float(self.fault[5:]) * usual
        factors = {"layer": 1.1, "scale": 2.0, "not finite": math.inf}
        if factor := factors.get(self.fault):
            matrices = [name for name, weight in self.model.named_parameters() if weight.dim() > 1]
            for name in matrices[-2:-1] if self.fault == "layer" else gradients:
                gradients[name] = gradients[name] * factor

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        return (5e-4, "last.weight") if config["fused_optimizer"] else (0.0, "")


@functools.cache
def cached_references(kind: str, lost: bool, other_masks: bool) -> tuple[Step, References]:
    """Return a step and its references, cached: faults of compiled code do not change them."""
    step = Step(kind, "lost" if lost else "")
    step.other_masks = other_masks
    return step, References(step, FP32, tolerance=0.02)


LOST = "the slope of the gradient of query.weight is -10"
long = functools.partial(pytest.param, marks=pytest.mark.long)
WRONG_CODE, WRONG_FORMAT = ("wrong", "code"), ("wrong", "format")


@pytest.mark.parametrize(
    ("kind", "fault", "config", "verdict", "message"),
    [
        *((kind, "", BF16, ("ok", ""), "") for kind in ("mlp", "convnet")),
        *((kind, "", COMPILED, ("ok", ""), "") for kind in ("mlp", "convnet")),
        *((kind, "", COMPILED_BF16, ("ok", ""), "") for kind in ("mlp", "convnet", "attention")),
        ("mlp", "layer", COMPILED_BF16, WRONG_CODE, "gradient of 3.weight"),
        ("mlp", "stale", COMPILED_BF16, WRONG_CODE, ""),
        ("mlp", "dropout", COMPILED_BF16, WRONG_CODE, "variance of the output 0"),
        ("mlp", "scale", COMPILED_BF16, WRONG_CODE, "gradient of"),
        ("mlp", "not finite", COMPILED_BF16, WRONG_CODE, "not finite"),
        ("mlp", "overflow", COMPILED_BF16, WRONG_FORMAT, "no loss scale"),
        ("convnet", "layer", COMPILED_BF16, WRONG_CODE, "gradient of 3.weight"),
        # Errors in the gradient of a bias before a BatchNorm, relative to a usual gradient.
        ("convnet", "bias 1e-4", COMPILED, ("ok", ""), ""),
        ("convnet", "bias 0.1", COMPILED, WRONG_CODE, ""),
        ("convnet", "failing", COMPILED, ("failed", ""), "RuntimeError: no such kernel"),
        ("attention", "layer", COMPILED_BF16, WRONG_CODE, "gradient of query.weight"),
        ("attention", "stale", COMPILED_BF16, WRONG_CODE, ""),
        ("attention", "lost", BF16, WRONG_FORMAT, LOST),
        # These take seconds each, because of their many draws.
        long("dropout", "", COMPILED_BF16, ("ok", ""), ""),
        long("dropout", "dropout", COMPILED_BF16, WRONG_CODE, "variance of the output 0"),
        long("dropout", "lost", BF16, WRONG_FORMAT, LOST),
        long("dropout", "masks", COMPILED_BF16, ("ok", ""), ""),
        long("dropout", "masks layer", COMPILED_BF16, WRONG_CODE, ""),
        # bf16 draws other dropout masks.
        ("mlp", "masks", COMPILED_BF16, ("ok", ""), ""),
        ("mlp", "masks layer", COMPILED_BF16, WRONG_CODE, ""),
    ],
)
def test_planted_faults_are_found_and_correct_configs_pass(
    kind: str, fault: str, config: Config, verdict: tuple[str, str], message: str
) -> None:
    step, references = cached_references(kind, fault == "lost", fault.startswith("masks"))
    step.fault = fault.removeprefix("masks").strip()
    result = references.compare(config, left_s=lambda: 1e9)
    assert (result.outcome, result.blames) == verdict and message in result.reason, result


class Noisy:
    """A Subject with made-up gradients. The steady one hardly differs between draws; the noisy one
    is mostly noise, as after dropout of nearly all values."""

    draws = True

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self._means = {"steady": torch.randn(400), "noisy": 0.03 * torch.randn(400)}

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        compiled = config["compile"] != "none"
        gradients = self._gradients(point, seed, compiled=compiled)
        if self.fault and compiled:
            gradients[self.fault] = 1.1 * gradients[self.fault]
        return Sample(outputs={"output 0": torch.ones(8)}, gradients=gradients, loss=1.0)

    def _gradients(self, point: int, seed: int, *, compiled: bool) -> dict[str, Tensor]:
        torch.manual_seed(seed + 10_000_000 * compiled)
        return {name: mean + 0.3 * torch.randn(1) for name, mean in self._means.items()}

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        return 0.0, ""


class NearlyZero(Noisy):
    """The noisy gradient is like that of a bias before a BatchNorm: 1e-5 of a usual one, mostly
    rounding noise, and ten times as large with another order of summation."""

    draws = False

    def _gradients(self, point: int, seed: int, *, compiled: bool) -> dict[str, Tensor]:
        torch.manual_seed(point // POINTS)
        bias = 1e-5 * (1 + 0.3 * torch.randn(400)) * (10 if compiled else 1)
        return self._means | {"noisy": bias}


class Chaotic(Noisy):
    """Rounding moves one gradient along itself by 10%, as in a deep network that hardly trains yet;
    with weights that are nudged, it moves this gradient the other way."""

    draws = False

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        found = super().sample(config, point, seed)
        if config["precision"] == "fp32":
            return found
        moved = {"none": (0.9, 1.1), "default": (1.1, 0.9)}[str(config["compile"])]
        factor = moved[point >= 2 * POINTS]
        found.gradients["noisy"] = factor * found.gradients["noisy"]
        return found

    def _gradients(self, point: int, seed: int, *, compiled: bool) -> dict[str, Tensor]:
        return dict(self._means)


class Coarse(Noisy):
    """The number format alone loses 10% of one gradient, and compiled code does not."""

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        found = super().sample(config, point, seed)
        if config["precision"] == "bf16" and config["compile"] == "none":
            found.gradients["noisy"] = 0.9 * found.gradients["noisy"]
        return found

    def _gradients(self, point: int, seed: int, *, compiled: bool) -> dict[str, Tensor]:
        torch.manual_seed(seed + 10_000_000 * compiled)
        return {name: mean * (1 + 0.01 * torch.randn(1)) for name, mean in self._means.items()}


class OneNumber(Noisy):
    """A model that returns its loss: the variance of one number is too uncertain."""

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        found = super().sample(config, point, seed)
        return replace(found, outputs={"output 0": torch.randn(1)})


@pytest.mark.parametrize("subject", [Noisy, NearlyZero, Chaotic, Coarse, OneNumber])
@pytest.mark.parametrize(("fault", "outcome"), [("", "ok"), ("steady", "wrong")])
def test_noise_passes_and_a_fault_is_found(subject: Any, fault: str, outcome: str) -> None:
    """Also rounding that changes with the weights, and the sums of two ranks."""
    torch.manual_seed(1)
    config = COMPILED_BF16 if subject in (Chaotic, Coarse) else COMPILED
    for summed in (None, lambda tensor: 2 * tensor):
        references = References(subject(fault), FP32, tolerance=0.02, summed=summed)
        result = references.compare(config, left_s=lambda: 1e9)
        assert result.outcome == outcome, result


class Spiking(Chaotic):
    """Where the loss is steep, bf16 makes the gradient longer, and rounding the weights shorter."""

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        gradients = dict(self._means)
        if config["precision"] == "bf16":
            gradients["steady"] = 1.15 * gradients["steady"]
        elif point >= 2 * POINTS:
            gradients["steady"] = (1 - float(self.fault)) * gradients["steady"]
        return Sample(outputs={"output 0": torch.ones(8)}, gradients=gradients, loss=1.0)


@pytest.mark.parametrize(("shorter", "outcome"), [("0", "wrong"), ("0.1", "ok")])
def test_a_format_may_do_what_rounding_the_weights_does(shorter: str, outcome: str) -> None:
    references = References(Spiking(shorter), FP32, tolerance=0.02)
    assert references.compare(BF16, left_s=lambda: 1e9).outcome == outcome


@pytest.mark.parametrize("kind", ["mlp", "convnet"])
def test_references_are_computed_once_and_the_fault_is_attributed(kind: str) -> None:
    step = Step(kind, "scale")
    references = References(step, FP32, tolerance=0.02)

    def compare(candidate: Config, left_s: float = 1e9) -> tuple[str, str, str]:
        result = references.compare(candidate, left_s=lambda: left_s)
        return result.outcome, result.blames, result.reason

    assert compare(BF16, left_s=0.0)[0] == UNVERIFIED, "without time"
    assert compare(BF16)[0] == "ok"
    before = step.passes[BF16]
    assert compare(BF16)[0] == "ok" and step.passes[BF16] == before
    assert compare(COMPILED_BF16)[:2] == WRONG_CODE
    *verdict, reason = compare(BF16.replace(fused_optimizer=True))
    assert verdict == ["wrong", "optimizer"] and "last.weight is 0.05% off" in reason


def test_comparison_cut_off_by_time_can_be_continued() -> None:
    whole, cut = (References(Step("mlp"), FP32, tolerance=0.02) for _ in range(2))
    left = iter([1e9] * 15)
    result = cut.compare(BF16, left_s=lambda: next(left, -1.0))
    assert result.outcome == UNVERIFIED and result.reason.startswith("no time was left")
    expected = whole.compare(BF16, left_s=lambda: 1e9)
    assert cut.compare(BF16, left_s=lambda: 1e9) == expected


@pytest.mark.parametrize(
    ("make", "how"), [(torch.optim.AdamW, {"lr": 1e-3}), (torch.optim.SGD, {"momentum": 0.9})]
)
def test_skipped_weight_decay_is_found_without_changing_the_optimizer(
    make: Any, how: dict[str, float]
) -> None:
    torch.manual_seed(0)
    net, hook_calls = make_mlp(), []
    optimizer = make(net.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **how})
    optimizer.register_step_post_hook(lambda *_: hook_calls.append(1))
    for _ in range(3):
        net(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    before = [p.detach().clone() for p in net.parameters()]
    updates = RecordedUpdates([optimizer])
    names = {id(p): name for name, p in net.named_parameters()}
    assert updates.error({"fused": True}, names)[0] <= 1e-4
    error, name = updates.error({"weight_decay": 0.0}, names)
    assert error > 1e-3 and name in dict(net.named_parameters())
    assert all(map(torch.equal, before, net.parameters())) and len(hook_calls) == 3
