"""A checkpoint in the middle, read into what is built anew: model, optimizer and schedule."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


torch.manual_seed(0)
dataset = TensorDataset(torch.randn(96, 1, 8, 8), torch.randint(3, (96,)))
checkpoint = Path(sys.argv[1] + ".checkpoint")
model, optimizer, scheduler = build()

for epoch in range(4):
    if epoch == 2:
        state = torch.load(checkpoint)
        model, optimizer, scheduler = build()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    for x, y in DataLoader(dataset, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    scheduler.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in state.items()}, checkpoint)

torch.save(model.state_dict(), sys.argv[1])
