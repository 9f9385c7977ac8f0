"""Which blocks of a model are repeated, and that they are compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from advisor.tuners import compiling
from advisor.tuners.act import gate
from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.compiling import repeated
from advisor.tuners.knobs import BY_NAME


class Block(nn.Module):
    def __init__(self, width: int = 8, rate: float = 0.0, index: int = 0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())
        self.rate, self.index = rate, index

    def forward(self, x: Tensor) -> Tensor:
        return x + (1 - self.rate) * self.body(x)


def transformer(layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(4, 16), encoder, nn.Linear(16, 4))


def swapped() -> nn.Module:
    """Two kinds in turn, of which one is there often enough."""
    return nn.ModuleList(Block(8 if at % 3 else 16) for at in range(8))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a transformer": (lambda: transformer(6), 6),
    "three are few": (lambda: transformer(3), 0),
    "by their kinds": (swapped, 5),
    "vit": (torchvision.models.vit_b_16, 12),
    "most of it is outside": (torchvision.models.resnet50, 0),
    "a deep one": (torchvision.models.resnet152, 35 + 7),
    "other rates": (lambda: nn.ModuleList(Block(rate=at / 10) for at in range(6)), 0),
    "numbered": (lambda: nn.ModuleList(Block(index=at) for at in range(6)), 6),
    "single layers": (lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), 0),
    "by name": (lambda: nn.ModuleDict({str(at): Block() for at in range(4)}), 4),
    "blocks of blocks": (
        lambda: nn.ModuleList(nn.Sequential(*(Block() for _ in range(4))) for _ in range(4)),
        4,
    ),
    "lazy": (lambda: nn.ModuleList(nn.Sequential(nn.LazyLinear(2)) for _ in range(4)), 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_repeated(name: str) -> None:
    make, count = MODELS[name]
    with torch.device("meta"):
        found = repeated(make())
    assert len(found) == count


# torch.compile looks for one, and hides the warning in a way that does not count here.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_they_are_compiled_once_and_the_model_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"backend": "eager"}
    monkeypatch.setattr(compiling, "_by_inductor", lambda _mode: how)
    torch.compiler.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), *(Block(index=at) for at in range(6)), nn.Linear(8, 2))
    x, row = torch.randn(3, 4), BY_NAME["compile"].model
    assert row is not None
    net(x).sum().backward()
    plain = [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]
    net.zero_grad()

    row(net, "blocks")
    before = graphs_compiled()
    told: list[int] = []
    how = {"sizes": True, "inference": False}
    gate.attach(net, **how, before=lambda: told.append(graphs_compiled() - before))
    net(x).sum().backward()

    assert graphs_compiled() - before == 1
    assert told == [0, *(5 * [1])], "artifacts are there before the first is compiled"
    assert net._compiled_call_impl is None
    for weight, gradient in zip(net.parameters(), plain, strict=True):
        torch.testing.assert_close(weight.grad, gradient)
