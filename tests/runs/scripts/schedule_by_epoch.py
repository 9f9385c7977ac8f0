"""A learning rate that falls after epochs, and once more where the loss no longer does."""

import sys

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(96, 12), torch.randint(3, (96,)))
model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 3))
head, body = list(model[3].parameters()), list(model[0].parameters())
optimizer = torch.optim.Adam([{"params": body}, {"params": head, "lr": 0.03}], lr=0.01)
steps = StepLR(optimizer, step_size=2, gamma=0.5)
plateau = ReduceLROnPlateau(optimizer, patience=0)

for epoch in range(5):
    total = 0.0
    for x, y in DataLoader(dataset, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    steps.step()
    plateau.step(total)
    print(f"epoch {epoch}: loss {total / 6:.4f}, lr {[g['lr'] for g in optimizer.param_groups]}")

torch.save(model.state_dict(), sys.argv[1])
