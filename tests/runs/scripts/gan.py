"""Two models with an optimizer each, by turns; BCELoss after a sigmoid."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.rand(96, 1, 8, 8)), batch_size=16, shuffle=True)
generator = nn.Sequential(
    nn.ConvTranspose2d(10, 8, 4),
    nn.BatchNorm2d(8),
    nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1),
)
discriminator = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(8, 1, 4), nn.Sigmoid()
)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
criterion = nn.BCELoss()
real, fake = torch.ones(16), torch.zeros(16)

for _ in range(3):
    for (pictures,) in loader:
        discriminator.zero_grad()
        loss_real = criterion(discriminator(pictures).view(-1), real)
        loss_real.backward()
        made = generator(torch.randn(16, 10, 1, 1))
        loss_fake = criterion(discriminator(made.detach()).view(-1), fake)
        loss_fake.backward()
        optimizer_d.step()

        generator.zero_grad()
        loss_g = criterion(discriminator(made).view(-1), real)
        loss_g.backward()
        optimizer_g.step()
    print(f"d {loss_real.item() + loss_fake.item():.4f}, g {loss_g.item():.4f}")

torch.save(nn.ModuleDict({"g": generator, "d": discriminator}).state_dict(), sys.argv[1])
