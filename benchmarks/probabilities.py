"""What bf16 autocast does to a model that returns probabilities, if the loss takes log(1 - p).

    python benchmarks/probabilities.py > probabilities.jsonl

Trains a small classifier on a CPU, of whose labels 0.2% are wrong: in fp32, and with bf16 autocast
around the model's call and outputs in float32, as `advisor run` has it. The model's sigmoid is in
that call, or outside of it. Prints a line of JSON for each: the loss on new data, in fp32, and the
share of probabilities that are exactly 1 in a training call.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

SEEDS, STEPS, INPUTS, ROWS, WRONG = 2, 700, 64, 256, 0.002


def batch(weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, INPUTS)
    right = (x @ weight > 0).float()
    return x, torch.where(torch.rand(rows) < WRONG, 1 - right, right)[:, None]


def loss_of(p: Tensor, y: Tensor) -> Tensor:
    return -(y * (p + 1e-8).log() + (1 - y) * (1 - p + 1e-8).log()).mean()


def train(seed: int, *, half: bool, inside: bool) -> dict[str, float]:
    """Trains a model; `inside`: its sigmoid is in the call of the model."""
    torch.manual_seed(seed)
    weight, width = torch.randn(INPUTS) / 8, 512
    layers = [nn.Linear(INPUTS, width), *[nn.Linear(width, width) for _ in range(2)]]
    parts = [part for layer in layers for part in (layer, nn.LeakyReLU(0.2))]
    model = nn.Sequential(*parts, nn.Linear(width, 1), nn.Sigmoid() if inside else nn.Identity())
    outside = nn.Identity() if inside else nn.Sigmoid()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x, y = batch(weight, ROWS)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            found = model(x)
        p = outside(found.float())
        optimizer.zero_grad()
        loss_of(p, y).backward()
        optimizer.step()
    with torch.no_grad():
        x, y = batch(weight, 20_000)
        return {
            "loss": round(float(nn.functional.binary_cross_entropy(outside(model(x)), y)), 4),
            "ones": round(float((p == 1).float().mean()), 3),
        }


def main() -> None:
    torch.set_num_threads(1)
    for seed in range(SEEDS):
        for inside in (True, False):
            for half in (False, True):
                about = {"seed": seed, "sigmoid": "inside" if inside else "outside", "bf16": half}
                print(json.dumps(about | train(seed, half=half, inside=inside)), flush=True)


if __name__ == "__main__":
    main()
