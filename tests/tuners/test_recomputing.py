"""Compiled with less kept for the backward pass: the same numbers from less memory."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from advisor.cache.config import Config
from advisor.tuners import recomputing
from advisor.tuners.act.advice import Advice

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

BUDGET = "activation_memory_budget"


@dataclasses.dataclass(frozen=True)
class Ran:
    """What one step gave, and the bytes that were kept for its backward pass."""

    gradients: list[Tensor]
    kept: int


def layers(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 32))
            for _ in range(2)
        )
    )


class Attends(nn.Module):
    """Attention, whose operations may draw, and here do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(0.0)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.layers(x).unflatten(1, (2, 16)).unsqueeze(0)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).flatten(0, 1)


def step(model: nn.Module) -> Ran:
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(1)
    x = torch.randn(64, 32)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).square().sum()
    loss.backward()
    kept = sum(size for where, size in sizes.items() if where not in weights)
    return Ran([parameter.grad for parameter in model.parameters()], kept)  # type: ignore[misc]


def advised(model: nn.Module, share: float) -> nn.Module:
    """As a script has it."""
    config = Config(compile="default", activation_memory=share, batch_size=64)
    return Advice(config, device="cpu").prepare(model)


@pytest.fixture(autouse=True)
def apart() -> None:
    torch.compiler.reset()


def test_less_is_kept_and_the_gradients_are_the_same() -> None:
    # Both in one process, as in a race: neither takes the code of the other.
    plain, half = step(advised(Attends(), 1.0)), step(advised(Attends(), 0.5))
    assert half.kept < 0.7 * plain.kept
    torch.testing.assert_close(half.gradients, plain.gradients)
    assert getattr(torch._functorch.config, BUDGET) == 1.0


def test_what_is_drawn_is_not_drawn_again() -> None:
    """PyTorch's own partitioner would: https://github.com/pytorch/pytorch/issues/190758."""
    plain, little = step(advised(layers(0.3), 1.0)), layers(0.3)
    recomputing.keep(little, 0.1)
    found = step(little)
    torch.testing.assert_close(found.gradients, plain.gradients)
    assert found.kept == plain.kept
