"""A stack of wide feed-forward blocks. Most of their work is matrix products."""

from torch import Tensor, nn


class Block(nn.Module):
    """A feed-forward block with a residual; maps (N, T, width) to (N, T, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.network(x)


class Wide(nn.Sequential):
    """A stack of `layers` blocks, each `width` wide."""

    def __init__(self, layers: int = 8, width: int = 4096) -> None:
        super().__init__(*(Block(width) for _ in range(layers)))
