"""ResNet-50 on JPEG files with torch's default DataLoader settings: the job waits for data.

python benchmarks/runs/resnet50_jpegs.py --root FOLDER
"""

import itertools
import sys
from pathlib import Path

import torch
import torchvision
from job import Speed, options
from torch import nn
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parent.parent / "targets"))

from jpegs import make_dataset


def main() -> None:
    args = options(__doc__, batch_size=128, size=224, root=True)
    hand = args.by_hand
    hand.set_flags()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    settings = {"num_workers": args.workers, "pin_memory": True} if args.workers else {}
    loader = DataLoader(
        make_dataset(args.root, args.size),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        **settings,
    )
    model = hand.prepare(torchvision.models.resnet50(weights=None).to(device))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=hand.fused or None
    )

    speed = Speed(args.steps, args.batch_size)
    for _ in itertools.count():
        for pictures, labels in loader:
            pictures = hand.to_layout(pictures.to(device, non_blocking=True))
            labels = labels.to(device, non_blocking=True)
            with hand.autocast(device):
                loss = criterion(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if speed.step(loss):
                return


if __name__ == "__main__":
    main()
