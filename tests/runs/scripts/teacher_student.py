"""Each step calls a frozen teacher first. One optimizer trains two students, one for each side of a
pair, and their temperature."""

import itertools
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
pictures = torch.randn(128, 3, 6, 6)
dataset = TensorDataset(pictures, pictures.flatten(1)[:, :20] + 0.1 * torch.randn(128, 20))
teacher = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))
teacher.eval().requires_grad_(False)
seeing = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 16))
reading = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))
warmth = nn.Parameter(torch.tensor(2.0))
parameters = itertools.chain(seeing.parameters(), reading.parameters(), [warmth])
optimizer = torch.optim.AdamW(parameters, lr=0.005)

for _ in range(2):
    for picture, text in DataLoader(dataset, batch_size=16, shuffle=True):
        with torch.no_grad():
            wanted = normalize(teacher(text))
        seen, read = normalize(seeing(picture)), normalize(reading(text))
        alike = warmth.exp() * seen @ read.T
        pairs = torch.arange(len(alike))
        loss = cross_entropy(alike, pairs) + cross_entropy(alike.T, pairs) + mse_loss(read, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")

state = nn.ModuleDict({"seeing": seeing, "reading": reading}).state_dict()
torch.save(state | {"warmth": warmth.detach()}, sys.argv[1])
