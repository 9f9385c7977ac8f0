"""LBFGS, which calls the model several times per step through a closure."""

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.linspace(-1, 1, 96).unsqueeze(1)
loader = DataLoader(TensorDataset(x, torch.sin(3 * x)), batch_size=48, shuffle=True)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)

for _ in range(4):
    for inputs, wanted in loader:

        def closure(inputs: Tensor = inputs, wanted: Tensor = wanted) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), wanted)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    print(f"loss {loss.item():.4f}")

torch.save(model.state_dict(), sys.argv[1])
