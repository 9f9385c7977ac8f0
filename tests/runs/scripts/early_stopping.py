"""Stops once the validation loss has not fallen for two epochs, and keeps the best weights."""

import copy
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(96, 16)
labels = (inputs[:, 0] + 2 * torch.randn(96) > 0).float().unsqueeze(1)
training = DataLoader(TensorDataset(inputs[:64], labels[:64]), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

best, kept, waited = float("inf"), None, 0
for epoch in range(50):
    model.train()
    for x, y in training:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        validation = criterion(model(inputs[64:]), labels[64:]).item()
    print(f"epoch {epoch}: {validation:.4f}")
    if validation < best:
        best, kept, waited = validation, copy.deepcopy(model.state_dict()), 0
    else:
        waited += 1
        if waited == 2:
            break

torch.save(kept, sys.argv[1])
