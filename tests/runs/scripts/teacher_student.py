"""A frozen teacher, called first in every step, and the small student that learns from it."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(128, 12), torch.randint(4, (128,)))
teacher = nn.Sequential(
    nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
)
teacher.eval().requires_grad_(False)
student = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(student.parameters(), lr=0.01)

for _ in range(2):
    for x, y in DataLoader(dataset, batch_size=16, shuffle=True):
        with torch.no_grad():
            wanted = log_softmax(teacher(x) / 2, dim=1)
        output = student(x)
        learned = kl_div(log_softmax(output / 2, 1), wanted, reduction="batchmean", log_target=True)
        loss = 4 * learned + 0.1 * cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")

torch.save(student.state_dict(), sys.argv[1])
