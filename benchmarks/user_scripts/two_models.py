"""Trains a large network, then a small one with the large one as its teacher."""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def large():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def small():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 49, 10),
    )


def train(name, model, loader, epochs, device, teacher=None):
    model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        start, total = time.time(), 0.0
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            scores = model(images)
            loss = F.cross_entropy(scores, labels)
            if teacher is not None:
                with torch.no_grad():
                    target = F.softmax(teacher(images) / 2, dim=1)
                loss = loss + F.kl_div(
                    F.log_softmax(scores / 2, dim=1), target, reduction="batchmean"
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"{name} epoch {epoch} loss {total / len(loader):.3f} {time.time() - start:.1f} s")
    torch.save(model.state_dict(), f"{name}.pt")
    return model.eval()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    labels = torch.randint(10, (args.samples,))
    images = torch.randn(args.samples, 1, 28, 28)
    images[torch.arange(args.samples), 0, labels + 8] += 2
    loader = DataLoader(TensorDataset(images, labels), args.batch_size, shuffle=True)
    teacher = train("large", large(), loader, args.epochs, device)
    train("small", small(), loader, args.epochs, device, teacher)
