"""Gradients clipped by norm and by value, and a rate that moves every step; a recurrent net."""

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(6, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0])


torch.manual_seed(0)
dataset = TensorDataset(torch.randn(128, 12, 6), torch.randint(4, (128, 12)))
model = Tagger()
criterion = nn.CrossEntropyLoss()
loader = DataLoader(dataset, batch_size=16, shuffle=True)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=0.02, epochs=2, steps_per_epoch=len(loader)
)

for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        loss = criterion(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
    print(f"loss {loss.item():.4f}, gradients' norm {norm:.4f}")

torch.save(model.state_dict(), sys.argv[1])
