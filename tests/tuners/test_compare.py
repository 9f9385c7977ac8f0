"""How configs are compared with strict fp32: nothing that is right fails, planted faults are found.

All on the CPU, in bf16 autocast and compiled for it, from fixed seeds.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from advisor.cache.config import Config
from advisor.tuners.decisions import POINTS
from advisor.tuners.measure.compare import References, passes, plain_of
from advisor.tuners.measure.run.recorded_state import RecordedUpdates
from advisor.tuners.measure.runner import UNVERIFIED, Compared
from advisor.tuners.measure.samples import NUDGE, Overflow, Sample, perturb, sampled

FP32 = Config(precision="fp32", compile="none", fused_optimizer=False)
BF16 = FP32.replace(precision="bf16")
COMPILED, BOTH = FP32.replace(compile="default"), BF16.replace(compile="default")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Of tensors this small threads wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Encoder(nn.Module):
    """Attention, norms, embeddings; a key bias whose gradient is nothing but rounding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.key, self.query = nn.Linear(32, 32), nn.Linear(32, 32)
        self.last = nn.Linear(32, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(tokens))
        pooled = functional.scaled_dot_product_attention(
            self.query(hidden), self.key(hidden), hidden
        )
        return self.last(pooled.mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x)[0].mean(1))


def _layers(dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(64, 8),
    )


def _convolutions() -> nn.Module:
    """A bias before a BatchNorm has a gradient that is nothing but rounding."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 8),
    )


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    draws: bool = False


_tokens = functools.partial(torch.randint, 50, (32, 12))
MODELS = {
    "layers": Model(_layers, functools.partial(torch.randn, 32, 16), draws=True),
    "convolutions": Model(_convolutions, functools.partial(torch.randn, 16, 3, 12, 12)),
    "recurrent": Model(Recurrent, functools.partial(torch.randn, 16, 10, 16)),
    "attention": Model(lambda: Encoder(0.0), _tokens),
    "dropout": Model(lambda: Encoder(0.1), _tokens, draws=True),
}


@functools.cache
def _built(kind: str, backend: str) -> tuple[nn.Module, Any, list[Tensor]]:
    """A model, compiled once for all tests, and its first weights, from which each pass starts."""
    torch.manual_seed(0)
    model = MODELS[kind].make()
    # Dynamo does not trace an LSTM by itself.
    compiled = model if kind == "recurrent" else torch.compile(model, backend=backend)
    return model, compiled, [p.detach().clone() for p in model.parameters()]


class Step:
    """A Subject. What is compiled has the fault, if there is one.

    Attributes:
        made: passes, by config.
        other_masks: whether a seed gives other dropout masks in bf16, as on a GPU.
    """

    def __init__(self, kind: str, fault: str = "", backend: str = "aot_eager") -> None:
        model = MODELS[kind]
        self.model, self._compiled, self._kept = _built(kind, backend)
        self.draws, self._fault = model.draws, fault
        torch.manual_seed(1)
        self._batches = [(x := model.batch(), torch.randint(8, (len(x),))) for _ in range(4)]
        self.made: dict[Config, int] = {}
        self.other_masks = False

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        self.made[config] = self.made.get(config, 0) + 1
        weights = dict(self.model.named_parameters())
        with torch.no_grad():
            for weight, kept in zip(weights.values(), self._kept, strict=True):
                weight.copy_(kept)
        perturb(list(weights.values()), point)
        torch.manual_seed(seed)
        if self.other_masks and config["precision"] == "bf16":
            torch.rand(1)
        inputs, labels = self._batches[point % POINTS]
        compiled = config["compile"] != "none"
        with torch.autocast("cpu", torch.bfloat16, enabled=config["precision"] == "bf16"):
            output = self._called(inputs, self._fault if compiled else "", compiled=compiled)
        loss = functional.cross_entropy(output.float(), labels)
        found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        gradients = dict(zip(weights, map(sampled, found), strict=True))
        if compiled:
            self._spoil(gradients)
        elif config["precision"] == "bf16" and self._fault == "lost":
            gradients["query.weight"] = torch.zeros_like(gradients["query.weight"])
        return Sample(outputs={"output 0": sampled(output)}, gradients=gradients, loss=loss.item())

    def _called(self, inputs: Tensor, fault: str, *, compiled: bool) -> Tensor:
        if fault == "stale":
            name, weight = list(self.model.named_parameters())[-2]
            stale = weight + (self._kept[-2] - weight).detach()
            found: Tensor = torch.func.functional_call(self.model, {name: stale}, (inputs,))
            return found
        rates = [m for m in self.model.modules() if isinstance(m, nn.Dropout)]
        if fault == "dropout":
            for one in rates:
                one.p *= 2
        try:
            return self._compiled(inputs) if compiled and not self._fault else self.model(inputs)
        finally:
            if fault == "dropout":
                for one in rates:
                    one.p /= 2

    def _spoil(self, gradients: dict[str, Tensor]) -> None:
        if self._fault == "overflow":
            raise Overflow("no loss scale")
        if self._fault == "failing":
            raise RuntimeError("no such kernel")
        if self._fault.startswith("bias "):
            usual = torch.cat([one.flatten() for one in gradients.values()]).square().mean().sqrt()
            gradients["0.bias"] = gradients["0.bias"] + float(self._fault[5:]) * usual
        factors = {"layer": 1.1, "scale": 2.0, "not finite": math.inf}
        if factor := factors.get(self._fault):
            matrices = [name for name, weight in self.model.named_parameters() if weight.dim() > 1]
            for name in matrices[-2:-1] if self._fault == "layer" else gradients:
                gradients[name] = gradients[name] * factor

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        return (5e-4, "last.weight") if config["fused_optimizer"] else (0.0, "")


def compared(step: Step, candidate: Config) -> Compared:
    references = References(step, FP32, tolerance=0.02)
    return references.compare(candidate, plain_of(candidate, FP32), left_s=lambda: 1e9)


@functools.cache
def _has_half(kind: str) -> bool:
    """Whether this CPU's oneDNN has the kernels: of LSTMs in bf16 some have none."""
    try:
        Step(kind).sample(BF16, 0, 0)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("config", [BF16, COMPILED, BOTH], ids=["bf16", "compiled", "both"])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_right_passes(kind: str, config: Config) -> None:
    if config["precision"] == "bf16" and not _has_half(kind):
        pytest.skip("this CPU has no kernels for it in bf16")
    found = compared(Step(kind), config)
    assert found.ok, found


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler here")
def test_other_masks_of_compiled_code_pass() -> None:
    found = compared(Step("layers", backend="inductor"), BOTH)
    assert found.ok, found


@pytest.mark.parametrize(("fault", "outcome"), [("", "ok"), ("layer", "wrong")])
@pytest.mark.parametrize("kind", ["layers", "dropout"])
def test_other_masks_in_another_number_format_hide_no_fault(
    kind: str, fault: str, outcome: str
) -> None:
    step = Step(kind, fault)
    step.other_masks = True
    found = compared(step, BOTH)
    assert found.outcome == outcome, found


class Noisy:
    """A Subject with made-up gradients: one is nearly the same in every draw, the other mostly
    what differs between draws, as after a dropout of nearly everything."""

    draws = True

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._means = {"steady": torch.randn(400), "noisy": 0.03 * torch.randn(400)}

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        torch.manual_seed(seed + 10_000_000 * (config["compile"] != "none"))
        found = {name: mean + 0.3 * torch.randn(1) for name, mean in self._means.items()}
        if self._fault and config["compile"] != "none":
            found[self._fault] = 1.1 * found[self._fault]
        return Sample(outputs={"output 0": torch.ones(8)}, gradients=found, loss=1.0)

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        return 0.0, ""


@pytest.mark.parametrize(("fault", "outcome"), [("", "ok"), ("steady", "wrong")])
def test_a_small_gradient_that_draws_hide_keeps_no_config_unverified(
    fault: str, outcome: str
) -> None:
    torch.manual_seed(1)
    references = References(Noisy(fault), FP32, tolerance=0.02)
    found = references.compare(COMPILED, FP32, left_s=lambda: 1e9)
    assert found.outcome == outcome, found


@pytest.mark.parametrize(
    ("kind", "fault", "blames", "said"),
    [
        ("layers", "layer", "code", "gradient of 3.weight"),
        ("layers", "stale", "code", ""),
        ("layers", "dropout", "code", "variance of the output 0"),
        ("layers", "scale", "code", "gradient of"),
        ("layers", "not finite", "code", "not finite"),
        ("layers", "overflow", "format", "no loss scale"),
        ("convolutions", "layer", "code", "gradient of 3.weight"),
        ("convolutions", "stale", "code", ""),
        ("convolutions", "not finite", "code", "not finite"),
        ("attention", "layer", "code", "gradient of query.weight"),
        ("attention", "stale", "code", ""),
        ("attention", "scale", "code", "gradient of"),
        ("dropout", "layer", "code", "gradient of query.weight"),
        ("dropout", "dropout", "code", "variance of the output 0"),
    ],
)
def test_planted_faults_are_found(kind: str, fault: str, blames: str, said: str) -> None:
    found = compared(Step(kind, fault), BOTH)
    assert (found.outcome, found.blames) == ("wrong", blames), found
    assert said in found.reason


@pytest.mark.parametrize(("off", "outcome"), [("1e-4", "ok"), ("0.1", "wrong")])
def test_a_gradient_that_is_nothing_but_rounding_may_be_other_rounding(
    off: str, outcome: str
) -> None:
    """Of a bias before a BatchNorm; `off` is a fraction of the usual gradient."""
    found = compared(Step("convolutions", f"bias {off}"), COMPILED)
    assert found.outcome == outcome, found


@pytest.mark.parametrize("kind", ["attention", "dropout"])
def test_a_number_format_that_loses_one_small_gradient_is_found(kind: str) -> None:
    found = compared(Step(kind, "lost"), BF16)
    assert (found.outcome, found.blames) == ("wrong", "format"), found
    assert "the slope of the gradient of query.weight is -100" in found.reason


@pytest.mark.parametrize("kind", ["layers", "convolutions"])
def test_references_are_made_once_and_a_fault_is_the_codes_alone(kind: str) -> None:
    step = Step(kind, "scale")
    references = References(step, FP32, tolerance=0.02)
    assert references.compare(BF16, BF16, left_s=lambda: 1e9).ok
    before = step.made[BF16]
    assert references.compare(BF16, BF16, left_s=lambda: 1e9).ok
    assert step.made[BF16] == before
    found = references.compare(BOTH, BF16, left_s=lambda: 1e9)
    assert (found.outcome, found.blames) == ("wrong", "code")
    found = references.compare(BF16.replace(fused_optimizer=True), BF16, left_s=lambda: 1e9)
    assert (found.outcome, found.blames) == ("wrong", "optimizer")
    assert "last.weight by 0.05%" in found.reason


@pytest.mark.parametrize("kind", ["layers", "convolutions"])
def test_without_time_nothing_is_verified(kind: str) -> None:
    references = References(Step(kind), FP32, tolerance=0.02)
    found = references.compare(BF16, BF16, left_s=lambda: 0.0)
    assert found.outcome == UNVERIFIED
    assert references.compare(BF16, BF16, left_s=lambda: 1e9).ok


def test_draws_go_on_where_the_time_was_over() -> None:
    whole, cut = (References(Step("layers"), FP32, tolerance=0.02) for _ in range(2))
    left = iter([1e9] * 15)
    found = cut.compare(BF16, BF16, left_s=lambda: next(left, -1.0))
    assert found.outcome == UNVERIFIED and found.reason.startswith("no time was left")
    expected = whole.compare(BF16, BF16, left_s=lambda: 1e9)
    assert cut.compare(BF16, BF16, left_s=lambda: 1e9) == expected


def test_what_a_config_raises_is_its_outcome() -> None:
    found = compared(Step("convolutions", "failing"), COMPILED)
    assert (found.outcome, found.reason) == ("failed", "RuntimeError: no such kernel")


def test_passes_are_the_same_where_only_the_optimizer_or_the_loader_differs() -> None:
    assert passes(FP32.replace(fused_optimizer=True, num_workers=4)) == passes(FP32)
    assert passes(BF16) != passes(FP32)


def test_samples_are_in_logical_order_and_have_memory_of_their_own() -> None:
    image = torch.randn(2, 3, 4, 5)
    last = image.to(memory_format=torch.channels_last)
    assert torch.equal(sampled(last), image.flatten())
    assert len(sampled(torch.zeros(10**6))) < 10**5
    before = sampled(image)
    image.zero_()
    assert before.abs().sum() > 0


def test_weights_move_alike_whatever_their_layout() -> None:
    weights = [torch.randn(4, 3, 5, 5), torch.zeros(6), torch.arange(3)]
    others = [weights[0].to(memory_format=torch.channels_last), *map(torch.clone, weights[1:])]
    kept = [one.clone() for one in weights]
    perturb(weights, 1)
    assert all(map(torch.equal, weights, kept))
    perturb(weights, 2)
    perturb(others, 2)
    assert all(map(torch.equal, weights, others))
    assert not torch.allclose(weights[0], kept[0], rtol=0.05) and bool(weights[1].all())
    assert torch.equal(weights[2], kept[2])
    weights[0].copy_(kept[0])
    perturb(weights[:1], 5)
    assert 0 < float((weights[0] / kept[0] - 1).abs().max()) < 2 * NUDGE


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
        functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    ],
    ids=["AdamW", "SGD"],
)
def test_an_optimizer_that_skips_weight_decay_is_found_and_its_own_state_stays(make: Any) -> None:
    torch.manual_seed(0)
    net, told = _layers(), []
    optimizer = make(net.parameters())
    optimizer.register_step_post_hook(lambda *_: told.append(1))
    for _ in range(3):
        net(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    before = [p.detach().clone() for p in net.parameters()]
    kept = RecordedUpdates([optimizer])
    names = {id(p): name for name, p in net.named_parameters()}
    assert kept.error({"fused": True}, names)[0] <= 1e-4
    part, name = kept.error({"weight_decay": 0.0}, names)
    assert part > 1e-3 and name in dict(net.named_parameters())
    assert all(map(torch.equal, before, net.parameters())) and len(told) == 3
