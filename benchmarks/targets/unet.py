"""A U-Net that puts pixels into two classes: five levels, 64 to 1024 channels.

    advisor tune benchmarks/targets/unet.py --shape 16x3x256x256

After Ronneberger, Fischer and Brox, U-Net, 2015, but with padding and BatchNorm.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (64, 128, 256, 512, 1024)


def block(before: int, after: int) -> nn.Sequential:
    """Maps (N, before, H, W) to (N, after, H, W)."""
    layers: list[nn.Module] = []
    for width in (before, after):
        layers += [nn.Conv2d(width, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
        layers += [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Net(nn.Module):
    """Maps images (N, 3, H, W) to logits (N, 2, H, W). H and W are multiples of 16."""

    def __init__(self) -> None:
        super().__init__()
        pairs = list(zip((3, *WIDTHS), WIDTHS, strict=False))
        self.down = nn.ModuleList(block(*pair) for pair in pairs)
        steps = list(zip(WIDTHS[:0:-1], WIDTHS[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in steps)
        self.join = nn.ModuleList(block(a, b) for a, b in steps)
        self.last = nn.Conv2d(WIDTHS[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, level in enumerate(self.down):
            x = level(functional.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for up, join, skipped in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat((up(x), skipped), 1))
        return self.last(x)
