"""A trainer class for a small convolutional network, with evaluation and checkpoints."""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class Net(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).mean((2, 3)))


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.folder = Path(args.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        labels = torch.randint(10, (args.samples,))
        images = torch.randn(args.samples, 3, 32, 32) + labels[:, None, None, None] / 5
        train, test = random_split(TensorDataset(images, labels), [0.9, 0.1])
        self.train_loader = DataLoader(train, args.batch_size, shuffle=True)
        self.test_loader = DataLoader(test, args.batch_size)
        self.model = Net().to(self.device)
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, args.epochs)
        self.epoch, self.best = 0, 0.0
        if args.resume:
            self.load(self.folder / "last.pt")

    def fit(self, epochs: int) -> None:
        while self.epoch < epochs:
            begin = time.perf_counter()
            loss = self.train_epoch()
            accuracy = self.evaluate()
            self.schedule.step()
            self.epoch += 1
            self.save(self.folder / "last.pt")
            if accuracy >= self.best:
                self.best = accuracy
                self.save(self.folder / "best.pt")
            seconds = time.perf_counter() - begin
            print(f"epoch {self.epoch} loss {loss:.3f} accuracy {accuracy:.3f} {seconds:.1f} s")

    def train_epoch(self) -> float:
        self.model.train()
        total = 0.0
        for images, labels in self.train_loader:
            images, labels = images.to(self.device), labels.to(self.device)
            self.optimizer.zero_grad()
            loss = self.loss(self.model(images), labels)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return total / len(self.train_loader)

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        right = count = 0
        for images, labels in self.test_loader:
            guesses = self.model(images.to(self.device)).argmax(1).cpu()
            right += (guesses == labels).sum().item()
            count += len(labels)
        return right / count

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "epoch": self.epoch,
            "best": self.best,
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.epoch, self.best = state["epoch"], state["best"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--folder", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    Trainer(args).fit(args.epochs)
