"""A small network for images of digits.

    advisor tune examples/mnist.py --shape 128x1x28x28

train_mnist.py trains it with what was found.
"""

from torch import Tensor, nn


class Net(nn.Module):
    """Images (N, 1, 28, 28) to the logits of ten classes (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 10, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(10, 20, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
        )
        self.classify = nn.Linear(20 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x).flatten(1))
