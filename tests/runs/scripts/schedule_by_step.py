"""A learning rate that goes up and down once, moved after every step."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2

torch.manual_seed(0)
x = torch.randn(256, 20)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=0.02, epochs=EPOCHS, steps_per_epoch=len(loader)
)

for _ in range(EPOCHS):
    for inputs, wanted in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(f"lr {scheduler.get_last_lr()[0]:.2e}, loss {loss.item():.4f}")

torch.save(model.state_dict(), sys.argv[1])
