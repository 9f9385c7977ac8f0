"""A script with a slow loader: does a run get the speed-up that its tuning promised?

    advisor tune --budget 75s --no-compile -- python benchmarks/slow_loader.py 1000000
    python benchmarks/slow_loader.py 60
    advisor run -- python benchmarks/slow_loader.py 60

Sleeps take the place of work: a worker needs 8.8 s for a batch, a step 2 s, or 0.4 s in bf16. Eight
workers make 0.91 batches a second, and have 16 ready whenever slow steps were made before. Prints
steps/s after the first 20 steps.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WARM = 20


class Samples(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(1.1)
        return torch.randn(64), index % 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.4 if torch.is_autocast_enabled("cpu") else 2.0)
        found: Tensor = self.layers(x)
        return found


def main() -> None:
    model, began = Net(), 0.0
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(Samples(), 8, num_workers=8, shuffle=True)
    for steps, (x, y) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if steps == WARM:
            began = time.perf_counter()
        if steps == int(sys.argv[1]):
            print(f"{(steps - WARM) / (time.perf_counter() - began):.3f} steps/s")
            return


if __name__ == "__main__":
    main()
