"""Trains torchvision's ResNet-50 on random images with the advice of `advisor tune`.

advisor tune torchvision:resnet50 --shape 64x3x224x224
python examples/train_resnet50.py --steps 50
"""

import argparse
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet50

import advisor

SAMPLE = (3, 224, 224)
CLASSES = 1000


class RandomImages(Dataset[tuple[torch.Tensor, int]]):
    """A dataset of `length` samples that repeats `images` random 8-bit images."""

    def __init__(self, length: int, images: int = 256) -> None:
        images = min(images, length)
        self.length = length
        self.images = torch.randint(256, (images, *SAMPLE), dtype=torch.uint8)
        self.labels = torch.randint(CLASSES, (images,)).tolist()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = index % len(self.labels)
        return self.images[image].float().div_(255), self.labels[image]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="at least 2; the first is not timed")
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    if args.steps < 2 or args.batch < 1:
        parser.error("--steps must be at least 2 and --batch at least 1")

    advice = advisor.apply("torchvision:resnet50", shape=(args.batch, *SAMPLE))
    print(f"advice: {advice.status} ({advice.reason})")
    torch.manual_seed(0)

    model = advice.prepare(resnet50(weights=None, num_classes=CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **advice.optimizer)
    loader = DataLoader(RandomImages(args.steps * args.batch), shuffle=True, **advice.loader)

    started = 0.0
    for step, (x, y) in enumerate(advice.batches(loader)):
        with advice.autocast():
            loss = cross_entropy(model(x), y)
        advice.step(loss, optimizer)
        if step == 0:
            loss.item()  # waits for the device
            started = time.perf_counter()
    final = loss.item()
    seconds = time.perf_counter() - started

    print(f"{(args.steps - 1) * args.batch / seconds:.1f} samples/s, loss {final:.4f}")


if __name__ == "__main__":
    main()
