"""A DCGAN on random images of 32 x 32; saves samples and both networks every epoch."""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--images", type=int, default=1600)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--latent", type=int, default=64)
parser.add_argument("--out", default="samples")
opt = parser.parse_args()

Path(opt.out).mkdir(exist_ok=True)
torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
images = torch.rand(opt.images, 3, 8, 8)
images = nn.functional.interpolate(images, size=32, mode="bilinear") * 2 - 1
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(images), batch_size=opt.batch_size, shuffle=True
)


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self, nz, ngf):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self, ndf):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, ndf * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 4, 1, 4, 1, 0, bias=False),
        )

    def forward(self, x):
        return self.main(x).view(-1)


netG = Generator(opt.latent, opt.width).to(device).apply(weights_init)
netD = Discriminator(opt.width).to(device).apply(weights_init)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
fixed_noise = torch.randn(16, opt.latent, 1, 1, device=device)

for epoch in range(opt.epochs):
    begin = time.time()
    for (real,) in loader:
        real = real.to(device)
        ones = torch.ones(real.size(0), device=device)
        zeros = torch.zeros(real.size(0), device=device)

        netD.zero_grad()
        lossD_real = criterion(netD(real), ones)
        lossD_real.backward()
        fake = netG(torch.randn(real.size(0), opt.latent, 1, 1, device=device))
        lossD_fake = criterion(netD(fake.detach()), zeros)
        lossD_fake.backward()
        optimizerD.step()

        netG.zero_grad()
        lossG = criterion(netD(fake), ones)
        lossG.backward()
        optimizerG.step()

    lossD = lossD_real.item() + lossD_fake.item()
    print(f"epoch {epoch} loss D {lossD:.3f} G {lossG.item():.3f} {time.time() - begin:.1f} s")
    with torch.no_grad():
        torch.save(netG(fixed_noise).cpu(), f"{opt.out}/fake_{epoch:03d}.pt")
    torch.save(netG.state_dict(), f"{opt.out}/netG.pt")
    torch.save(netD.state_dict(), f"{opt.out}/netD.pt")
