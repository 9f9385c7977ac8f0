"""Large linear layers in fp8: which, that they stay whose they were, and what is said of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advisor.cache.config import Config
from advisor.tuners import fp8
from advisor.tuners.act.advice import Advice

needs_torchao = pytest.mark.skipif(not fp8.installed(), reason="needs torchao")


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(2048, 2064), nn.Linear(2064, 8)
        self.attention = nn.MultiheadAttention(2048, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x))


def test_which_layers_gain() -> None:
    layers = [nn.Linear(2048, 2048), nn.Linear(2048, 2064, bias=False)]
    others = [nn.Linear(*sizes) for sizes in ((2048, 2050), (2050, 2048), (4096, 1024))]
    assert all(map(fp8.gains, layers)) and not any(map(fp8.gains, (*others, nn.Conv2d(8, 8, 3))))


@needs_torchao
def test_the_parameters_stay_and_so_do_their_names() -> None:
    torch.manual_seed(0)
    model = Wide()
    names = dict(model.named_parameters())
    x = torch.randn(5, 2048)  # no multiple of 16
    exactly = model(x)
    advice = Advice(Config(precision="fp8"), device="cpu")
    assert advice.prepare(model) is model and fp8.CAVEAT in advice.report()
    assert dict(model.named_parameters()) == names
    large = {name for name, one in model.named_modules() if type(one).__name__ == "Float8Linear"}
    assert large == {"wide"}  # attention reads its weight by itself
    found = model(x)
    assert not torch.equal(found, exactly)
    torch.testing.assert_close(found, exactly, rtol=0.1, atol=0.1)
    found.sum().backward()
    assert model.wide.weight.grad is not None and bool(model.wide.weight.grad.isfinite().all())


def test_what_stands_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "installed", lambda: True)
    assert fp8.lacking((8, 9), 3) == ""
    assert "compute capability 8.9" in fp8.lacking((8, 6), 3)
    assert "no linear layer has 2048 features" in fp8.lacking((9, 0), 0)
    monkeypatch.setattr(fp8, "installed", lambda: False)
    assert "pip install 'torch-advisor[torchao]'" in fp8.lacking((9, 0), 3)
