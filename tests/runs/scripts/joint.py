"""Two models under one optimizer: an encoder for each side, and how well they agree."""

import itertools
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
pictures = torch.randn(128, 3, 6, 6)
dataset = TensorDataset(pictures, pictures.flatten(1)[:, :20] + 0.1 * torch.randn(128, 20))
seeing = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 16))
reading = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))
warmth = nn.Parameter(torch.tensor(2.0))
parameters = itertools.chain(seeing.parameters(), reading.parameters(), [warmth])
optimizer = torch.optim.AdamW(parameters, lr=0.005)

for _ in range(2):
    for picture, text in DataLoader(dataset, batch_size=16, shuffle=True):
        seen, read = normalize(seeing(picture)), normalize(reading(text))
        alike = warmth.exp() * seen @ read.T
        pairs = torch.arange(len(alike))
        loss = (cross_entropy(alike, pairs) + cross_entropy(alike.T, pairs)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")

state = nn.ModuleDict({"seeing": seeing, "reading": reading}).state_dict()
torch.save(state | {"warmth": warmth.detach()}, sys.argv[1])
