"""A second model that follows the trained one's weights slowly, and is what is kept."""

import copy
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(128, 3, 8, 8), torch.randint(5, (128,)))
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(8, 5),
)
averaged = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


@torch.no_grad()
def follow(decay: float) -> None:
    for slow, fast in zip(averaged.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)
    for slow, fast in zip(averaged.buffers(), model.buffers(), strict=True):
        slow.copy_(fast)


for x, y in DataLoader(dataset, batch_size=8, shuffle=True):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follow(0.9)

pictures, labels = dataset.tensors
print(f"averaged: loss {nn.functional.cross_entropy(averaged(pictures), labels).item():.4f}")
torch.save(averaged.state_dict(), sys.argv[1])
