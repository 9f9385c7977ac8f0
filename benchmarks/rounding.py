"""How far bf16 takes a ViT's gradients, over how far models of rounding do.

    python benchmarks/rounding.py

Trains ViT-B/16 on random pictures under bf16 autocast. At some steps the gradient of every weight
is taken in strict fp32, under autocast, and in fp32 with three draws of rounding by each model; a
comparison allows three times the most that those are off.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
from advisor.tuners.measure.randomness import Rounding, amplitude

STEPS, LOOKS, DRAWS, BATCH = 300, (5, 60, 150, 300), 3, 64
HALF = amplitude(torch.bfloat16, tf32=False)


class Each(Rounding):
    """Every element of a result is off by an error of its own."""

    def _off(self, result: Tensor) -> Tensor:
        if not result.is_floating_point() or result.numel() == 1:
            return result
        return result * (1 + HALF * (2 * torch.rand_like(result) - 1))


def batches(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    pictures = torch.randint(256, (512, 3, 224, 224), dtype=torch.uint8, device=device)
    labels = torch.randint(1000, (512,), device=device)
    while True:
        drawn = torch.randint(512, (BATCH,), device=device)
        yield pictures[drawn].float().div_(127.5).sub_(1), labels[drawn]


def gradients(
    model: nn.Module,
    x: Tensor,
    back: Tensor,
    active: contextlib.AbstractContextManager[object],
    draw: int = 0,
) -> list[Tensor]:
    """Of all weights, from the gradient that comes back to the outputs."""
    torch.manual_seed(draw)
    with active:
        out = model(x)
        found = torch.autograd.grad(out, list(model.parameters()), back.to(out.dtype))
    return [one.float() for one in found]


def look(model: nn.Module, x: Tensor, y: Tensor, device: torch.device) -> str:
    """bf16's distances over those of each model of rounding."""
    out = model(x)
    loss = functional.cross_entropy(out, y)
    (back,) = torch.autograd.grad(loss, out)
    fp32 = gradients(model, x, back, contextlib.nullcontext())

    def apart(found: list[Tensor]) -> list[float]:
        return [
            float((a - b).norm() / b.norm().clamp(min=1e-30))
            for a, b in zip(found, fp32, strict=True)
        ]

    bf16 = apart(gradients(model, x, back, torch.autocast(device.type, torch.bfloat16)))
    said = f"loss {loss.item():.2f}"
    for name, kind in (("each", Each), ("grid", Rounding)):
        draws = [apart(gradients(model, x, back, kind(HALF), 1 + n)) for n in range(DRAWS)]
        most = [max(one) for one in zip(*draws, strict=True)]
        shares = [a / max(b, 1e-30) for a, b in zip(bf16, most, strict=True)]
        beyond = sum(share > 3 for share in shares)
        said += f"; over {name}: median {statistics.median(shares):.2f}, worst {max(shares):.2f},"
        said += f" {beyond} of {len(shares)} beyond 3"
    return said


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = torchvision.models.vit_b_16(weights=None).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
    data = batches(device)
    for step in range(STEPS + 1):
        x, y = next(data)
        if step in LOOKS:
            print(f"step {step}: {look(model, x, y, device)}", flush=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
