"""What is taken of a training step to compare it, and the weights at which it is compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

SAMPLED = 2**18 + 1
"""Elements of one tensor that are compared, evenly taken from all."""

Named = dict[str, Tensor]


def sampled(tensor: Tensor) -> Tensor:
    """At most SAMPLED elements, in their logical order, whatever the memory format."""
    flat = tensor.detach().contiguous().flatten()
    # Odd, so that it does not meet the same column of every row.
    stride = math.ceil(flat.numel() / SAMPLED) | 1 if flat.numel() > SAMPLED else 1
    return flat[::stride]


def kept(tensor: Tensor) -> Tensor:
    """A sample of a tensor as float32, in memory of its own: the next step writes over a step's."""
    part = sampled(tensor)
    return torch.empty_like(part, dtype=torch.float32).copy_(part)


def gradients(weights: Iterable[tuple[str, nn.Parameter]]) -> Named:
    """Samples of the gradients that a step has left; zeros where there is none."""
    found: Named = {}
    for name, weight in weights:
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        found[name] = kept(grad.to_dense() if grad.is_sparse else grad)
    return found


def disturbed(values: Tensor, number: int) -> Tensor:
    """Other values of the same size, at which nothing computed from the first ones is right.

    Args:
        values: of a parameter, contiguous.
        number: of the parameter; the same number moves it alike every time.
    """
    flat = values.flatten()
    drawn = torch.Generator(values.device).manual_seed(number)
    noise = 2 * torch.rand(flat.shape, generator=drawn, device=values.device) - 1
    moved = flat.roll(1) * (1 + 0.2 * noise) + 0.02 * noise * (flat == 0)
    return moved.to(values.dtype).view(values.shape)


def draws(step: Callable[[], None], device: torch.device) -> bool:
    """Whether a step draws random numbers of PyTorch's."""

    def states() -> list[Tensor]:
        on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]

    before = states()
    step()
    return not all(map(torch.equal, before, states()))
