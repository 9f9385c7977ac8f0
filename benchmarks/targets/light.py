"""A network with almost no computation: data loading is the limit on any device.

advisor tune benchmarks/targets/light.py --shape 32x3x224x224 \\
    --data benchmarks/targets/jpegs.py --data-arg root=FOLDER
"""

from torch import Tensor, nn


class Net(nn.Module):
    """Maps images (N, 3, H, W) to the logits of a thousand classes (N, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 16, stride=16)
        self.classify = nn.Linear(16, 1000)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.patches(images).relu().mean((2, 3)))
