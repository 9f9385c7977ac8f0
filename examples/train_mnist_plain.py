"""Trains mnist.py on synthetic digits. This is an ordinary script without calls to advisor.

advisor tune -- python examples/train_mnist_plain.py
advisor run -- python examples/train_mnist_plain.py
"""

import argparse
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from mnist import SAMPLE, Net, make_digits


def train(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device
) -> float:
    """Trains one epoch. Returns its last loss."""
    model.train()
    for x, y in loader:
        loss = cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Returns the fraction of a loader's samples that a model classifies correctly."""
    model.eval()
    right = [(model(x.to(device)).argmax(1) == y.to(device)).float() for x, y in loader]
    return torch.cat(right).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16384, help="number of samples per epoch")
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prototypes = torch.randn(10, *SAMPLE)
    digits, unseen = make_digits(prototypes, args.samples), make_digits(prototypes, 1024)
    loader = DataLoader(digits, args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(unseen, args.batch_size)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for epoch in range(1, args.epochs + 1):
        began = time.perf_counter()
        loss = train(model, loader, optimizer, device)
        speed = len(loader) * args.batch_size / (time.perf_counter() - began)
        right = accuracy(model, test_loader, device)
        print(f"epoch {epoch}: {speed:,.0f} samples/s, loss {loss:.4f}, accuracy {right:.1%}")


if __name__ == "__main__":
    main()
