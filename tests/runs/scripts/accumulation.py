"""Gradients of four batches gathered before a step; a copy follows slowly, and is what is kept."""

import copy
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(256, 3, 8, 8), torch.randint(10, (256,)))
loader = DataLoader(dataset, batch_size=8, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
)
averaged = copy.deepcopy(model).eval().requires_grad_(False)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


@torch.no_grad()
def follow(decay: float) -> None:
    for slow, fast in zip(averaged.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)
    for slow, fast in zip(averaged.buffers(), model.buffers(), strict=True):
        slow.copy_(fast)


for epoch in range(2):
    for i, (x, y) in enumerate(loader, 1):
        loss = criterion(model(x), y) / 4
        loss.backward()
        if i % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            follow(0.9)
    print(f"epoch {epoch}: loss {4 * loss.item():.4f}, {criterion(averaged(x), y).item():.4f}")

state = nn.ModuleDict({"trained": model, "averaged": averaged}).state_dict()
torch.save(state, sys.argv[1])
