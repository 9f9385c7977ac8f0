"""DCGAN as in pytorch/examples: two models, two optimizers, BCELoss after a sigmoid.

python benchmarks/runs/dcgan.py
"""

import torch
from job import Pictures, Speed, normalized, options
from torch import nn
from torch.utils.data import DataLoader

NOISE, WIDTH, SIDE = 100, 64, 64


def generator() -> nn.Sequential:
    """Maps noise (N, NOISE, 1, 1) to pictures (N, 3, 64, 64)."""
    layers: list[nn.Module] = []
    before = NOISE
    for width, stride, padding in ((8, 1, 0), (4, 2, 1), (2, 2, 1), (1, 2, 1)):
        after = width * WIDTH
        layers += [
            nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(True),
        ]
        before = after
    layers += [nn.ConvTranspose2d(before, 3, 4, 2, 1, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


def discriminator() -> nn.Sequential:
    """Maps pictures (N, 3, 64, 64) to the probabilities that they are real (N, 1, 1, 1)."""
    layers: list[nn.Module] = [nn.Conv2d(3, WIDTH, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
    for width in (1, 2, 4):
        layers += [
            nn.Conv2d(width * WIDTH, 2 * width * WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width * WIDTH),
            nn.LeakyReLU(0.2, True),
        ]
    layers += [nn.Conv2d(8 * WIDTH, 1, 4, 1, 0, bias=False), nn.Sigmoid()]
    return nn.Sequential(*layers)


def init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def main() -> None:
    args = options(__doc__, batch_size=128)
    hand = args.by_hand
    hand.set_flags()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    loader = DataLoader(
        Pictures(SIDE),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
    )
    net_g, net_d = generator().apply(init).to(device), discriminator().apply(init).to(device)
    for net in (net_g, net_d):
        hand.prepare(net)
    settings = {"lr": 0.0002, "betas": (0.5, 0.999), "fused": hand.fused or None}
    optimizer_g = torch.optim.Adam(net_g.parameters(), **settings)
    optimizer_d = torch.optim.Adam(net_d.parameters(), **settings)
    criterion = nn.BCELoss()
    real_label = torch.ones(args.batch_size, device=device)
    fake_label = torch.zeros(args.batch_size, device=device)

    speed = Speed(args.steps, args.batch_size)
    while True:
        for pictures, _ in loader:
            real = hand.to_layout(normalized(pictures.to(device, non_blocking=True)))

            net_d.zero_grad()
            with hand.autocast(device):
                output = net_d(real)
            loss_real = criterion(output.float().view(-1), real_label)
            loss_real.backward()
            noise = torch.randn(args.batch_size, NOISE, 1, 1, device=device)
            with hand.autocast(device):
                fake = net_g(noise)
                output = net_d(fake.detach())
            loss_fake = criterion(output.float().view(-1), fake_label)
            loss_fake.backward()
            optimizer_d.step()

            net_g.zero_grad()
            with hand.autocast(device):
                output = net_d(fake)
            loss_g = criterion(output.float().view(-1), real_label)
            loss_g.backward()
            optimizer_g.step()
            if speed.step(loss_real + loss_fake):
                return


if __name__ == "__main__":
    main()
