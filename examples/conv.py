"""One convolution, which can be tuned in a minute or two.

    advisor tune examples/conv.py --shape 64x3x256x256

train_conv.py trains it with the advice.
"""

from torch import Tensor, nn


class Net(nn.Module):
    """Maps images (N, 3, H, W) to features (N, 64, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)
