"""A checkpoint in the middle, read into a model, optimizer and schedules that are built anew; rates
that fall after epochs, and once more where the loss no longer does."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset


def build() -> tuple[nn.Module, torch.optim.Optimizer, StepLR, ReduceLROnPlateau]:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 3))
    head, body = list(model[3].parameters()), list(model[0].parameters())
    optimizer = torch.optim.AdamW([{"params": body}, {"params": head, "lr": 0.03}], lr=0.01)
    return model, optimizer, StepLR(optimizer, 2, 0.5), ReduceLROnPlateau(optimizer, patience=0)


torch.manual_seed(0)
dataset = TensorDataset(torch.randn(96, 1, 8, 8), torch.randint(3, (96,)))
checkpoint = Path(sys.argv[1] + ".checkpoint")
parts = model, optimizer, steps, plateau = build()

for epoch in range(4):
    if epoch == 2:
        parts = model, optimizer, steps, plateau = build()
        for part, state in zip(parts, torch.load(checkpoint), strict=True):
            part.load_state_dict(state)
    total = 0.0
    for x, y in DataLoader(dataset, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    steps.step()
    plateau.step(total)
    print(f"epoch {epoch}: loss {total / 6:.4f}, {[g['lr'] for g in optimizer.param_groups]}")
    torch.save([part.state_dict() for part in parts], checkpoint)

torch.save(model.state_dict(), sys.argv[1])
