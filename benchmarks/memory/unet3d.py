"""Trains MONAI's 3D U-Net on made-up volumes: a script that runs out of memory.

python unet3d.py --batch-size 8 --size 160
"""

from __future__ import annotations

import argparse

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import BasicUNet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Volumes(Dataset[tuple[Tensor, Tensor]]):
    """Noise with a bright ball in it, and the mask of the ball."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.axis = torch.linspace(-1, 1, size)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        x, y, z = torch.rand(3, generator=drawn) - 0.5
        squares = [(self.axis - at) ** 2 for at in (x, y, z)]
        inside = squares[0][:, None, None] + squares[1][:, None] + squares[2] < 0.1
        noise = torch.rand(self.size, self.size, self.size, generator=drawn)
        return (inside + noise)[None], inside.long()[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Volumes(400, args.size)
    loader = DataLoader(data, args.batch_size, shuffle=True, num_workers=12, drop_last=True)
    model = BasicUNet(spatial_dims=3, in_channels=1, out_channels=2).to(device)
    loss_of = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    for epoch in range(args.epochs):
        for step, (volumes, masks) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(model(volumes.to(device)), masks.to(device))
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
