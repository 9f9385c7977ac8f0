"""A small network that classifies images of digits, and synthetic digits.

    advisor tune examples/mnist.py --shape 128x1x28x28

train_mnist_plain.py trains it without calls to advisor, train_mnist.py with its advice.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SAMPLE = (1, 28, 28)


class Net(nn.Module):
    """Maps images (N, 1, 28, 28) to the logits of ten classes (N, 10)."""

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


def make_digits(prototypes: Tensor, count: int) -> TensorDataset:
    """Returns `count` noisy copies of the ten prototypes, with their classes."""
    labels = torch.randint(10, (count,))
    return TensorDataset(prototypes[labels] + torch.randn(count, *SAMPLE), labels)
