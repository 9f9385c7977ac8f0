"""Keeps copies as it trains: the whole model in a file, read again, and deep copies of it."""

import copy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(96, 3, 8, 8), torch.randint(4, (96,)))
model = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4)
)
whole = Path(sys.argv[1]).with_suffix(".whole")
if len(sys.argv) > 2:
    model.load_state_dict(torch.load(sys.argv[2]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
best = copy.deepcopy(model)

for _ in range(2):
    for x, y in DataLoader(dataset, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        best = copy.deepcopy(model)
        torch.save(model, whole)
        read = torch.load(whole, weights_only=False)
        assert torch.equal(model.eval()(x), best.eval()(x))
        assert torch.equal(model(x), read.eval()(x))
        model.train()

torch.save(best.state_dict(), sys.argv[1])
