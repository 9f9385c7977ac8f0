"""Already uses bf16 autocast, channels_last, a fused optimizer and a loader worker."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(128, 3, 8, 8), torch.randint(4, (128,)))
model = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4)
)
model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=1)

for _ in range(2):
    for x, y in loader:
        x = x.to(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")

torch.save(model.state_dict(), sys.argv[1])
